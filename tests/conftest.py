"""For all tests: shapes and types in the signatures of functions on tensors are checked at every call.

The metrics are checked in `tests/metrics` by its own fixture, because their word on bad input is under test there.
"""

from __future__ import annotations

import jaxtyping

# Before anything imports these modules. An int is accepted for a float, as type checkers do.
jaxtyping.install_import_hook(
    ["collapse_monitor.capture.rows", "collapse_monitor.measure", "collapse_monitor.testing"],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)
