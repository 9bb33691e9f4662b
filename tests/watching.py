"""What tests of the monitor share: one observed step, comparisons of snapshots, and what a window may not leave behind."""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from collapse_monitor.monitor import Monitor
from collapse_monitor.records import Snapshot
from tests.capture.models import Call, case_named, loss_of

GPT = case_named("gpt-sdpa")


def gpt(seed: int = 0) -> nn.Module:
    return GPT.model(seed)


def strict(model: nn.Module, **options: Any) -> Monitor:
    """A monitor that samples every step and lets no fault of its own pass."""
    return Monitor(model, **{"every": 1, "budget": None, "on_error": "raise", **options})


def step_of(monitor: Monitor, model: nn.Module, step: int, call: Call | None = None) -> Snapshot:
    """One observed forward and backward; its snapshot."""
    args, kwargs = call or GPT.call(step)
    with monitor.observe(step):
        loss_of(model(*args, **kwargs)).backward()
    model.zero_grad()
    snapshot = monitor.latest
    assert snapshot is not None
    return snapshot


def second_step(model: nn.Module, call: Callable[[int], Call], **options: Any) -> Snapshot:
    """What a monitor reads on the second of two steps, when the plan is known."""
    with strict(model, **options) as monitor:
        step_of(monitor, model, 0, call(0))
        return step_of(monitor, model, 1, call(1))


def same_readings(one: Snapshot, other: Snapshot, but: tuple[str, ...] = ()) -> bool:
    """Whether all readings agree to 1e-5, nan where nan is."""
    for name in set(one.metrics) - set(but):
        pairs = zip(flat(one, name), flat(other, name), strict=True)
        if not all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-7) or (math.isnan(a) and math.isnan(b)) for a, b in pairs):
            return False
    return one.sites == other.sites


def flat(snapshot: Snapshot, name: str) -> list[float]:
    return snapshot.series(name) if name in snapshot.blocks else [value for head in snapshot.heads(name) for value in head]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("collapse_monitor") and r.levelno >= logging.WARNING]


@dataclass
class Surroundings:
    """Everything around a model that a window could leave something in."""

    hooks: int
    modes: int
    threads: int
    grad_enabled: bool
    attributes: list[set[str]]

    @classmethod
    def of(cls, model: nn.Module) -> Surroundings:
        kinds = [name for name in vars(nn.Module()) if "hook" in name]
        hooks = sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds if isinstance(getattr(module, kind), dict))
        return cls(
            hooks,
            torch._C._len_torch_function_stack(),
            threading.active_count(),
            torch.is_grad_enabled(),
            [set(vars(module)) for module in model.modules()],
        )


class Dispatched(TorchDispatchMode):
    """Counts what reaches the device, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def assert_similarity(snapshot: Snapshot, outputs: list[Any], only: list[int] | None = None) -> None:
    """`token_similarity` of these outputs, by the definition: the mean cosine of all distinct pairs."""
    expected = []
    for output in outputs:
        unit = nn.functional.normalize(output.double(), dim=-1)
        n = unit.shape[1]
        cosines = unit @ unit.mT
        expected.append(float(((cosines.sum((1, 2)) - n) / (n * (n - 1))).mean()))
    got = snapshot.series("token_similarity")
    assert [got[i] for i in (range(len(got)) if only is None else only)] == pytest.approx(expected, rel=1e-4, abs=1e-6)
