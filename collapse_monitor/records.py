"""The frozen records that travel from the monitor to rules, sinks and readers: floats and text, no tensors."""

from __future__ import annotations

import enum
import math
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

FORMAT_VERSION = 1
"""Version of the written form of a snapshot; readers refuse a newer one."""


class Severity(enum.StrEnum):
    """How urgent an alert is: `info` is a note, `warning` asks for a look today, `critical` for a stop or checkpoint now."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """0, 1 or 2: larger is more urgent."""
        return _RANKS[self]


_RANKS = {severity: rank for rank, severity in enumerate(Severity)}


@dataclass(frozen=True, slots=True)
class Site:
    """A place to listen: one execution of a block, or one execution of an attention.

    `name` is the canonical module name (without wrapper prefixes); a module that runs several times in one forward is
    several sites, the later ones named `name@1`, `name@2`. `layer` is the index of the block execution in order of entry
    (an attention carries the index of the block it runs in, None outside all blocks). The fields after it belong to
    attention sites and are None for blocks. `how` says what ran: `sdpa`, `softmax`, `exp`, `flex`, ... or `module`.
    """

    name: str
    kind: Literal["block", "attention"]
    layer: int | None
    heads: int | None = None
    query_length: int | None = None
    key_length: int | None = None
    causal: bool | None = None
    cross: bool | None = None
    how: str = "module"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All readings of one step.

    Attributes:
        step: the step the readings belong to.
        sites: every site, in order of entry.
        blocks: metric name -> one float per block execution, nan where missing.
        attention: metric name -> per attention site, one float per head.
        missing: what was not measured and why. Keys are a site name, a metric name, or `site/metric`.
        attainable_rank: per block min(tokens measured, width): the largest rank that could have been read.
        tokens: per block the mean number of tokens measured per sequence.
        context: what the user logged beside it (`train_loss`, `val_loss`, ...).
        notes: remarks about how the snapshot was taken, and where readings are heading.
        source: `train` (the training forward was heard) or `probe` (a separate forward).
    """

    step: int
    sites: tuple[Site, ...]
    blocks: Mapping[str, tuple[float, ...]]
    attention: Mapping[str, tuple[tuple[float, ...], ...]]
    missing: Mapping[str, str] = field(default_factory=dict)
    attainable_rank: tuple[int, ...] = ()
    tokens: tuple[float, ...] = ()
    context: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    source: Literal["train", "probe"] = "train"

    @property
    def block_sites(self) -> tuple[Site, ...]:
        return tuple(site for site in self.sites if site.kind == "block")

    @property
    def attention_sites(self) -> tuple[Site, ...]:
        return tuple(site for site in self.sites if site.kind == "attention")

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names `series` answers to."""
        return (*self.blocks, *self.attention)

    def series(self, metric: str) -> list[float]:
        """One value per block execution in order of entry, nan where missing.

        For an attention metric: the mean over the heads of the block's self-attention sites.

        Raises:
            KeyError: the snapshot has no such metric; the message lists those it has.
        """
        if metric in self.blocks:
            return list(self.blocks[metric])
        per_layer: dict[int, list[float]] = {}
        for site, values in zip(self.attention_sites, self._per_head(metric), strict=True):
            if site.layer is not None and not site.cross:
                per_layer.setdefault(site.layer, []).extend(values)
        return [_nanmean(per_layer.get(site.layer if site.layer is not None else -1, [])) for site in self.block_sites]

    def heads(self, metric: str) -> list[list[float]]:
        """One list of per-head values for each attention site, in order of entry.

        Raises:
            KeyError: the snapshot has no such attention metric; the message lists those it has.
        """
        return [list(values) for values in self._per_head(metric)]

    def _per_head(self, metric: str) -> tuple[tuple[float, ...], ...]:
        if metric not in self.attention:
            raise KeyError(f"no readings of {metric!r} at step {self.step}; this snapshot has {', '.join(self.metrics) or 'none'}")
        return self.attention[metric]

    def with_context(self, context: Mapping[str, float]) -> Snapshot:
        """The same readings with the user's own numbers beside them."""
        return replace(self, context={**self.context, **context})

    def table(self, history: Sequence[Snapshot] = (), alerts: Iterable[Alert | Finding] = ()) -> str:
        """A table, one row per block: what to look at first.

        Where standard output is a terminal the layers that `alerts` name are coloured, and columns that it has no room for are left out;
        everywhere else the text is plain and whole.

        Args:
            history: snapshots from before, for a curve of the last checks beside each number.
            alerts: alerts or findings, for the colours.
        """
        from collapse_monitor.tables import text_table

        if not _on_terminal():
            return text_table(self, history)
        from collapse_monitor.terminal import coloured_table, escape_codes

        return escape_codes(coloured_table(self, history, alerts, width=shutil.get_terminal_size().columns))

    def _repr_html_(self) -> str:
        from collapse_monitor.tables import html_table

        return html_table(self)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; nan becomes None, infinities the strings `inf` and `-inf`."""
        return {"version": FORMAT_VERSION, **_jsonable(asdict(self))}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Snapshot:
        """The inverse of `to_dict`.

        Raises:
            ValueError: the record was written by a newer version of the package.
        """
        check_version(record)
        return cls(
            step=int(record["step"]),
            sites=tuple(Site(**site) for site in record["sites"]),
            blocks={name: tuple(_floats(values)) for name, values in record["blocks"].items()},
            attention={name: tuple(tuple(_floats(head)) for head in values) for name, values in record["attention"].items()},
            missing=dict(record["missing"]),
            attainable_rank=tuple(record["attainable_rank"]),
            tokens=tuple(_floats(record["tokens"])),
            context=dict(zip(record["context"], _floats(record["context"].values()), strict=True)),
            notes=tuple(record["notes"]),
            source=record["source"],
        )


@dataclass(frozen=True, slots=True)
class Condition:
    """What a rule says about one layer at one check: the rule judges, the engine decides when that becomes an alert.

    `state` is `fire` (beyond the firing bound), `hold` (beyond the clearing bound only: keeps an alert that is firing) or
    `no_data` (the rule's reading was not there). A layer without a condition is healthy. `head` names one head if one stands out.
    """

    layer: int | None
    metric: str
    value: float
    bound: float
    baseline: float | None = None
    state: Literal["fire", "hold", "no_data"] = "fire"
    severity: Severity = Severity.WARNING
    head: int | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One reading that a finding rests on."""

    metric: str
    value: float
    bound: float | None = None
    baseline: float | None = None
    layers: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Evidence:
        """The inverse of `dataclasses.asdict`, after JSON."""
        bound, baseline = _optional(record["bound"]), _optional(record["baseline"])
        return cls(record["metric"], _float(record["value"]), bound, baseline, tuple(record["layers"]))


@dataclass(frozen=True, slots=True)
class Finding:
    """The diagnosis: a named phenomenon with its evidence, what speaks against it, causes and remedies.

    `notes` are sentences about the evidence, such as how a reading falls with depth.
    """

    phenomenon: str
    severity: Severity
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    since: int | None = None
    evidence: tuple[Evidence, ...] = ()
    against: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    anchor: str = ""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return _jsonable(asdict(self))

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Finding:
        """The inverse of `to_dict`."""
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}
        fields["severity"] = Severity(fields["severity"])
        fields["evidence"] = tuple(Evidence.from_dict(evidence) for evidence in fields["evidence"])
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Alert:
    """One event in the life of a rule: it began to fire, was resolved, or lost its data.

    `layers` are block indices in order of entry, the first one is the suspected origin. `value`, `baseline` and `bound` are of
    that first layer. `since` is the step at which the condition was first seen, `step` the one at which it was confirmed.
    """

    rule: str
    state: Literal["firing", "resolved", "no_data"]
    severity: Severity
    step: int
    since: int
    layers: tuple[int, ...]
    metric: str
    value: float
    baseline: float | None
    bound: float | None
    message: str
    finding: Finding | None = None

    def to_dict(self) -> dict[str, Any]:
        return _jsonable(asdict(self))

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Alert:
        """The inverse of `to_dict`."""
        fields: dict[str, Any] = {key: value for key, value in record.items() if key != "version"}
        fields["severity"] = Severity(fields["severity"])
        fields["layers"] = tuple(fields["layers"])
        fields["value"] = _float(fields["value"])
        fields["baseline"], fields["bound"] = _optional(fields["baseline"]), _optional(fields["bound"])
        fields["finding"] = None if fields["finding"] is None else Finding.from_dict(fields["finding"])
        return cls(**fields)


def check_version(record: Mapping[str, Any]) -> None:
    """Refuse a record from the future.

    Raises:
        ValueError: with both version numbers and the next step.
    """
    version = record.get("version", FORMAT_VERSION)
    if version > FORMAT_VERSION:
        raise ValueError(
            f"log format {version} is newer than this collapse_monitor reads ({FORMAT_VERSION}): upgrade collapse_monitor to read it"
        )


def _on_terminal() -> bool:
    """Whether somebody looks at standard output, with something that knows colours."""
    isatty = getattr(sys.stdout, "isatty", None)
    return callable(isatty) and bool(isatty()) and os.environ.get("TERM") != "dumb"


def _nanmean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_jsonable(item) for item in value]
    return value


def _float(value: Any) -> float:
    return math.nan if value is None else float(value)


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)


def _floats(values: Any) -> list[float]:
    return [_float(value) for value in values]
