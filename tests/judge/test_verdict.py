"""The verdict benchmark in short: planted faults named at the right layer, the same run without a fault silent."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

# A busy machine may need ten times as long as an idle one.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "verdict.py"


def said_by(*options: str) -> str:
    return subprocess.run(
        [sys.executable, str(BENCHMARK), *options], capture_output=True, text=True, check=True, cwd=BENCHMARK.parents[1]
    ).stdout


def test_faults_are_named_and_a_healthy_run_is_left_alone() -> None:
    said = said_by("--short")
    assert "named 2 of 2, located 2 of 2; 0 warnings in 16 checks of healthy runs" in said
    assert re.search(r"tokens to their mean +\[1\] +\.\n", said)
    assert re.search(r"gradient cut +\. +\[1\]\n", said)


@pytest.mark.parametrize(("fault", "phenomenon"), [("attention copied", "attention_stagnation"), ("samples alike", "dimensional_collapse")])
def test_a_rare_phenomenon_is_named_in_a_real_training_mid_run_and_from_the_start(fault: str, phenomenon: str) -> None:
    said = said_by("--seeds", "0", "--kinds", "vit", "--fault", fault)
    assert re.search(rf" 1 {phenomenon}\n", said)
    assert "named 2 of 2, located 2 of 2" in said
