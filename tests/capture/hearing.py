"""One observed forward with a receiver that keeps everything it is handed, and the truth about it from the test's own hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from collapse_monitor.capture.plan import Plan
from collapse_monitor.capture.sampling import Sampler
from collapse_monitor.capture.selection import Selection
from collapse_monitor.capture.window import Observed
from collapse_monitor.observation import AttentionObservation, BlockObservation, Key
from tests.capture.models import Case, loss_of


@dataclass
class Heard:
    """A receiver that keeps what it is given, by site name once the window has closed."""

    plan: Plan | None = None
    attention_of: dict[Key, AttentionObservation] = field(default_factory=dict)
    block_of: dict[Key, BlockObservation] = field(default_factory=dict)
    branch_of: dict[Key, tuple[Tensor, Tensor]] = field(default_factory=dict)
    gradient_of: dict[Key, Tensor] = field(default_factory=dict)
    operand_of: dict[tuple[Key, str], Tensor] = field(default_factory=dict)
    names: dict[tuple[str, str], Key] = field(default_factory=dict)
    faults: list[tuple[str, BaseException]] = field(default_factory=list)
    output: Any = None
    reads: frozenset[str] | None = None  # None: everything

    def asks(self, *reads: str) -> bool:
        return self.reads is None or bool(self.reads & set(reads))

    def attention(self, key: Key, observation: AttentionObservation) -> None:
        assert key not in self.attention_of, "one observation per attention"
        self.attention_of[key] = observation

    def block(self, key: Key, observation: BlockObservation) -> None:
        assert key not in self.block_of, "one observation per block"
        self.block_of[key] = observation

    def branch(self, key: Key, branch: Tensor, stream: Tensor) -> None:
        self.branch_of[key] = (branch, stream)

    def gradient(self, key: Key, gradient: Tensor) -> None:
        self.gradient_of.setdefault(key, gradient)

    def qv_gradient(self, key: Key, role: str, gradient: Tensor) -> None:
        self.operand_of.setdefault((key, role), gradient)

    def rows(self, name: str) -> AttentionObservation:
        return self.attention_of[self.names["attention", name]]

    def sample(self, name: str) -> BlockObservation:
        return self.block_of[self.names["block", name]]

    def joined(self, name: str) -> tuple[Tensor, Tensor]:
        return self.branch_of[self.names["attention", name]]


def hear(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: Plan | None = None,
    limits: tuple[int | None, int | None, int | None] = (None, None, None),
    backward: bool = False,
) -> Heard:
    """One forward inside a window: a discovery without a plan, a lean window with one."""
    heard = Heard()
    selection = Selection(model, None, None, "train")
    observed = Observed(model, plan, Sampler(*limits), heard, lambda what, error: heard.faults.append((what, error)), selection)
    with observed:
        heard.output = model(*args, **kwargs)
        if backward:
            loss_of(heard.output).backward()
    if heard.faults:
        raise AssertionError(f"faults: {heard.faults}") from heard.faults[0][1]
    heard.plan = observed.plan
    heard.names = {(site.kind, site.name): key for key, site in observed.sites.items()}
    return heard


def both_ways(model: nn.Module, case_call: Callable[[int], Any], **options: Any) -> Iterator[tuple[str, int, Callable[[], Heard]]]:
    """A discovery window on step 0, then a lean window on step 1: `(kind, step, run)`, to be run in this order."""
    known: list[Plan | None] = [None]

    def run(step: int) -> Heard:
        args, kwargs = case_call(step)
        heard = hear(model, args, kwargs, known[0], **options)
        known[0] = heard.plan
        return heard

    for step, kind in enumerate(("discovery", "lean")):
        yield kind, step, lambda step=step: run(step)


@contextmanager
def calls_of(modules: dict[str, nn.Module]) -> Iterator[dict[str, list[tuple[Any, Any, Any]]]]:
    """By name, `(args, kwargs, output)` of every call, as the test's own hooks saw them; tensors are copies that keep their gradient."""
    seen: dict[str, list[tuple[Any, Any, Any]]] = {name: [] for name in modules}
    handles = []
    for name, module in modules.items():

        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            seen[name].append((_copied(args), _copied(kwargs), _copied(output)))

        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _copied(structure: Any) -> Any:
    if isinstance(structure, Tensor):
        return structure.detach().clone()
    if isinstance(structure, dict):
        return {key: _copied(item) for key, item in structure.items()}
    if isinstance(structure, tuple | list):
        return tuple(_copied(item) for item in structure)
    return structure


def first_hidden(*structures: Any) -> Tensor:
    """The first floating tensor of three axes."""
    todo = list(structures)
    while todo:
        item = todo.pop(0)
        if isinstance(item, Tensor):
            if item.ndim == 3 and item.is_floating_point():
                return item
        elif isinstance(item, dict):
            todo = [*item.values(), *todo]
        elif isinstance(item, tuple | list):
            todo = [*item, *todo]
    raise AssertionError("no hidden state among these")


def batch_major(case: Case, hidden: Tensor) -> Tensor:
    """[batch, token, dim], whatever the model's layout."""
    return hidden if case.batch_first else hidden.transpose(0, 1)


def strided(valid: list[int], wanted: int | None) -> list[int]:
    """floor((i + 1/2) n / m) over the valid positions, written as the definition reads."""
    taken = len(valid) if wanted is None else min(wanted, len(valid))
    return [valid[int((i + 0.5) * len(valid) / taken)] for i in range(taken)]


def valid_positions(kwargs: dict[str, Any], batch: int, tokens: int) -> list[list[int]]:
    """For every sequence the positions of real tokens."""
    mask = kwargs.get("attention_mask")
    if mask is None or mask.shape[1] != tokens:
        return [list(range(tokens))] * batch
    return [[i for i in range(tokens) if mask[b, i]] for b in range(batch)]


def named(model: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    return {name: model.get_submodule(name) for name in names}


def assert_rows(observation: AttentionObservation, truth: Tensor, wanted: int | None, valid: list[list[int]] | None = None) -> None:
    """Rows of the observation are those of the true map [batch, head, query, key] at the stride midpoints, to 1e-5.

    All sequences are expected. With `valid`, queries elsewhere must not appear, and a sequence with fewer has rows that see nothing.
    """
    batch, heads, queries, keys = truth.shape
    weights, index = observation.weights, observation.query_index
    assert index is not None
    assert weights.shape[:2] == (batch, heads)
    assert weights.shape[3] == keys
    visible = torch.ones_like(weights, dtype=torch.bool) if observation.visible is None else observation.visible.expand_as(weights)
    for b in range(batch):
        rows = index if index.ndim == 1 else index[b]
        expected = strided(list(range(queries)) if valid is None else valid[b], wanted)
        assert rows.tolist()[: len(expected)] == expected
        seen = truth[b][:, expected]
        got, shown = weights[b][:, : len(expected)], visible[b][:, : len(expected)]
        lively = shown.any(-1)
        assert not visible[b][:, len(expected) :].any(), "rows of no valid query see no key"
        torch.testing.assert_close(torch.where(shown, got, 0)[lively], seen[lively], atol=1e-5, rtol=0)
        assert not (seen[~lively] > 0).any(), "a row that sees keys was left out"
    if observation.logits is not None:
        again = observation.logits.masked_fill(~visible, float("-inf")).softmax(-1)
        torch.testing.assert_close(again[visible], weights[visible], atol=1e-5, rtol=0)
