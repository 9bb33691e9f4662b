"""What was found, and what to do about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class State(enum.StrEnum):
    """`ok`, `note` (worth knowing, nothing is broken) or `wrong` (readings are not seen, or not all)."""

    OK = "ok"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Found:
    """One finding. `steps` are what to do next: commands to type, or a sentence."""

    state: State
    what: str
    steps: tuple[str, ...] = ()


def ok(what: str) -> Found:
    return Found(State.OK, what)


def note(what: str, *steps: str) -> Found:
    return Found(State.NOTE, what, steps)


def wrong(what: str, *steps: str) -> Found:
    return Found(State.WRONG, what, steps)
