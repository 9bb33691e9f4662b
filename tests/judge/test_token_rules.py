"""Rank collapse, over-smoothing and non-finite values: named when they are there, at the right layer; silent when they are not.

The healthy courses have the values that small real models show: digit ViTs and byte-level GPTs, learning rates 1e-3 to 5e-3.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collapse_monitor.judge import DEFAULT_RULES, Judge
from collapse_monitor.judge.thresholds import TRANSIENT_STEPS
from tests.judge.courses import EVERY, HEALTHY, names, phase, verdict

# A network without residual connections at its first step, and while it fails to train.
WITHOUT_RESIDUAL = {"similarity": [0.96, 0.9998, 1.0, 1.0], "contraction": [0.35, 0.05, 0.2, 0.7], "rank": [4.0, 1.2, 1.0, 1.0]}
# A healthy model at the peak of the phase in which it learns what all tokens share.
LEARNING_THE_MEAN = {"similarity": [0.96, 0.989, 0.993, 0.9965], "contraction": [0.2, 0.55, 0.74, 0.74], "rank": [6.6, 3.8, 3.0, 2.5]}


class TestRankCollapse:
    def test_from_the_first_step_on(self) -> None:
        events = verdict(phase(10, **WITHOUT_RESIDUAL))
        assert names(events) == [("rank_collapse", "firing", "critical", (1, 2, 3))]
        assert (events[0].since, events[0].step, events[0].baseline) == (0, EVERY, None)

    @pytest.mark.parametrize("every", [1, 4, 25, 50])
    def test_not_while_a_healthy_model_learns_the_mean(self, every: int) -> None:
        start = phase(math.ceil(8 / every), similarity=0.87)
        peak = phase(math.ceil(140 / every), **LEARNING_THE_MEAN)
        assert verdict(start, peak, phase(60, similarity=0.6), every=every) == []

    def test_unless_it_never_ends(self) -> None:
        events = verdict(phase(40, **LEARNING_THE_MEAN))
        assert names(events) == [("rank_collapse", "firing", "warning", (2, 3))]
        assert events[0].step >= TRANSIENT_STEPS

    def test_a_collapse_that_many_blocks_share_is_critical_when_complete(self) -> None:
        deep = {"similarity": [0.9] * 6 + [0.99, 0.999, 0.99999, 1.0], "contraction": 0.6, "rank": [9.0] * 6 + [4.0, 1.9, 1.1, 1.0]}
        assert names(verdict(phase(40, layers=10, **deep)))[-1][2] == "critical"

    def test_in_mid_run_with_baseline_origin_and_step(self) -> None:
        broken = phase(4, similarity=[0.3, 0.3, 1.0, 1.0], contraction=[0.9, 0.9, 0.0, 0.8], rank=[30, 30, 1, 1])
        (event,) = verdict(HEALTHY, broken)
        assert (event.rule, event.layers, event.since) == ("rank_collapse", (2, 3), len(HEALTHY) * EVERY)
        assert event.step == event.since + EVERY
        assert event.baseline == pytest.approx(0.3)
        assert (event.metric, event.value, event.bound) == ("token_similarity", 1.0, 0.99)

    def test_in_mid_run_without_a_single_culprit(self) -> None:
        shared = phase(4, similarity=[0.7, 0.9, 0.97, 0.995], contraction=0.45, rank=[20, 12, 9, 6])
        assert ("rank_collapse", "firing", "critical", (3,)) not in names(verdict(HEALTHY, shared)), "the last block alone may smooth"
        shared = phase(4, similarity=[0.8, 0.97, 0.993, 0.997], contraction=0.45, rank=[20, 12, 6, 4])
        assert names(verdict(HEALTHY, shared)) == [
            ("rank_collapse", "firing", "critical", (2, 3)),
            ("oversmoothing", "firing", "warning", (1,)),
        ]

    def test_tokens_mixed_to_nine_tenths_in_one_block(self) -> None:
        mixed = phase(4, similarity=[0.5, 0.66, 0.996, 0.996], contraction=[0.9, 0.9, 0.107, 0.75], rank=[8, 7, 1.9, 1.9], attainable=17)
        assert names(verdict(phase(20, similarity=0.6, attainable=17, rank=8), mixed)) == [("rank_collapse", "firing", "critical", (2, 3))]

    def test_it_ends_when_tokens_differ_again(self) -> None:
        events = verdict(phase(6, **WITHOUT_RESIDUAL), phase(6))
        assert [event.state for event in events] == ["firing", "resolved"]
        assert events[1].value == pytest.approx(0.3)
        assert events[1].layers == (1, 2, 3)

    def test_no_flutter_between_the_bounds(self) -> None:
        near = phase(20, **{**WITHOUT_RESIDUAL, "similarity": [0.96, 0.985, 0.985, 0.985], "rank": 4.0})
        assert names(verdict(phase(4, **WITHOUT_RESIDUAL), near)) == [("rank_collapse", "firing", "critical", (1, 2, 3))]

    def test_alike_tokens_of_full_rank_are_anisotropy(self) -> None:
        assert verdict(phase(40, similarity=[0.3, 0.6, 0.995, 0.995], rank=40.0, contraction=0.2)) == []

    def test_alike_inputs_are_not_the_networks_doing(self) -> None:
        assert verdict(phase(40, similarity=0.995, rank=5.0, contraction=1.0)) == []

    def test_a_last_block_may_smooth_but_not_erase(self) -> None:
        smooth = {"similarity": [0.3, 0.3, 0.8, 0.993], "rank": [30, 30, 20, 6]}
        assert verdict(phase(20, **smooth, contraction=[0.9, 0.9, 0.9, 0.3])) == []
        erased = {"similarity": [0.3, 0.3, 0.3, 1.0], "rank": [30, 30, 30, 1]}
        assert names(verdict(phase(4, **erased, contraction=[0.9, 0.9, 0.9, 0.0]))) == [("rank_collapse", "firing", "critical", (3,))]

    def test_a_first_block_that_adds_much_to_a_small_input(self) -> None:
        start = {"similarity": [0.991, 0.6, 0.6, 0.6], "rank": [6, 20, 20, 20]}
        assert verdict(phase(4, **start, contraction=[0.12, 2, 1, 1])) == []
        assert names(verdict(phase(4, **start, contraction=[0.03, 2, 1, 1]))) == [("rank_collapse", "firing", "critical", (0,))]

    def test_tokens_that_are_multiples_of_one_direction(self) -> None:
        (event,) = verdict(HEALTHY, phase(4, rank=[30, 1.0, 30, 30]))
        assert (event.rule, event.layers, event.metric, event.value) == ("rank_collapse", (1,), "effective_rank", 1.0)
        assert event.baseline == pytest.approx(30)
        assert "though they are not all the same" in event.message
        assert "effective_rank of layer 1 is 1 of 64 attainable (baseline 30, bound 2)" in event.message

    def test_a_rank_far_below_its_own_past(self) -> None:
        (event,) = verdict(HEALTHY, phase(4, rank=[30, 30, 5, 6]))
        assert (event.severity, event.layers) == ("warning", (2, 3))
        assert event.bound == pytest.approx(min(0.25 * 64, 30 / 3))
        assert verdict(HEALTHY, phase(4, rank=[30, 30, 12, 12])) == [], "2.5 times lower is nothing"

    def test_ranks_of_few_tokens_prove_nothing(self) -> None:
        assert verdict(phase(20, rank=4, attainable=6), phase(20, rank=1.9, attainable=6)) == []

    @pytest.mark.parametrize("missing", ["token_similarity", "relative_residual", "effective_rank", "contraction"])
    def test_one_reading_may_be_missing(self, missing: str) -> None:
        (event,) = verdict(phase(10, **WITHOUT_RESIDUAL, without=[missing]))
        assert (event.rule, event.severity) == ("rank_collapse", "critical")
        assert event.layers == (1, 2, 3)
        assert event.metric == ("relative_residual" if missing == "token_similarity" else "token_similarity")

    def test_only_the_similarity_is_enough(self) -> None:
        others = ["relative_residual", "effective_rank", "contraction"]
        assert names(verdict(phase(10, **WITHOUT_RESIDUAL, without=others))) == [("rank_collapse", "firing", "critical", (1, 2, 3))]

    def test_no_blocks_at_all(self) -> None:
        assert verdict(phase(20, layers=0)) == []


@settings(max_examples=25, deadline=None)
@given(layers=st.integers(3, 24), data=st.data())
def test_the_origin_is_the_block_that_erases(layers: int, data: st.DataObject) -> None:
    origin = data.draw(st.integers(0, layers - 1))
    similarity = [0.3] * origin + [0.9999] * (layers - origin)
    contraction = [0.9] * layers
    contraction[origin] = 0.02
    rank = [30.0] * origin + [1.3] * (layers - origin)
    (event,) = verdict(phase(20, layers=layers), phase(3, layers=layers, similarity=similarity, contraction=contraction, rank=rank))
    assert (event.rule, event.layers) == ("rank_collapse", tuple(range(origin, layers)))


class TestOversmoothing:
    def test_against_the_own_baseline(self) -> None:
        (event,) = verdict(HEALTHY, phase(4, similarity=[0.3, 0.92, 0.94, 0.95]))
        assert (event.rule, event.severity, event.layers) == ("oversmoothing", "warning", (1, 2, 3))
        assert (event.value, event.bound, event.baseline) == (0.92, 0.9, pytest.approx(0.3))

    def test_small_models_that_live_there(self) -> None:
        assert verdict(phase(20, similarity=[0.65, 0.87, 0.92, 0.95]), phase(20, similarity=[0.7, 0.9, 0.94, 0.965])) == []

    def test_the_last_block_alone(self) -> None:
        assert verdict(HEALTHY, phase(20, similarity=[0.3, 0.3, 0.3, 0.95])) == []

    def test_not_on_absolute_grounds(self) -> None:
        assert verdict(phase(40, similarity=0.95, rank=8)) == []

    def test_not_in_the_first_steps(self) -> None:
        assert verdict(phase(20), phase(40, similarity=0.95, rank=8), every=3) == []

    @pytest.mark.parametrize("checks", [5, 20, 80])
    def test_however_slowly_tokens_become_alike(self, checks: int) -> None:
        drift = [{"similarity": 1 - 0.7 * 0.05 ** (check / checks)} for check in range(checks + 1)]
        (event,) = verdict(HEALTHY, phase(20), drift, phase(5, similarity=0.965))
        assert (event.rule, event.severity) == ("oversmoothing", "warning")

    def test_one_block_that_smooths_by_itself_and_a_shift_of_the_data(self) -> None:
        before = {"similarity": [0.1, 0.2, 0.3, 0.4], "contraction": [0.97, 0.93, 0.9, 0.9]}
        alone = {"similarity": [0.1, 0.2, 0.6, 0.65], "contraction": [0.97, 0.93, 0.6, 0.85]}
        shifted = {"similarity": [0.2, 0.5, 0.75, 0.85], "contraction": [0.88, 0.75, 0.7, 0.72]}
        (event,) = verdict(phase(20, **before), phase(3, **alone))
        assert (event.rule, event.severity, event.layers) == ("oversmoothing", "warning", (2,))
        assert verdict(phase(20, **before), phase(6, **shifted)) == []

    def test_an_inner_block_that_erases_differences_needs_no_past(self) -> None:
        residual = [0.9, 0.15, 0.9, 0.85]
        erased = {
            "similarity": [0.1, 0.97, 0.1, 0.2],
            "contraction": [0.95, 0.15 / 0.9, 0.98, 0.94],
            "blocks": {"relative_residual": residual},
        }
        (event,) = verdict(phase(3, **erased))
        assert (event.rule, event.severity, event.layers) == ("oversmoothing", "warning", (1,))

    def test_the_first_block_of_a_decoder_is_given_other_tokens(self) -> None:
        """Tokens that start out alike enter it: what it is given has nothing to do with what the encoder's last block gave."""
        residual = [0.9, 0.85, 0.05, 0.07]
        decoder = {"similarity": [0.1, 0.2, 0.97, 0.95], "contraction": [0.95, 0.94, 0.19, 1.3], "blocks": {"relative_residual": residual}}
        assert verdict(phase(6, **decoder)) == []

    def test_it_becomes_rank_collapse_when_it_is_one(self) -> None:
        smooth = phase(6, similarity=[0.3, 0.93, 0.95, 0.97])
        same = phase(6, similarity=[0.3, 0.9995, 0.9999, 1.0], contraction=[0.9, 0.04, 0.5, 0.2], rank=[30, 1.3, 1.1, 1])
        assert names(verdict(HEALTHY, smooth, same)) == [
            ("oversmoothing", "firing", "warning", (1, 2, 3)),
            ("rank_collapse", "firing", "critical", (1, 2, 3)),
        ]


class TestNonFinite:
    def test_at_once_from_the_layer_it_appears_in(self) -> None:
        nan = math.nan
        bad = phase(5, nonfinite=[0, 0, 0.01, 1.0], similarity=[0.3, 0.3, nan, nan], rank=[30, 30, nan, nan], max_logit=[5, 5, 5, nan])
        (event,) = verdict(HEALTHY, bad)
        assert (event.rule, event.severity, event.layers, event.step) == ("non_finite", "critical", (2, 3), len(HEALTHY) * EVERY)

    def test_one_infinite_gradient_is_a_scaler_at_work(self) -> None:
        gradients = [{"blocks": {"gradient_norm": math.inf if check % 7 == 3 else 1.0}} for check in range(40)]
        assert verdict(gradients) == []

    def test_infinite_gradients_that_stay(self) -> None:
        (event,) = verdict(phase(5, blocks={"gradient_norm": 1.0}), phase(6, blocks={"gradient_norm": [1.0, math.inf, 1.0, 1.0]}))
        assert (event.rule, event.severity, event.layers, event.metric) == ("non_finite", "warning", (1,), "gradient_norm")

    def test_the_checks_in_a_row_survive_a_resume(self) -> None:
        judge, resumed = Judge(DEFAULT_RULES), Judge(DEFAULT_RULES)
        bad = phase(2, blocks={"gradient_norm": math.inf})
        assert verdict(phase(5, blocks={"gradient_norm": 1.0}), bad, judge=judge) == []
        resumed.load_state_dict(judge.state_dict())
        assert names(verdict(bad, judge=resumed, start=500)) == [("non_finite", "firing", "warning", (0, 1, 2, 3))]
