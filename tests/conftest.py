"""For all tests: the shapes and types in the signatures of the tensor functions are checked at every call."""

from __future__ import annotations

from collections.abc import Iterator

import jaxtyping
import pytest

# Before anything imports these modules. An int is accepted for a float, as type checkers do.
jaxtyping.install_import_hook(
    ["collapse_monitor.metrics", "collapse_monitor.capture.rows", "collapse_monitor.measure", "collapse_monitor.testing"],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)


@pytest.fixture(autouse=True)
def _shape_checks(request: pytest.FixtureRequest) -> Iterator[None]:
    """`@pytest.mark.unchecked_shapes` switches them off where a function's own word on bad input is under test."""
    if request.node.get_closest_marker("unchecked_shapes") is None:
        yield
        return
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
