"""Many steps in few columns, and the extremes that come back after TensorBoard has thinned a log out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from collapse_monitor.report import TensorBoardSink
from collapse_monitor.report.columns import bin_worst, drop_overtaken, fold_extremes
from collapse_monitor.report.dense import DenseEvents
from collapse_monitor.report.envelope import SHORTEST_WINDOW, Envelope
from collapse_monitor.report.naming import dense_tag, range_tag
from tests.report.logdirs import content, tensors
from tests.synthetic import make_snapshot

METRICS = [name for name in make_snapshot().metrics if name != "token_similarity"]


def slow_bin(values: np.ndarray, columns: int, collapse: str | None) -> np.ndarray:
    """Value by value."""
    count = len(values)
    found = np.full((columns, values.shape[1]), np.nan)
    for row in range(values.shape[1]):
        finite = sorted(value for value in values[:, row] if np.isfinite(value))
        middle = finite[(len(finite) - 1) // 2] if finite else 0.0
        for column in range(columns):
            inside = [value for value in values[column * count // columns : (column + 1) * count // columns, row] if not np.isnan(value)]
            endless = [value for value in inside if np.isinf(value)]
            key = {"high": lambda value: value, "low": lambda value: -value, None: lambda value: abs(value - middle)}[collapse]  # noqa: B023
            if inside:
                found[column, row] = endless[0] if endless else max(inside, key=key)
    return found


@pytest.mark.parametrize("collapse", ["high", "low", None])
def test_the_worst_of_a_column_stands_for_it(collapse: str | None) -> None:
    random = np.random.default_rng(1)
    values = random.normal(size=(97, 5)).astype(np.float32)
    values[random.random(values.shape) < 0.2] = np.nan
    values[40, 2], values[3, 0], values[10:20, 4] = np.inf, -np.inf, np.nan
    binned = bin_worst(np.arange(97) * 3, values, collapse, 13)
    np.testing.assert_allclose(binned.values, slow_bin(values, 13, collapse), rtol=1e-6)
    assert binned.kept == 97
    assert list(binned.first[:3]) == [0, 21, 42]
    assert list(binned.last[:2]) == [18, 39]
    assert binned.last[-1] == 96 * 3


def test_few_steps_stay_as_they_are() -> None:
    values = np.array([[1, np.nan], [2, 3]], dtype=np.float32)
    same = bin_worst(np.array([5, 9]), values, "high", 2)
    np.testing.assert_array_equal(same.values, values)
    assert list(same.first) == list(same.last) == [5, 9]
    assert bin_worst(np.zeros(0), np.zeros((0, 3)), None, 4).values.shape == (0, 3)


@pytest.mark.parametrize(("collapse", "wanted"), [("high", 9.0), ("low", -7.0), (None, 9.0)])
def test_an_extreme_goes_where_its_step_is(collapse: str | None, wanted: float) -> None:
    columns = bin_worst(np.array([0, 10, 20]), np.full((3, 2), 0.5), collapse)
    window = np.array([[-7.0, 0.5], [9.0, 0.5], [6, 0], [6, 0]])  # at step 14 of a window that ends at 20, in row 0
    folded = fold_extremes(columns, [(20, window)], collapse)
    expected = np.full((3, 2), 0.5)
    expected[1, 0] = wanted
    np.testing.assert_array_equal(folded.values, expected)
    assert list(folded.last) == [0, 14, 20]
    assert list(columns.last) == [0, 10, 20], "what was given is not changed"


def test_extremes_of_readings_that_are_there_change_nothing() -> None:
    values = np.random.default_rng(0).random((50, 3)).astype(np.float32)
    envelope = Envelope()
    for step, row in enumerate(values):
        envelope.add(step, ("a",), row[None].astype(np.float64))
    columns = bin_worst(np.arange(50), values, "high")
    folded = fold_extremes(columns, [(49, envelope.take(49)["a"])], "high")
    np.testing.assert_array_equal(folded.values, values)
    np.testing.assert_array_equal(folded.last, columns.last)


def test_late_steps_overtake() -> None:
    assert drop_overtaken([1, 2, 3, 3, 2, 5]) == [0, 4, 5]
    assert drop_overtaken([]) == []


def test_windows_hold_their_extremes_with_gaps_and_new_metrics() -> None:
    envelope = Envelope()
    nan = np.nan
    for step, rows in [(0, {"a": [1, nan]}), (10, {"a": [3, nan], "b": [5, 6]}), (20, {"b": [4, 9]})]:
        envelope.add(step, tuple(rows), np.array(list(rows.values()), dtype=float))
    found = envelope.take(20)
    np.testing.assert_array_equal(found["a"], [[1, nan], [3, nan], [20, 0], [10, 0]])
    np.testing.assert_array_equal(found["b"], [[4, 6], [5, 9], [0, 10], [10, 0]])
    envelope.add(30, ("a",), np.array([[7.0, 8.0, 9.0]]))  # another model
    assert envelope.take(30)["a"].tolist() == [[7, 8, 9], [7, 8, 9], [0, 0, 0], [0, 0, 0]]


def test_windows_grow_so_that_tensorboard_keeps_them_all() -> None:
    envelope, windows = Envelope(), 0
    envelope.add(0, ("a",), np.zeros((1, 1)))
    counted = {}
    for step in range(1, 1_000_001):
        envelope._seen, envelope._in_window = step, envelope._in_window + 1  # a million snapshots without their readings
        if envelope.due:
            envelope._in_window = 0
            windows += 1
        if step in (1000, 100_000, 1_000_000):
            counted[step] = windows
    assert counted[1000] == 1000 // SHORTEST_WINDOW
    assert counted[1_000_000] < 4000


def test_a_spike_survives_a_log_that_was_thinned_out(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path, max_queue=10_000)
    sink = TensorBoardSink(writer)
    spike, last = 1234, 2000
    for step in range(last + 1):
        similarity = [0.3, 0.99 if step == spike else 0.3, 0.3]
        sink.write(make_snapshot(step, 3, similarity=similarity, without=METRICS), [])
    sink.close()
    writer.close()
    thin = EventAccumulator(str(tmp_path), size_guidance={"tensors": 60})
    thin.Reload()
    kept = tensors(thin, dense_tag("token_similarity"))
    windows = tensors(thin, range_tag("token_similarity"))
    assert len(kept) == 60
    assert spike not in kept
    assert list(windows)[-1] == last, "closing writes the window that had begun"
    assert content(thin, range_tag("token_similarity"))["kind"] == "range"
    folded = fold_extremes(bin_worst(np.array(list(kept)), np.stack(list(kept.values())), "high"), list(windows.items()), "high")
    column = np.searchsorted(folded.first, spike, side="right") - 1
    assert folded.values[column, 1] == np.float32(0.99)
    assert (folded.values == np.float32(0.99)).sum() == 1
    assert folded.last[column] >= spike


def test_a_writer_closed_by_its_owner_is_left_alone(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path)
    dense = DenseEvents(writer)
    dense.close()
    for step in range(1100):
        dense.write(make_snapshot(step, 2, without=METRICS), [])
    writer.close()
    dense.close()
