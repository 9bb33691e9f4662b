"""The distribution read is the one the model used: to 1e-5 in fp32, against an independent source for every kind of model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn

from tests.capture.hearing import Heard, assert_rows, both_ways, calls_of, named, valid_positions
from tests.capture.models import CASES, OTHERS, Case, WrittenGPT, bert, case_named, each, gpt2, llama, timm_vit, words

LIMITS = [pytest.param(None, id="all_rows"), pytest.param(4, id="sampled_rows")]
TORCH = [case for case in CASES if case.name.startswith(("encoder", "decoder", "transformer", "torchvision"))]


def true_rows_of(attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What the module itself returns when asked for its weights, without dropout."""
    attention.eval()
    asked = {**kwargs, "need_weights": True, "average_attn_weights": False, "is_causal": False}
    return attention(*args, **asked)[1].detach()


@each(TORCH)
@pytest.mark.parametrize("wanted", LIMITS)
def test_modules_of_torch_agree_with_their_own_weights(case: Case, wanted: int | None) -> None:
    model, twin = case.model(), case.model()
    attentions = named(model, [site.name for site in case.attentions])
    for _, _, run in both_ways(model, case.call, limits=(None, None, wanted)):
        with calls_of(attentions) as calls:
            heard = run()
        for name, seen in calls.items():
            args, kwargs, _ = seen[0]
            with torch.no_grad():
                truth = true_rows_of(twin.get_submodule(name), args, kwargs)
            assert_rows(heard.rows(name), truth, wanted)


@pytest.mark.parametrize("wanted", LIMITS)
def test_a_written_softmax_is_read_as_it_is(wanted: int | None) -> None:
    case = case_named("gpt-softmax")
    model = case.model()
    for _, _, run in both_ways(model, case.call, limits=(None, None, wanted)):
        heard = run()
        for site in case.attentions:
            truth = model.get_submodule(site.name).rows
            assert isinstance(truth, Tensor)
            assert_rows(heard.rows(site.name), truth, wanted)


@pytest.mark.parametrize("wanted", LIMITS)
def test_a_fused_kernel_agrees_with_its_written_twin(wanted: int | None) -> None:
    case = case_named("gpt-sdpa")
    model, twin = case.model().eval(), WrittenGPT(fused=False).eval()
    twin.load_state_dict(model.state_dict())
    for _, step, run in both_ways(model, case.call, limits=(None, None, wanted)):
        heard = run()
        twin(words(step))
        for site in case.attentions:
            truth = twin.get_submodule(site.name).rows
            assert isinstance(truth, Tensor)
            assert_rows(heard.rows(site.name), truth, wanted)


@each([case for case in CASES if case.name.startswith("pure")])
@pytest.mark.parametrize("wanted", LIMITS)
def test_pure_attention_agrees_with_the_formula(case: Case, wanted: int | None) -> None:
    model = case.model()
    attentions = named(model, [site.name for site in case.attentions])
    for _, _, run in both_ways(model, case.call, limits=(None, None, wanted)):
        with calls_of(attentions) as calls:
            heard = run()
        for name, seen in calls.items():
            packed = attentions[name].qkv(seen[0][0][0]).double()
            q, k, _ = rearrange(packed, "b n (three h d) -> three b h n d", three=3, h=4).detach()
            scores = torch.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5
            truth = scores.exp() / scores.exp().sum(-1, keepdim=True)
            assert_rows(heard.rows(name), truth.float(), wanted)


@pytest.mark.zoo
@pytest.mark.parametrize("wanted", LIMITS)
@pytest.mark.parametrize(
    ("fused", "training"), [(True, False), (False, False), (False, True)], ids=["fused-eval", "unfused-eval", "unfused-train"]
)
def test_timm_agrees_with_what_enters_its_attention_dropout(fused: bool, training: bool, wanted: int | None) -> None:
    """In train mode a fused kernel hides its rows and draws other dropout masks than the twin: there is nothing to compare with."""
    case = case_named("timm-vit-fused" if fused else "timm-vit-unfused")
    model = case.model().train(training)
    twin = timm_vit(False).eval()
    twin.load_state_dict(model.state_dict())
    source = model if not fused else twin
    drops = {site.name: source.get_submodule(f"{site.name}.attn_drop") for site in case.attentions}
    for _, step, run in both_ways(model, case.call, limits=(None, None, wanted)):
        with calls_of(drops) as calls, torch.no_grad():
            heard = run()
            if fused:
                twin(*case.call(step)[0])
        for name, seen in calls.items():
            assert_rows(heard.rows(name), seen[0][0][0], wanted)


BUILDERS = {"bert": bert, "gpt2": gpt2, "llama": llama}


@each([case for case in OTHERS if case.library == "transformers"])
@pytest.mark.parametrize("wanted", LIMITS)
def test_hugging_face_agrees_with_the_eager_models_attentions(case: Case, wanted: int | None) -> None:
    model = case.model().eval()
    twin = BUILDERS[case.name.split("-")[0]]("eager").eval()
    twin.load_state_dict(model.state_dict())

    def checked(heard: Heard, kwargs: dict[str, Any]) -> None:
        with torch.no_grad():
            maps = twin(**kwargs, output_attentions=True).attentions
        assert len(maps) == len(case.attentions)
        for site, truth in zip(case.attentions, maps, strict=True):
            valid = valid_positions(kwargs, *truth.shape[0:3:2])
            assert_rows(heard.rows(site.name), truth, wanted, valid)

    for _, step, run in both_ways(model, case.call, limits=(None, None, wanted)):
        checked(run(), case.call(step)[1])
