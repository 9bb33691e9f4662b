"""Token samples of equal shape, stacked, so that the number of operations does not grow with depth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from collapse_monitor.observation import BlockObservation, Key, TokenSample, reason_against

T = TypeVar("T")

LARGEST_STACK = 6 * 2**20
"""Values in one stack: a larger one is evaluated in parts. 24 MiB in fp32 keep the peak of memory flat, and on a CPU the allocator reuses
memory of this size where it returns larger pieces to the system and pays for every page anew."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenStack:
    """Distinct samples of one shape, dtype and device. The first `inputs` of them are no block's output: less is read from them."""

    samples: tuple[TokenSample, ...]
    inputs: int

    @property
    def sequences(self) -> int:
        return self.samples[0].hidden.shape[0]

    @property
    def tokens(self) -> int:
        return self.samples[0].hidden.shape[1]

    @property
    def dim(self) -> int:
        return self.samples[0].hidden.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.samples[0].hidden.dtype

    def hidden(self) -> Float[Tensor, "batch token dim"]:
        """All sequences of all samples along one axis; a fresh copy."""
        return _hidden(self.samples)

    def mask(self) -> Bool[Tensor, "batch token"] | None:
        """The mask of `hidden`; None where every token is valid."""
        return _mask(self.samples)


@dataclass(frozen=True, slots=True, eq=False)
class PairStack:
    """Inputs and outputs of blocks, of one shape: dtypes may differ between the two sides."""

    keys: tuple[Key, ...]
    inputs: tuple[TokenSample, ...]
    outputs: tuple[TokenSample, ...]

    def hidden(self) -> tuple[Float[Tensor, "batch token dim"], Float[Tensor, "batch token dim"]]:
        """All sequences of all inputs, and of all outputs; fresh copies."""
        return _hidden(self.inputs), _hidden(self.outputs)

    def masks(self) -> tuple[Bool[Tensor, "batch token"] | None, Bool[Tensor, "batch token"] | None]:
        """The masks of `hidden`."""
        return _mask(self.inputs), _mask(self.outputs)


def stack_samples(blocks: Mapping[Key, BlockObservation], with_inputs: bool) -> list[TokenStack]:
    """Every distinct sample of these blocks in exactly one stack; inputs that are no output come first in each."""
    outputs = {id(block.output): block.output for block in blocks.values()}
    inputs = {id(block.input): block.input for block in blocks.values() if with_inputs and block.input is not None}
    alone = [sample for identity, sample in inputs.items() if identity not in outputs]
    groups: dict[object, tuple[list[TokenSample], list[TokenSample]]] = {}
    for side, samples in enumerate((alone, outputs.values())):
        for sample in samples:
            groups.setdefault(_likeness(sample), ([], []))[side].append(sample)
    return [
        TokenStack(tuple(part), sum(id(sample) not in outputs for sample in part))
        for first, rest in groups.values()
        for part in _parts([*first, *rest], (*first, *rest)[0])
    ]


def stack_pairs(blocks: Mapping[Key, BlockObservation]) -> list[PairStack]:
    """Blocks whose input and output have equal shape, grouped by it."""
    groups: dict[object, list[tuple[Key, TokenSample, TokenSample]]] = {}
    for key, block in blocks.items():
        before, after = block.input, block.output
        if before is not None and before.hidden.shape == after.hidden.shape and before.hidden.device == after.hidden.device:
            groups.setdefault((_likeness(before), _likeness(after)), []).append((key, before, after))
    stacks = []
    for members in groups.values():
        for part in _parts(members, members[0][1]):
            keys, inputs, outputs = zip(*part, strict=True)
            stacks.append(PairStack(keys, inputs, outputs))
    return stacks


def reason_against_block(block: BlockObservation) -> str | None:
    """Why the output of a block cannot be measured, or None if it can."""
    return reason_against_sample(block.output)


def reason_against_sample(sample: TokenSample) -> str | None:
    """Why a sample cannot be measured, or None if it can."""
    reason = reason_against(sample.hidden, axes=3)
    if reason is None and sample.mask is not None and tuple(sample.mask.shape) != tuple(sample.hidden.shape[:2]):
        return f"a mask of shape {list(sample.mask.shape)} for tokens of shape {list(sample.hidden.shape)}"
    return reason


def _hidden(samples: Sequence[TokenSample]) -> Float[Tensor, "batch token dim"]:
    return rearrange(torch.stack([sample.hidden for sample in samples]), "sample sequence token dim -> (sample sequence) token dim")


def _mask(samples: Sequence[TokenSample]) -> Bool[Tensor, "batch token"] | None:
    masks = [sample.mask for sample in samples if sample.mask is not None]
    return rearrange(torch.stack(masks), "sample sequence token -> (sample sequence) token") if masks else None


def _likeness(sample: TokenSample) -> object:
    return sample.hidden.device, sample.hidden.dtype, sample.hidden.shape, sample.mask is None


def _parts(members: Sequence[T], sample: TokenSample) -> Iterable[Sequence[T]]:
    """Members of one stack, in parts of equal size that are not too large."""
    number = min(len(members), -(-len(members) * sample.hidden.numel() // LARGEST_STACK))
    size = -(-len(members) // max(number, 1))
    return (members[start : start + size] for start in range(0, len(members), size))
