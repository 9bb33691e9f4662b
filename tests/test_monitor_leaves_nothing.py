"""After a window, after an exception, after a thousand steps: hooks, modes, threads, tensors and copies are what they would have been."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.models import Case, WrittenGPT, each, loss_of, words
from tests.watching import GPT, Surroundings, flat, gpt, same_readings, step_of, strict, warnings_in


@each(quick=("gpt-sdpa", "decoder-batch_first-pre_norm"))
@pytest.mark.parametrize("source", ["train", "probe"])
def test_a_window_leaves_the_model_as_it_was(case: Case, source: Any) -> None:
    model = case.model()
    before = Surroundings.of(model)
    monitor = strict(model, source=source)
    for step in range(3):
        args, kwargs = case.call(step)
        with monitor.observe(step):
            loss_of(model(*args, **kwargs)).backward()
        assert Surroundings.of(model) == before
    monitor.close()
    assert Surroundings.of(model) == before


def test_an_unsampled_step_touches_nothing() -> None:
    model = gpt()
    before = Surroundings.of(model)
    monitor = strict(model, every=10)
    step_of(monitor, model, 0)
    with monitor.observe(1):
        assert Surroundings.of(model) == before


class UserError(Exception):
    pass


class Raising(nn.Module):
    """A block that raises when asked to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.raises = inner, False

    def forward(self, x: Tensor) -> Tensor:
        if self.raises:
            raise UserError("out of memory, say")
        return self.inner(x)


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise UserError("in backward")


@pytest.mark.parametrize("known", [False, True], ids=["discovery", "lean"])
@pytest.mark.parametrize("source", ["train", "probe"])
@pytest.mark.parametrize("where", ["forward", "backward", "between", "after", "KeyboardInterrupt"])
def test_the_users_exception_passes_and_nothing_stays(where: str, source: Any, known: bool) -> None:
    model = gpt()
    broken = Raising(model.blocks[1].mlp)
    model.blocks[1].mlp = broken
    before = Surroundings.of(model)
    monitor = strict(model, source=source)
    if known:
        step_of(monitor, model, 0)
    expected = KeyboardInterrupt if where == "KeyboardInterrupt" else UserError
    with pytest.raises(expected) as raised, monitor.observe(1):  # noqa: PT012 the window is what is under test
        broken.raises = where == "forward"
        output = model(*GPT.call(1)[0])
        if where == "between":
            raise UserError
        if where == "KeyboardInterrupt":
            raise KeyboardInterrupt
        loss_of(RaisesInBackward.apply(output) if where == "backward" else output).backward()
        raise UserError
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None, "the user's exception is not tangled with one of ours"
    assert Surroundings.of(model) == before
    broken.raises = False
    model.zero_grad()
    again = step_of(monitor, model, 2)
    assert len(again.block_sites) == 3
    assert not any(value != value for value in again.series("effective_rank"))


def test_a_forward_that_raised_teaches_nothing() -> None:
    """The plan comes from a whole forward; half a first forward must not become the plan of the run."""
    model, twin = gpt(), gpt()
    model.blocks[1].mlp = Raising(model.blocks[1].mlp)
    twin.blocks[1].mlp = Raising(twin.blocks[1].mlp)
    monitor = strict(model)
    model.blocks[1].mlp.raises = True
    with pytest.raises(UserError), monitor.observe(0):
        model(*GPT.call(0)[0])
    assert monitor.latest is None
    assert monitor.sites == ()
    model.blocks[1].mlp.raises = False
    torch.manual_seed(3)
    snapshot = step_of(monitor, model, 1)
    torch.manual_seed(3)
    assert same_readings(snapshot, step_of(strict(twin), twin, 1))


def test_a_forward_that_raised_and_was_caught_inside_the_window_is_no_reading() -> None:
    """Code that halves the batch when memory runs out."""
    model = gpt()
    model.blocks[1].mlp = broken = Raising(model.blocks[1].mlp)
    monitor = strict(model, on_error="warn")
    first = step_of(monitor, model, 0)
    broken.raises = True
    with monitor.observe(1):
        try:
            model(*GPT.call(1)[0])
        except UserError:
            broken.raises = False
            loss_of(model(*GPT.call(1)[0])).backward()
    latest = monitor.latest
    assert latest is first or (latest is not None and not any(v != v for v in latest.series("effective_rank")))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed only by the cycle collector counts as kept."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("known", [False, True], ids=["discovery", "lean"])
@each([GPT])
def test_activations_are_free_when_the_window_closes(case: Case, known: bool) -> None:
    model = case.model()
    monitor = strict(model)
    if known:
        step_of(monitor, model, 0)
    alive: list[weakref.ref[Tensor]] = []
    for module in model.modules():
        module.register_forward_hook(lambda _, args, output: alive.append(weakref.ref(output)))
    with monitor.observe(1):
        loss = loss_of(model(*case.call(1)[0]))
        loss.backward()
        del loss
    assert len(alive) > 20
    assert not [ref for ref in alive if ref() is not None]


@pytest.mark.usefixtures("no_collector")
def test_a_graph_that_outlives_the_window_carries_no_hook() -> None:
    model = gpt()
    monitor = strict(model)
    kept: list[Tensor] = []
    model.blocks[0].register_forward_hook(lambda _, args, output: kept.append(output))
    for step in range(2):
        with monitor.observe(step):
            loss = loss_of(model(*GPT.call(step)[0]))
        assert not kept[-1]._backward_hooks
        loss.backward()


def test_a_closed_monitor_is_free() -> None:
    model = gpt()
    monitor = strict(model)
    step_of(monitor, model, 0)
    monitor.close()
    gone = weakref.ref(monitor)
    del monitor
    gc.collect()
    assert gone() is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_is_flat_over_a_thousand_steps() -> None:
    torch.manual_seed(0)
    model = WrittenGPT(fused=True, depth=1)
    monitor = strict(model)
    tensors, blocks = [], []
    for step in range(1000):
        step_of(monitor, model, step, ((words(step, tokens=5 + step % 7),), {}))
        if step % 100 == 99:
            gc.collect()
            tensors.append(sum(issubclass(type(item), Tensor) for item in gc.get_objects()))
            blocks.append(sys.getallocatedblocks())
    assert len(set(tensors[1:])) == 1
    assert blocks[-1] - blocks[2] < 2_000, "not even a few objects per step"


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: _through_a_file(model),
    "moving average": lambda model: torch.optim.swa_utils.AveragedModel(model),
}


def _through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("known", [False, True], ids=["discovery", "lean"])
@pytest.mark.parametrize("way", ["deepcopy", *(pytest.param(way, marks=pytest.mark.slow) for way in COPIES if way != "deepcopy")])
def test_copies_made_inside_a_window_feed_nothing(way: str, known: bool) -> None:
    """The copy runs other data before, between and after: the readings stay those of the model."""
    model, lonely = gpt(), gpt()
    monitor, alone = strict(model), strict(lonely)
    if known:
        for watcher, watched in ((monitor, model), (alone, lonely)):
            torch.manual_seed(5)
            step_of(watcher, watched, 0)
    torch.manual_seed(7)
    with monitor.observe(1):
        twin = COPIES[way](model).eval()
        with torch.no_grad():
            twin(*GPT.call(90)[0])
        output = model(*GPT.call(1)[0])
        with torch.no_grad():
            twin(*GPT.call(91)[0])
        loss_of(output).backward()
    assert monitor.latest is not None
    torch.manual_seed(7)
    assert same_readings(monitor.latest, step_of(alone, lonely, 1))
    assert list(twin.state_dict())[-1].endswith("head.bias")


def test_state_dicts_taken_inside_a_window_have_the_same_keys() -> None:
    model = gpt()
    keys = list(model.state_dict())
    with strict(model).observe(0):
        assert list(model.state_dict()) == keys
        loss_of(model(*GPT.call(0)[0])).backward()
        assert list(model.state_dict()) == keys


def test_two_monitors_on_one_model_do_not_hear_each_other() -> None:
    model, lonely = gpt(), gpt()
    one, other, alone = strict(model), strict(model), strict(lonely)
    for step in range(3):
        args, _ = GPT.call(step)
        torch.manual_seed(step)
        with one.observe(step), other.observe(step):
            loss_of(model(*args)).backward()
        model.zero_grad()
        torch.manual_seed(step)
        expected = step_of(alone, lonely, step)
        assert one.latest is not None
        assert other.latest is not None
        assert same_readings(one.latest, expected)
        assert same_readings(other.latest, expected)


def test_a_nested_observation_of_the_same_monitor_is_the_outer_one() -> None:
    model = gpt()
    monitor = strict(model)
    before = Surroundings.of(model)
    with monitor.observe(0):
        with monitor.observe(1):
            loss_of(model(*GPT.call(0)[0])).backward()
        assert monitor._open
    assert monitor.latest is not None
    assert monitor.latest.step == 0
    assert Surroundings.of(model) == before


def test_readings_do_not_depend_on_modes_of_the_user(caplog: pytest.LogCaptureFixture) -> None:
    """Another function mode inside the window neither sees our work nor is disturbed by how it is nested."""

    class Counts(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counts.seen += 1
            return func(*args, **(kwargs or {}))

    model = gpt()
    args, _ = GPT.call(0)
    with Counts():
        model(*args)
    alone, Counts.seen = Counts.seen, 0
    monitor = strict(model)
    for step in range(2):
        for outside in (False, True):
            if outside:
                with Counts(), monitor.observe(2 * step):
                    model(*args)
            else:
                with monitor.observe(2 * step + 1), Counts():
                    model(*args)
            assert Counts.seen == alone
            assert torch._C._len_torch_function_stack() == 0
            Counts.seen = 0
    assert not [text for text in warnings_in(caplog) if "not above" not in text]
    assert flat(monitor.latest, "effective_rank") if monitor.latest else False
