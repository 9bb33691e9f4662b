"""Readings of a model without training it: one forward, and the model is as it was."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from collapse_monitor.arguments import check_model
from collapse_monitor.capture.probe import heard_once
from collapse_monitor.capture.window import Observed
from collapse_monitor.measure import Window
from collapse_monitor.metrics import DEFAULT_METRICS, GRADIENT_READINGS
from collapse_monitor.records import Site, Snapshot

logger = logging.getLogger("collapse_monitor")


def probe(model: nn.Module, *args: Any, **kwargs: Any) -> Snapshot:
    """One forward of the model on these arguments, in the mode it is in, and every reading that needs no gradient.

    The model is left as it was: random states, buffers and gradients do not change.

    Raises:
        ValueError: `model` is no `nn.Module`, or it has neither blocks nor attention; the message says how to name `sites`.
    """
    check_model("probe", model)
    receiver = Window(DEFAULT_METRICS)
    observed = _heard(model, args, kwargs, receiver)
    assert observed.plan is not None
    if (problem := observed.plan.problem()) is not None:
        raise ValueError(problem)
    receiver.weights(observed.weights())
    missing = {**observed.missing, **dict.fromkeys(GRADIENT_READINGS, "probe runs no backward")}
    return receiver.launch(0, observed.sites, missing, notes=observed.notes, source="probe").snapshot()


def find_sites(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Site, ...]:
    """Every block and attention execution of one forward on these arguments, in order of entry. The model is left as it was.

    Raises:
        ValueError: `model` is no `nn.Module`.
    """
    check_model("find_sites", model)
    observed = _heard(model, args, kwargs, Window(()))
    return tuple(observed.plan.sites.values()) if observed.plan is not None else ()


def _heard(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], receiver: Window) -> Observed:
    return heard_once(model, args, kwargs, receiver, lambda what, error: logger.warning("%s: %s: %s", what, type(error).__name__, error))
