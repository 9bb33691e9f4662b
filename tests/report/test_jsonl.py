"""The JSONL sink: strict JSON, one whole line per snapshot, and what is left after a kill."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collapse_monitor.records import Alert, Snapshot
from collapse_monitor.report import JSONLSink, read
from tests.synthetic import make_alert, make_snapshot


def strictly(line: str) -> dict[str, Any]:
    """JSON without the NaN and Infinity that Python would let pass."""

    def refuse(token: str) -> None:
        raise ValueError(f"{token} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_a_line_is_a_snapshot_with_its_alerts(tmp_path: Path) -> None:
    sink = JSONLSink(tmp_path / "deep" / "er" / "log.jsonl")
    assert not (tmp_path / "deep").exists()
    written = [make_snapshot(step, similarity=step / 10, context={"train_loss": 0.5}, missing={"a": 'b "c"'}) for step in range(3)]
    for snapshot in written:
        sink.write(snapshot, [make_alert(step=snapshot.step)] if snapshot.step == 1 else [])
    sink.close()
    lines = sink.path.read_text().splitlines()
    assert len(lines) == 3
    for line, snapshot in zip(lines, written, strict=True):
        record = strictly(line)
        assert record["version"] == 1
        again = Snapshot.from_dict(record)
        assert (again.step, again.sites, again.missing, again.context) == (
            snapshot.step,
            snapshot.sites,
            snapshot.missing,
            snapshot.context,
        )
        assert again.attainable_rank == snapshot.attainable_rank
        for metric in snapshot.metrics:
            assert again.series(metric) == pytest.approx(snapshot.series(metric), rel=1e-6)
    assert [Alert.from_dict(alert) for alert in strictly(lines[1])["alerts"]] == [make_alert(step=1)]


NUMBERS = st.floats(width=32) | st.floats()


@settings(max_examples=60, deadline=None)
@given(values=st.lists(NUMBERS, min_size=1, max_size=5), name=st.text(max_size=8), reason=st.text(max_size=8))
def test_any_numbers_and_names_survive(values: list[float], name: str, reason: str) -> None:
    snapshot = make_snapshot(
        layers=len(values),
        heads=2,
        blocks={"branch_ratio": values},
        attention={"max_logit": [[value, -value] for value in values]},
        missing={name: reason},
        context={name: values[0]},
    )
    record = strictly(JSONLSink("unused")._encode(snapshot, []))
    again = Snapshot.from_dict(record)
    for ours, theirs in zip(again.blocks["branch_ratio"], values, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, nan_ok=True)
    assert again.heads("max_logit")[0] == pytest.approx([values[0], -values[0]], rel=1e-6, nan_ok=True)
    assert dict(again.missing) == {name: reason}
    # The same fields as the record's own form, so that either reads the other.
    assert set(snapshot.to_dict()) == set(record) - {"time", "alerts"}


WRITER = """
import sys
from collapse_monitor.report import JSONLSink
from tests.synthetic import make_snapshot
sink = JSONLSink(sys.argv[1])
for step in range(int(sys.argv[2]), 10**9):
    sink.write(make_snapshot(step, layers=24, heads=8), [])
    print(step, flush=True)
"""


def killed_writer(path: Path, start: int, lines: int) -> int:
    """Write in another process until `lines` are confirmed, then kill it; the last step it confirmed."""
    command = [sys.executable, "-c", WRITER, str(path), str(start)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        for _ in range(lines):
            last = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        rest = process.stdout.read().split()
    assert process.returncode == -signal.SIGKILL
    return max([last, *map(int, rest)])


def test_a_kill_loses_at_most_the_line_in_work(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    last = killed_writer(path, 0, 30)
    again = killed_writer(path, last + 10, 5)
    steps = [strictly(line)["step"] for line in path.read_text().splitlines() if line.endswith("}")]
    assert steps[: last + 1] == list(range(last + 1)), "every confirmed line is there and whole"
    assert set(range(last + 10, again + 1)) <= set(steps)
    run = read(path)
    assert set(range(last + 1)) <= set(run.steps)


def test_a_torn_line_is_closed_off_when_the_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    first = JSONLSink(path)
    for step in range(2):
        first.write(make_snapshot(step), [])
    first.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    second = JSONLSink(path)
    second.write(make_snapshot(2), [])
    second.close()
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert [strictly(lines[index])["step"] for index in (0, 2)] == [0, 2]
    assert list(read(path).steps) == [0, 2]


def test_a_resumed_run_appends(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for step in range(3):
        sink = JSONLSink(path)
        sink.write(make_snapshot(step), [])
        sink.close()
        sink.close()
    assert path.read_bytes().endswith(b"}\n")
    assert [strictly(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]


def test_copies_open_the_file_for_themselves(tmp_path: Path) -> None:
    sink = JSONLSink(tmp_path / "log.jsonl")
    sink.write(make_snapshot(0), [])
    again = pickle.loads(pickle.dumps(copy.deepcopy(sink)))
    sink.close()
    again.write(make_snapshot(1), [])
    again.close()
    assert list(read(sink.path).steps) == [0, 1]


def test_nothing_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    sink = JSONLSink(tmp_path / "log.jsonl")
    sink.write(make_snapshot(0), [])
    sink.close()
    assert (len(os.listdir("/proc/self/fd")) if before else 0) == before


def test_a_large_snapshot_is_quick() -> None:
    """48 layers, 16 heads: a ninth of the time that a dict on the way takes. The quickest of ten, taken in turns."""
    snapshot = make_snapshot(layers=48, heads=16, max_logit=math.pi, uniformity=1 / 3)
    sink = JSONLSink("unused")

    def seconds(encode: Callable[[], str]) -> float:
        started = time.process_time()
        encode()
        return time.process_time() - started

    took = [(seconds(lambda: sink._encode(snapshot, [])), seconds(lambda: json.dumps(snapshot.to_dict()))) for _ in range(10)]
    direct, through_a_dict = (min(times) for times in zip(*took, strict=True))
    assert direct < 0.5 * through_a_dict
