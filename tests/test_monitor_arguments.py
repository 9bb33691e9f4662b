"""What the monitor says to bad arguments and to models it cannot watch: what, where, got, allowed, next step."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collapse_monitor.metrics import DEFAULT_METRICS, Metric
from collapse_monitor.monitor import Monitor
from collapse_monitor.once import find_sites, probe
from collapse_monitor.records import Site
from tests.watching import GPT, gpt, step_of, strict, warnings_in

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "every zero": ({"every": 0}, "every=0: must be at least 1; every=1 samples each step"),
    "every negative": ({"every": -3}, "every=-3: must be at least 1"),
    "every a float": ({"every": 2.5}, "every=2.5: give a number of steps (every=50) or a function step -> bool"),
    "every a bool": ({"every": True}, "every=True: give a number of steps"),
    "budget zero": ({"budget": 0.0}, "budget=0.0: the share of training time the monitor may take, between 0 and 1"),
    "budget a percentage": ({"budget": 5}, "budget=5: the share of training time"),
    "budget a text": ({"budget": "1%"}, "budget='1%': the share of training time"),
    "source": ({"source": "eval"}, "source='eval': allowed are 'auto', 'train', 'probe'"),
    "ranks": ({"ranks": "some"}, "ranks='some': allowed are 'local', 'all'"),
    "on_error": ({"on_error": "ignore"}, "on_error='ignore': allowed are 'warn', 'raise'"),
    "metric unknown": ({"metrics": ["effective_rnk"]}, "unknown metric 'effective_rnk': did you mean 'effective_rank'"),
    "metric no metric": ({"metrics": [torch.sum]}, "expected a name or a Metric"),
    "site unknown": ({"sites": ["blocks.O"]}, "sites: the model has no module 'blocks.O'; did you mean 'blocks."),
    "sites a number": ({"sites": 5}, "sites=5: give a list of names of modules"),
    "sites numbers": ({"sites": [5]}, "sites=[5]: give a list of names of modules"),
    "sites a string": ({"sites": "blocks.0"}, "sites='blocks.0': give a list, sites=['blocks.0']"),
    "token_mask": ({"token_mask": 3}, "token_mask=3: give the name of a keyword of the model call, or a function (args, kwargs) -> mask"),
    "rules none": ({"rules": None}, "rules=None: give a list of rules and names"),
    "mute none": ({"mute": None}, "mute=None: give a list of rule names"),
    "sinks none": ({"sinks": None}, "sinks: expected a list, got NoneType"),
    "rule unknown": ({"rules": ["no_such_rule"]}, "no_such_rule"),
    "sink": ({"sinks": [object()]}, "sinks: a sink is an object with write(snapshot, alerts) and close(), got object"),
    "mute unknown": ({"mute": ["no_such_rule"]}, "no_such_rule"),
    "max_tokens": ({"max_tokens": 0}, "max_tokens=0"),
    "max_sequences": ({"max_sequences": -1}, "max_sequences=-1"),
    "max_queries": ({"max_queries": 1.5}, "max_queries=1.5"),
}


@pytest.mark.parametrize("what", list(BAD))
def test_a_bad_argument_is_refused_at_once_by_name(what: str) -> None:
    options, sentence = BAD[what]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Monitor(gpt(), **options)


@pytest.mark.parametrize("made", [Monitor, probe, find_sites], ids=lambda made: made.__name__)
def test_a_model_that_is_none(made: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{made.__name__}(model, ...) needs an nn.Module, got a function")):
        made(lambda x: x)
    with pytest.raises(ValueError, match=re.escape("needs an nn.Module, got the class Linear")):
        made(nn.Linear)


@pytest.mark.parametrize(
    ("reads", "wrong"),
    [("hidden", lambda hidden, mask: hidden.mean()), ("attention", lambda rows, mask: rows.mean((0, -1))), ("gradient", lambda g: g)],
)
def test_a_metric_of_the_wrong_shape_is_refused_at_once(reads: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"Metric 'mine' reads '\w+' and returned a tensor of shape .*; expected a tensor of shape"):
        Monitor(gpt(), metrics=[*DEFAULT_METRICS, Metric("mine", reads, wrong)])


class NoTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.only(x)


NOTHING = r"no Transformer block and no attention found: the forward called 2 modules and 1 functions.*sites=\["


def test_probing_a_model_without_blocks_is_one_clear_error() -> None:
    with pytest.raises(ValueError, match=NOTHING):
        probe(NoTransformer(), torch.ones(3, 4))


def test_a_model_without_blocks_has_no_sites() -> None:
    assert find_sites(NoTransformer(), torch.ones(3, 4)) == ()


def test_watching_a_model_without_blocks_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = NoTransformer()
    monitor = Monitor(model, every=1, budget=None)
    for step in range(3):
        with monitor.observe(step):
            model(torch.ones(3, 4)).sum().backward()
    (warning,) = warnings_in(caplog)
    assert re.search(NOTHING, warning)
    assert monitor.latest is None
    assert monitor.sites == ()


def test_watching_a_model_without_blocks_raises_if_asked_to() -> None:
    model = NoTransformer()
    with pytest.raises(ValueError, match=NOTHING), strict(model).observe(0):
        model(torch.ones(3, 4)).sum().backward()


def test_a_model_with_blocks_but_no_attention_is_read() -> None:
    """An MLP-mixer's residual blocks: block metrics, no attention sites."""

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(*(Residual() for _ in range(3))))
    snapshot = step_of(strict(model), model, 0, ((torch.randn(2, 5, 4),), {}))
    assert [site.name for site in snapshot.sites] == ["1.0", "1.1", "1.2"]
    assert all(value > 1 for value in snapshot.series("effective_rank"))
    assert snapshot.heads("attention_uniformity") == []


def test_chosen_sites_are_the_only_ones_read() -> None:
    model = gpt()
    snapshot = step_of(strict(model, sites=["blocks.1"]), model, 0)
    assert [(site.name, site.layer) for site in snapshot.sites] == [("blocks.1", 0), ("blocks.1.attention", 0)]
    whole = step_of(strict(model), model, 0)
    assert len(whole.sites) == 6


def test_sites_found_are_sites_to_choose() -> None:
    model = gpt()
    sites = find_sites(model, *GPT.call(0)[0])
    chosen = [site for site in sites if site.layer == 2]
    assert all(isinstance(site, Site) for site in chosen)
    for step in range(2):
        snapshot = step_of(strict(model, sites=chosen), model, step)
        assert [site.name for site in snapshot.sites] == ["blocks.2", "blocks.2.attention"]
        assert snapshot.series("effective_rank")[0] > 1


def test_a_module_that_discovery_does_not_take_for_a_block_is_read_if_named() -> None:
    model = gpt()
    monitor = strict(model, sites=["blocks.0.mlp"])
    for step in range(2):
        snapshot = step_of(monitor, model, step)
        (site,) = snapshot.sites
        assert (site.name, site.kind, site.layer) == ("blocks.0.mlp", "block", 0)
        if step == 0:
            assert "next sampled step" in snapshot.missing["blocks.0.mlp"]
        else:
            assert snapshot.series("effective_rank")[0] > 1


def test_a_token_mask_by_name_and_by_function_read_the_same_tokens() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = gpt()

        def forward(self, ids: Tensor, real: Tensor) -> Tensor:
            return self.inner(ids)

    real = torch.ones(3, 10, dtype=torch.long)
    real[1, 6:] = 0
    call = (GPT.call(0)[0][0], real), {}
    snapshots = []
    for mask in (None, "real", lambda args, kwargs: args[1]):
        model = Padded()
        monitor = strict(model, token_mask=mask)
        for step in range(2):
            torch.manual_seed(step)
            snapshot = step_of(monitor, model, step, call)
        snapshots.append(snapshot)
    blind, named, computed = snapshots
    assert blind.tokens == (10.0,) * 3
    assert named.tokens == computed.tokens == (pytest.approx(26 / 3),) * 3
    assert named.series("effective_rank") == computed.series("effective_rank")
    assert named.series("effective_rank") != blind.series("effective_rank")


def test_a_token_mask_that_is_not_in_the_call_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = gpt()
    monitor = Monitor(model, every=1, budget=None, token_mask="real")
    for step in range(3):
        step_of(monitor, model, step)
    (warning,) = warnings_in(caplog)
    assert "token_mask='real', but the model was not called with a tensor of that name" in warning
