"""What a person reads: value, baseline, bound, since, layers and the next step, in one line."""

from __future__ import annotations

import json

import pytest

from collapse_monitor.judge import DEFAULT_RULES, Judge
from collapse_monitor.judge.catalogue import CATALOGUE
from collapse_monitor.judge.wording import number, ranges, spell_layers
from collapse_monitor.records import Alert, Severity
from tests.judge.courses import HEALTHY, phase, verdict
from tests.synthetic import make_snapshot

BROKEN = phase(
    4,
    similarity=[0.3, 0.3, 0.9996, 1.0],
    contraction=[0.9, 0.9, 0.03, 0.8],
    rank=[30, 30, 1.2, 1],
    blocks={"branch_ratio": 0.2},
    missing={"qk_to_v_gradient": "backward did not run inside the observed window"},
)


def test_a_firing_alert() -> None:
    (event,) = verdict(HEALTHY, BROKEN)
    assert event.message == (
        "rank_collapse (critical) in layers 2-3 ('blocks.2' first), since step 500: "
        "token_similarity of layer 2 is 0.9996 (baseline 0.3, bound 0.99). "
        "All tokens of a sequence have become nearly the same, so attention has nothing left to select and the gradients of "
        "queries and keys vanish. Next: check the residual path of the first layer named, and compare its "
        "branch_ratio with the layer before it. "
        "Remedy: scale each residual branch by 1/sqrt(depth) (Noci et al. 2022, arXiv 2206.03126). See phenomena.md#rank_collapse"
    )
    assert "\n" not in event.message


def test_a_resolved_alert() -> None:
    events = verdict(HEALTHY, BROKEN, phase(4, similarity=0.4))
    assert events[1].message == (
        "rank_collapse resolved at step 650 in layers 2-3 ('blocks.2' first), after 150 steps: "
        "token_similarity of layer 2 is back at 0.4 (bound 0.99)."
    )
    assert events[1].severity is Severity.INFO


def test_lost_data_and_its_reason() -> None:
    lost = phase(3, without=["nonfinite"], missing={"nonfinite": "switched off: it raised"})
    (event,) = verdict(HEALTHY, lost)
    assert event.message == (
        "non_finite has no data in layers 0-3 ('blocks.0' first), since step 500: nonfinite was not read (switched off: it raised); "
        "whether it is healthy is not known."
    )


def test_a_finding_has_evidence_causes_remedies_and_says_what_was_not_read() -> None:
    (event,) = verdict(HEALTHY, BROKEN)
    finding = event.finding
    assert finding is not None
    assert (finding.phenomenon, finding.layers, finding.since, finding.anchor) == (
        "rank_collapse",
        (2, 3),
        500,
        "phenomena.md#rank_collapse",
    )
    fired = finding.evidence[0]
    assert (fired.metric, fired.value, fired.bound, fired.layers) == ("token_similarity", 0.9996, 0.99, (2, 3))
    beside = {evidence.metric: evidence for evidence in finding.evidence[1:]}
    assert set(beside) == {"relative_residual", "effective_rank", "branch_ratio", "attention_uniformity"}
    assert beside["effective_rank"].value == 1.2
    assert beside["relative_residual"].baseline == pytest.approx(0.83, abs=0.01)
    assert finding.against == (CATALOGUE["rank_collapse"].against, "not read: qk_to_v_gradient")
    assert len(finding.remedies) == 2


def test_findings_are_what_is_true_now() -> None:
    judge = Judge(DEFAULT_RULES)
    verdict(HEALTHY, BROKEN, judge=judge)
    assert [(finding.phenomenon, finding.layers) for finding in judge.findings] == [("rank_collapse", (2, 3))]
    verdict(phase(4), judge=judge, start=1000)
    assert judge.findings == []
    assert [alert.state for alert in judge.alerts] == ["firing", "resolved"]


def test_alerts_survive_json() -> None:
    for alert in verdict(HEALTHY, BROKEN, phase(4)):
        again = Alert.from_dict(json.loads(json.dumps(alert.to_dict(), allow_nan=False)))
        assert again == alert


def test_layers_are_spelt_as_ranges() -> None:
    assert ranges([]) == ""
    assert ranges([4]) == "4"
    assert spell_layers([2], make_snapshot()) == "layer 2 ('blocks.2')"
    assert spell_layers([], make_snapshot()) == "attention outside all blocks"


def test_numbers_keep_what_matters() -> None:
    assert number(0.9999971) == "0.9999971"
    assert number(float("inf")) == "inf"
