"""The doctor: real environments with and without TensorBoard and the tab, and logs of real sinks with all that can be wrong with them."""

from __future__ import annotations

import json
import os
import sysconfig
import time
import venv
from pathlib import Path

import pytest
import tensorboard
import tensorboard_data_server
from torch.utils.tensorboard import SummaryWriter

from collapse_monitor import JSONLSink, TensorBoardSink, __version__, read
from collapse_monitor.cli import main
from collapse_monitor.commands.doctor.environment import examine_environment, interpreter_of
from collapse_monitor.commands.doctor.findings import Found, State
from collapse_monitor.commands.doctor.logs import examine_logs
from tests.commands.conftest import STEPS, Logs
from tests.commands.test_command_line import typed
from tests.synthetic import make_alert, make_snapshot

ROOT = Path(__file__).parents[2]
TAB = "[tensorboard_plugins]\ncollapse_monitor = collapse_monitor.tensorboard_plugin.loader:CollapseLoader\n"


class Environment:
    """An environment of Python with a command `tensorboard`, and what is said to be installed in it."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.bin = folder / "bin"
        self.python = self.bin / "python"
        self.packages = next(folder.glob("lib/python*/site-packages"))
        command = self.bin / "tensorboard"
        command.write_text(f"#!{self.python}\nfrom tensorboard.main import run_main\nrun_main()\n")
        command.chmod(0o755)

    def install(self, name: str, version: str, entry_points: str = "") -> None:
        info = self.packages / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)

    def see(self, *folders: str | Path) -> None:
        """Modules of other folders; what is installed there counts too."""
        (self.packages / "more.pth").write_text("".join(f"{folder}\n" for folder in folders))


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


def said(found: list[Found], state: State) -> list[str]:
    return [one.what for one in found if one.state is state]


def only(found: list[Found], state: State) -> Found:
    (one,) = [one for one in found if one.state is state]
    return one


# -- what is installed


def test_a_complete_environment(environment: Environment) -> None:
    environment.see(ROOT, sysconfig.get_path("purelib"))
    environment.install("collapse_monitor", __version__, TAB)
    found, fast = examine_environment(str(environment.bin))
    assert not said(found, State.WRONG)
    assert any(f"collapse_monitor {__version__} from {ROOT / 'collapse_monitor'}" in what for what in said(found, State.OK))
    command = f"tensorboard {tensorboard.__version__} on the PATH: {environment.bin / 'tensorboard'} (Python "
    assert any(what.startswith(command) for what in said(found, State.OK))
    assert f"the tab Collapse is installed there (collapse-monitor {__version__})" in said(found, State.OK)
    assert fast == (tensorboard_data_server.server_binary() is not None)


def test_tensorboard_in_an_environment_without_the_tab(environment: Environment) -> None:
    environment.install("tensorboard", "2.21.0")
    found, fast = examine_environment(str(environment.bin))
    missing = only(found, State.WRONG)
    assert (
        missing.what
        == f"the tab Collapse is missing: collapse-monitor is not installed for {environment.python}, which TensorBoard runs with"
    )
    assert missing.steps[0] == f"{environment.python} -m pip install collapse-monitor"
    assert not fast
    assert "slow loader" in only(found, State.NOTE).what


def test_a_version_without_the_tab(environment: Environment) -> None:
    environment.install("tensorboard", "2.20.0")
    environment.install("collapse_monitor", "0.0.1")
    found, _ = examine_environment(str(environment.bin))
    assert only(found, State.WRONG).what == "collapse-monitor 0.0.1 is installed there, without the tab"
    assert any("does not start beside setuptools 82" in what for what in said(found, State.NOTE))


def test_a_plugin_that_cannot_be_imported(environment: Environment) -> None:
    environment.install("tensorboard", "2.21.0")
    environment.install("collapse_monitor", __version__, TAB)
    environment.install("other_plugin", "1.0", "[tensorboard_plugins]\nother_plugin = no_such_module:Loader\n")
    found, _ = examine_environment(str(environment.bin))
    problems = said(found, State.WRONG)
    assert len(problems) == 2
    assert any(
        "its plugin other_plugin cannot be imported (ModuleNotFoundError: No module named 'no_such_module')" in what for what in problems
    )


def test_a_command_without_tensorboard(environment: Environment) -> None:
    found, fast = examine_environment(str(environment.bin))
    assert only(found, State.WRONG).what == f"{environment.bin / 'tensorboard'} is there, but {environment.python} has no tensorboard"
    assert not fast


def test_a_command_of_a_python_that_is_gone(environment: Environment) -> None:
    environment.python.unlink()
    found, _ = examine_environment(str(environment.bin))
    assert only(found, State.WRONG).what == f"{environment.bin / 'tensorboard'} belongs to {environment.python}, which does not run"


def test_no_command_on_the_path(tmp_path: Path) -> None:
    found, _ = examine_environment(str(tmp_path))
    assert any("there is no such command on the PATH" in what for what in said(found, State.NOTE))


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("#!/opt/env/bin/python3\nimport x\n", "/opt/env/bin/python3"),
        ("#!/opt/env/bin/python -sE\n", "/opt/env/bin/python"),
        ("#!/bin/sh\n'''exec' \"/opt/my env/bin/python\" \"$0\" \"$@\"\n' '''\n", "/opt/my env/bin/python"),
        ("#!/bin/sh\n'''exec' /opt/env/bin/python \"$0\" \"$@\"\n' '''\n", "/opt/env/bin/python"),
        ("#!/bin/sh\nexec something\n", None),
        ("#!/usr/bin/env no-such-python\n", None),
        ("MZ\x90", None),
    ],
)
def test_the_python_of_a_command(text: str, python: str | None, tmp_path: Path) -> None:
    script = tmp_path / "tensorboard"
    script.write_text(text)
    assert interpreter_of(script) == (None if python is None else Path(python))


def test_the_python_that_the_environment_chooses(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(environment.bin))
    script = environment.bin / "other"
    script.write_text("#!/usr/bin/env python\n")
    assert interpreter_of(script) == environment.python


# -- what is in a log


def test_sound_logs(logs: Logs) -> None:
    found = examine_logs(logs.tensorboard, fast=False)
    faulty = len(logs.memory["faulty"].alerts)
    assert [(one.state, one.what) for one in found] == [
        (
            State.OK,
            f"{logs.path('tensorboard', 'faulty')}: {STEPS} steps from 0 to {STEPS - 1}, {faulty} alert{'s' * (faulty > 1)}, log format 1",
        ),
        (State.OK, f"{logs.path('tensorboard', 'healthy')}: {STEPS} steps from 0 to {STEPS - 1}, 0 alerts, log format 1"),
    ]


def test_json_lines_are_not_for_tensorboard(logs: Logs) -> None:
    found = examine_logs(logs.path("json", "healthy"), fast=True)
    assert said(found, State.OK) == [f"{logs.path('json', 'healthy')}: {STEPS} steps from 0 to {STEPS - 1}, 0 alerts, log format 1"]
    assert only(found, State.NOTE).steps == (f"collapse-monitor report {logs.path('json', 'healthy')} -o report.html",)


def test_nothing_of_ours(tmp_path: Path) -> None:
    assert "no such file or folder" in only(examine_logs(tmp_path / "nowhere", fast=True), State.WRONG).what
    assert only(examine_logs(tmp_path, fast=True), State.WRONG).what.endswith("(0 files, none of them an event file)")
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("loss", 1.0, 0)
    assert only(examine_logs(tmp_path, fast=True), State.WRONG).what.endswith("(1 event files of others)")


def test_curves_of_the_aggregates_only(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("collapse_summary/effective_rank_min", 1.0, 0)
    assert "curves of the aggregates only" in only(examine_logs(tmp_path, fast=True), State.WRONG).what


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("kind", ["tensorboard", "json"])
def test_a_torn_tail(kind: str, old: bool, logs: Logs, tmp_path: Path) -> None:
    whole = logs.path(kind, "healthy")
    whole = next(whole.iterdir()) if whole.is_dir() else whole
    file = tmp_path / whole.name
    file.write_bytes(whole.read_bytes()[:-7])
    if old:
        os.utime(file, (time.time() - 3600,) * 2)
    found = examine_logs(file, fast=True)
    assert not said(found, State.WRONG)
    torn = next(one for one in found if "half a" in one.what)
    assert torn.what.startswith(
        f"{file} ends where its run was killed" if old else f"{file} is being written, or its run has just been killed"
    )
    assert f": {STEPS - 1} steps from 0 to {STEPS - 2}, " in said(found, State.OK)[0]


@pytest.mark.parametrize("whole_record", [True, False])
def test_a_damaged_file(whole_record: bool, logs: Logs, tmp_path: Path) -> None:
    """Noughts, as a crash of the machine leaves them: from the beginning of a record on, or within one."""
    file = next(logs.path("tensorboard", "healthy").iterdir())
    data = file.read_bytes()
    ends = [0]
    while ends[-1] < len(data):
        ends.append(ends[-1] + 16 + int.from_bytes(data[ends[-1] : ends[-1] + 8], "little"))
    begin, end = ends[STEPS // 2 + 1 :][:2]  # the first record is of the writer
    middle = begin + 400
    noughts = data[:begin] + bytes(500) if whole_record else data[:middle] + bytes(end - middle) + data[end:]
    (tmp_path / file.name).write_bytes(noughts)
    reason = "come 500 bytes that are no record" if whole_record else "a record cannot be decoded and is left out"
    kept = list(range(STEPS // 2)) + ([] if whole_record else list(range(STEPS // 2 + 1, STEPS)))
    found = examine_logs(tmp_path, fast=True)
    assert reason in only(found, State.WRONG).what
    assert f": {len(kept)} steps from 0 to {kept[-1]}, " in only(found, State.OK).what
    assert list(read(tmp_path).steps) == kept


def test_two_writers_in_one_folder(tmp_path: Path) -> None:
    mine = SummaryWriter(str(tmp_path))
    sink = TensorBoardSink(tmp_path)
    for step in range(3):
        mine.add_scalar("loss", 1.0, step)
        sink.write(make_snapshot(step), [])
        mine.flush()
    time.sleep(0.01)
    mine.add_scalar("loss", 1.0, 3)
    mine.close()
    sink.close()
    assert len(list(tmp_path.iterdir())) == 2
    slow = only(examine_logs(tmp_path, fast=False), State.WRONG)
    assert "has two writers at once" in slow.what
    assert "--reload_multifile=true" in slow.steps[1]
    assert "the fast one, which is in use here, reads both" in only(examine_logs(tmp_path, fast=True), State.NOTE).what


def test_a_resumed_run_has_one_writer_after_the_other(tmp_path: Path) -> None:
    for start in (0, 2):
        sink = TensorBoardSink(tmp_path)
        for step in range(start, start + 3):
            sink.write(make_snapshot(step), [make_alert(step=step)])
        sink.close()
        time.sleep(1.1)  # event files are named by the second
    found = examine_logs(tmp_path, fast=False)
    assert [one.what for one in found] == [f"{tmp_path}: 5 steps from 0 to 4, 6 alerts, log format 1"]


def test_a_newer_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = JSONLSink(tmp_path / "log.jsonl")
    sink.write(make_snapshot(0), [])
    sink.close()
    record = json.loads((tmp_path / "log.jsonl").read_text())
    (tmp_path / "log.jsonl").write_text(json.dumps({**record, "version": 2}) + "\n")
    problem = only(examine_logs(tmp_path, fast=True), State.WRONG)
    assert problem.what.endswith("log format 2, newer than this collapse_monitor reads (1)")
    assert problem.steps == ("python -m pip install --upgrade collapse-monitor",)


# -- as typed


def test_the_exit_status_and_the_next_steps(environment: Environment, logs: Logs, tmp_path: Path) -> None:
    path = {**os.environ, "PATH": str(environment.bin)}
    done = typed("doctor", logs.tensorboard, env=path)
    assert done.returncode == 1
    assert f"       next: {environment.python} -m pip install tensorboard\n" in done.stdout
    assert done.stdout.endswith("\n1 thing to mend\n")
    environment.see(ROOT, sysconfig.get_path("purelib"))
    environment.install("collapse_monitor", __version__, TAB)
    done = typed("doctor", logs.tensorboard, env=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\nnothing to mend\n")
    assert typed("doctor", tmp_path / "nowhere", env=path).returncode == 1


def test_without_a_log_only_the_installation_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor"])
    assert "steps from" not in capsys.readouterr().out
