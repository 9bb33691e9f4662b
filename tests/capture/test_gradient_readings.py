"""Gradient readings of a monitored step equal those taken by hand in a twin run: retain_grad on blocks, q and v, and `.grad` of weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from collapse_monitor.monitor import Monitor
from collapse_monitor.records import Snapshot
from tests.capture.hearing import first_hidden
from tests.capture.models import CASES, Case, case_named, each, loss_of

NAMES = ["gradient_norm", "qk_to_v_gradient", "parameter_gradient_norm", "qk_to_v_weight_gradient", "branch_ratio"]


def snapshots(case: Case, model: nn.Module, steps: int = 2, loss_scale: float = 1.0) -> list[Snapshot]:
    """The first comes from the discovery window, the others from lean ones. Weights stay as they are."""
    monitor = Monitor(model, every=1, budget=None, metrics=NAMES, on_error="raise")
    taken = []
    for step in range(steps):
        args, kwargs = case.call(step)
        torch.manual_seed(step)
        model.zero_grad()
        with monitor.observe(step, loss_scale=loss_scale):
            (loss_of(model(*args, **kwargs)) * loss_scale).backward()
        snapshot = monitor.latest
        assert snapshot is not None
        taken.append(snapshot)
    return taken


@contextmanager
def retained(model: nn.Module, blocks: tuple[str, ...]) -> Iterator[dict[str, Tensor]]:
    """The very tensors that blocks return, keeping their gradient."""
    kept: dict[str, Tensor] = {}
    handles = []
    for name in blocks:

        def hook(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
            kept[name] = first_hidden(output)
            kept[name].retain_grad()

        handles.append(model.get_submodule(name).register_forward_hook(hook))
    yield kept
    for handle in handles:
        handle.remove()


def twin_step(case: Case, step: int) -> tuple[nn.Module, dict[str, Tensor]]:
    model = case.model()
    args, kwargs = case.call(step)
    torch.manual_seed(step)
    with retained(model, case.blocks) as kept:
        loss_of(model(*args, **kwargs)).backward()
    return model, kept


@each([case for case in CASES if case.name != "pure-residual"])
def test_gradient_norm_is_that_of_the_blocks_output(case: Case) -> None:
    for step, snapshot in enumerate(snapshots(case, case.model())):
        _, kept = twin_step(case, step)
        expected = [float(kept[name].grad.norm()) for name in case.blocks]
        assert snapshot.series("gradient_norm") == pytest.approx(expected, rel=1e-5)
        assert min(expected) > 0


def test_gradient_norm_at_a_sum_that_the_caller_makes() -> None:
    """dL/d(sum) of layer i is what arrives at the input of layer i + 1."""
    case = case_named("pure-residual")
    for step, snapshot in enumerate(snapshots(case, case.model())):
        model = case.model()
        stream = case.call(step)[0][0]
        sums = []
        for layer in model.layers:
            stream = stream + layer(stream)
            stream.retain_grad()
            sums.append(stream)
        loss_of(stream).backward()
        assert snapshot.series("gradient_norm") == pytest.approx([float(s.grad.norm()) for s in sums], rel=1e-5)


@each()
def test_parameter_gradient_norm_is_over_all_parameters_of_the_block(case: Case) -> None:
    for step, snapshot in enumerate(snapshots(case, case.model())):
        model, _ = twin_step(case, step)
        expected = []
        for name in case.blocks:
            squares = [p.grad.double().square().sum() for p in model.get_submodule(name).parameters() if p.grad is not None]
            expected.append(float(sum(squares) ** 0.5))
        assert snapshot.series("parameter_gradient_norm") == pytest.approx(expected, rel=1e-5)


@contextmanager
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """q and v of every call of the fused kernel, keeping their gradients."""
    original, kept = F.scaled_dot_product_attention, []

    def kernel(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.requires_grad:
            query.retain_grad()
            value.retain_grad()
        kept.append((query, value))
        return original(query, key, value, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", kernel)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
        yield kept


@each([case for case in CASES if all(site.how == "sdpa" for site in case.attentions)])
def test_the_gradient_ratio_is_that_of_the_kernels_own_q_and_v(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for step, snapshot in enumerate(snapshots(case, case.model())):
        with kernel_calls(monkeypatch) as kept:
            twin_step(case, step)
        assert len(kept) == len(case.attentions)
        expected = [[float(q.grad.norm() / v.grad.norm())] for q, v in kept]
        assert snapshot.heads("qk_to_v_gradient") == [pytest.approx(value, rel=1e-4) for value in expected]


def test_the_gradient_ratio_of_a_written_softmax() -> None:
    """q and v enter matrix products: the test keeps what their projections return, of which they are views."""
    case = case_named("gpt-softmax")
    for step, snapshot in enumerate(snapshots(case, case.model())):
        model = case.model()
        projections = tuple(f"{site.name}.{role}" for site in case.attentions for role in "qv")
        args, kwargs = case.call(step)
        torch.manual_seed(step)
        with retained(model, projections) as kept:
            loss_of(model(*args, **kwargs)).backward()
        ratios = [[float(kept[f"{site.name}.q"].grad.norm() / kept[f"{site.name}.v"].grad.norm())] for site in case.attentions]
        assert snapshot.heads("qk_to_v_gradient") == [pytest.approx(value, rel=1e-4) for value in ratios]


SEPARATE = {"gpt-sdpa": ("q", "v"), "gpt-softmax": ("q", "v"), "bert": ("query", "value"), "llama": ("q_proj", "v_proj")}


@each([case for case in CASES if case.name in SEPARATE or case.name.split("-")[0] in SEPARATE])
def test_the_weight_gradient_ratio_where_q_and_v_have_weights_of_their_own(case: Case) -> None:
    query, value = SEPARATE.get(case.name) or SEPARATE[case.name.split("-")[0]]
    for step, snapshot in enumerate(snapshots(case, case.model())):
        model, _ = twin_step(case, step)
        expected = []
        for site in case.attentions:
            q, v = (model.get_submodule(f"{site.name}.{role}").weight.grad for role in (query, value))
            expected.append([float(q.norm() / v.norm())])
        assert snapshot.heads("qk_to_v_weight_gradient") == [pytest.approx(item, rel=1e-4) for item in expected]


def test_a_loss_scale_is_divided_out() -> None:
    case = case_named("gpt-sdpa")
    plain, scaled = (snapshots(case, case.model(), loss_scale=scale)[1] for scale in (1.0, 1024.0))
    for name in ("gradient_norm", "parameter_gradient_norm", "qk_to_v_gradient"):
        assert scaled.series(name) == pytest.approx(plain.series(name), rel=1e-4)


def test_the_branch_ratio_is_a_ratio_of_norms() -> None:
    case = case_named("gpt-sdpa")
    for step, snapshot in enumerate(snapshots(case, case.model())):
        model = case.model()
        seen: list[tuple[float, float]] = []
        for name in case.blocks:
            block, streams = model.get_submodule(name), []
            block.register_forward_pre_hook(lambda _, args, streams=streams: streams.append(args[0]))
            # the dropout runs twice: after attention, then after the MLP
            block.drop.register_forward_hook(lambda _, args, out, streams=streams: streams.append(out))
            block.register_forward_hook(
                lambda _, args, out, streams=streams, seen=seen: seen.append((streams[1].norm().item(), streams[0].norm().item()))
            )
        args, kwargs = case.call(step)
        torch.manual_seed(step)
        model(*args, **kwargs)
        assert snapshot.series("branch_ratio") == pytest.approx([branch / stream for branch, stream in seen], rel=1e-4)


def test_backward_outside_the_window_is_listed_not_guessed() -> None:
    case = case_named("gpt-sdpa")
    model = case.model()
    monitor = Monitor(model, every=1, budget=None, metrics=NAMES, on_error="raise")
    for step in range(2):
        args, kwargs = case.call(step)
        with monitor.observe(step):
            loss = loss_of(model(*args, **kwargs))
        loss.backward()
        snapshot = monitor.latest
        assert snapshot is not None
        for name in NAMES[:4]:
            assert all(value != value for value in snapshot.series(name))
            assert snapshot.missing[name] == "backward did not run inside the observed window"
        assert all(value == value for value in snapshot.series("branch_ratio"))
