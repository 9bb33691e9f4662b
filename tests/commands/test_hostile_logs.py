"""Logs whose names are made to do harm, and places that cannot be read or written: one sentence, and nothing but text."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from collapse_monitor.cli import main
from collapse_monitor.report import JSONLSink, TensorBoardSink
from collapse_monitor.report.files import find_files
from tests.synthetic import make_alert, make_snapshot

pytestmark = pytest.mark.slow

EVIL = "\x1b[31m\r\n\x00\u202e</script>"


def hostile(path: Path, name: str = EVIL, steps: int = 2) -> Path:
    """A log of a model whose modules have such names, with an alert that repeats one."""
    snapshot = make_snapshot()
    snapshot = replace(snapshot, sites=tuple(replace(site, name=f"{name}{site.name}") for site in snapshot.sites))
    sink = JSONLSink(path) if path.suffix == ".jsonl" else TensorBoardSink(path)
    for step in range(steps):
        sink.write(replace(snapshot, step=step), [make_alert(step=step, message=f"{name} is ill")])
    sink.close()
    return path


def raw(*words: object, **variables: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "collapse_monitor.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, check=False, env={**os.environ, **variables})


@pytest.mark.parametrize("words", [["report"], ["report", "--summary"], ["check"], ["read"], ["doctor"]], ids="-".join)
def test_names_are_text_to_a_terminal(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([words[0], str(hostile(tmp_path / "log \x1b[31m\r\n")), *words[1:]])
    said = capsys.readouterr()
    assert "\\x1b[31m\\x0d\\x0a" in said.out
    assert not set(said.out + said.err) & {"\x1b", "\r", "\x00", "\u202e"}


def test_one_line_per_run_whatever_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile(tmp_path / "a\nhealthy  0 blocks.0  -  99  b.jsonl")
    assert main(["report", str(tmp_path), "--summary"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_name_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = hostile(tmp_path / os.fsdecode(b"\xff.jsonl"), name="")
    assert main(["report", str(path)]) == 0
    assert "\\udcff.jsonl" in capsys.readouterr().out
    assert main(["report", str(path), "-o", str(tmp_path / "report.html")]) == 0
    assert "<h2>\\udcff.jsonl</h2>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert main(["read", str(path), "--csv", str(tmp_path / "table.csv")]) == 0
    assert "\\udcff.jsonl,0," in (tmp_path / "table.csv").read_text(encoding="utf-8")


def test_a_terminal_that_knows_ascii_only(tmp_path: Path) -> None:
    path = hostile(tmp_path / "é漢.jsonl", name="")
    for words in (["report"], ["read", "--csv", "-"]):
        done = raw(words[0], path, *words[1:], PYTHONIOENCODING="ascii")
        assert (done.returncode, done.stderr) == (0, b"")
        assert rb"\xe9\u6f22.jsonl" in done.stdout


@pytest.mark.skipif(os.name != "posix", reason="closes a file descriptor as a POSIX shell does")
def test_without_standard_output(tmp_path: Path) -> None:
    path = hostile(tmp_path / "log.jsonl", name="")
    command = f"'{sys.executable}' -m collapse_monitor.cli check '{path}' >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (1, b"")


def test_what_the_system_refuses_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = hostile(tmp_path / "log.jsonl", name="")
    for words in (["report", path, "-o", tmp_path], ["read", path, "--csv", tmp_path]):
        assert main(list(map(str, words))) == 2
        assert capsys.readouterr().err == f"collapse-monitor {words[0]}: {tmp_path}: is a directory\n"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may read everything")
def test_a_log_that_may_not_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = hostile(tmp_path / "log.jsonl", name="")
    path.chmod(0)
    assert main(["check", str(path)]) == 2
    assert capsys.readouterr().err == f"collapse-monitor check: {path}: permission denied\n"


def test_links_are_followed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile(tmp_path / "elsewhere" / "run9", name="")
    hostile(tmp_path / "logs" / "run1", name="")
    (tmp_path / "logs" / "a-link-to-run1").symlink_to(tmp_path / "logs" / "run1")
    (tmp_path / "logs" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "logs" / "run1" / "round").symlink_to(tmp_path / "logs")
    found = [file.parent.relative_to(tmp_path).as_posix() for file in find_files(tmp_path / "logs", "*tfevents*")]
    assert found == ["logs/linked/run9", "logs/run1"]
    assert main(["report", str(tmp_path / "logs"), "--summary"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_log_of_one_reading(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = hostile(tmp_path / "log.jsonl", name="", steps=1)
    assert main(["report", str(path)]) == 0
    assert "1 reading, of step 0." in " ".join(capsys.readouterr().out.split())
    assert main(["read", str(path)]) == 0
    assert "1 step from 0 to 0, 4 layers, 1 alert\n" in capsys.readouterr().out


def test_a_run_of_which_nothing_was_read_is_not_called_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    sink = JSONLSink(log)
    for step in range(3):
        snapshot = make_snapshot(step)
        unread = {name: (math.nan,) * len(values) for name, values in snapshot.blocks.items()}
        sink.write(replace(snapshot, blocks=unread, attention={}), [])
    sink.close()
    assert main(["check", str(log)]) == 2
    assert capsys.readouterr().out.startswith("no data")
    assert main(["report", str(log), "--text"]) == 0
    assert "No verdict: no layer could be read in 3 readings" in capsys.readouterr().out
    assert main(["report", str(log), "--summary"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("no data")
