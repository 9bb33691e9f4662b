"""Where a block of the benchmark's models keeps its parts, so that one fault can be planted into all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Parts:
    """One block.

    Attributes:
        block: its output is the stream behind it.
        branch: its output is what self-attention adds to the stream.
        heads: of the self-attention.
        query: makes queries, or queries, keys and values at once.
        key: makes keys; None where `query` makes them.
        up: first layer of the MLP.
        scale_skip: sets the factor on the stream in each of the block's additions.
    """

    block: nn.Module
    branch: nn.Module
    heads: int
    query: nn.Linear
    key: nn.Linear | None
    up: nn.Linear
    scale_skip: Callable[[float], None]

    def on_queries_and_keys(self, query: Change, key: Change) -> None:
        """Change both at every forward from now on."""
        if self.key is not None:
            self.query.register_forward_hook(lambda _module, _args, output: query(output))
            self.key.register_forward_hook(lambda _module, _args, output: key(output))
            return

        def change(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            first, second, third = output.chunk(3, dim=-1)
            return torch.cat([query(first), key(second), third], dim=-1)

        self.query.register_forward_hook(change)

    def on_output(self, change: Change) -> None:
        """Change the stream behind the block at every forward from now on."""

        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

        self.block.register_forward_hook(hook)

    def query_key_parameters(self, heads: int | None = None) -> list[Tensor]:
        """Views of the weights and biases that make queries and keys, of the first `heads` heads."""
        if self.key is not None:
            parts = [parameter for layer in (self.query, self.key) for parameter in (layer.weight, layer.bias)]
        else:
            parts = [part for parameter in (self.query.weight, self.query.bias) for part in parameter.detach().chunk(3)[:2]]
        return [part.detach()[: len(part) * (heads or self.heads) // self.heads] for part in parts]


def parts_of(model: Any) -> list[Parts]:
    """The blocks of a model in order of entry."""
    if hasattr(model, "bert"):
        return [_of_bert(layer) for layer in model.bert.encoder.layer]
    return [_of_pre_norm(block) for block in model.blocks]


def _of_pre_norm(block: Any) -> Parts:
    attention = block.attention

    def scale_skip(factor: float) -> None:
        block.residual = False
        if not factor:
            return

        def add_less(branch: nn.Module, norm: nn.Module) -> None:
            """What the branch replaces the stream with is the branch plus that little of the stream."""
            stream: list[Tensor] = []
            norm.register_forward_pre_hook(lambda _module, args: stream.append(args[0]))
            branch.register_forward_hook(lambda _module, _args, output: stream.pop() * factor + output)

        add_less(attention, block.attention_norm)
        add_less(block.mlp, block.mlp_norm)
        if hasattr(block, "cross"):
            add_less(block.cross, block.cross_norm)

    return Parts(block, attention, attention.heads, attention.qkv, None, block.mlp[0], scale_skip)


def _of_bert(layer: Any) -> Parts:
    attention = layer.attention.self

    def scale_skip(factor: float) -> None:
        for output in (layer.attention.output, layer.output):

            def forward(hidden_states: Tensor, input_tensor: Tensor, output: Any = output) -> Tensor:
                changed = output.dropout(output.dense(hidden_states))
                return output.LayerNorm(changed + factor * input_tensor if factor else changed)

            output.forward = forward

    return Parts(
        layer,
        layer.attention.output.dense,
        attention.num_attention_heads,
        attention.query,
        attention.key,
        layer.intermediate.dense,
        scale_skip,
    )
