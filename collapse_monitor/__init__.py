"""Says which layers of a Transformer have stopped doing work while it trains: since when, why, and what to change.

The names below are loaded when they are first used, so that `import collapse_monitor` stays light: no torch, no Lightning,
no TensorBoard.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collapse_monitor import metrics, testing
    from collapse_monitor.integrations.lightning import CollapseCallback
    from collapse_monitor.judge import DEFAULT_RULES, diagnose
    from collapse_monitor.metrics import DEFAULT_METRICS, Metric
    from collapse_monitor.monitor import Monitor
    from collapse_monitor.once import find_sites, probe
    from collapse_monitor.records import Alert, Finding, Severity, Site, Snapshot
    from collapse_monitor.report import ConsoleSink, JSONLSink, TensorBoardSink, read
    from collapse_monitor.report.live import LiveSink

__version__ = "0.1.0"

__all__ = [
    "DEFAULT_METRICS",
    "DEFAULT_RULES",
    "Alert",
    "CollapseCallback",
    "ConsoleSink",
    "Finding",
    "JSONLSink",
    "LiveSink",
    "Metric",
    "Monitor",
    "Severity",
    "Site",
    "Snapshot",
    "TensorBoardSink",
    "diagnose",
    "find_sites",
    "metrics",
    "probe",
    "read",
    "testing",
]

_HOME = {
    "DEFAULT_METRICS": "collapse_monitor.metrics",
    "DEFAULT_RULES": "collapse_monitor.judge",
    "Alert": "collapse_monitor.records",
    "CollapseCallback": "collapse_monitor.integrations.lightning",
    "ConsoleSink": "collapse_monitor.report",
    "Finding": "collapse_monitor.records",
    "JSONLSink": "collapse_monitor.report",
    "LiveSink": "collapse_monitor.report.live",
    "Metric": "collapse_monitor.metrics",
    "Monitor": "collapse_monitor.monitor",
    "Severity": "collapse_monitor.records",
    "Site": "collapse_monitor.records",
    "Snapshot": "collapse_monitor.records",
    "TensorBoardSink": "collapse_monitor.report",
    "diagnose": "collapse_monitor.judge",
    "find_sites": "collapse_monitor.once",
    "probe": "collapse_monitor.once",
    "read": "collapse_monitor.report",
}

_INSTALL = {
    "lightning": "pytorch-lightning",
    "pytorch_lightning": "pytorch-lightning",
    "rich": "rich",
    "sklearn": "collapse-monitor[demo]",
    "tensorboard": "tensorboard",
    "transformers": "collapse-monitor[hf]",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'collapse_monitor' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        value = getattr(import_module(_HOME[name]), name) if name in _HOME else import_module(f"collapse_monitor.{name}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _INSTALL:
            raise
        raise ImportError(f"collapse_monitor.{name} needs {package}, which is not installed: pip install '{_INSTALL[package]}'") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
