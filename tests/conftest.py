"""For all tests: shapes and types in the signatures of functions on tensors are checked at every call.

The metrics are checked in `tests/metrics` by its own fixture, because their word on bad input is under test there.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import beartype
import jaxtyping


@beartype.beartype
def _draws(values: list[int]) -> None:
    """Makes beartype load the part of itself that draws random numbers."""


# To check one item of a list beartype draws from Python's global generator, which a monitored run must leave alone: give it its own.
_own = random.Random(0)
for _name, _module in list(sys.modules.items()):
    if _name.startswith("beartype.") and vars(_module).get("getrandbits") == random.getrandbits:
        vars(_module)["getrandbits"] = _own.getrandbits

# Before anything imports these modules. An int is accepted for a float, as type checkers do.
jaxtyping.install_import_hook(
    ["collapse_monitor.capture.rows", "collapse_monitor.measure", "collapse_monitor.testing"],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)

# Scripts and shared pieces of the tests are no tests, and are not searched for doctests.
collect_ignore = [str(path) for path in Path(__file__).parent.rglob("*.py") if not path.name.startswith("test_")]
