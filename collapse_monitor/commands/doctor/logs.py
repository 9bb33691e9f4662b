"""What a log directory holds: whose data, from which version, up to which step, and what keeps TensorBoard from showing it."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable
from pathlib import Path

from collapse_monitor.commands.doctor.findings import Found, note, ok, wrong
from collapse_monitor.commands.logs import natural
from collapse_monitor.records import FORMAT_VERSION
from collapse_monitor.report.content import parse_json, read_alerts
from collapse_monitor.report.events import read_events
from collapse_monitor.report.files import find_files
from collapse_monitor.report.integrity import Integrity, inspect_events

RECENT = 120.0
"""Seconds. A file written to so lately may still be growing."""

_COPY = "copy the file again, if it is a copy; a run that goes on begins a new file when it is resumed"
_UPGRADE = "python -m pip install --upgrade collapse-monitor"


def examine_logs(path: Path, fast: bool) -> list[Found]:
    """Everything below `path`. `fast`: TensorBoard reads with its fast loader, which minds several files in one folder less."""
    if not path.exists():
        return [
            wrong(f"{path}: no such file or folder", "give the folder that your logger writes to, for Lightning by default: lightning_logs")
        ]
    files = [path] if path.is_file() else sorted(find_files(path), key=lambda file: natural(str(file)))
    events = [file for file in files if "tfevents" in file.name]
    found: list[Found] = []
    ours = in_events = False
    for folder, group in itertools.groupby(events, key=lambda file: file.parent):
        members = list(group)
        states = {file: inspect_events(file) for file in members}
        said, has_ours = _readings(folder, members)
        ours = in_events = in_events or has_ours
        found += [*said, *_ends(states), *_neighbours(folder, states, fast)]
    for file in files:
        if file.suffix == ".jsonl" or (path.is_file() and file not in events):
            said = _lines(file)
            ours |= bool(said)
            found += said
    if not ours:
        kinds = f"{len(events)} event files of others" if events else f"{len(files)} files, none of them an event file"
        found.append(
            wrong(
                f"{path} holds nothing written by collapse_monitor ({kinds})",
                "let the run write: CollapseCallback() in a Trainer with a logger, or Monitor(model, sinks=[TensorBoardSink(writer)])",
                "and wait for the first sampled step: by default one in 50",
            )
        )
    elif not in_events:
        found.append(note("TensorBoard does not read JSON lines", f"collapse-monitor report {path} -o report.html"))
    return found


def _readings(folder: Path, files: Iterable[Path]) -> tuple[list[Found], bool]:
    """What we have written into one folder of event files."""
    steps: set[int] = set()
    versions: set[int] = set()
    alerts = 0
    damaged: list[Found] = []
    for file in files:
        lost: list[int] = []
        for step, tensors, records in read_events(file, lost):
            steps.add(step)
            alerts += len(records)
            versions |= {tensor.about["v"] for tensor in tensors}
            versions |= {record.get("version", FORMAT_VERSION) for record in records}
        if lost:
            count = "a record" if len(lost) == 1 else f"{len(lost)} records"
            damaged.append(wrong(f"{file} is damaged: {count} cannot be decoded and {'is' if len(lost) == 1 else 'are'} left out", _COPY))
    if steps:
        return [_counted(folder, steps, alerts, versions), *damaged], True
    if any(b"collapse_summary/" in file.read_bytes() for file in files):
        said = f"{folder} holds curves of the aggregates only: they were written by tensorboardX, or through another logger"
        return [wrong(said, "use torch.utils.tensorboard.SummaryWriter, for Lightning with tensorboard installed")], True
    return damaged, False


def _counted(where: Path, steps: set[int], alerts: int, versions: set[int]) -> Found:
    written = ", ".join(map(str, sorted(versions)))
    said = (
        f"{where}: {len(steps)} steps from {min(steps)} to {max(steps)}, {alerts} alert{'' if alerts == 1 else 's'}, log format {written}"
    )
    if max(versions, default=0) > FORMAT_VERSION:
        return wrong(f"{said}, newer than this collapse_monitor reads ({FORMAT_VERSION})", _UPGRADE)
    return ok(said)


def _ends(states: dict[Path, Integrity]) -> list[Found]:
    found = []
    for file, state in states.items():
        rest = state.size - state.readable
        if state.broken:
            said = f"{file} is damaged: after {state.records} records come {rest} bytes that are no record, and nothing behind them is read"
            found.append(wrong(said, _COPY))
        elif state.torn:
            found.append(_torn(file, f"the last {rest} bytes are half a record"))
    return found


def _torn(file: Path, what: str) -> Found:
    if time.time() - file.stat().st_mtime < RECENT:
        return note(f"{file} is being written, or its run has just been killed: {what}", "nothing: all that is before can be read")
    return note(f"{file} ends where its run was killed: {what}", "nothing: all that is before can be read; a resumed run begins a new file")


def _neighbours(folder: Path, states: dict[Path, Integrity], fast: bool) -> list[Found]:
    """Files of one folder that were written at the same time: TensorBoard goes on to the newer one and never comes back."""
    written = sorted((state.first, state.last, file.name) for file, state in states.items() if state.records)
    if not any(later[0] < earlier[1] for earlier, later in itertools.pairwise(written)):
        return []
    names = ", ".join(name for *_, name in written)
    said = f"{folder} has two writers at once ({names}): TensorBoard's slow loader stops reading the older file"
    steps = (
        "give TensorBoardSink the SummaryWriter that your training uses, or a folder of its own, such as runs/mine/collapse",
        f"to see these: tensorboard --logdir {folder} --load_fast=false --reload_multifile=true",
    )
    return [note(f"{said}; the fast one, which is in use here, reads both", steps[0]) if fast else wrong(said, *steps)]


def _lines(file: Path) -> list[Found]:
    """What we have written into a file of JSON lines; nothing if it is not ours."""
    steps: set[int] = set()
    versions: set[int] = set()
    alerts, last = 0, b"\n"
    with file.open("rb") as lines:
        for last in lines:
            record = parse_json(last)
            if isinstance(record, dict) and {"version", "step", "sites", "blocks"} <= record.keys():
                if isinstance(record["step"], int) and isinstance(record["version"], int):
                    steps.add(record["step"])
                    versions.add(record["version"])
                    alerts += len(read_alerts(json.dumps(record.get("alerts", []))))
    if not steps:
        return []
    torn = [] if last.endswith(b"\n") else [_torn(file, f"the last {len(last)} bytes are half a line")]
    return [_counted(file, steps, alerts, versions), *torn]
