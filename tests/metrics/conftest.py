"""In these tests every metric checks the shapes and dtypes in its signature, its result's too, however it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CellType, FunctionType

import pytest
from beartype import beartype
from jaxtyping import jaxtyped
from torch import Tensor

from collapse_monitor.metrics import DEFAULT_METRICS


def checked(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A copy of a function that raises where arguments or results break the shapes of its signature."""
    assert isinstance(plain, FunctionType)
    copy = FunctionType(plain.__code__, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
    copy.__annotations__ = dict(plain.__annotations__)
    copy.__module__ = plain.__module__
    return jaxtyped(copy, typechecker=beartype)


def inner(metric: Callable[..., Tensor]) -> CellType:
    """The place where the wrapper that switches autocast off holds the metric it calls."""
    assert isinstance(metric, FunctionType)
    return dict(zip(metric.__code__.co_freevars, metric.__closure__ or (), strict=True))["metric"]


CELLS = [inner(metric.compute) for metric in DEFAULT_METRICS]
PLAIN = [cell.cell_contents for cell in CELLS]
CHECKED = [checked(plain) for plain in PLAIN]


@pytest.fixture
def unchecked_shapes() -> None:
    """For tests of what a metric itself says about bad input."""


@pytest.fixture(autouse=True)
def _checked_shapes(request: pytest.FixtureRequest) -> Iterator[None]:
    functions = PLAIN if "unchecked_shapes" in request.fixturenames else CHECKED
    for cell, function in zip(CELLS, functions, strict=True):
        cell.cell_contents = function
    yield
    for cell, function in zip(CELLS, PLAIN, strict=True):
        cell.cell_contents = function


@pytest.fixture(scope="session", autouse=True)
def _checks_are_alive() -> None:
    """The checks themselves must not go to sleep unnoticed."""
    with pytest.raises(Exception, match=r"violates type hint|Type-check error"):
        CHECKED[0]([1.0])
