"""The page on the verdict's worth says what the benchmark printed, and speaks of the faults that there are."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page() -> str:
    return (ROOT / "docs" / "verdict.md").read_text()


def test_the_figures_in_its_sentences_are_those_of_its_tables(page: str) -> None:
    prose, table = page.split("```text\n")
    named, planted, located, placed, warnings, checks = re.findall(r"\d+", table[table.index("\nnamed ") :])
    said = " ".join(prose.split())
    assert f"{named} of {planted} faults were named rightly" in said
    assert f"{located} of the {placed} that have a place" in said
    assert f"{warnings} warnings came in {checks} checks of healthy runs" in said


def test_every_fault_of_the_benchmark_is_in_its_tables(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    try:
        from faults import FAULTS

        names = [fault.name for fault in FAULTS]
    finally:
        for module in ("faults", "models", "parts"):
            sys.modules.pop(module, None)
    matrix = page[page.index("confusion matrix") :]
    assert [name for name in names if f"\n{name}  " not in matrix] == []
