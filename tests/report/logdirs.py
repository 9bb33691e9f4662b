"""Event files as TensorBoard itself reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray


def accumulate(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    return accumulator


def tensors(accumulator: EventAccumulator, tag: str) -> dict[int, np.ndarray]:
    return {event.step: make_ndarray(event.tensor_proto) for event in accumulator.Tensors(tag)}


def content(accumulator: EventAccumulator, tag: str) -> dict[str, Any]:
    return json.loads(accumulator.SummaryMetadata(tag).plugin_data.content)
