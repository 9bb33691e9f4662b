"""Where in its course a lean step is: which listened calls are open, and how many operations of each kind they have made."""

from __future__ import annotations

from collections import Counter

from collapse_monitor.capture.plan import Kind, Place

Call = tuple[str, int]
"""Name of a module, and the number of its call."""
Address = tuple[Call, Call | None, str, int]
"""A call, the last one inside it that has returned, a kind of operation, and its number among those since then."""


class Course:
    """Counts as `Place` does, so that an address means the same in every step that runs as the watched one did."""

    def __init__(self) -> None:
        self._stack: list[Call] = [("", -1)]
        self._over: dict[Call, Call] = {}  # by an open call, the last one inside it that has returned
        self._calls: Counter[str] = Counter()
        self._counts: Counter[tuple[Call, Call | None, str]] = Counter()

    @property
    def depth(self) -> int:
        """How many listened calls are open."""
        return len(self._stack) - 1

    def enter(self, name: str) -> Call:
        """A listened module is called."""
        call = (name, self._calls[name])
        self._calls[name] += 1
        self._stack.append(call)
        return call

    def leave(self, name: str) -> Call | None:
        """It returns, or has raised: calls inside it that never returned end with it. None if it was not open."""
        while len(self._stack) > 1:
            call = self._stack.pop()
            self._over[self._stack[-1]] = call
            if call[0] == name:
                return call
        return None

    def next(self, kind: Kind) -> Address:
        """Count an operation."""
        call = self._stack[-1]
        after = self._over.get(call)
        number = self._counts[call, after, kind]
        self._counts[call, after, kind] = number + 1
        return call, after, kind, number

    def strayed(self, place: Place) -> bool:
        """Whether there were more or fewer operations of its kind than in the watched forward: the n-th may be another one."""
        return place.role == "operation" and self._counts[(place.frame, place.call), place.after, place.kind] != place.total


def address(place: Place) -> Address:
    """Where an operation is looked for."""
    return (place.frame, place.call), place.after, place.kind, place.ordinal
