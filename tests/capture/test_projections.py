"""Which weights made q, k and v: against weights cut out by hand, and against what the model does when they are taken away."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from collapse_monitor.capture.plan import AttentionPlan
from collapse_monitor.capture.weights import read_weights
from tests.capture.hearing import Heard, hear
from tests.capture.projected import OWN, Projected, Separate, Stack, Unbound, each_projected


def attention_of(heard: Heard, name: str) -> AttentionPlan:
    assert heard.plan is not None
    return next(plan for plan in heard.plan.attentions if plan.site.name == name)


@each_projected()
def test_weights_are_those_cut_out_by_hand(case: Projected) -> None:
    model = case.model()
    heard = hear(model, *case.call(0))
    assert heard.plan is not None
    assert {plan.site.name for plan in heard.plan.attentions} == set(case.sites)
    for site in case.sites:
        observed = read_weights(model, attention_of(heard, site).projections)
        assert not observed.unknown
        for got, expected in zip((observed.query, observed.key, observed.value), case.truth(model, site), strict=True):
            assert got is not None
            torch.testing.assert_close(got, expected.detach(), atol=1e-6, rtol=1e-5)


def without(model: nn.Module, elements: Tensor) -> None:
    """Zero these places of all parameters laid end to end."""
    with torch.no_grad():
        start = 0
        for parameter in model.parameters():
            places = torch.arange(start, start + parameter.numel()).reshape(parameter.shape)
            parameter[torch.isin(places, elements)] = 0
            start += parameter.numel()


@pytest.mark.parametrize("role", ["query", "key"])
@each_projected(composed=False)
def test_a_head_without_its_rows_sees_all_keys_alike(case: Projected, role: str) -> None:
    """Independent of the order of heads in any weight: it is the map of this head that becomes uniform, and of no other."""
    model = case.model().eval()
    for name, parameter in model.named_parameters():
        if "bias" in name:
            nn.init.zeros_(parameter)
    site = case.sites[0]
    heard = hear(model, *case.call(0))
    elements = case.elements(model, site)[0 if role == "query" else 1]
    shared = [head for head in range(len(elements)) if torch.equal(elements[head], elements[1])]
    before = heard.rows(site)
    lively = torch.ones_like(before.weights[:, 0, :, 0], dtype=torch.bool)
    if before.visible is not None:
        lively = before.visible.expand_as(before.weights)[:, 0].any(-1)  # rows of padding see nothing
    without(model, elements[1])
    after = hear(model, *case.call(0), plan=heard.plan).rows(site)
    learned_key = case.name == "Extended" and role == "key"  # a key that is a parameter stays what it was
    for head in range(before.weights.shape[1]):
        uniform = spread_over_visible(after.weights, after.visible)[:, head]
        if head not in shared:
            torch.testing.assert_close(after.weights[:, head][lively], before.weights[:, head][lively], atol=1e-6, rtol=0)
        elif not learned_key:
            torch.testing.assert_close(after.weights[:, head][lively], uniform[lively], atol=1e-5, rtol=0)


def spread_over_visible(weights: Tensor, visible: Tensor | None) -> Tensor:
    seen = torch.ones_like(weights) if visible is None else visible.expand_as(weights).to(weights.dtype)
    return seen / seen.sum(-1, keepdim=True).clamp(min=1)


def test_one_weight_is_read_in_place() -> None:
    """No copy of a fused weight: what is read is the parameter's own memory."""
    case = next(case for case in OWN if case.name == "Unbound")
    model = case.model()
    plan = attention_of(hear(model, *case.call(0)), "layers.0")
    weights = read_weights(model, plan.projections)
    start = model.layers[0].qkv.weight.data_ptr()
    size = model.layers[0].qkv.weight[:24].nbytes
    assert [w.data_ptr() - start for w in (weights.query, weights.key, weights.value) if w is not None] == [0, size, 2 * size]


def test_the_plan_follows_the_weights() -> None:
    """A plan holds names and numbers: after a step it reads the new weights, on a lean window too."""
    torch.manual_seed(0)
    model = Stack(Unbound)
    call = ((torch.randn(2, 5, 24),), {})
    plan = hear(model, *call).plan
    with torch.no_grad():
        model.layers[1].qkv.weight.normal_()
    assert plan is not None
    observed = read_weights(model, plan.attentions[1].projections)
    torch.testing.assert_close(observed.value, model.layers[1].weights()[2].detach())


@pytest.mark.parametrize("wrapper", ["module", "_orig_mod", "model"])
def test_wrappers_do_not_matter(wrapper: str) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(wrapper, Stack(Separate))

        def forward(self, x: Tensor) -> Tensor:
            return getattr(self, wrapper)(x)

    torch.manual_seed(0)
    model = Wrapped()
    plan = hear(model, (torch.randn(2, 5, 24),), {}).plan
    assert plan is not None
    for index, attention in enumerate(plan.attentions):
        observed = read_weights(model, attention.projections)
        torch.testing.assert_close(observed.query, getattr(model, wrapper).layers[index].weights()[0].detach())
