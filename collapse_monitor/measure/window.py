"""One sampled step: takes observations as they are made, and starts the copy to the host when it closes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from torch import Tensor

from collapse_monitor.measure.demand import WEIGHT_READS, Demand
from collapse_monitor.measure.evaluate import BlockEvaluation
from collapse_monitor.measure.faults import Faults
from collapse_monitor.measure.heads import AttentionEvaluation
from collapse_monitor.measure.pack import Pack
from collapse_monitor.measure.pending import Outline, Pending
from collapse_monitor.measure.pooled import PooledFeatures
from collapse_monitor.measure.precision import undisturbed
from collapse_monitor.measure.scalars import ScalarEvaluation
from collapse_monitor.measure.stack import reason_against_sample
from collapse_monitor.measure.weights import WeightEvaluation
from collapse_monitor.metrics import Metric, Reads
from collapse_monitor.observation import ROW_READS, AttentionObservation, BlockObservation, Key, WeightObservation, reason_against
from collapse_monitor.records import Site


class Window:
    """Turns the observations of one step into a snapshot. A `Receiver`: for every key the first observation counts.

    Attention rows, branches and gradients are reduced to numbers as they come. Block samples are kept and evaluated at `launch`, in
    stacks. Nothing here raises because of what it is given: what cannot be measured is nan, with a reason in `Snapshot.missing`.

    Args:
        metrics: what to measure; only this is computed.
        history: features of earlier steps, for metrics that read them.
        loss_scale: the factor the loss was multiplied with; gradient readings are divided by it.
    """

    def __init__(self, metrics: Sequence[Metric], history: PooledFeatures | None = None, loss_scale: float = 1.0) -> None:
        self._demand = Demand.of(metrics)
        self._loss_scale = loss_scale
        self._faults = Faults()
        self._pack = Pack()
        self._attention = AttentionEvaluation(self._demand, self._faults, self._pack)
        self._scalars = ScalarEvaluation(self._demand, self._faults, self._pack, loss_scale)
        self._weights = WeightEvaluation(self._demand, self._faults, self._pack)
        self._evaluation = BlockEvaluation(self._demand, self._faults, history)
        self._blocks: dict[Key, BlockObservation] = {}
        self._heard: set[tuple[str, Key]] = set()
        self._refused: dict[Key, str] = {}
        self._device_types: set[str] = set()

    @property
    def faults(self) -> list[tuple[str, BaseException]]:
        """What a metric, or the measuring itself, raised: the first exception under each name."""
        return self._faults.raised

    def asks(self, *reads: Reads) -> bool:
        """Whether any metric reads one of these."""
        return self._demand.asks(*reads)

    def attention(self, key: Key, obs: AttentionObservation) -> None:
        """Reduce the rows of one attention to numbers per row and head, now."""
        reason = reason_against(obs.weights, axes=4)
        if reason is not None:
            self._refused.setdefault(key, f"its attention weights are {reason}")
        elif self._first("attention", key):
            self._quietly("attention readings", obs.weights, lambda: self._attention.observe(key, obs))

    def block(self, key: Key, obs: BlockObservation) -> None:
        """Keep the samples of one block until the window closes."""
        reason = reason_against_sample(obs.output)
        if reason is not None:
            self._refused.setdefault(key, f"its output is {reason}")
            return
        if obs.input is not None and (obs.input is not obs.output) and reason_against_sample(obs.input) is not None:
            obs = BlockObservation(obs.output)
        if self._first("block", key):
            self._device_types.add(obs.output.hidden.device.type)
            self._blocks[key] = obs

    def branch(self, key: Key, branch: Tensor, stream: Tensor) -> None:
        """The operands of the addition where an attention joined the stream."""
        if self._demand.asks("branch") and self._first("branch", key):
            self._quietly("branch readings", branch, lambda: self._scalars.branch(key, branch, stream))

    def gradient(self, key: Key, grad: Tensor) -> None:
        """The gradient at the output of a block."""
        if self._demand.asks("gradient") and self._first("gradient", key):
            self._quietly("gradient readings", grad, lambda: self._scalars.gradient(key, grad))

    def qv_gradient(self, key: Key, role: str, grad: Tensor) -> None:
        """The gradient at the q or v of an attention."""
        if self._demand.asks("qv_gradient") and self._first(f"gradient of {role}", key):
            self._quietly("gradient readings", grad, lambda: self._scalars.qv_gradient(key, role, grad))

    def parameters(
        self,
        gradients: Mapping[Key, Sequence[Tensor]],
        qv: Mapping[Key, tuple[list[Tensor], list[Tensor]]],
        loss_scale: float | None = None,
        unknown: Mapping[Key, str] | None = None,
    ) -> None:
        """The gradients of parameters, when the window closes.

        Args:
            gradients: of the parameters of each block.
            qv: for each attention those of the weights that made q, and of those that made v.
            loss_scale: the factor still in these gradients, if an optimiser has taken it off already; None: that of the window.
            unknown: why `qv` lacks an attention.
        """
        self._scalars.unknown.update(unknown or {})
        if not self._demand.asks("parameter_gradients", "qv_weight_gradient"):
            return
        tensors = [tensor for group in (*gradients.values(), *(side for pair in qv.values() for side in pair)) for tensor in group]
        scale = self._loss_scale if loss_scale is None else loss_scale
        if tensors:
            self._quietly("parameter gradient readings", tensors[0], lambda: self._scalars.parameters(gradients, qv, scale))

    def weights(self, found: Iterable[tuple[Key, WeightObservation]]) -> float:
        """The weights that made q, k and v of each attention, on steps where they are read; reduced now.

        Returns:
            the seconds of the host that took.
        """
        started = time.perf_counter()
        if self._demand.asks(*WEIGHT_READS):
            with undisturbed("cpu", "cuda", "mps", "xpu"):
                self._faults.attempt("weight readings", lambda: self._weights.observe(found))
        return time.perf_counter() - started

    def launch(
        self,
        step: int,
        sites: Mapping[Key, Site],
        missing: Mapping[str, str],
        notes: Sequence[str] = (),
        source: Literal["train", "probe"] = "train",
        context: Mapping[str, float] | None = None,
    ) -> Pending:
        """Evaluate the blocks and start the copy to the host; nothing waits for the device.

        Args:
            step: the step the readings belong to.
            sites: every site by its key, in order of entry; what was heard under other keys is dropped.
            missing: reasons the caller knows, in the form of `Snapshot.missing`; they take precedence.
            notes: remarks for the snapshot.
            source: which forward was heard.
            context: the user's own numbers.
        """
        blocks = {key: self._blocks[key] for key in sites if key in self._blocks}
        self._blocks = {}
        self._scalars.close()
        with undisturbed(*self._device_types):
            self._attention.close()
            self._faults.attempt("block readings", lambda: self._evaluation.launch(blocks, self._pack))
            parcel = self._pack.send()
        outline = Outline(
            step,
            dict(sites),
            dict(missing),
            tuple(notes),
            source,
            dict(context or {}),
            frozenset(key for kind, key in self._heard if kind in ("attention", "block")) | self._unread(sites),
            self._refused,
        )
        return Pending(outline, self._demand, self._faults, parcel, self._evaluation, self._attention, self._scalars, self._weights)

    def _unread(self, sites: Mapping[Key, Site]) -> frozenset[Key]:
        """Attentions whose rows nobody asked for: that none came does not mean that they were not called."""
        return frozenset() if self.asks(*ROW_READS) else frozenset(key for key, site in sites.items() if site.kind == "attention")

    def _first(self, kind: str, key: Key) -> bool:
        """Recomputation and accumulation fire again: the first time counts."""
        if (kind, key) in self._heard:
            return False
        self._heard.add((kind, key))
        return True

    def _quietly(self, name: str, tensor: Tensor, measure: Callable[[], None]) -> None:
        self._device_types.add(tensor.device.type)
        with undisturbed(tensor.device.type):
            self._faults.attempt(name, measure)
