"""What users hand in, checked where it arrives."""

from __future__ import annotations

import operator

from torch import nn


def whole_step(step: object) -> int:
    """The number of a step.

    Raises:
        ValueError: it is not a whole number.
    """
    try:
        return operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"observe(step={step!r}): the step must be a whole number, the one your loss is logged with") from None


def check_model(name: str, model: object) -> None:
    """Refuse what is no model.

    Raises:
        ValueError: says what is needed.
    """
    if not isinstance(model, nn.Module):
        given = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ValueError(f"{name}(model, ...) needs an nn.Module, got {given}")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a word that is not on the list.

    Raises:
        ValueError: with the list.
    """
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")
