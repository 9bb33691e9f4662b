"""A real TensorBoard with the built package beside it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE = 90


@contextmanager
def serve(logdir: Path, package: Path, log: Path, *flags: str) -> Iterator[str]:
    """TensorBoard as a user starts it; `package` is a folder with the package and its entry points. Gives its address."""
    environment = {**os.environ, "PYTHONPATH": str(package), "PYTHONUNBUFFERED": "1", "no_proxy": "*", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", "0", "--reload_interval", "1", *flags]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=logdir)
    try:
        yield until(lambda: _address(process, log), "TensorBoard says where it serves")
    finally:
        process.terminate()
        process.wait(30)


def _address(process: subprocess.Popen[bytes], log: Path) -> str | None:
    said = log.read_text()
    assert process.poll() is None, said
    found = re.search(r"at (http://\S+)", said)
    return found[1] if found else None


def until(look: Callable[[], Any], what: str) -> Any:
    """What `look` gives as soon as it is true."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {PATIENCE} s: {what}")


def fetch(url: str) -> tuple[int, bytes]:
    """Status and body, whatever the status."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=PATIENCE) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def fetch_json(url: str) -> Any:
    return json.loads(fetch(url)[1])


def index_of(address: str, runs: set[str]) -> dict[str, Any]:
    """The index of the plugin, as soon as all runs are in it."""

    def look() -> dict[str, Any] | None:
        index = fetch_json(f"{address}data/plugin/collapse_monitor/index")
        return index if runs <= {run["name"] for run in index["runs"]} else None

    return until(look, f"runs {runs} are read")
