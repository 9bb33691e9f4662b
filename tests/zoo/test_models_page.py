"""docs/models.md lists the models of the zoo, with the numbers their truth says."""

from __future__ import annotations

import re
from pathlib import Path

from tests.zoo.catalogue import SHELVES
from tests.zoo.registry import Model

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
REMEDY = "the page is out of date: run `python docs/generate_models.py`"


def rows_of(library: str) -> list[list[str]]:
    """The cells of a library's table, without its head."""
    section = PAGE.read_text().partition(f"\n## {library}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def expected(model: Model) -> list[str]:
    return [model.name, str(model.truth.blocks), str(model.truth.sites)]


def test_the_page_lists_the_zoo() -> None:
    for shelf in SHELVES:
        assert [cells[:3] for cells in rows_of(shelf.library)] == [expected(model) for model in shelf.models], f"{shelf.library}: {REMEDY}"


def test_the_page_lists_nothing_else() -> None:
    sections = re.findall(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    assert sections == [*(shelf.library for shelf in SHELVES), "What is not read, and why"], REMEDY


def test_kernels_are_those_of_the_truth() -> None:
    for shelf in SHELVES:
        for cells, model in zip(rows_of(shelf.library), shelf.models, strict=True):
            assert tuple(re.findall(r"`(\w+)`", cells[6])) == (model.truth.how if model.truth.sites else ()), f"{model.title}: {REMEDY}"
