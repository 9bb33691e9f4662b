"""The short form of the verdict benchmark: two planted faults named at the right layer, the same run without a fault silent."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "verdict.py"


@pytest.mark.slow
def test_faults_are_named_and_a_healthy_run_is_left_alone() -> None:
    said = subprocess.run([sys.executable, str(BENCHMARK), "--short"], capture_output=True, text=True, check=True, cwd=BENCHMARK.parents[1])
    assert "named 2 of 2, located 2 of 2; 0 warnings in 16 checks of healthy runs" in said.stdout
    assert re.search(r"tokens to their mean +\[1\] +\.\n", said.stdout)
    assert re.search(r"gradient cut +\. +\[1\]\n", said.stdout)
