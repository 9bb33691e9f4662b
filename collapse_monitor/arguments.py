"""What users hand in, checked where it arrives."""

from __future__ import annotations

import operator


def whole_step(step: object) -> int:
    """The number of a step.

    Raises:
        ValueError: it is not a whole number.
    """
    try:
        return operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"observe(step={step!r}): the step must be a whole number, the one your loss is logged with") from None


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse a word that is not on the list.

    Raises:
        ValueError: with the list.
    """
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: allowed are {', '.join(map(repr, allowed))}")
