"""Which steps are sampled: the user's choice, stretched where the monitor would cost more than its budget."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

GRACE_SAMPLES, GRACE_SECONDS, GRACE_LIMIT = 40, 0.5, 5.0
"""The budget binds after so many samples that cost so much, or at a cost of the limit: a share of the first moments means nothing."""
_REMEMBERED = 21

WEIGHTS_EVERY = 10
"""Projections change slowly: their weights are read with the first of every ten samples."""


class Schedule:
    """Decides step by step. With a number, a step is sampled when `step // every` has changed since the last sampled one.

    Attributes:
        every: the number of steps between samples now in force, None when the user's own function decides.
    """

    def __init__(self, every: int | Callable[[int], bool], budget: float | None) -> None:
        if isinstance(every, bool) or not (callable(every) or isinstance(every, int)):
            raise ValueError(f"every={every!r}: give a number of steps (every=50) or a function step -> bool")
        if isinstance(every, int) and every < 1:
            raise ValueError(f"every={every}: must be at least 1; every=1 samples each step, a large number samples rarely")
        if budget is not None and not (isinstance(budget, int | float) and not isinstance(budget, bool) and 0 < budget <= 1):
            raise ValueError(
                f"budget={budget!r}: the share of training time the monitor may take, between 0 and 1 (0.01 is 1 %), or None for no limit"
            )
        self._asked, self._budget = every, budget
        self.every: int | None = every if isinstance(every, int) else None
        self._last: int | None = None
        self._spent, self._samples = 0.0, 0
        self._costs: deque[float] = deque(maxlen=_REMEMBERED)
        self._step_times: deque[float] = deque(maxlen=_REMEMBERED)
        self._mark: tuple[float, int] | None = None  # when the step number in progress was first asked for
        self._paid = 0.0  # since then, for samples
        self._gap = 1
        self._turn = 0
        self._rare, self._rare_now = 0.0, 0.0
        self._before: int | None = None

    def wants(self, step: int) -> bool:
        """Whether to sample this step. Call once for each of its micro-batches."""
        self._measure(step, time.perf_counter())
        sampled = self._due(step)
        if sampled:
            self._before, self._last = self._last, step
        return sampled

    def _measure(self, step: int, now: float) -> None:
        """Book the time a step takes without what samples cost. Micro-batches are one step; step numbers may advance by more than one."""
        if self._mark is not None:
            began, before = self._mark
            if step == before:
                return
            if step > before:
                self._step_times.append(max(now - began - self._paid, 0.0) / (step - before))
        self._mark, self._paid = (now, step), 0.0

    def _due(self, step: int) -> bool:
        anew = self._last is None or step < self._last
        if callable(self._asked):
            return bool(self._asked(step)) and (anew or step - (self._last or 0) >= self._gap)
        assert self.every is not None
        return anew or step // self.every != (self._last or 0) // self.every

    def retract(self) -> None:
        """The sampled step turned out to be none: nothing was trained. The next one is sampled in its place."""
        self._last = self._before

    @property
    def _binds(self) -> bool:
        return self._spent > GRACE_LIMIT or (self._spent > GRACE_SECONDS and self._samples >= GRACE_SAMPLES)

    def charge(self, seconds: float, once: bool = False) -> str | None:
        """Book what a sampled step cost; `once` for what will not come again. A sentence when the interval changes."""
        self._paid += seconds
        seconds += self._rare - self._rare_now
        self._rare_now = 0.0
        if once:
            return None
        self._spent += seconds
        self._samples += 1
        self._costs.append(seconds)
        if self._budget is None or not self._binds or not self._step_times:
            return None
        cost, step_time = median(self._costs), max(median(self._step_times), 1e-6)
        needed = math.ceil(cost / (self._budget * step_time))
        if self.every is None:
            self._gap = needed
            return None
        assert isinstance(self._asked, int)
        needed = max(self._asked, needed)
        if needed > 1.25 * self.every or needed < 0.5 * self.every:
            before, self.every = self.every, needed
            return (
                f"sampling every {needed} steps instead of {before}: a sampled step costs {1e3 * cost:.1f} ms more, a training step takes "
                f"{1e3 * step_time:.1f} ms, and the budget is {self._budget:.1%} of training time (budget=None switches this off)"
            )
        return None

    def weights_due(self) -> bool:
        """Whether this sample reads the weights of the projections too. Call once for each."""
        self._turn += 1
        return self._turn % WEIGHTS_EVERY == 1

    def spread(self, seconds: float) -> None:
        """Say how much of what this sample will be charged comes with one sample in ten only: all of them bear it alike."""
        self._rare, self._rare_now = seconds / WEIGHTS_EVERY, seconds

    def charge_late(self, seconds: float) -> None:
        """Book what the last sample cost after its window: reading its numbers."""
        self._paid += seconds
        if self._costs:
            self._spent += seconds
            self._costs[-1] += seconds

    @property
    def interval(self) -> int:
        """Steps between samples that the budget allows."""
        return self._gap if self.every is None else self.every

    def agree(self, interval: int) -> None:
        """Take the interval that several processes agreed on, so that all sample the same steps."""
        if self.every is None:
            self._gap = interval
        else:
            self.every = interval

    def state_dict(self) -> dict[str, Any]:
        return {"every": self.every, "last": self._last, "spent": self._spent, "samples": self._samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.every is not None and state.get("every") is not None:
            self.every = max(self.every, int(state["every"]))
        self._last = state.get("last")
        self._spent, self._samples = float(state.get("spent", 0.0)), int(state.get("samples", 0))
