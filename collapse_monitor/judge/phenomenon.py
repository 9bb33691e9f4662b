"""What the catalogue says of a phenomenon."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phenomenon:
    """One phenomenon.

    Attributes:
        name: of the rule that finds it, and the docs anchor.
        summary: one sentence that says what has happened.
        next_step: the first thing to look at.
        causes: usual causes, most likely first.
        remedies: what counters it, with the paper.
        readings: metrics that belong to the evidence, beside the one that fired.
        against: what speaks against it, or for something else that looks like it.
        rises: readings that rise with it.
        falls: readings that fall with it.
    """

    name: str
    summary: str
    next_step: str
    causes: tuple[str, ...]
    remedies: tuple[str, ...]
    readings: tuple[str, ...]
    against: str = ""
    rises: tuple[str, ...] = ()
    falls: tuple[str, ...] = ()

    @property
    def anchor(self) -> str:
        return f"phenomena.md#{self.name}"
