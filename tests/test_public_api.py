"""The front door: few names, each of them real, loaded when used, with a clear word when something is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import collapse_monitor as cm

NAMES = {
    *("Monitor", "probe", "diagnose", "find_sites", "read", "CollapseCallback", "metrics", "testing"),
    *("Snapshot", "Site", "Alert", "Finding", "Severity", "Metric", "DEFAULT_METRICS", "DEFAULT_RULES"),
    *("TensorBoardSink", "JSONLSink", "ConsoleSink", "LiveSink"),
}


def test_the_public_names_are_these() -> None:
    assert set(cm.__all__) == NAMES
    assert len(cm.__all__) == len(NAMES) <= 20
    assert set(dir(cm)) >= NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_name_is_there_and_documented(name: str) -> None:
    value = getattr(cm, name)
    assert value is getattr(cm, name)
    if not isinstance(value, tuple | list):
        assert value.__doc__


def test_a_wrong_name_lists_the_right_ones() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Moniter'; it has DEFAULT_METRICS, .*Monitor"):
        cm.Moniter  # noqa: B018


def test_defaults_are_tuples_that_extend_by_listing() -> None:
    assert all(isinstance(metric, cm.Metric) for metric in [*cm.DEFAULT_METRICS])
    assert all(callable(rule) for rule in [*cm.DEFAULT_RULES])


def test_every_default_metric_is_an_attribute_of_metrics_and_has_a_range() -> None:
    for metric in cm.DEFAULT_METRICS:
        assert callable(getattr(cm.metrics, metric.name))
        assert metric.range[0] < metric.range[1]


def _in_a_process_without(*missing: str, code: str) -> str:
    block = f"import sys; sys.modules.update(dict.fromkeys({missing!r}))"
    command = [sys.executable, "-c", f"{block}\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False).stderr.splitlines()[-1]


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    said = _in_a_process_without("lightning", "pytorch_lightning", code="import collapse_monitor as cm; cm.CollapseCallback")
    assert said.startswith("ImportError: ")
    assert "pip install pytorch-lightning" in said.replace("'", "")
    said = _in_a_process_without("rich", code="import collapse_monitor as cm; cm.LiveSink")
    assert said == "ImportError: collapse_monitor.LiveSink needs rich, which is not installed: pip install 'rich'"
