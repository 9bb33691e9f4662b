"""What all commands have in common: help, one clear sentence for what is wrong, nothing heavy before it is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from collapse_monitor.cli import COMMANDS, main
from tests.commands.conftest import Logs

ROOT = Path(__file__).parents[2]
INSTALLED = Path(sys.executable).parent / "collapse-monitor"
COMMAND = [str(INSTALLED)] if INSTALLED.exists() else [sys.executable, "-m", "collapse_monitor.cli"]


def typed(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    """As a user types it, in a process of its own."""
    return subprocess.run([*COMMAND, *map(str, words)], capture_output=True, text=True, check=False, cwd=ROOT, **options)  # type: ignore[call-overload]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} {command.SUMMARY}" in said for name, command in COMMANDS.items())


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_each_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    said = capsys.readouterr().out
    assert (COMMANDS[name].__doc__ or "missing").splitlines()[0] in said
    assert f"usage: collapse-monitor {name}" in said


@pytest.mark.parametrize("command", ["report", "check", "read"])
def test_an_unknown_path_is_one_sentence(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"collapse-monitor {command}: {tmp_path / 'nowhere'}: no such file or folder\n"
    assert main([command, str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"collapse-monitor {command}: {tmp_path}: nothing written by collapse_monitor in it\n"


def test_the_page_also_says_it_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "nowhere"), "-o", str(tmp_path / "report.html")]) == 2
    assert capsys.readouterr().err == f"collapse-monitor report: {tmp_path / 'nowhere'}: no such file or folder\n"
    assert not (tmp_path / "report.html").exists()


def test_as_typed(logs: Logs) -> None:
    done = typed("report", logs.tensorboard, "--summary")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["verdict", "critical", "healthy"]
    failed = typed("check", logs.path("json", "faulty"))
    assert (failed.returncode, failed.stderr) == (1, "")
    lost = typed("read", "no/such/log")
    assert (lost.returncode, lost.stdout) == (2, "")
    assert lost.stderr == "collapse-monitor read: no/such/log: no such file or folder\n"


def test_a_reader_that_has_seen_enough_is_no_error(logs: Logs) -> None:
    command = [sys.executable, "-m", "collapse_monitor.cli", "read", str(logs.tensorboard), "--csv", "-"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"run,step,metric,unit,layer,name,head,value\n"
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0
    assert said == b""


def test_what_was_found_is_read_without_torch(logs: Logs) -> None:
    code = (
        f"import sys; from collapse_monitor.cli import main; main(['check', {str(logs.tensorboard)!r}]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, cwd=ROOT).returncode == 0
