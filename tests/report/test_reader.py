"""Logs back as arrays, from TensorBoard folders and JSONL files, also torn, resumed, mixed with others' data, or from the future."""

from __future__ import annotations

import json
import struct
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

import collapse_monitor as cm
from collapse_monitor.records import Alert, Snapshot
from collapse_monitor.report import JSONLSink, TensorBoardSink, read
from collapse_monitor.report.naming import dense_tag
from collapse_monitor.report.reader import read_runs
from tests.report.logdirs import accumulate, tensors
from tests.synthetic import make_alert, make_snapshot


def course(steps: range, shift: float = 0.0) -> list[tuple[Snapshot, list[Alert]]]:
    random = np.random.default_rng(0)
    return [
        (make_snapshot(step, similarity=random.random(4) + shift, heads=3), [make_alert(step=step)] if step % 20 == 0 else [])
        for step in steps
    ]


def log_to(kind: str, folder: Path, entries: list[tuple[Snapshot, list[Alert]]]) -> Path:
    path = folder / "log.jsonl" if kind == "jsonl" else folder
    sink = JSONLSink(path) if kind == "jsonl" else TensorBoardSink(folder, heads_every=2)
    for snapshot, alerts in entries:
        sink.write(snapshot, alerts)
    sink.close()
    return path


@pytest.mark.parametrize("kind", ["tensorboard", "jsonl"])
def test_what_was_written_is_read(kind: str, tmp_path: Path) -> None:
    entries = course(range(0, 50, 10))
    run = cm.read(log_to(kind, tmp_path, entries))
    assert run.steps.dtype == np.int64
    assert list(run.steps) == [0, 10, 20, 30, 40]
    assert run.layers == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert run.sites == tuple(f"blocks.{layer}.attention" for layer in range(4))
    assert set(run.metrics) == set(entries[0][0].metrics)
    for metric in run.metrics:
        expected = np.array([snapshot.series(metric) for snapshot, _ in entries])
        assert run.series(metric).dtype == np.float64
        np.testing.assert_allclose(run.series(metric), expected, rtol=1e-6)
    heads = run.heads("attention_uniformity")
    assert heads.shape == (5, 4, 3)
    carried = slice(None) if kind == "jsonl" else slice(0, None, 2)
    np.testing.assert_allclose(heads[carried], 0.8, rtol=1e-3)
    assert kind == "jsonl" or np.isnan(heads[1::2]).all()
    assert [alert.step for alert in run.alerts] == [0, 20, 40]
    assert run.alerts[1] == make_alert(step=20)


def test_what_a_metric_is(tmp_path: Path) -> None:
    run = read(log_to("tensorboard", tmp_path, course(range(2))))
    assert run.about["effective_rank"] == {
        "meaning": "Exponential of the entropy of the singular values",
        "unit": "directions",
        "range": [1, None],
        "collapse": "low",
    }


@pytest.mark.parametrize("kind", ["tensorboard", "jsonl"])
def test_a_metric_that_is_not_there(kind: str, tmp_path: Path) -> None:
    run = read(log_to(kind, tmp_path, course(range(2))))
    with pytest.raises(KeyError, match="has no readings of 'nonsense'; it has .*token_similarity"):
        run.series("nonsense")
    with pytest.raises(KeyError, match="has no heads of 'token_similarity'; it has attention_uniformity, "):
        run.heads("token_similarity")


@pytest.mark.parametrize("kind", ["tensorboard", "jsonl"])
def test_a_resume_overtakes_what_came_after(kind: str, tmp_path: Path) -> None:
    path = log_to(kind, tmp_path, course(range(0, 60, 10)))
    time.sleep(1.1 if kind == "tensorboard" else 0)  # event files are named by the second
    log_to(kind, tmp_path, course(range(30, 50, 10), shift=1.0))
    run = read(path)
    assert list(run.steps) == [0, 10, 20, 30, 40]
    assert (run.series("token_similarity")[:3] < 1).all()
    assert (run.series("token_similarity")[3:] > 1).all()
    assert [alert.step for alert in run.alerts] == [0, 20, 40]


@pytest.mark.parametrize("kind", ["tensorboard", "jsonl"])
def test_a_torn_tail_ends_the_run_where_it_is_torn(kind: str, tmp_path: Path) -> None:
    path = log_to(kind, tmp_path, course(range(0, 60, 10)))
    file = path if path.is_file() else next(path.iterdir())
    whole = file.read_bytes()
    for cut in (2, 5, 100):
        file.write_bytes(whole[:-cut])
        assert list(read(path).steps) == [0, 10, 20, 30, 40]
    file.write_bytes(whole[:-7] + b"\0" * 4096)  # as some file systems leave it
    assert list(read(path).steps)[:5] == [0, 10, 20, 30, 40]


def test_every_prefix_of_an_event_file_can_be_read_or_is_refused_clearly(tmp_path: Path) -> None:
    log_to("tensorboard", tmp_path / "whole", course(range(3)))
    whole = next((tmp_path / "whole").iterdir()).read_bytes()
    cut = tmp_path / "events.out.tfevents.1.cut"
    for size in range(0, len(whole), 97):
        cut.write_bytes(whole[:size])
        try:
            assert list(read(cut).steps) == list(range(len(read(cut).steps)))
        except FileNotFoundError as error:
            assert "nothing written by collapse_monitor in it" in str(error)  # noqa: PT017


def test_the_data_of_others_is_passed_over(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path)
    sink = TensorBoardSink(writer)
    for snapshot, alerts in course(range(0, 50, 10)):
        writer.add_scalar("loss", 1.0, snapshot.step)
        writer.add_scalar("collapse/mine", 1.0, snapshot.step)
        writer.add_tensor("collapse/theirs", __import__("torch").zeros(3), snapshot.step)
        writer.add_text("note", "collapse", snapshot.step)
        sink.write(snapshot, alerts)
    writer.close()
    run = read(tmp_path)
    assert set(run.metrics) == set(make_snapshot().metrics)
    assert len(run.steps) == 5


def test_lines_of_others_are_passed_over(tmp_path: Path) -> None:
    path = log_to("jsonl", tmp_path, course(range(2)))
    path.write_text('{"loss": 3}\n[1]\nnot json\n\n' + path.read_text() + "{}\n")
    assert list(read(path).steps) == [0, 1]


def test_layers_may_change_their_number(tmp_path: Path) -> None:
    entries = [(make_snapshot(0, layers=2), []), (make_snapshot(1, layers=4), [])]
    for kind in ("jsonl", "tensorboard"):
        run = read(log_to(kind, tmp_path / kind, entries))
        series = run.series("token_similarity")
        assert series.shape == (2, 4)
        assert np.isnan(series[0, 2:]).all()
        assert np.isfinite(series[1]).all()


def test_a_newer_jsonl_log_is_refused(tmp_path: Path) -> None:
    path = log_to("jsonl", tmp_path, course(range(1)))
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}) + "\n")
    with pytest.raises(ValueError, match=r"log format 2 is newer than this collapse_monitor reads \(1\): upgrade collapse_monitor"):
        read(path)


def test_a_newer_tensorboard_log_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collapse_monitor.report.naming.FORMAT_VERSION", 2)
    log_to("tensorboard", tmp_path, course(range(1)))
    with pytest.raises(ValueError, match="log format 2 is newer"):
        read(tmp_path)


def test_a_folder_of_runs_asks_for_one(tmp_path: Path) -> None:
    for name in ("one", "two"):
        log_to("tensorboard", tmp_path / name, course(range(2)))
    SummaryWriter(tmp_path / "other").close()
    with pytest.raises(ValueError, match=r"holds 2 runs, read one of them: .*one, .*two"):
        read(tmp_path)
    assert len(read(tmp_path / "two").steps) == 2


def test_a_jsonl_file_is_found_in_its_folder(tmp_path: Path) -> None:
    log_to("jsonl", tmp_path / "run", course(range(3)))
    (tmp_path / "other.jsonl").write_text('{"loss": 1}\n')
    assert len(read(tmp_path).steps) == 3


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="nothing written by collapse_monitor in it"):
        read(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(FileNotFoundError, match="nothing written by collapse_monitor in it"):
        read(tmp_path / "empty.jsonl")


def test_the_checksum_is_that_of_tensorboard() -> None:
    from tensorboard.summary.writer.record_writer import masked_crc32c

    from collapse_monitor.report.events import _masked_crc

    for length in (0, 1, 4096, 2**40):
        header = struct.pack("<Q", length)
        assert _masked_crc(header) == masked_crc32c(header)


def test_context_free_snapshots_without_attention(tmp_path: Path) -> None:
    plain = replace(make_snapshot(0), attention={}, sites=make_snapshot().block_sites)
    for kind in ("jsonl", "tensorboard"):
        run = read(log_to(kind, tmp_path / kind, [(plain, [])]))
        assert run.head_metrics == ()
        assert run.series("token_similarity").shape == (1, 4)


def test_all_runs_below_a_folder(tmp_path: Path) -> None:
    for name in ("b", "a/inner"):
        log_to("tensorboard", tmp_path / name, course(range(3)))
    assert [run.path for run in read_runs(tmp_path)] == [tmp_path / "a" / "inner", tmp_path / "b"]
    with pytest.raises(ValueError, match="holds 2 runs, read one of them"):
        read(tmp_path)


@pytest.mark.parametrize("kind", ["tensorboard", "jsonl"])
def test_heads_alone_without_the_steps_between(kind: str, tmp_path: Path) -> None:
    run = read(log_to(kind, tmp_path, course(range(0, 50, 10))))
    steps, values = run.logged_heads("attention_uniformity")
    assert list(steps) == ([0, 10, 20, 30, 40] if kind == "jsonl" else [0, 20, 40])
    np.testing.assert_array_equal(values, run.heads("attention_uniformity")[np.isin(run.steps, steps)])
    assert run.site_layers == (0, 1, 2, 3)


def test_extremes_of_windows_are_no_readings(tmp_path: Path) -> None:
    run = read(log_to("tensorboard", tmp_path, course(range(200))))
    assert "effective_rank" not in run.head_metrics
    assert run.series("effective_rank").shape == (200, 4)


@pytest.mark.slow
def test_reading_is_several_times_faster_than_tensorboards_own_reader(tmp_path: Path) -> None:
    entries = [(make_snapshot(step, 48, 1), []) for step in range(600)]
    log_to("tensorboard", tmp_path, entries)
    ours, theirs = [], []
    for _ in range(3):
        started = time.thread_time()
        run = read(tmp_path)
        ours.append(time.thread_time() - started)
        started = time.thread_time()
        log = accumulate(tmp_path)
        theirs.append(time.thread_time() - started)
    assert len(run.steps) == len(tensors(log, dense_tag("effective_rank"))) == 600
    assert min(ours) < min(theirs) / 3


def test_json_lines_beside_event_files_are_the_same_run_and_elsewhere_another(tmp_path: Path) -> None:
    log_to("tensorboard", tmp_path / "both", course(range(3)))
    log_to("jsonl", tmp_path / "both" / "collapse", course(range(3)))
    log_to("jsonl", tmp_path / "lines", course(range(2)))
    assert [run.path for run in read_runs(tmp_path)] == [tmp_path / "both", tmp_path / "lines" / "log.jsonl"]
    assert read(tmp_path / "both").path == tmp_path / "both"


@pytest.mark.parametrize("kind", ["tensorboard", "jsonl"])
def test_the_unit_of_a_metric(kind: str, tmp_path: Path) -> None:
    run = read(log_to(kind, tmp_path, course(range(2))))
    assert [run.unit(metric) for metric in ("effective_rank", "token_similarity", "max_logit")] == ["directions", "", "nats"]


def test_noughts_in_a_record_end_the_log_there(tmp_path: Path) -> None:
    """As a crash of the machine leaves them: the file has its length, the data was never written."""
    log_to("tensorboard", tmp_path, course(range(6)))
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] + bytes(len(data) // 2))
    assert 0 < len(read(tmp_path).steps) < 6
