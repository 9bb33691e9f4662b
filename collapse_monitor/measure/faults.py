"""What went wrong while measuring: recorded once per metric, never raised into the run."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from collapse_monitor.metrics import Metric

T = TypeVar("T")


@dataclass(slots=True)
class Faults:
    """Exceptions by the name of the metric, or of the group of readings, that raised them: the first one of each."""

    raised: list[tuple[str, BaseException]] = field(default_factory=list)

    def attempt(self, name: str, compute: Callable[[], T]) -> T | None:
        """The result, or None after recording the first fault under this name."""
        try:
            return compute()
        except Exception as error:
            if name not in self.names:
                traceback.clear_frames(error.__traceback__)  # they hold the tensors of the run
                self.raised.append((name, error))
            return None

    def attempt_metric(self, metric: Metric, shape: tuple[int, ...], *arguments: Any) -> Tensor | None:
        """What a metric's own function gives, if it is a tensor of the right shape."""
        return self.attempt(metric.name, lambda: _checked(metric.compute(*arguments), shape))

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.raised}

    def reason(self, name: str) -> str | None:
        """One line about the fault under this name."""
        return next((described(error) for known, error in self.raised if known == name), None)


def described(error: BaseException) -> str:
    """One line that names an exception."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _checked(value: object, shape: tuple[int, ...]) -> Tensor:
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(f"returned {got}; expected a tensor of shape {list(shape)}")
    return value.detach().to(torch.float32)
