"""Watched runs for the verdict benchmark: a healthy past, what a fault makes of it, and a run as it goes by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from faults import Fault
from parts import parts_of
from torch import Tensor, nn
from trainings import Batch, Training

import collapse_monitor as cm
from collapse_monitor.testing import MemorySink

EVERY = 5
PAST = 220
"""Steps before a fault: 44 checks of baseline."""

HELD_OUT = 64
"""Samples behind val_loss, the same each time."""

VISIBLE = 0.05
"""A fault that changes neither a block's output nor its gradients by this much cannot be seen by anyone."""

ATTENDS = 0.9
"""Uniformity below which a block selects, so that it can cease to."""


@dataclass
class Watched:
    """A run and what the monitor said of it."""

    training: Training
    fault: str | None
    block: int | None
    planted: int | None
    losses: list[float]
    alerts: list[cm.Alert]
    snapshots: list[cm.Snapshot] = field(repr=False)
    visible: bool = True


@dataclass
class Past:
    """A healthy run at the step where faults are planted: everything a resume needs."""

    training: Training
    model: dict[str, Any]
    optimizer: dict[str, Any]
    monitor: dict[str, Any]
    losses: list[float]
    uniformity: list[float]
    snapshots: list[cm.Snapshot]
    alerts: list[cm.Alert]


def healthy_past(training: Training, steps: int = PAST) -> Past:
    model = training.model()
    optimizer = _optimizer(model, training)
    sink = MemorySink()
    with cm.Monitor(model, every=EVERY, budget=None, sinks=[sink]) as monitor:
        losses = _train(training, model, optimizer, monitor, range(steps), training.batches())
        state, alerts = monitor.state_dict(), monitor.alerts
    uniformity = sink.snapshots[-1].series("attention_uniformity")
    return Past(training, model.state_dict(), optimizer.state_dict(), state, losses, uniformity, sink.snapshots, alerts)


def with_fault(past: Past, fault: Fault | None, block: int, steps: int = 80) -> Watched | None:
    """What follows when a fault is planted now: the run goes on from its checkpoint.

    `fault` None: nothing is planted. None is returned where no block attends and the fault needs one that does.
    """
    training = past.training
    if fault is not None and fault.attending:
        places = range(len(past.uniformity) - fault.behind)
        block = min(places, key=past.uniformity.__getitem__)
        if fault.selecting and past.uniformity[block] > ATTENDS:
            return None
    if fault is not None and fault.behind:
        block += 1
    model = training.model()
    model.load_state_dict(past.model)
    optimizer = _optimizer(model, training)
    optimizer.load_state_dict(copy.deepcopy(past.optimizer))
    data = training.batches()
    for _ in past.losses:
        next(data)
    start = len(past.losses)
    sink = MemorySink()
    with cm.Monitor(model, every=EVERY, budget=None, sinks=[sink]) as monitor:
        monitor.load_state_dict(past.monitor)
        after, visible = _planted(training, model, fault, block)
        losses = _train(training, model, optimizer, monitor, range(start, start + steps), data, after)
    name, place = (None, None) if fault is None else (fault.name, block)
    alerts = [alert for alert in monitor.alerts if alert.step >= start]
    return Watched(training, name, place, start, past.losses + losses, alerts, past.snapshots + sink.snapshots, visible)


def from_start(training: Training, fault: Fault | None, block: int, steps: int | None = None) -> Watched:
    """A run from its first step on, with a fault in it from the beginning or without one."""
    model = training.model()
    sink = MemorySink()
    after, visible = _planted(training, model, fault, block)
    optimizer = _optimizer(model, training)
    with cm.Monitor(model, every=EVERY, budget=None, sinks=[sink]) as monitor:
        losses = _train(training, model, optimizer, monitor, range(steps or training.steps), training.batches(), after)
    name, place = (None, None) if fault is None else (fault.name, None if fault.everywhere else block)
    return Watched(training, name, place, None if fault is None else 0, losses, monitor.alerts, sink.snapshots, visible)


def _train(
    training: Training,
    model: Any,
    optimizer: torch.optim.Optimizer,
    monitor: cm.Monitor,
    steps: range,
    data: Iterator[Batch],
    after: Callable[[], None] | None = None,
) -> list[float]:
    losses = []
    held_out = next(replace(training, batch=HELD_OUT if training.kind != "minilm" else 8).batches(held_out=True))
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = training.lr * training.schedule(step, training.steps)
        parts = []
        with monitor.observe(step):
            for _ in range(training.accumulate):
                loss = training.loss(model, next(data)) / training.accumulate
                loss.backward()
                parts.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after()
        losses.append(float(torch.stack(parts).sum()))
        monitor.log(step, train_loss=losses[-1])
        if step % (4 * EVERY) == 0:
            with torch.no_grad():
                model.eval()
                monitor.log(step, val_loss=float(training.loss(model, held_out)))
                model.train()
    return losses


def _optimizer(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=training.lr)


def _planted(training: Training, model: Any, fault: Fault | None, block: int) -> tuple[Callable[[], None] | None, bool]:
    """Plant the fault; says also whether the block's output or its input's gradient changed by more than VISIBLE on one batch."""
    if fault is None:
        return None, True
    if fault.everywhere:
        return fault.plant(model, block), True
    batch = next(training.batches(held_out=True))
    before = _effect(training, model, block, batch)
    after = fault.plant(model, block)
    if after is not None:
        return after, True  # it works through training: nothing has changed yet
    then = _effect(training, model, block, batch)
    changes = [(new - old).norm() / old.norm() for old, new in zip(before, then, strict=True)]
    return None, any(not change <= VISIBLE for change in changes)


def _effect(training: Training, model: Any, block: int, batch: Batch) -> tuple[Tensor, ...]:
    """The block's output and the gradient at the output of the block before it, or at its own."""
    kept: dict[int, Tensor] = {}

    def keep(index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            stream = output[0] if isinstance(output, tuple) else output
            stream.retain_grad()
            kept[index] = stream

        return hook

    blocks = parts_of(model)
    handles = [blocks[index].block.register_forward_hook(keep(index)) for index in {block, max(block - 1, 0)}]
    training.loss(model, batch).backward()
    model.zero_grad()
    for handle in handles:
        handle.remove()
    gradient = kept[max(block - 1, 0)].grad
    # The last block of an encoder passes no gradient to the first one of the decoder.
    return (kept[block].detach(),) if gradient is None else (kept[block].detach(), gradient)
