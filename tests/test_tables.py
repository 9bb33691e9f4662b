"""The table of a snapshot: what stands in it, that it is aligned, and that HTML stays inert."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from collapse_monitor.records import Site, Snapshot
from collapse_monitor.tables import compare_text, html_table, text_table
from tests.screen import ROOT, seen
from tests.synthetic import make_snapshot

NAN = math.nan


def test_one_row_per_block_with_the_metrics_that_are_there() -> None:
    snapshot = make_snapshot(300, similarity=[0.1, 0.2, 0.9996, 1.0], rank=[40, 30, 1.2, NAN], without=["relative_residual"])
    lines = snapshot.table().splitlines()
    assert lines[0] == "step 300"
    assert lines[2].split() == ["block", "rank", "similarity", "uniformity", "logit"]
    assert [line.split()[:4] for line in lines[3:7]] == [
        ["0", "blocks.0", "40.0/64", "0.1000"],
        ["1", "blocks.1", "30.0/64", "0.2000"],
        ["2", "blocks.2", "1.2/64", "0.9996"],
        ["3", "blocks.3", "-", "1.000"],
    ]
    assert lines[7] == "64 tokens of each sequence were measured: a rank read from 64 tokens cannot exceed 64."


def test_numbers_end_under_each_other() -> None:
    lines = text_table(make_snapshot(blocks={"gradient_norm": [1e-9, 12345.678, NAN, math.inf]})).splitlines()[3:7]
    assert len({len(line) for line in lines}) == 1


def test_what_is_missing_and_why() -> None:
    reasons = {f"blocks.{layer}": "not executed" for layer in range(7)} | {"gradient_norm": "backward did not run"}
    table = text_table(make_snapshot(missing=reasons))
    assert "not measured: blocks.0, blocks.1, blocks.2, blocks.3 and 3 more (not executed)" in table
    assert "not measured: gradient_norm (backward did not run)" in table


def test_context_source_and_sampling() -> None:
    snapshot = Snapshot(
        9,
        (Site("a" * 50, "block", 0), Site("b", "block", 1)),
        {"token_similarity": (0.5, 0.5)},
        {},
        tokens=(16.0, 64.0),
        context={"train_loss": 2.5},
        notes=("half of the batch was read",),
        source="probe",
    )
    table = text_table(snapshot)
    assert table.startswith("step 9 (separate forward), train_loss 2.500\n")
    assert f"{'a' * 15}…{'a' * 15}" in table
    assert "16 to 64 tokens of each sequence were measured: a rank read from 64 tokens cannot exceed 64." in table
    assert "half of the batch was read" in table


def test_no_blocks() -> None:
    assert text_table(make_snapshot(layers=0)) == "step 0\nno blocks"


class Inert(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_html_is_escaped() -> None:
    hostile = "<script>alert('x')</script>&\"<img src=x>"
    snapshot = Snapshot(
        0,
        (Site(hostile[:30], "block", 0),),
        {"token_similarity": (0.5,)},
        {},
        missing={hostile: hostile},
        context={hostile: 1.0},
        notes=(hostile,),
    )
    page = Inert()
    page.feed(html_table(snapshot))
    assert page.tags == {"div", "table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert hostile in "".join(page.text)
    assert snapshot._repr_html_() == html_table(snapshot)


def test_html_and_text_say_the_same() -> None:
    snapshot = make_snapshot(3, similarity=[0.1, 0.2, 0.3, 0.4], missing={"x": "y"})
    page = Inert()
    page.feed(html_table(snapshot))
    shown = " ".join(page.text)
    words = [word for word in text_table(snapshot).split() if word != "-"]
    assert not [word for word in words if word not in shown]


def test_two_runs_beside_each_other() -> None:
    table = compare_text(make_snapshot(5, similarity=0.25), make_snapshot(5, similarity=0.75), ("healthy", "faulty"))
    lines = table.splitlines()
    assert lines[0] == "healthy: step 5, faulty: step 5"
    assert lines[3].split() == ["block", *["healthy", "faulty"] * 5]
    assert lines[4].split()[4:6] == ["0.2500", "0.7500"]
    assert "healthy\nstep 0" in compare_text(make_snapshot(layers=2), make_snapshot(layers=3), ("healthy", "faulty"))


@pytest.mark.parametrize("value", [0.0, 1e-30, 0.1 + 0.2, 999.9996, 99999.9, 1e5, 1e300, -5.5, math.inf])
def test_any_number_fits_a_column(value: float) -> None:
    cell = text_table(make_snapshot(layers=1, blocks={"branch_ratio": value})).splitlines()[3].split()[-1]
    assert len(cell) <= 9
    assert float(cell) == pytest.approx(value, rel=0.05)


def course() -> list[Snapshot]:
    return [make_snapshot(step, similarity=[0.1, 0.2, 0.3, 0.1 * step], rank=[30.0, 30.0, 30.0, 30.0 - step]) for step in range(10)]


def test_the_course_of_the_last_checks_stands_beside_each_number() -> None:
    *before, last = course()
    lines = last.table(before).splitlines()
    assert [line.split()[5] for line in lines[3:7]] == ["▁▁▁▁▁▁▁▁", "▂▂▂▂▂▂▂▂", "▃▃▃▃▃▃▃▃", "▂▃▄▅▅▆▇█"]
    assert len({len(line) for line in lines[3:7]}) == 1


def test_snapshots_of_another_model_or_of_later_have_no_part_in_the_course() -> None:
    *before, last = course()
    others = [make_snapshot(3, layers=2), make_snapshot(50)]
    assert last.table([*before, *others]) == last.table(before)
    assert last.table(others) == last.table()


def test_plain_where_nobody_looks() -> None:
    code = "import sys; from tests.synthetic import *; print(make_snapshot().table((), [make_alert()])); sys.exit('rich' in sys.modules)"
    surroundings = {**os.environ, "FORCE_COLOR": "1"}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=surroundings)
    assert said.stdout == f"{text_table(make_snapshot())}\n"


def test_in_colour_on_a_terminal() -> None:
    code = "from tests.synthetic import *; print(make_snapshot().table((), [make_alert()]))"
    lines, text = seen(code)
    assert "\n".join(lines) == text_table(make_snapshot())
    coloured = [line for line in text.splitlines() if "\x1b[1;31m" in line]
    assert [line.partition("blocks.")[2][0] for line in coloured] == ["1", "2"]
    assert "\x1b[1;31m" not in seen(code, environment={"NO_COLOR": "1"})[1]
    assert "\x1b" not in seen(code, environment={"TERM": "dumb"})[1]


def test_a_narrow_terminal_has_room_for_what_matters_most() -> None:
    lines, _ = seen("from tests.synthetic import *; print(make_snapshot(9).table([make_snapshot(8)]))", columns=80)
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == ["effective", "token", "relative"]
    assert [line.split()[-1] for line in lines[3:7]] == ["▁▁"] * 4
    assert lines[7] == "no room for attention_uniformity, max_logit"
