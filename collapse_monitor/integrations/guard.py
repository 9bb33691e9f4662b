"""Hooks of a host in which a fault of ours stays ours."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger("collapse_monitor")

Hook = TypeVar("Hook", bound=Callable[..., Any])


def harmless(hook: Hook) -> Hook:
    """A hook whose exceptions become one warning, unless its object is `strict`. It needs an attribute `_said`, a set of sentences."""

    @functools.wraps(hook)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return hook(self, *args, **kwargs)
        except Exception as error:
            if self.strict:
                raise
            say_once(self._said, f"{hook.__name__}: {type(error).__name__}: {error}")
            return None

    return guarded  # type: ignore[return-value]


def say_once(said: set[str], sentence: str) -> None:
    """Warn, unless these words have been said before."""
    if sentence not in said:
        said.add(sentence)
        logger.warning(sentence)
