"""The run a monitor watches is the run that would have been: bit for bit, with dropout on."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collapse_monitor.monitor import Monitor
from tests.capture.models import CASES, Case, case_named, each, loss_of

STEPS = 30


@dataclass
class Run:
    """All that a training run leaves."""

    losses: list[float]
    state: dict[str, Tensor]
    gradients: list[Tensor | None]
    torch_state: Tensor
    python_state: Any
    numpy_state: Any
    snapshots: int = 0


def train(
    case: Case,
    watch: Callable[[nn.Module], Monitor] | None,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    steps: int = STEPS,
) -> Run:
    """AdamW on the case's data; `wrap` makes the trained model of the bare one."""
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 the global generator is what must be left alone
    bare = case.model()
    model = wrap(bare)
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-3)
    monitor = watch(model) if watch is not None else None
    losses, seen = [], set()
    for step in range(steps):
        args, kwargs = case.call(step)
        if monitor is None:
            loss = loss_of(model(*args, **kwargs))
            loss.backward()
        else:
            with monitor.observe(step):
                loss = loss_of(model(*args, **kwargs))
                loss.backward()
            if monitor.latest is not None:
                seen.add(monitor.latest.step)
        optimizer.step()
        optimizer.zero_grad() if step < steps - 1 else None
        losses.append(loss.item())
    gradients = [p.grad for p in bare.parameters()]
    state = {name: tensor.clone() for name, tensor in bare.state_dict().items()}
    if monitor is not None:
        monitor.close()
    return Run(losses, state, gradients, torch.get_rng_state(), random.getstate(), np.random.get_state(), len(seen))  # noqa: NPY002


def assert_same(plain: Run, watched: Run) -> None:
    assert watched.losses == plain.losses
    assert list(watched.state) == list(plain.state)
    assert all(torch.equal(watched.state[name], plain.state[name]) for name in plain.state)
    for one, other in zip(watched.gradients, plain.gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)
    assert torch.equal(watched.torch_state, plain.torch_state)
    assert watched.python_state == plain.python_state
    assert all(np.array_equal(a, b) for a, b in zip(watched.numpy_state, plain.numpy_state, strict=True))


def watching(**options: Any) -> Callable[[nn.Module], Monitor]:
    return lambda model: Monitor(model, budget=None, on_error="raise", **options)


@functools.cache
def plain_run(name: str) -> Run:
    """The run without a monitor, once for all tests that compare with it."""
    plain = train(case_named(name), None)
    assert plain.losses[-1] < plain.losses[0], "a run that learns nothing would prove nothing"
    return plain


@each(CASES, quick=("encoder-token_first-post_norm", "gpt-sdpa"))
@pytest.mark.parametrize("every", [1, 3])
def test_thirty_steps_are_the_same(case: Case, every: int) -> None:
    watched = train(case, watching(every=every))
    assert_same(plain_run(case.name), watched)
    assert watched.snapshots == STEPS // every


@each(CASES, quick=("gpt-sdpa",))
def test_thirty_steps_are_the_same_beside_a_probe(case: Case) -> None:
    watched = train(case, watching(every=2, source="probe"))
    assert_same(plain_run(case.name), watched)
    assert watched.snapshots == STEPS // 2


COMPILED = [
    case for case in CASES if case.name in ("encoder-batch_first-pre_norm", "gpt-sdpa", "gpt-softmax", "timm-vit-fused", "llama-sdpa")
]


@pytest.mark.slow
@each(COMPILED)
def test_thirty_steps_of_a_compiled_model_are_the_same(case: Case) -> None:
    """A compiled model is never listened to: other kernels, other dropout masks. It is probed beside its training."""

    def compiled(model: nn.Module) -> nn.Module:
        torch._dynamo.reset()
        return torch.compile(model, backend="eager")

    plain, watched = train(case, None, compiled), train(case, watching(every=5), compiled)
    assert_same(plain, watched)
    assert watched.snapshots == 6


@pytest.mark.slow
def test_a_model_that_is_compiled_in_place_is_the_same() -> None:
    case = case_named("gpt-sdpa")

    def compiled(model: nn.Module) -> nn.Module:
        torch._dynamo.reset()
        model.compile(backend="eager")
        return model

    plain, watched = train(case, None, compiled), train(case, watching(every=5), compiled)
    assert_same(plain, watched)
    assert watched.snapshots == 6


@pytest.mark.slow
def test_a_model_whose_compiled_wrapper_is_called_is_the_same() -> None:
    """The monitor holds the bare model, the run calls what `torch.compile` made of it: whole graphs, none of them compiled anew."""
    case = case_named("gpt-sdpa")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    bare = case.model()
    wrapped = torch.compile(bare, backend="eager", fullgraph=True)
    monitor = Monitor(bare, every=2, budget=None, on_error="raise")
    losses = []
    torch.manual_seed(1)
    for step in range(6):
        with monitor.observe(step):
            loss = loss_of(wrapped(*case.call(step)[0]))
            loss.backward()
        bare.zero_grad()
        losses.append(loss.item())
        assert monitor.latest is not None
        assert (monitor.latest.step, monitor.latest.source) == (step - step % 2, "probe")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.manual_seed(1)
    torch._dynamo.reset()
    assert losses == [loss_of(torch.compile(bare, backend="eager")(*case.call(step)[0])).item() for step in range(6)]


class DropsLayers(nn.Module):
    """Stochastic depth as it is often written: Python's and numpy's generators decide which blocks run."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        x = self.inner.embed(ids)
        for block in self.inner.blocks:
            if random.random() < 0.7 and np.random.rand() < 0.9:  # noqa: NPY002
                x = block(x)
        return self.inner.head(x)


@pytest.mark.parametrize("source", ["train", "probe"])
def test_generators_of_python_and_numpy_are_left_alone(source: Any) -> None:
    case = case_named("gpt-sdpa")
    assert_same(train(case, None, DropsLayers, steps=12), train(case, watching(every=1, source=source), DropsLayers, steps=12))


class CountsCalls(nn.Module):
    """Buffers that every training forward changes, as batch norm and moving averages do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2))
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return self.norm(x.transpose(1, 2))


@pytest.mark.parametrize("source", ["train", "probe"])
def test_buffers_are_updated_once_per_step(source: Any) -> None:
    first = case_named("encoder-batch_first-pre_norm")
    case = Case("buffers", CountsCalls, first.call, (), ())
    plain, watched = train(case, None, steps=12), train(case, watching(every=1, source=source), steps=12)
    assert_same(plain, watched)
    assert int(watched.state["calls"]) == 12


def test_the_mode_of_every_module_stays() -> None:
    case = case_named("gpt-sdpa")
    model = case.model()
    model.blocks[1].eval()
    monitor = Monitor(model, every=1, budget=None, on_error="raise")
    modes = [module.training for module in model.modules()]
    default = torch.get_default_dtype()
    for step in range(3):
        with monitor.observe(step):
            loss_of(model(*case.call(step)[0])).backward()
            assert [module.training for module in model.modules()] == modes
            assert torch.get_default_dtype() is default
        assert [module.training for module in model.modules()] == modes
