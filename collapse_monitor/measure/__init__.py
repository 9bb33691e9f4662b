"""From observations to a snapshot: maths on the device, one copy to the host per step, fp64 there. Nothing else copies to the host."""

from __future__ import annotations

from collapse_monitor.measure.exchange import Exchange, apart
from collapse_monitor.measure.pending import Pending
from collapse_monitor.measure.pooled import PooledFeatures
from collapse_monitor.measure.ranks import any_process, read_scalars
from collapse_monitor.measure.window import Window

__all__ = ["Exchange", "Pending", "PooledFeatures", "Window", "any_process", "apart", "read_scalars"]
