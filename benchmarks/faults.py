"""Faults to plant into a small Transformer while it trains: each in its cause, in one block, with the phenomena that name it rightly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: how the tables call it.
        named: phenomena that name it rightly.
        plant: changes block `index` of the model; what it returns, if anything, runs after every optimiser step.
        from_start: whether it can also be told without a healthy past.
        everywhere: whether it has no block of its own.
        attending: whether it is planted into the block that selects most.
    """

    name: str
    named: frozenset[str]
    plant: Callable[[Any, int], Callable[[], None] | None]
    from_start: bool = False
    everywhere: bool = False
    attending: bool = False


def _projection(block: nn.Module) -> nn.Linear:
    return block.attention.qkv  # type: ignore[union-attr, return-value]


def residual_off(model: Any, index: int) -> None:
    model.blocks[index].residual = False


def residual_scaled(model: Any, index: int) -> None:
    """x / 20 + f(x) in place of x + f(x), in both branches."""
    block = model.blocks[index]

    def forward(hidden: Tensor) -> Tensor:
        hidden = hidden / 20 + block.attention(block.attention_norm(hidden))
        return hidden / 20 + block.mlp(block.mlp_norm(hidden))

    block.forward = forward


def tokens_to_mean(model: Any, index: int) -> None:
    model.blocks[index].register_forward_hook(lambda _block, _args, output: output.mean(1, keepdim=True).expand_as(output))


def qk_times(factor: float) -> Callable[[Any, int], None]:
    def plant(model: Any, index: int) -> None:
        projection = _projection(model.blocks[index])
        with torch.no_grad():
            for parameter in (projection.weight, projection.bias):
                parameter[: 2 * len(parameter) // 3] *= factor

    return plant


def qk_small(model: Any, index: int) -> None:
    """Queries and keys at a thirtieth of their size, at every forward: training cannot undo it at once."""

    def shrink(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        size = output.shape[-1] // 3
        return torch.cat([output[..., : 2 * size] / 30, output[..., 2 * size :]], dim=-1)

    _projection(model.blocks[index]).register_forward_hook(shrink)


def qk_rate(model: Any, index: int) -> Callable[[], None]:
    """A learning rate for queries and keys that is far too high: signed steps of .08."""
    projection = _projection(model.blocks[index])
    before = projection.weight.detach().clone()

    def run_away() -> None:
        with torch.no_grad():
            rows = 2 * len(before) // 3
            projection.weight[:rows] += 80 * (projection.weight[:rows] - before[:rows])
            before.copy_(projection.weight)

    return run_away


def heads_cloned(model: Any, index: int) -> None:
    """Every head gets the queries and keys of the first one."""
    attention = model.blocks[index].attention

    def clone(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        size = output.shape[-1] // 3
        head = size // attention.heads
        query, key, value = output.split(size, dim=-1)
        return torch.cat([query[..., :head].repeat(1, 1, attention.heads), key[..., :head].repeat(1, 1, attention.heads), value], dim=-1)

    attention.qkv.register_forward_hook(clone)


def position_only(model: Any, index: int) -> None:
    """Queries and keys lose their content: each position gets those of the average sample."""

    def average(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        size = output.shape[-1] // 3
        return torch.cat([output[..., : 2 * size].mean(0, keepdim=True).expand(len(output), -1, -1), output[..., 2 * size :]], dim=-1)

    _projection(model.blocks[index]).register_forward_hook(average)


def gated_off(model: Any, index: int) -> None:
    model.blocks[index].attention.register_forward_hook(lambda _module, _args, output: output * 1e-4)


def features_of_rank(rank: int) -> Callable[[Any, int], None]:
    def plant(model: Any, index: int) -> None:
        width = model.head.in_features
        basis = torch.linalg.qr(torch.randn(width, rank, generator=torch.Generator().manual_seed(rank)))[0]
        model.blocks[index].register_forward_hook(lambda _block, _args, output: output @ basis @ basis.T)

    return plant


def gradient_gain(factor: float) -> Callable[[Any, int], None]:
    """Forward as before, backward times a factor: what a saturated, or a very steep, function does to the layers before it."""

    def plant(model: Any, index: int) -> None:
        def scale(_block: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (args[0] * factor + (args[0] * (1 - factor)).detach(), *args[1:])

        model.blocks[index].register_forward_pre_hook(scale)

    return plant


def single_column(model: Any, index: int) -> None:
    """Every query that can looks at the sixth key."""

    def point(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        size = output.shape[-1] // 3
        query, key, value = output.split(size, dim=-1)
        ones = torch.ones_like(query)
        pull = torch.zeros_like(key)
        pull[:, 5] = 3.0
        return torch.cat([0.05 * query + ones, 0.05 * key + pull, value], dim=-1)

    _projection(model.blocks[index]).register_forward_hook(point)


def not_a_number(model: Any, index: int) -> None:
    with torch.no_grad():
        model.blocks[index].mlp[0].bias[0] = float("nan")


def one_head_blows_up(model: Any, index: int) -> None:
    projection = _projection(model.blocks[index])
    size = len(projection.weight) // 3
    head = size // model.blocks[index].attention.heads
    with torch.no_grad():
        for start in (0, size):
            projection.weight[start : start + head] *= 40


def duplicate_tokens(model: Any, index: int) -> None:
    """The second half of the tokens is a copy of the first half."""

    def copy(_block: nn.Module, _args: Any, output: Tensor) -> Tensor:
        half = output.shape[1] // 2
        return torch.cat([output[:, :half], output[:, :half], output[:, 2 * half :]], dim=1)

    model.blocks[index].register_forward_hook(copy)


TOKENS = frozenset({"rank_collapse", "oversmoothing"})
SHARP = frozenset({"attention_entropy_collapse", "logit_explosion"})

FAULTS: tuple[Fault, ...] = (
    Fault("residual off", TOKENS, residual_off, from_start=True),
    Fault("residual scaled down", TOKENS, residual_scaled, from_start=True),
    Fault("tokens to their mean", frozenset({"rank_collapse"}), tokens_to_mean, from_start=True),
    Fault("features of rank 1", frozenset({"rank_collapse"}), features_of_rank(1), from_start=True),
    Fault("features of rank 4", frozenset({"rank_collapse", "oversmoothing", "dimensional_collapse"}), features_of_rank(4)),
    Fault("q, k weights x 12", SHARP, qk_times(12)),
    Fault("q, k / 30", frozenset({"uniform_attention"}), qk_small, attending=True),
    Fault("q, k rate x 80", SHARP, qk_rate),
    Fault("one head blows up", frozenset({"logit_explosion"}), one_head_blows_up, attending=True),
    Fault("heads cloned", frozenset({"head_redundancy"}), heads_cloned, attending=True),
    Fault("q, k position-only", frozenset({"input_independent_attention"}), position_only, attending=True),
    Fault("one column", frozenset({"single_column_attention"}), single_column),
    Fault("attention gated off", frozenset({"bypassed_attention"}), gated_off, from_start=True),
    Fault("gradient cut", frozenset({"vanishing_gradient"}), gradient_gain(1e-4)),
    Fault("gradient gain 1e4", frozenset({"exploding_gradient"}), gradient_gain(1e4)),
    Fault("half the tokens doubled", frozenset({"dead_tokens"}), duplicate_tokens, from_start=True),
    Fault("NaN", frozenset({"non_finite"}), not_a_number, from_start=True),
)
