"""Two processes on gloo: each measures, the first reports, and whatever one of them does, the other is never left waiting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).with_name("process_runs.py")
FORKED = (
    "unwatched local together stop_everywhere stop_from_rank_one stop_together fault_local fault_together fault_at_once "
    "fault_at_once_local other_sites budgets monitored hand_made parts probed plain_loop closed_alone hugging_face"
).split()


@dataclass
class Runs:
    """What the processes of each case left."""

    folder: Path

    def __getitem__(self, case: str) -> list[dict[str, Any]]:
        error = self.folder / f"{case}.error"
        assert not error.exists(), error.read_text()
        return [json.loads((self.folder / f"{case}.{rank}.json").read_text()) for rank in (0, 1)]

    def written(self, case: str) -> list[tuple[int, int]]:
        """(process, step) of everything that a sink was given."""
        return [(int(rank), int(step)) for rank, step in map(str.split, (self.folder / f"{case}.writers").read_text().splitlines())]

    @property
    def said(self) -> str:
        return (self.folder / "output").read_text()


def run(folder: Path, *cases: str) -> Runs:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with (folder / "output").open("w") as output:
        command = [sys.executable, str(SCRIPT), str(folder), *cases]
        subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=300, check=False)
    return Runs(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All cases, run once, also when several pytest processes share this file."""
    shared = tmp_path_factory.getbasetemp()
    shared = shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared
    folder = shared / "ddp"
    with FileLock(str(folder) + ".lock"):
        if not folder.exists():
            folder.mkdir()
            run(folder, *FORKED)
    return Runs(folder)


def steps(note: dict[str, Any]) -> list[int]:
    return [snapshot["step"] for snapshot in note["snapshots"]]


@pytest.mark.parametrize(
    "case", ["local", "together", "fault_local", "fault_together", "fault_at_once", "fault_at_once_local", "monitored", "probed"]
)
def test_the_run_is_the_run_that_would_have_been(runs: Runs, case: str) -> None:
    for plain, watched in zip(runs["unwatched"], runs[case], strict=True):
        assert watched["losses"] == plain["losses"]
        assert watched["parameters"] == plain["parameters"]
        assert watched["global_step"] == plain["global_step"] == 8


@pytest.mark.parametrize("case", ["local", "together", "fault_local", "probed", "parts", "hand_made"])
def test_one_process_writes(runs: Runs, case: str) -> None:
    assert runs.written(case) == [(0, 0), (0, 2), (0, 4), (0, 6)]


def test_one_logger_writes(runs: Runs) -> None:
    """The Trainer's loggers of the second process get nothing, and the first has one file for each."""
    assert runs["local"]
    assert len(list((runs.folder / "local" / "tb").rglob("events.out.tfevents.*"))) == 1
    (table,) = (runs.folder / "local" / "csv").rglob("metrics.csv")
    assert "collapse_summary/effective_rank_min" in table.read_text()


def test_each_process_measures_its_own_data_without_talking(runs: Runs) -> None:
    first, second = runs["local"]
    assert steps(first) == steps(second) == [0, 2, 4, 6]
    assert all(a["rank"] != b["rank"] for a, b in zip(first["snapshots"], second["snapshots"], strict=True))
    assert [note["collectives"] for note in (first, second)] == [note["collectives"] for note in runs["unwatched"]]


def test_readings_of_all_processes_are_averaged_with_one_collective_per_sample(runs: Runs) -> None:
    first, second = runs["together"]
    assert first["snapshots"] == second["snapshots"]
    for mean, *alone in zip(first["snapshots"], *(note["snapshots"] for note in runs["local"]), strict=True):
        assert mean["rank"] == pytest.approx([sum(pair) / 2 for pair in zip(*(one["rank"] for one in alone), strict=True)], rel=1e-12)
        assert mean["context"]["train_loss"] == pytest.approx(sum(one["context"]["train_loss"] for one in alone) / 2, rel=1e-6)
    agreement = 1
    assert first["collectives"] == runs["unwatched"][0]["collectives"] + agreement + len(first["snapshots"])


@pytest.mark.parametrize("case", ["stop_everywhere", "stop_from_rank_one", "stop_together"])
def test_a_stop_is_decided_together(runs: Runs, case: str) -> None:
    first, second = runs[case]
    assert first["global_step"] == second["global_step"] == 5
    assert first["losses"][:5] == runs["unwatched"][0]["losses"][:5]


def test_the_checkpoint_is_complete_before_the_stop(runs: Runs) -> None:
    assert runs["stop_everywhere"]
    (saved,) = runs.folder.glob("collapse-step*.ckpt")
    assert saved.name == "collapse-step4.ckpt"
    assert torch.load(saved, weights_only=True)["global_step"] == 5


def test_an_alert_of_the_second_process_is_said_by_it(runs: Runs) -> None:
    first, second = runs["stop_from_rank_one"]
    assert (first["alerts"], second["alerts"]) == ([], [4])
    assert "process 1, step 4: alarm (warning) in layer 0" in runs.said


@pytest.mark.parametrize("case", ["fault_local", "fault_together", "fault_at_once", "fault_at_once_local"])
def test_a_fault_in_one_process_holds_nobody_up(runs: Runs, case: str) -> None:
    first, second = runs[case]
    assert first["snapshots"][-1]["step"] == 6
    assert first["snapshots"][-1]["rank"] == pytest.approx(runs["local"][0]["snapshots"][-1]["rank"])
    assert "RuntimeError: only here" in runs.said
    assert set(first["metrics"]) == set(second["metrics"]), "who monitors a number finds it in each process"


def test_processes_that_hear_other_sites_say_so(runs: Runs) -> None:
    for note in runs["other_sites"]:
        assert all("readings of this process only" in snapshot["notes"][-1] for snapshot in note["snapshots"])


def test_the_budget_stretches_all_processes_alike(runs: Runs) -> None:
    first, second = runs["budgets"]
    assert steps(first) == steps(second)
    assert first["every"] == second["every"] > 1


def test_headlines_of_each_process_can_be_monitored(runs: Runs) -> None:
    first, second = runs["monitored"]
    assert first["metrics"]["collapse/min_rank"] == pytest.approx(min(first["snapshots"][-1]["rank"]))
    assert second["metrics"]["collapse/min_rank"] == pytest.approx(min(second["snapshots"][-1]["rank"]))
    assert list((runs.folder / "monitored").glob("*.ckpt"))


@pytest.mark.parametrize("case", ["hand_made", "parts", "probed"])
def test_every_form_of_training_step_is_read_below_the_wrapper(runs: Runs, case: str) -> None:
    for note in runs[case]:
        assert note["sites"] == ["net.blocks.0", "net.blocks.1"]
        assert steps(note) == [0, 2, 4, 6]


def test_a_loop_may_look_at_the_monitor_in_one_process(runs: Runs) -> None:
    first, second = runs["plain_loop"]
    assert first["looked"] == [None, 0, 0, 2, 2, 4, 4, 6], "averages arrive with the next step"
    assert first["rank"] == second["rank"]
    assert first["loss"] == 0.5
    assert runs.written("plain_loop") == [(0, 0), (0, 2), (0, 4), (0, 6)]


def test_closing_waits_for_nobody(runs: Runs) -> None:
    for note in runs["closed_alone"]:
        assert note["step"] == 2
        assert "readings of this process only" in note["notes"][-1]


def test_hugging_face_stops_in_all_processes(runs: Runs) -> None:
    first, second = runs["hugging_face"]
    assert first["world"] == 2
    assert first["global_step"] == second["global_step"] == 4
    assert (first["alerts"], second["alerts"]) == ([], [4])
    assert {process for process, _ in runs.written("hugging_face")} == {0}


@pytest.mark.parametrize("case", ["spawned", "launched"])
def test_processes_that_start_from_nothing(case: str, tmp_path: Path) -> None:
    found = run(tmp_path, case)
    first, second = found[case]
    assert first["global_step"] == second["global_step"] == 8
    assert steps(first) == steps(second) == [0, 2, 4, 6]
    written = [json.loads(line)["step"] for line in (tmp_path / f"{case}.jsonl").read_text().splitlines()]
    assert written == [0, 2, 4, 6]
