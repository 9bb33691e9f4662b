"""Logs that others have written into, that disks have damaged, or that lie beside what is no log."""

from __future__ import annotations

import json
import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.types_pb2 import DT_FLOAT, DT_STRING
from tensorboard.summary.writer.record_writer import masked_crc32c

from collapse_monitor.records import Snapshot
from collapse_monitor.report import JSONLSink, TensorBoardSink, naming, read
from collapse_monitor.report.events import read_events
from collapse_monitor.report.html import write_report
from collapse_monitor.report.reader import read_runs
from tests.synthetic import make_alert, make_snapshot

STEPS = 6
ABOUT = b'{"v":1,"metric":"token_similarity"}'


def sound(folder: Path) -> Path:
    """The one file of a log with alerts."""
    sink = TensorBoardSink(folder)
    for step in range(STEPS):
        sink.write(make_snapshot(step), [make_alert(step=step)])
    sink.close()
    return next(folder.iterdir())


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return b"".join([length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data))])


def event(plugin: str, content: bytes, data: bytes, *shape: int, kind: int = DT_FLOAT, tag: str = "collapse/foreign") -> bytes:
    event = Event(step=3)
    value = event.summary.value.add(tag=tag)
    value.metadata.plugin_data.plugin_name, value.metadata.plugin_data.content = plugin, content
    value.tensor.dtype = kind
    for size in shape:
        value.tensor.tensor_shape.dim.add(size=size)
    if kind == DT_STRING:
        value.tensor.string_val.append(data)
    else:
        value.tensor.tensor_content = data
    return record(event.SerializeToString())


def alerts(*records: Any) -> bytes:
    return event(naming.ALERT_PLUGIN, b"", json.dumps(records).encode(), kind=DT_STRING)


ONE = struct.pack("<f", 1.0)
FOREIGN = {
    "not an event": record(b"collapse" + b"\xff" * 50),
    "shape of another size": event(naming.PLUGIN, ABOUT, ONE, 5),
    "half a number": event(naming.PLUGIN, ABOUT, b"abc", 1),
    "no dimension": event(naming.PLUGIN, ABOUT, ONE),
    "three dimensions": event(naming.PLUGIN, ABOUT, ONE, 1, 1, 1),
    "unknown type": event(naming.PLUGIN, ABOUT, ONE, 1, kind=77),
    "text": event(naming.PLUGIN, ABOUT, b"text", 1, kind=DT_STRING),
    "more than memory": event(naming.PLUGIN, ABOUT, b"", 2**40),
    "version in words": event(naming.PLUGIN, b'{"v":"2","metric":"token_similarity"}', ONE, 1),
    "list of metrics": event(naming.PLUGIN, b'{"v":1,"metric":["token_similarity"]}', ONE, 1),
    "nested without end": event(naming.PLUGIN, b"[" * 100_000, ONE, 1),
    "alerts that are no text": event(naming.ALERT_PLUGIN, b"", b"\xff\xfe", kind=DT_STRING),
    "alerts that are no list": event(naming.ALERT_PLUGIN, b"", b'{"a":1}', kind=DT_STRING),
    "alerts of others": alerts(1, None, "x", {}, {**make_alert().to_dict(), "severity": "doom"}),
    "alerts with something more": alerts({**make_alert().to_dict(), "more": 1}),
    "alerts before the first layer": alerts({**make_alert().to_dict(), "layers": [-9]}, {**make_alert().to_dict(), "layers": ["x"]}),
}


@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=list(FOREIGN))
def test_what_is_not_ours_changes_nothing(foreign: bytes, tmp_path: Path) -> None:
    file = sound(tmp_path / "log")
    expected = read(file)
    file.write_bytes(file.read_bytes() + foreign)
    found = read(file)
    assert list(found.steps) == list(range(STEPS))
    assert found.metrics == expected.metrics
    assert found.alerts == expected.alerts
    write_report([file], tmp_path / "report.html")


def test_what_a_log_says_about_a_metric_is_believed_only_where_it_can_be_meant(tmp_path: Path) -> None:
    file = sound(tmp_path)
    odd = {"v": 1, "metric": "mine", "layers": 7, "range": "x", "collapse": "sideways", "unit": 3, "meaning": {}}
    file.write_bytes(file.read_bytes() + event(naming.PLUGIN, json.dumps(odd).encode(), ONE, 1))
    found = read(file)
    assert "mine" not in found.about
    assert found.layers == tuple(f"blocks.{layer}" for layer in range(4))
    assert found.series("mine")[3].tolist() == [1.0]


def test_a_damaged_record_is_counted_and_the_others_are_read(tmp_path: Path) -> None:
    file = sound(tmp_path)
    data = file.read_bytes()
    ends = [0]
    while ends[-1] < len(data):
        ends.append(ends[-1] + 16 + int.from_bytes(data[ends[-1] : ends[-1] + 8], "little"))
    begin, end = ends[3], ends[4]
    file.write_bytes(data[: begin + 400] + bytes(end - begin - 400) + data[end:])
    damaged: list[int] = []
    steps = [step for step, _, _ in read_events(file, damaged)]
    assert damaged == [3]
    assert len(steps) == STEPS - 1
    assert list(read(file).steps) == steps


def test_no_byte_of_a_file_can_break_the_reader(tmp_path: Path) -> None:
    file = sound(tmp_path)
    whole, chance = file.read_bytes(), random.Random(0)
    read_back = 0
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 3, 30))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        file.write_bytes(damaged)
        try:
            read_back += bool(len(read(file).steps))
        except FileNotFoundError as error:
            assert "nothing written by collapse_monitor in it" in str(error)  # noqa: PT017
        except ValueError as error:
            assert "newer" in str(error)  # noqa: PT017
    assert read_back > 20


def test_lines_that_look_like_ours_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    sink = JSONLSink(path)
    for step in range(2):
        sink.write(make_snapshot(step), [make_alert(step=step)])
    sink.close()
    good = json.loads(path.read_text().splitlines()[0])
    odd: list[dict[str, Any]] = [
        {"version": "one"},
        {"step": None},
        {"step": 10**30},
        {"sites": 7},
        {"sites": [{"name": "x"}]},
        {"sites": []},
        {"blocks": {"token_similarity": ["x"]}},
        {"attention": {"max_logit": [[1.0]]}},
        {"context": 3},
    ]
    lines = [json.dumps({**good, **change}) for change in odd] + ["[" * 100_000, "{}"]
    foreign = [{**good, "step": 2, "alerts": found} for found in (7, [3, {}], None)]
    path.write_text("\n".join([*lines, *path.read_text().splitlines(), *map(json.dumps, foreign)]))
    run = read(path)
    assert list(run.steps) == [0, 1, 2]
    assert [alert.step for alert in run.alerts] == [0, 1]


def test_a_newer_log_is_named(tmp_path: Path) -> None:
    file = sound(tmp_path)
    file.write_bytes(file.read_bytes() + alerts({"version": 2}))
    with pytest.raises(ValueError, match=f"^{file}: log format 2 is newer"):
        read(tmp_path)


def test_folders_and_links_that_are_named_like_logs(tmp_path: Path) -> None:
    sound(tmp_path / "run one")
    (tmp_path / "old.tfevents.d").mkdir()
    (tmp_path / "more.jsonl").mkdir()
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "events.out.tfevents.2.gone").symlink_to(tmp_path / "nowhere")
    assert [run.path for run in read_runs(tmp_path)] == [tmp_path / "run one"]


@pytest.mark.filterwarnings("error")
def test_readings_beyond_single_precision_are_infinite_and_warn_nobody(tmp_path: Path) -> None:
    sink, lines = TensorBoardSink(tmp_path / "tensorboard"), JSONLSink(tmp_path / "lines.jsonl")
    for step in range(200):  # so that a window of extremes is written too
        snapshot: Snapshot = make_snapshot(step, layers=1, rank=1e300)
        sink.write(replace(snapshot, attention={}), [])
    lines.write(snapshot, [])
    sink.close()
    lines.close()
    assert np.isposinf(read(tmp_path / "tensorboard").series("effective_rank")).all()
    assert read(tmp_path / "lines.jsonl").series("effective_rank").tolist() == [[1e300]]
    write_report([tmp_path / "tensorboard", tmp_path / "lines.jsonl"], tmp_path / "report.html")
