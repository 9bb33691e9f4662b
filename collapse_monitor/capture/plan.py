"""What discovery hands to later steps: where in a forward every reading is taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from collapse_monitor.capture.rows.folding import Folding
from collapse_monitor.capture.rows.softmax import MapAxes
from collapse_monitor.capture.sampling import Chunk, Layout
from collapse_monitor.capture.tensors import Path
from collapse_monitor.observation import Key
from collapse_monitor.records import Site

Kind = Literal["fused", "softmax", "exp", "product", "add"]


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of the forward: what a module call took or returned, or the n-th operation of a kind inside it.

    Operations are counted within the innermost *listened* call around them, anew `after` each listened call inside it: so the count means
    the same in every step, also where such a call is left out. `total` is how many there were: another total means another course, in
    which the n-th may be a different one.
    """

    frame: str
    call: int
    role: Literal["input", "output", "operation"]
    path: Path = ()
    kind: Kind = "product"
    ordinal: int = 0
    after: tuple[str, int] | None = None
    total: int = 0


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Where a block's hidden state comes out and goes in. `module`: its attribute path. `missing`: why it cannot be read."""

    key: Key
    site: Site
    module: str
    output: Place | None
    input: Place | None
    layout: Layout
    missing: str = ""


Strides = tuple[tuple[int, int], ...]
"""(size, stride) of nested loops over the elements of a contiguous parameter, outermost first; empty for a single place."""


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """A part of one parameter as [head, row, column]: column is the input feature. `shape` is that of the whole parameter."""

    name: str
    shape: tuple[int, ...]
    start: int
    head: Strides
    row: Strides
    column: Strides


@dataclass(frozen=True, slots=True)
class Term:
    """`scale` times a product of weights, the one nearest to the attention first."""

    scale: float
    factors: tuple[WeightSlice, ...]


@dataclass(frozen=True, slots=True)
class Projection:
    """What multiplies the stream, per head: a sum of terms, all of which read the same features."""

    terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Projections:
    """What made q, k and v: one projection, or one for each head that runs apart; `reasons` says by role why one is not known."""

    query: tuple[Projection, ...] = ()
    key: tuple[Projection, ...] = ()
    value: tuple[Projection, ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where an attention's distribution, its q and v, and the addition of its result are found.

    `maps` has one place per parallel head or chunk of queries, else one. `query` and `value` name an operand (0 or 1) of an operation;
    None for a fused kernel, which gets q and v as arguments. `branch` is an addition, which operand carries the result, whether the other
    is the stream (else the block's input is), and the layout of both.
    """

    key: Key
    site: Site
    how: str
    maps: tuple[Place, ...]
    folding: Folding
    axes: MapAxes | None = None
    query: tuple[Place, int] | None = None
    value: tuple[Place, int] | None = None
    branch: tuple[Place, int, bool, Layout] | None = None
    block: Key | None = None
    projections: Projections = Projections()
    chunks: tuple[Chunk, ...] = ()
    unread: int = 0  # how many other maps it has, of which nothing is read
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a lean step needs."""

    blocks: tuple[BlockPlan, ...] = ()
    attentions: tuple[AttentionPlan, ...] = ()
    frames: frozenset[str] = frozenset()
    rejected: dict[str, str] = field(default_factory=dict)
    seen: str = ""  # what the watched forward did, in a few words
    external: bool = False  # whether attention of other packages was called

    def tells_more(self, other: Plan) -> bool:
        """Whether a forward watched anew showed what that one did not."""
        return len(self.missing) < len(other.missing) or len(self.attentions) > len(other.attentions)

    def problem(self) -> str | None:
        """Why there is nothing to watch, with the next step; None where there is something."""
        if self.blocks or self.attentions:
            return None
        reasons = "".join(f"; {name}: {reason}" for name, reason in list(self.rejected.items())[:3])
        return (
            f"no Transformer block and no attention found: the forward called {self.seen}{reasons}. "
            'If the model has blocks, name their modules: sites=["encoder.layers.0", ...] (names as in model.named_modules())'
        )

    @property
    def sites(self) -> dict[Key, Site]:
        """Every site by the key its observations carry, in order of entry."""
        plans: list[BlockPlan | AttentionPlan] = [*self.blocks, *self.attentions]
        ordered = sorted(plans, key=lambda plan: _entry(plan.key))
        return {plan.key: plan.site for plan in ordered}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a snapshot should say about what is read."""
        names = [plan.site.name for plan in self.attentions if plan.unread]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return (f"of several maps in one attention the first is read: {', '.join(names[:3])}{more}",) if names else ()

    @property
    def missing(self) -> dict[str, str]:
        plans: list[BlockPlan | AttentionPlan] = [*self.blocks, *self.attentions]
        return {plan.site.name: plan.missing for plan in plans if plan.missing}


def _entry(key: Key) -> tuple[int, int]:
    order, kind = key[1], key[0]
    return (int(str(order)), 0 if kind == "block" else 1)
