"""Every model of the zoo: found as its architecture says, rows as its kernels use them, and trained as if nobody looked."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from collapse_monitor.capture.plan import Plan
from collapse_monitor.monitor import Monitor
from collapse_monitor.observation import AttentionObservation
from collapse_monitor.once import find_sites
from collapse_monitor.testing import MemorySink
from tests.capture.hearing import Heard, hear
from tests.zoo.catalogue import MODELS, installed
from tests.zoo.oracle import distance_of_rows, maps_of_forward
from tests.zoo.registry import Model, seed_everything

# Libraries warn of what their makers will change; none of it is about this package, whose own words are tested elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore")

LIMITS = (4, 16, 16)


def each(wanted: Callable[[Model], bool] = lambda model: True) -> Any:
    """Parametrise with `model`; all but the quick ones carry the marker that leaves them out of `make check`."""
    models = [model for model in MODELS if wanted(model)]
    params = [pytest.param(model, id=model.title, marks=[] if model.quick else [pytest.mark.zoo]) for model in models]
    return pytest.mark.parametrize("model", params)


@pytest.fixture(autouse=True)
def _library(request: pytest.FixtureRequest) -> None:
    model = request.node.callspec.params.get("model") if hasattr(request.node, "callspec") else None
    if model is not None and not installed(model.library):
        pytest.skip(f"{model.library} is not installed: {model.name} is not tested")


@each()
def test_sites_are_those_of_the_architecture(model: Model) -> None:
    module, (args, kwargs) = model.made(), model.call()
    seed_everything(2)
    with torch.set_grad_enabled(model.trains):
        sites = find_sites(module, *args, **kwargs)
    attentions = [site for site in sites if site.kind == "attention"]
    truth = model.truth
    assert len(sites) - len(attentions) == truth.blocks, "blocks"
    assert len(attentions) == truth.sites, "attentions"
    if attentions:
        first = attentions[0]
        assert (first.heads, first.query_length, first.key_length, first.causal) == (truth.heads, truth.queries, truth.keys, truth.causal)
        assert tuple(sorted({site.how for site in attentions})) == truth.how
        if truth.cross is not None:
            assert sum(bool(site.cross) for site in attentions) == truth.cross


@each(lambda model: model.truth.sites > 0)
def test_rows_are_those_the_kernels_used(model: Model) -> None:
    """In the window that discovers and in the lean one after it: every observed row is a row of a map of its own, in order."""
    module = model.made()
    plan: Plan | None = None
    for _ in range(2):
        seed_everything(2)
        args, kwargs = model.call()
        with torch.set_grad_enabled(model.trains), maps_of_forward() as maps:
            module(*args, **kwargs)
        lean = plan is not None
        seed_everything(2)
        args, kwargs = model.call()
        with torch.set_grad_enabled(model.trains):
            heard = hear(module, args, kwargs, plan, LIMITS)
        plan = heard.plan
        assert_rows(model, heard, maps, 1e-5, lean)


UNHEARD = ("dispatcher_operator", "flex_causal", "flex_distances", "slots")
"""Models whose maps the oracle does not see, or (slots) sees along the other axis."""


def assert_rows(model: Model, heard: Heard, maps: list[Tensor], tolerance: float, lean: bool) -> None:
    observed = observations(heard)
    unknown = model.name == "slots" and not lean  # which axis is the keys is known after the first forward only
    assert len(observed) == (0 if unknown else model.truth.sites)
    left = [] if model.name in UNHEARD else maps
    assert heard.plan is not None
    chunks = {plan.site.name: len(plan.chunks) for plan in heard.plan.attentions if plan.chunks}
    for name, observation in observed:
        if name in chunks:
            left = [torch.cat(left[: chunks[name]], -2), *left[chunks[name] :]]
        rows = [lively_rows(observation, head) for head in range(observation.weights.shape[1])]
        for part in rows:
            torch.testing.assert_close(part.sum(-1), torch.ones(len(part)), atol=1e-5, rtol=0, msg=f"rows of {name} sum to 1")
        if model.name not in UNHEARD and any(len(part) for part in rows):
            left = after_those_of(name, rows, left, tolerance)


def after_those_of(name: str, rows: list[Tensor], maps: list[Tensor], tolerance: float) -> list[Tensor]:
    """The maps after the one that holds all rows; where every head ran by itself, after those that hold one head each."""
    distances = [distance_of_rows(torch.cat(rows), full) for full in maps]
    nearest = next((i for i, distance in enumerate(distances) if distance <= tolerance), None)
    if nearest is not None:
        return maps[nearest + 1 :]
    assert len(rows) > 1, f"{name}: the nearest map is {min(distances, default=float('inf')):.1e} away"
    for head, part in enumerate(rows):
        maps = after_those_of(f"head {head} of {name}", [part], maps, tolerance)
    return maps


def observations(heard: Heard) -> list[tuple[str, AttentionObservation]]:
    """What was observed of each attention, in order of entry."""
    named = [(name, key) for (kind, name), key in heard.names.items() if kind == "attention" and key in heard.attention_of]
    return [(name, heard.attention_of[key]) for name, key in named]


def lively_rows(observation: AttentionObservation, head: int) -> Tensor:
    """The rows [row, key] of a head that see something."""
    weights = observation.weights[:, head].float()
    if observation.visible is None:
        return weights.flatten(0, -2)
    visible = observation.visible.expand_as(observation.weights)[:, head]
    return torch.where(visible, weights, 0).flatten(0, -2)[visible.any(-1).flatten()]


HALF = ("torch/encoder_post_norm", "torch/decoder", "written: attention/softmax_module", "written: attention/soft_cap", "timm/vit", "timm/swin",
        "transformers/Bert-eager", "transformers/Llama-sdpa", "transformers/GptOss", "transformers/T5-sdpa", "x-transformers/decoder")  # fmt: skip


@each(lambda model: model.title in HALF)
def test_rows_of_a_model_in_bfloat16(model: Model) -> None:
    module = model.made().to(torch.bfloat16)
    half = lambda leaf: leaf.to(torch.bfloat16) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf  # noqa: E731
    seed_everything(2)
    args, kwargs = tree_map(half, model.call())
    with maps_of_forward() as maps:
        module(*args, **kwargs)
    seed_everything(2)
    heard = hear(module, args, kwargs, None, LIMITS)
    assert_rows(model, heard, maps, 1e-2, lean=False)


TWINS = ("Bert", "GPT2", "OPT", "Llama", "Mistral", "Qwen3", "ViT", "CLIP")


@pytest.mark.zoo
@pytest.mark.parametrize("name", TWINS)
def test_rows_of_the_fused_kernel_are_those_its_eager_twin_returns(name: str) -> None:
    """The same weights with the kernel that gives its map away: the library's own answer."""
    fused, eager = (next(m for m in MODELS if m.title == f"transformers/{name}-{kernel}") for kernel in ("sdpa", "eager"))
    twin = without_dropout(eager.made())
    module = without_dropout(fused.made())
    module.load_state_dict(twin.state_dict())
    args, kwargs = eager.call()
    returned = [weights for weights in attentions_of(twin(*args, **kwargs, output_attentions=True)) if weights is not None]
    heard = observations(hear(module, args, kwargs, None, LIMITS))
    assert len(heard) == len(returned) > 0
    for (_, observation), weights in zip(heard, returned, strict=True):
        index = observation.query_index
        assert index is not None
        rows = index if index.ndim == 2 else index.expand(len(weights), -1)
        for sequence in range(len(weights)):
            truth = weights[sequence][:, rows[sequence]]
            visible = torch.ones_like(truth, dtype=torch.bool)
            if observation.visible is not None:
                visible = observation.visible.expand_as(observation.weights)[sequence]
            seen = visible.any(-1)
            got = torch.where(visible, observation.weights[sequence], 0)
            torch.testing.assert_close(got[seen], truth[seen], atol=1e-5, rtol=0)


def attentions_of(output: Any) -> Iterable[Any]:
    """The maps of a model's output, of its towers one after the other."""
    if hasattr(output, "vision_model_output"):
        return (*output.vision_model_output.attentions, *output.text_model_output.attentions)
    return output.attentions


def without_dropout(module: nn.Module) -> nn.Module:
    for part in module.modules():
        for name, value in vars(part).items():
            if "dropout" in name and isinstance(value, float):
                setattr(part, name, 0.0)
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return module


@each(lambda model: model.repeats)
def test_training_does_not_notice_the_monitor(model: Model) -> None:
    """Outputs, losses, gradients, buffers and random states are bitwise equal: while it discovers, and in the lean window after."""
    alone, watched = course(model, None), course(model, sink := MemorySink())
    assert len(alone) == len(watched)
    for (name, one), (_, other) in zip(alone, watched, strict=True):
        if isinstance(one, Tensor):
            assert isinstance(other, Tensor)
            assert torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)), name
            assert torch.equal(one.isnan(), other.isnan()), name
        else:
            assert one == other, name
    assert sink.steps == ([0, 1] if model.truth.blocks or model.truth.sites else [])


def course(model: Model, sink: MemorySink | None) -> list[tuple[str, object]]:
    """Everything that two steps of a run leave behind."""
    module = model.made()
    seed_everything(3)
    found = bool(model.truth.blocks or model.truth.sites)
    monitor = Monitor(module, every=1, budget=None, sinks=[sink], on_error="raise" if found else "warn") if sink is not None else None
    left: list[tuple[str, object]] = []
    for step in range(2):
        args, kwargs = model.call(step)
        with monitor.observe(step) if monitor is not None else nullcontext(), torch.set_grad_enabled(model.trains):
            output = module(*args, **kwargs)
            numbers = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            losses = [leaf.float().square().mean() for leaf in numbers if leaf.requires_grad]
            if losses:
                torch.stack(losses).sum().backward()
        left += [(f"output of step {step}", leaf.detach().clone()) for leaf in numbers]
        left += [(f"gradient of {name}", p.grad.clone()) for name, p in module.named_parameters() if p.grad is not None]
        module.zero_grad()
    if monitor is not None:
        monitor.close()
    left += [(f"buffer {name}", buffer.clone()) for name, buffer in module.named_buffers()]
    left += [("random state", torch.get_rng_state()), ("Python's random state", random.getstate())]
    return [*left, ("numpy's random state", str(numpy.random.get_state()))]  # noqa: NPY002
