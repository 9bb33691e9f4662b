"""Commands that read logs, on logs of real trainings: the report in text, the check, and tables of values."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from collapse_monitor import JSONLSink
from collapse_monitor.cli import main
from collapse_monitor.judge.catalogue import CATALOGUE
from collapse_monitor.records import Alert, Severity
from tests.commands.conftest import STEPS, Logs
from tests.synthetic import make_alert, make_snapshot

KINDS = ("tensorboard", "json")
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Run a command; its status, what it printed, and what it printed on standard error."""

    def run(*words: object) -> tuple[int, str, str]:
        status = main([str(word) for word in words])
        return status, *capsys.readouterr()

    return run


def write_log(path: Path, *alerts: Alert, steps: int = 3) -> Path:
    sink = JSONLSink(path)
    for step in range(steps):
        sink.write(make_snapshot(step), [alert for alert in alerts if alert.step == step])
    sink.close()
    return path


# -- report


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_says_verdict_when_where_why_and_what_to_do(kind: str, logs: Logs, say: Say) -> None:
    status, said, _ = say("report", logs.path(kind, "faulty"), "--text")
    assert status == 0
    text = " ".join(said.split())
    alert = next(alert for alert in logs.memory["faulty"].alerts if alert.rule == "rank_collapse")
    phenomenon = CATALOGUE["rank_collapse"]
    assert f"{logs.path(kind, 'faulty')} Critical: " in text
    assert f"{STEPS} readings from step 0 to {STEPS - 1}" in text
    assert f"when since step {alert.since}, confirmed at step {alert.step}, still so at the end of the log" in text
    assert f"where layers {alert.layers[0]}-{alert.layers[-1]}, blocks.{alert.layers[0]} first" in text
    assert f"why {phenomenon.summary}" in text
    assert f"do - First: {phenomenon.next_step}." in text
    assert all(f"- {remedy}" in text for remedy in phenomenon.remedies)
    assert all(f"- {cause}" in text for cause in phenomenon.causes)
    assert max(map(len, said.splitlines()[2:])) <= 100
    assert "\x1b" not in said


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_healthy_run_there_is_one_sentence(kind: str, logs: Logs, say: Say) -> None:
    path = logs.path(kind, "healthy")
    assert say("report", path) == (0, f"{path}\nHealthy: nothing was found in {STEPS} readings from step 0 to {STEPS - 1}.\n", "")


def test_one_aligned_line_per_run_in_natural_order(tmp_path: Path, say: Say) -> None:
    write_log(tmp_path / "run10.jsonl", steps=11)
    write_log(tmp_path / "run9.jsonl", make_alert(step=1, severity=Severity.WARNING), make_alert(rule="oversmoothing", step=2))
    (tmp_path / "notes.txt").write_text("nothing")
    status, said, _ = say("report", tmp_path, "--summary")
    lines = said.splitlines()
    assert status == 0
    assert lines[0].split("  ")[0] == "verdict"
    columns = [lines[0].index(word) for word in ("verdict", "worst layer", "first alert", "last step", "run")]
    cells = [[line[a:b].strip() for a, b in zip(columns, [*columns[1:], None], strict=True)] for line in lines[1:]]
    assert cells == [
        ["critical", "1 blocks.1", "1 rank_collapse", "2", str(tmp_path / "run9.jsonl")],
        ["healthy", "0 blocks.0", "-", "10", str(tmp_path / "run10.jsonl")],
    ]


def test_the_healthy_layer_that_is_nearest_to_collapse(logs: Logs, say: Say) -> None:
    last = logs.memory["healthy"].snapshots[-1].series("token_similarity")
    worst = last.index(max(last))
    line = say("report", logs.path("json", "healthy"), "--summary")[1].splitlines()[1]
    assert line.split()[:3] == ["healthy", str(worst), f"blocks.{worst}"]


def test_a_run_named_twice_is_told_once(logs: Logs, say: Say) -> None:
    lines = say("report", logs.tensorboard, logs.path("tensorboard", "healthy"), "--summary")[1].splitlines()
    assert len(lines) == 3


def test_what_cannot_be_read_does_not_hide_the_others(logs: Logs, tmp_path: Path, say: Say) -> None:
    newer = tmp_path / "newer.jsonl"
    newer.write_text(json.dumps({**json.loads(write_log(tmp_path / "old.jsonl", steps=1).read_text()), "version": 2}) + "\n")
    status, said, wrong = say("report", newer, logs.path("json", "healthy"), "--summary")
    assert status == 2
    assert len(said.splitlines()) == 2
    reason = "log format 2 is newer than this collapse_monitor reads (1): upgrade collapse_monitor to read it"
    assert wrong == f"collapse-monitor report: {newer}: {reason}\n"


def test_the_page(logs: Logs, tmp_path: Path, say: Say) -> None:
    page = tmp_path / "new" / "report.html"
    status, said, _ = say("report", logs.tensorboard, "-o", page)
    assert status == 0
    assert said.startswith(f"{page} (")
    assert page.read_text().lower().startswith("<!doctype html>")


# -- check


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_run_passes(kind: str, logs: Logs, say: Say) -> None:
    path = logs.path(kind, "healthy")
    assert say("check", path, "--fail-on", "warning") == (0, f"healthy  {path}, steps 0 to {STEPS - 1}\n", "")


@pytest.mark.parametrize("kind", KINDS)
def test_an_alert_fails_with_its_text(kind: str, logs: Logs, say: Say) -> None:
    status, said, _ = say("check", logs.path(kind, "faulty"), logs.path(kind, "healthy"))
    alert = next(alert for alert in logs.memory["faulty"].alerts if alert.rule == "rank_collapse")
    assert status == 1
    assert f"CRITICAL  {logs.path(kind, 'faulty')}, step {alert.step}: {alert.message}\n" in said
    assert f"healthy  {logs.path(kind, 'healthy')}, " in said


def test_the_severity_is_chosen(tmp_path: Path, say: Say) -> None:
    log = write_log(tmp_path / "log.jsonl", make_alert("oversmoothing", 1, Severity.WARNING, "tokens grow alike"))
    assert say("check", log) == (0, f"healthy  {log}, steps 0 to 2; milder than critical: oversmoothing (warning)\n", "")
    assert say("check", log, "--fail-on", "warning") == (1, f"WARNING  {log}, step 1: tokens grow alike\n", "")


def test_an_alert_that_was_resolved_has_fired(tmp_path: Path, say: Say) -> None:
    fired = make_alert(step=1)
    over = Alert(**{**{name: getattr(fired, name) for name in Alert.__slots__}, "state": "resolved", "step": 2})
    log = write_log(tmp_path / "log.jsonl", fired, over)
    assert say("check", log) == (1, f"CRITICAL  {log}, step 1: tokens are alike (over at step 2)\n", "")


def test_what_cannot_be_read_outweighs_an_alert(logs: Logs, tmp_path: Path, say: Say) -> None:
    status, said, wrong = say("check", logs.path("json", "faulty"), tmp_path)
    assert status == 2
    assert "CRITICAL" in said
    assert "nothing written by collapse_monitor" in wrong


# -- read


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("kind", KINDS)
def test_every_reading_is_a_line(kind: str, logs: Logs, tmp_path: Path, say: Say) -> None:
    path, table = logs.path(kind, "healthy"), tmp_path / "new" / "out.csv"
    status, said, _ = say("read", path, "--csv", table)
    found = rows(table)
    assert (status, said) == (0, f"{table}: {len(found)} lines\n")
    snapshots = logs.memory["healthy"].snapshots
    expected = {
        (snapshot.step, metric, layer): value
        for snapshot in snapshots
        for metric in snapshot.metrics
        for layer, value in enumerate(snapshot.series(metric))
        if not math.isnan(value)
    }
    got = {(int(row["step"]), row["metric"], int(row["layer"])): float(row["value"]) for row in found}
    assert len(found) == len(expected)
    assert got == pytest.approx(expected, rel=1e-6)
    assert {row["run"] for row in found} == {str(path)}
    assert {(row["layer"], row["name"]) for row in found} == {("0", "blocks.0"), ("1", "blocks.1"), ("2", "blocks.2")}
    assert {row["unit"] for row in found if row["metric"] == "effective_rank"} == {"directions"}
    assert {row["head"] for row in found} == {""}


@pytest.mark.parametrize("kind", KINDS)
def test_heads(kind: str, logs: Logs, tmp_path: Path, say: Say) -> None:
    say("read", logs.path(kind, "healthy"), "--csv", tmp_path / "out.csv", "--heads")
    found = [row for row in rows(tmp_path / "out.csv") if row["metric"] == "attention_uniformity"]
    steps = range(0, STEPS, 4) if kind == "tensorboard" else range(STEPS)
    assert [(int(row["step"]), row["layer"], row["name"], row["head"]) for row in found] == [
        (step, str(layer), f"blocks.{layer}.attention", str(head)) for step in steps for layer in range(3) for head in range(4)
    ]
    expected = [value for step in steps for site in logs.memory["healthy"].snapshots[step].heads("attention_uniformity") for value in site]
    assert [float(row["value"]) for row in found] == pytest.approx(expected, rel=1e-3)


def test_one_column_per_metric(logs: Logs, tmp_path: Path, say: Say) -> None:
    say("read", logs.json, "--csv", tmp_path / "out.csv", "--wide")
    found = rows(tmp_path / "out.csv")
    assert len(found) == 2 * STEPS * 3
    assert [int(row["step"]) for row in found[: STEPS * 3]] == [step for step in range(STEPS) for _ in range(3)]
    snapshot = logs.memory["faulty"].snapshots[5]
    row = next(row for row in found if (row["run"], row["step"], row["layer"]) == (str(logs.path("json", "faulty")), "5", "2"))
    assert list(row)[:4] == ["run", "step", "layer", "name"]
    assert set(list(row)[4:]) == set(snapshot.metrics)
    for metric in snapshot.metrics:
        value = snapshot.series(metric)[2]
        assert row[metric] == "" if math.isnan(value) else float(row[metric]) == pytest.approx(value, rel=1e-6)


def test_one_column_per_metric_and_one_line_per_head(logs: Logs, tmp_path: Path, say: Say) -> None:
    say("read", logs.path("tensorboard", "healthy"), "--csv", tmp_path / "out.csv", "--wide", "--heads")
    found = rows(tmp_path / "out.csv")
    assert list(found[0])[:5] == ["run", "step", "layer", "name", "head"]
    assert len({(row["step"], row["name"], row["head"]) for row in found}) == len(found)
    assert {"max_logit", "attention_uniformity"} <= found[0].keys()


def test_what_is_in_a_log(logs: Logs, say: Say) -> None:
    status, said, _ = say("read", logs.path("tensorboard", "healthy"))
    lines = [line.split() for line in said.splitlines()]
    assert status == 0
    assert said.splitlines()[1] == f"{STEPS} steps from 0 to {STEPS - 1}, 3 layers, 0 alerts"
    assert ["effective_rank", "directions"] in lines
    assert ["max_logit", "nats", "heads"] in lines
