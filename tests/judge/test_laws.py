"""Laws over depth against closed forms and models that obey them; laws over time against straight lines and noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import collapse_monitor as cm
from collapse_monitor.judge import Judge, depth_law
from collapse_monitor.judge.laws import FLOOR, slope
from collapse_monitor.records import Snapshot
from collapse_monitor.testing import PureAttention, tiny_vit
from tests.synthetic import make_sites, make_snapshot


def with_residuals(*residuals: float) -> Snapshot:
    return Snapshot(0, make_sites(len(residuals)), {"relative_residual": residuals}, {})


@pytest.mark.parametrize("rate", [0.9, 0.5, 0.1])
def test_exponential(rate: float) -> None:
    law = depth_law(with_residuals(*(0.9 * rate**layer for layer in range(10 if rate > 0.2 else 6))))
    assert (law.kind, law.rate) == ("exponential", pytest.approx(rate, rel=1e-3))


def test_doubly_exponential_and_its_floor() -> None:
    law = depth_law(with_residuals(*(max(0.8 ** (3**layer), 1e-7) for layer in range(6))))
    assert law.kind == "doubly exponential"
    assert law.floor == 4  # .8^81 is 1.4e-8
    assert FLOOR < 0.8**27


def test_no_law() -> None:
    assert depth_law(with_residuals(0.8, 0.82, 0.79, 0.8)).kind == "none"
    assert depth_law(with_residuals(0.1, 0.9, 0.05, 0.8, 0.2, 0.7)).kind == "none"


def test_published_bert_with_skips_is_exponential() -> None:
    """BERT with attention and skips only (Dong et al. 2021, figure 2): .69 to .074 in 12 layers."""
    published = (0.6872, 0.7169, 0.6364, 0.4890, 0.3531, 0.2233, 0.2048, 0.2401, 0.2332, 0.1738, 0.1408, 0.0962, 0.0743)
    law = depth_law(with_residuals(*published))
    assert law.kind == "exponential"
    assert 0.75 < law.rate < 0.9


def test_too_few_layers() -> None:
    assert depth_law(with_residuals(0.5)).kind == "unknown"
    assert depth_law(make_snapshot(without=["relative_residual"])).kind == "unknown"


def test_causal_attention_is_exponential_and_bidirectional_doubly() -> None:
    """Dong et al. 2021 for attention without masks; Wu et al. 2024 for causal attention."""
    hidden = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    assert depth_law(cm.probe(PureAttention(depth=4, residual=False), hidden)).kind == "doubly exponential"
    causal = depth_law(cm.probe(PureAttention(depth=8, residual=False, causal=True), hidden))
    assert causal.kind == "exponential"


def played(values: list[float], metric: str = "similarity") -> Judge:
    judge = Judge(["oversmoothing"])
    for check, value in enumerate(values):
        judge.check(make_snapshot(10 * check, **{metric: value}))
    return judge


def test_a_forecast_is_where_the_line_meets_the_bound() -> None:
    """1 - similarity falls by 3 % per check: from .2 to .1 it takes log 2 / .03 = 23 checks of 10 steps."""
    judge = played([1 - 0.2 * np.exp(-0.03 * (check - 19)) for check in range(20)])
    (forecast, *_) = judge.outlook
    assert (forecast.metric, forecast.layers) == ("token_similarity", (0, 1, 2, 3))
    assert forecast.steps == pytest.approx(231, abs=2)
    assert "token_similarity of layers 0-3 reaches 0.9 in about 230 steps at this slope" in forecast.sentence


def test_no_forecast_for_noise_for_the_wrong_way_or_too_far_off() -> None:
    random = np.random.default_rng(0)
    assert played(list(0.5 + 0.05 * random.normal(size=20))).outlook == []
    assert played([0.5 - 0.005 * check for check in range(20)]).outlook == []
    assert played([0.1 + 0.0005 * check for check in range(20)]).outlook == []


def test_a_slope_is_per_step_in_the_scale_of_the_reading() -> None:
    per_step, fit = slope([(10 * check, 8 * np.exp(-0.1 * check)) for check in range(10)], "effective_rank")
    assert per_step == pytest.approx(-0.01)
    assert fit == pytest.approx(1)
    assert np.isnan(slope([(0, 1.0), (1, 2.0)], "effective_rank")[0])


def test_a_forecast_is_told_once_in_the_log_and_while_it_holds_in_the_table(caplog: pytest.LogCaptureFixture) -> None:
    course = [0.3] * 24 + [1 - 0.7 * np.exp(-0.06 * check) for check in range(24)]
    judge = Judge(["oversmoothing"])
    with caplog.at_level("INFO", logger="collapse_monitor"):
        for check, value in enumerate(course):
            judge.check(make_snapshot(10 * check, similarity=value))
    told = [record.getMessage() for record in caplog.records if "at this slope" in record.getMessage()]
    assert len(told) == 1
    assert "nothing fires yet: token_similarity of layers 0-3 reaches 0.9 in about" in told[0]
    assert judge.outlook[0].sentence.startswith("token_similarity of layers 0-3 reaches 0.9 in about")


def test_while_something_fires_no_forecast_says_that_nothing_does(caplog: pytest.LogCaptureFixture) -> None:
    """`branch_ratio` begins to fall when tokens have been alike for long."""
    judge = Judge(["oversmoothing", "bypassed_attention"])
    with caplog.at_level("INFO", logger="collapse_monitor"):
        for check in range(56):
            ratio = 0.3 if check < 32 else 0.3 * 0.92 ** (check - 32)
            judge.check(make_snapshot(10 * check, similarity=0.3 if check < 24 else 0.95, blocks={"branch_ratio": ratio}))
    assert [forecast.metric for forecast in judge.outlook] == ["branch_ratio"]
    assert judge.status["oversmoothing"] == "firing"
    assert not [record for record in caplog.records if "nothing fires yet" in record.getMessage()]


def test_an_alert_says_when_the_next_bound_is_reached() -> None:
    """From .3 on 1 - similarity falls by 6 % per check: .9 is passed, .99 comes log(10) / .06 = 38 checks of 10 steps later."""
    course = [0.3] * 24 + [1 - 0.7 * np.exp(-0.06 * check) for check in range(40)]
    judge = Judge(["oversmoothing"])
    (alert,) = [alert for check, value in enumerate(course) for alert in judge.check(make_snapshot(10 * check, similarity=value))]
    assert alert.rule == "oversmoothing"
    assert "token_similarity of layers 0-3 reaches 0.99 in about 3" in alert.message
    assert alert.message.index("reaches 0.99") < alert.message.index("Next:")


def test_the_table_of_a_monitored_run_says_where_a_reading_is_heading() -> None:
    """A gate on each branch that closes by 8 % per check: what attention adds is on its way to nothing."""
    model = tiny_vit()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.out.weight *= 4
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with cm.Monitor(model, every=1, budget=None) as monitor:
        for step in range(44):
            if step >= 16:
                with torch.no_grad():
                    for block in model.blocks:
                        block.attention.out.weight *= 0.92
                        block.attention.out.bias *= 0.92
            with monitor.observe(step):
                model(images)
        table = monitor.latest.table() if monitor.latest else ""
    assert "branch_ratio of layers 0-3 reaches 0.01 in about" in table
