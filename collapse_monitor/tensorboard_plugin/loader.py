"""What TensorBoard loads at its start. A fault in here would take the whole command down, so nothing may leave it."""

from __future__ import annotations

import logging
from typing import Any

from tensorboard.plugins import base_plugin

NAME = "collapse_monitor"
ALERT_NAME = "collapse_monitor_alerts"
KEPT_READINGS = 4000
"""Readings of a tag that TensorBoard is asked to keep: ten times what it keeps by default, and 92 MB where a log has 100 000."""

_log = logging.getLogger("collapse_monitor")


class CollapseLoader(base_plugin.TBLoader):
    """Asks TensorBoard for enough memory, and makes the plugin."""

    def fix_flags(self, flags: Any) -> None:
        """Keep more readings than the 10 or 100 of TensorBoard's default, and every alert. `--samples_per_plugin` of the user wins."""
        try:
            kept = getattr(flags, "samples_per_plugin", None)
            if isinstance(kept, dict):
                kept.setdefault(NAME, KEPT_READINGS)
                kept.setdefault(ALERT_NAME, 0)  # 0 keeps all
        except Exception:
            _log.warning("collapse_monitor: TensorBoard will thin readings out", exc_info=True)

    def load(self, context: base_plugin.TBContext) -> base_plugin.TBPlugin | None:
        """The plugin; None, with a line in the log, where it cannot be made."""
        try:
            from collapse_monitor.tensorboard_plugin.plugin import CollapsePlugin

            return CollapsePlugin(context)
        except Exception:
            _log.warning("collapse_monitor: the tab Collapse could not be made", exc_info=True)
            return None
