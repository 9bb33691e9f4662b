"""The verdict: rules on the run's own history, and the engine that turns what they see into alerts. No torch in here."""

from collapse_monitor.judge.baseline import Baseline
from collapse_monitor.judge.diagnosis import diagnose, explain, undecided
from collapse_monitor.judge.engine import Judge
from collapse_monitor.judge.history import History
from collapse_monitor.judge.laws import DepthLaw, Forecast, depth_law, forecasts
from collapse_monitor.judge.preflight import preflight
from collapse_monitor.judge.rule import Rule, confirmed_after
from collapse_monitor.judge.rules import DEFAULT_RULES, resolve_rules

__all__ = [
    "DEFAULT_RULES",
    "Baseline",
    "DepthLaw",
    "Forecast",
    "History",
    "Judge",
    "Rule",
    "confirmed_after",
    "depth_law",
    "diagnose",
    "explain",
    "forecasts",
    "preflight",
    "resolve_rules",
    "undecided",
]
