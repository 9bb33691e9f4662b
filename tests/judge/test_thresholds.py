"""One table of numbers: each with a reason and a source, hold on the mild side of fire, and no other number in the rules."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import collapse_monitor.judge.rules as rules_module
from collapse_monitor.judge.catalogue import CATALOGUE
from collapse_monitor.judge.rule import name_of
from collapse_monitor.judge.rules import DEFAULT_RULES, SILENCES, SILENCES_DOWNSTREAM
from collapse_monitor.judge.thresholds import THRESHOLDS

FOLDER = Path(rules_module.__file__).parent
RULES = [name_of(rule) for rule in DEFAULT_RULES]
# Where smaller is worse; elsewhere larger is.
LOW = {
    "rank_collapse.rank_share_of_similar",
    "rank_collapse.contraction",
    "rank_collapse.edge_contraction",
    "rank_collapse.lost_residual",
    "rank_collapse.erased_before",
    "rank_collapse.complete_residual",
    "rank_collapse.effective_rank",
    "rank_collapse.rank_share",
    "rank_collapse.multiples",
    "attention_entropy_collapse.uniformity",
    "attention_entropy_collapse.one_hot",
    "uniform_attention.selectivity",
    "uniform_attention.absolute",
    "map.sink_mass",
    "input_independent_attention.share",
    "bypassed_attention.ratio",
    "bypassed_attention.absolute",
    "vanishing_gradient.gain",
    "vanishing_gradient.single",
    "vanishing_gradient.cumulative",
    "vanishing_gradient.qk_collapsed",
    "dimensional_collapse.rank",
    "dimensional_collapse.absolute",
    "width_collapse.stable_rank",
    "width_collapse.contraction",
    "attention_sink.uniformity",
}


@pytest.mark.parametrize("name", THRESHOLDS)
def test_each_threshold_is_explained(name: str) -> None:
    threshold = THRESHOLDS[name]
    assert name.partition(".")[0] in {*CATALOGUE, "map"}
    assert len(threshold.reason) > 20
    assert threshold.source
    if name in LOW:
        assert threshold.fire <= threshold.hold
    else:
        assert threshold.fire >= threshold.hold


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*_rules.py")), ids=lambda path: path.name)
def test_rules_hold_no_numbers_of_their_own(path: Path) -> None:
    constants = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    numbers = {value for value in constants if isinstance(value, int | float) and value not in (0, 1, 2)}
    assert not numbers, f"{path.name}: put {numbers} into the table of thresholds"


def test_every_threshold_is_used() -> None:
    text = "".join(path.read_text() for path in FOLDER.glob("*.py") if not path.name.endswith("thresholds.py"))
    unused = [name for name in THRESHOLDS if name.partition(".")[2] not in text]
    assert not unused


def test_each_built_in_rule_has_an_entry_in_the_catalogue() -> None:
    assert set(RULES) <= set(CATALOGUE)
    assert set(CATALOGUE) - set(RULES) == {"attention_sink", "massive_activation", "width_collapse"}, (
        "these are information: no rule alerts on them"
    )


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_catalogue_explains_and_helps(name: str) -> None:
    phenomenon = CATALOGUE[name]
    assert phenomenon.anchor == f"phenomena.md#{name}"
    assert len(phenomenon.remedies) >= 2
    for remedy in phenomenon.remedies:
        assert "arXiv" in remedy
        assert any(str(year) in remedy for year in range(2012, 2027))
    assert phenomenon.causes
    assert phenomenon.summary.endswith(".")
    assert phenomenon.readings


def test_readings_of_the_catalogue_are_metrics() -> None:
    from collapse_monitor.metrics import DEFAULT_METRICS

    known = {metric.name for metric in DEFAULT_METRICS}
    assert {reading for phenomenon in CATALOGUE.values() for reading in phenomenon.readings} <= known


def test_echoes_name_rules_and_never_themselves() -> None:
    for table in (SILENCES, SILENCES_DOWNSTREAM):
        for source, echoes in table.items():
            assert {source, *echoes} <= set(CATALOGUE)
            assert source not in echoes
            assert not any(source in table.get(echo, ()) for echo in echoes), "two rules must not silence each other"
