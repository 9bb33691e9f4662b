"""A zoo of small models of many libraries, each with what there is to find in it, written by hand from its architecture.

Models are built offline from their configurations, a few thousand parameters each, in train mode, with dropout where they have it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

DIM, HEADS, BATCH, TOKENS, WORDS = 32, 4, 2, 12, 99

Call = tuple[tuple[Any, ...], dict[str, Any]]
Inputs = Callable[[torch.Generator], Call]


@dataclass(frozen=True)
class Truth:
    """What one forward of a model contains.

    Attributes:
        blocks: executions of a unit that carries the residual stream.
        sites: executions of an attention over tokens.
        heads, queries, keys: of the first site. None where there is no site, or where it depends on the draw.
        causal: whether the first site hides what is later.
        cross: how many sites take their keys from another sequence; None where a class token looks at itself and all others.
        how: the kernels the sites go through, in order of their names.
    """

    blocks: int
    sites: int
    heads: int | None = HEADS
    queries: int | None = TOKENS
    keys: int | None = TOKENS
    causal: bool = False
    cross: int | None = 0
    how: tuple[str, ...] = ("sdpa",)


@dataclass(frozen=True)
class Model:
    """One model of the zoo: how to build it, how to call it, and the truth about it.

    Attributes:
        trains: whether a backward can follow (flex_attention has none on the CPU).
        repeats: whether two plain runs from one seed agree with each other.
        quick: runs on every check.
        note: what is special about it, for the table of models.
    """

    library: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Inputs
    truth: Truth
    trains: bool = True
    repeats: bool = True
    quick: bool = False
    note: str = ""

    @property
    def title(self) -> str:
        return f"{self.library}/{self.name}"

    def made(self, seed: int = 0) -> nn.Module:
        """The model in train mode, its weights from the seed."""
        seed_everything(seed)
        return self.build().train()

    def call(self, seed: int = 1) -> Call:
        return self.inputs(torch.Generator().manual_seed(seed))


class Shelf:
    """The models of one library, in the order they were put there."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.models: list[Model] = []

    def model(
        self, truth: Truth, inputs: Inputs, *, name: str = "", **about: Any
    ) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
        """Decorator: puts the function, which builds the module, on the shelf under its own name or the one given."""

        def put(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
            self.models.append(Model(self.library, name or build.__name__, build, inputs, truth, **about))
            return build

        return put


def seed_everything(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002 - some models draw from the global generator
    torch.manual_seed(seed)


# -- inputs


def tensors(*shapes: tuple[int, ...]) -> Inputs:
    """Positional arguments of normal numbers."""
    return lambda generator: (tuple(torch.randn(*shape, generator=generator) for shape in shapes), {})


def hidden(tokens: int = TOKENS, dim: int = DIM) -> Inputs:
    return tensors((BATCH, tokens, dim))


def images(size: int = 32, channels: int = 3) -> Inputs:
    return tensors((BATCH, channels, size, size))


def named(**makers: Callable[[torch.Generator], Any]) -> Inputs:
    """Keyword arguments, each made by its function."""
    return lambda generator: ((), {key: make(generator) for key, make in makers.items()})


def normal(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(*shape, generator=generator)


def ids(tokens: int = TOKENS, low: int = 5, high: int = 90, batch: int = BATCH) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randint(low, high, (batch, tokens), generator=generator)


def words(tokens: int = TOKENS) -> Inputs:
    """One positional argument of token ids."""
    draw = ids(tokens)
    return lambda generator: ((draw(generator),), {})


def constant(value: Any) -> Callable[[torch.Generator], Any]:
    return lambda generator: value
