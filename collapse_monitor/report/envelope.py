"""The extremes between two readings that TensorBoard keeps: it thins long logs out at random, and a spike of one step would go with it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SHORTEST_WINDOW = 128
"""Snapshots. TensorBoard keeps thousands of readings of a tag, so that at first nothing is lost."""

WINDOWS_PER_LOG = 500
"""A window grows with the log: some 500 windows and 500 more for each factor e of length, fewer than TensorBoard keeps in any real run."""


KEPT_WHOLE = 1000
"""Snapshots. So many readings of a tag are kept by TensorBoard with any sensible setting."""


class Envelope:
    """Per metric and layer the smallest and the largest value since the last window, and when they were.

    >>> envelope = Envelope()
    >>> for step, value in enumerate([0.25, 0.75, 0.125, 0.5]):
    ...     envelope.add(step, ("token_similarity",), np.array([[value]]))
    >>> {metric: rows.tolist() for metric, rows in envelope.take(step).items()}
    {'token_similarity': [[0.125], [0.75], [1.0], [2.0]]}
    """

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._seen = 0
        self._in_window = 0
        self._clear(0)

    def add(self, step: int, metrics: tuple[str, ...], values: NDArray[np.float64]) -> None:
        """One snapshot, `[metric, layer]`, nan where missing."""
        if values.shape[1] != self._low.shape[1] or not self._rows.keys() >= set(metrics):
            # Another model, or a metric that was never there before: what the window held of the others is kept where it fits.
            self._rows = {metric: row for row, metric in enumerate(dict.fromkeys((*self._rows, *metrics)))}
            self._grow(values.shape[1])
        rows = np.array([self._rows[metric] for metric in metrics], dtype=np.int64)
        low, high = self._low[rows], self._high[rows]
        below, above = values < low, values > high
        self._low[rows], self._low_step[rows] = np.where(below, values, low), np.where(below, step, self._low_step[rows])
        self._high[rows], self._high_step[rows] = np.where(above, values, high), np.where(above, step, self._high_step[rows])
        self._seen += 1
        self._in_window += 1

    @property
    def due(self) -> bool:
        """Whether the window is long enough to be written."""
        return self._in_window >= max(SHORTEST_WINDOW, self._seen // WINDOWS_PER_LOG)

    @property
    def unfinished(self) -> bool:
        """Whether a window has begun in a log so long that it may be thinned out."""
        return self._in_window > 0 and self._seen >= KEPT_WHOLE

    def take(self, step: int) -> dict[str, NDArray[np.float32]]:
        """Per metric `[4, layer]`: smallest, largest, how many steps before `step` the one was and the other. The window starts anew."""
        nothing = self._low > self._high
        ago = [np.where(nothing, 0, step - steps) for steps in (self._low_step, self._high_step)]
        with np.errstate(over="ignore"):  # beyond single precision is infinite
            rows = np.stack([np.where(nothing, np.nan, self._low), np.where(nothing, np.nan, self._high), *ago], axis=1).astype(np.float32)
        self._clear(self._low.shape[1])
        self._in_window = 0
        return {metric: rows[row] for metric, row in self._rows.items()}

    def _clear(self, layers: int) -> None:
        shape = (len(self._rows), layers)
        self._low, self._high = np.full(shape, np.inf), np.full(shape, -np.inf)
        self._low_step, self._high_step = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)

    def _grow(self, layers: int) -> None:
        before = (self._low, self._high, self._low_step, self._high_step)
        self._clear(layers)
        if before[0].shape[1] == layers:
            for old, new in zip(before, (self._low, self._high, self._low_step, self._high_step), strict=True):
                new[: len(old)] = old


RANGE = "range"
"""What the log calls such a tensor in its description."""
