"""Faults to plant into a small Transformer while it trains: each in its cause, with the phenomena that name it rightly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from models import norm_free, post_norm
from parts import parts_of
from torch import Tensor, nn

EVERY_KIND = ("gpt", "vit", "seq2seq", "bert")
STACKED = ("gpt", "vit", "bert")
"""Models in which a block follows one that attends to the same tokens."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: how the tables call it.
        named: phenomena that name it rightly.
        plant: changes block `index` of the model; what it returns, if anything, runs after every optimiser step.
        mid_run: whether it is planted into a healthy run.
        from_start: steps a run with the fault from its first step on is followed; 0: it is not planted then.
        steps: how long it is followed after it was planted mid-run.
        attending: whether it is planted into the block that selects most.
        selecting: whether only if that block does select.
        behind: whether it takes from the block in front of the faulty one.
        everywhere: whether it has no block of its own.
        kinds: of models it is planted into.
    """

    name: str
    named: frozenset[str]
    plant: Callable[[Any, int], Callable[[], None] | None]
    mid_run: bool = True
    from_start: int = 80
    steps: int = 80
    attending: bool = False
    selecting: bool = False
    behind: bool = False
    everywhere: bool = False
    kinds: tuple[str, ...] = EVERY_KIND


def skip_scaled(factor: float) -> Callable[[Any, int], None]:
    """x * factor + f(x) in place of x + f(x), in all branches."""
    return lambda model, index: parts_of(model)[index].scale_skip(factor)


def tokens_to_mean(model: Any, index: int) -> None:
    parts_of(model)[index].on_output(lambda output: output.mean(1, keepdim=True).expand_as(output))


def qk_times(factor: float, heads: int | None = None) -> Callable[[Any, int], None]:
    def plant(model: Any, index: int) -> None:
        for part in parts_of(model)[index].query_key_parameters(heads):
            part *= factor

    return plant


def qk_small(model: Any, index: int) -> None:
    """Queries and keys at a thirtieth of their size, at every forward: training cannot undo it at once."""
    parts_of(model)[index].on_queries_and_keys(lambda query: query / 30, lambda key: key / 30)


def qk_rate(model: Any, index: int) -> Callable[[], None]:
    """A learning rate for queries and keys that is far too high."""
    weights = parts_of(model)[index].query_key_parameters()
    before = [weight.clone() for weight in weights]

    def run_away() -> None:
        for weight, old in zip(weights, before, strict=True):
            weight += 80 * (weight - old)
            old.copy_(weight)

    return run_away


def heads_cloned(model: Any, index: int) -> None:
    """Every head gets the queries and keys of the first one."""
    parts = parts_of(model)[index]

    def clone(output: Tensor) -> Tensor:
        return output.chunk(parts.heads, dim=-1)[0].repeat(1, 1, parts.heads)

    parts.on_queries_and_keys(clone, clone)


def position_only(model: Any, index: int) -> None:
    """Queries and keys lose their content: each position gets those of the average sample."""

    def average(output: Tensor) -> Tensor:
        return output.mean(0, keepdim=True).expand_as(output)

    parts_of(model)[index].on_queries_and_keys(average, average)


def copied_attention(model: Any, index: int) -> None:
    """Queries and keys are those of the block before, so that both look at the same tokens."""
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[Tensor], Tensor]:
        def store(output: Tensor) -> Tensor:
            kept[name] = output
            return output

        return store

    before, parts = parts_of(model)[index - 1], parts_of(model)[index]
    before.on_queries_and_keys(keep("query"), keep("key"))
    parts.on_queries_and_keys(lambda query: kept["query"] + 0 * query, lambda key: kept["key"] + 0 * key)


def gated_off(model: Any, index: int) -> None:
    parts_of(model)[index].branch.register_forward_hook(lambda _module, _args, output: output * 1e-4)


def gate_closes(model: Any, index: int) -> Callable[[], None]:
    """What attention adds fades by 3 % in each step."""
    left = [1.0]
    parts_of(model)[index].branch.register_forward_hook(lambda _module, _args, output: output * left[0])

    def close() -> None:
        left[0] *= 0.97

    return close


def qk_grow(model: Any, index: int) -> Callable[[], None]:
    """Query and key weights grow by 1.5 % in each step."""
    weights = parts_of(model)[index].query_key_parameters()

    def grow() -> None:
        for weight in weights:
            weight *= 1.015

    return grow


def features_of_rank(rank: int) -> Callable[[Any, int], None]:
    def plant(model: Any, index: int) -> None:
        basis: list[Tensor] = []

        def project(output: Tensor) -> Tensor:
            if not basis:
                random = torch.randn(output.shape[-1], rank, generator=torch.Generator().manual_seed(rank))
                basis.append(torch.linalg.qr(random)[0])
            return output @ basis[0].to(output.dtype) @ basis[0].T.to(output.dtype)

        parts_of(model)[index].on_output(project)

    return plant


def samples_alike(model: Any, index: int) -> None:
    """The mean token of a sample keeps one direction of what told it apart; within a sample tokens differ as before."""
    usual: list[Tensor] = []

    def project(output: Tensor) -> Tensor:
        mean = output.mean(1, keepdim=True)
        usual.append(mean.detach().mean(0, keepdim=True))
        del usual[1:]  # the first batch says what is usual, once and for all
        direction = torch.zeros(output.shape[-1], dtype=output.dtype)
        direction[:2] = torch.tensor([0.6, -0.8])
        return output - mean + usual[0] + ((mean - usual[0]) @ direction).unsqueeze(-1) * direction

    parts_of(model)[index].on_output(project)


def gradient_gain(factor: float) -> Callable[[Any, int], None]:
    """Forward as before, backward times a factor: what a saturated, or a very steep, function does to the layers before it."""

    def plant(model: Any, index: int) -> None:
        def scale(_block: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (args[0] * factor + (args[0] * (1 - factor)).detach(), *args[1:])

        parts_of(model)[index].block.register_forward_pre_hook(scale)

    return plant


def single_column(model: Any, index: int) -> None:
    """Every query that can looks at the sixth key."""

    def pull(key: Tensor) -> Tensor:
        strong = torch.zeros_like(key)
        strong[:, 5] = 3.0
        return 0.05 * key + strong

    parts_of(model)[index].on_queries_and_keys(lambda query: 0.05 * query + torch.ones_like(query), pull)


def not_a_number(model: Any, index: int) -> None:
    with torch.no_grad():
        parts_of(model)[index].up.bias[0] = float("nan")


def duplicate_tokens(model: Any, index: int) -> None:
    """The second half of the tokens is a copy of the first half."""

    def copy(output: Tensor) -> Tensor:
        half = output.shape[1] // 2
        return torch.cat([output[:, :half], output[:, :half], output[:, 2 * half :]], dim=1)

    parts_of(model)[index].on_output(copy)


TOKENS = frozenset({"rank_collapse", "oversmoothing"})
SHARP = frozenset({"attention_entropy_collapse", "logit_explosion"})
LONG = 300
"""Steps within which what is so from the start, and may be so on purpose, is noted: attention has to select first."""

FAULTS: tuple[Fault, ...] = (
    Fault("residual off", TOKENS, skip_scaled(0.0)),
    Fault("residual scaled down", TOKENS, skip_scaled(1 / 20)),
    Fault("tokens to their mean", frozenset({"rank_collapse"}), tokens_to_mean),
    Fault("features of rank 1", frozenset({"rank_collapse"}), features_of_rank(1)),
    Fault("features of rank 4", frozenset({"rank_collapse", "oversmoothing", "dimensional_collapse"}), features_of_rank(4), from_start=0),
    Fault("samples alike", frozenset({"dimensional_collapse"}), samples_alike, from_start=240, steps=120),
    Fault("q, k weights x 12", SHARP, qk_times(12)),
    Fault("q, k / 30", frozenset({"uniform_attention"}), qk_small, attending=True, selecting=True, from_start=0),
    Fault("q, k rate x 80", SHARP, qk_rate),
    Fault("q, k grow slowly", SHARP, qk_grow, from_start=0, steps=240, kinds=("gpt", "vit")),
    Fault("one head blows up", frozenset({"logit_explosion"}), qk_times(40, heads=1), attending=True),
    Fault("heads cloned", frozenset({"head_redundancy"}), heads_cloned, attending=True, from_start=LONG),
    Fault(
        "attention copied",
        frozenset({"attention_stagnation"}),
        copied_attention,
        attending=True,
        behind=True,
        from_start=LONG,
        kinds=STACKED,
    ),
    Fault("q, k position-only", frozenset({"input_independent_attention"}), position_only, attending=True, from_start=LONG),
    Fault("one column", frozenset({"single_column_attention"}), single_column, from_start=LONG),
    Fault("attention gated off", frozenset({"bypassed_attention"}), gated_off, from_start=220),
    Fault("attention fades slowly", frozenset({"bypassed_attention"}), gate_closes, from_start=0, steps=240, kinds=("gpt", "vit")),
    Fault("gradient cut", frozenset({"vanishing_gradient"}), gradient_gain(1e-4)),
    Fault("gradient gain 1e4", frozenset({"exploding_gradient"}), gradient_gain(1e4)),
    Fault("half the tokens doubled", frozenset({"dead_tokens"}), duplicate_tokens),
    Fault("NaN", frozenset({"non_finite"}), not_a_number),
    Fault(
        "48 post-norm layers",
        frozenset({"rank_collapse", "vanishing_gradient"}),
        lambda model, _index: post_norm(model, 48, deep=False),
        mid_run=False,
        from_start=50,
        everywhere=True,
        kinds=("gpt", "vit"),
    ),
    Fault(
        "small init",
        frozenset({"vanishing_gradient"}),
        lambda model, _index: norm_free(model, 8, gain=0.25),
        mid_run=False,
        everywhere=True,
        kinds=("gpt", "vit"),
    ),
    Fault(
        "large init",
        frozenset({"exploding_gradient"}),
        lambda model, _index: norm_free(model, 8, gain=2.2),
        mid_run=False,
        everywhere=True,
        kinds=("gpt", "vit"),
    ),
)
