"""One line of JSON per snapshot: what a process that is killed leaves behind can be read."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from collapse_monitor.records import Alert, Site, Snapshot
from collapse_monitor.report.naming import FORMAT_VERSION

_seven_digits = "{:.7g}".format


class JSONLSink:
    """Appends one JSON object per snapshot to a file: its readings, with the alerts of that step under `alerts`.

    The file and its folders are made with the first snapshot. Each line is handed to the operating system whole, so that a kill loses at
    most the line in work; one torn by an earlier kill is closed off when the file is opened again. A resumed run appends. `read` reads it
    back, and so does `Snapshot.from_dict(json.loads(line))`. Numbers carry seven digits, nan is null, infinities are text.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise ValueError(f"JSONLSink({path!r}): give the path of a file")
        self.path = Path(path)
        self._file: int | None = None
        self._sites: tuple[tuple[Site, ...], str] = ((), "[]")

    def write(self, snapshot: Snapshot, alerts: Sequence[Alert]) -> None:
        line = self._encode(snapshot, alerts).encode() + b"\n"
        if self._file is None:
            self._file = _open_to_append(self.path)
        while line:
            line = line[os.write(self._file, line) :]

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy, also one in another process, opens the file for itself.
        return {**self.__dict__, "_file": None}

    def _encode(self, snapshot: Snapshot, alerts: Sequence[Alert]) -> str:
        """`Snapshot.to_dict` as text. Its thousands of numbers are written directly: that is three times faster than through a dict."""
        if snapshot.sites != self._sites[0]:
            self._sites = (snapshot.sites, _json([asdict(site) for site in snapshot.sites]))
        fields = {
            "version": str(FORMAT_VERSION),
            "step": str(int(snapshot.step)),
            "time": f"{time.time():.3f}",
            "sites": self._sites[1],
            "blocks": _object({name: f"[{_numbers(values)}]" for name, values in snapshot.blocks.items()}),
            "attention": _object(
                {name: f"[{','.join(f'[{_numbers(heads)}]' for heads in sites)}]" for name, sites in snapshot.attention.items()}
            ),
            "missing": _json(dict(snapshot.missing)),
            "attainable_rank": f"[{_numbers(snapshot.attainable_rank)}]",
            "tokens": f"[{_numbers(snapshot.tokens)}]",
            "context": _object({name: _numbers([value]) for name, value in snapshot.context.items()}),
            "notes": _json(list(snapshot.notes)),
            "source": _json(snapshot.source),
            "alerts": _json([alert.to_dict() for alert in alerts]),
        }
        return _object(fields)


def _open_to_append(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    size = os.lseek(file, 0, os.SEEK_END)
    if size:
        os.lseek(file, size - 1, os.SEEK_SET)
        if os.read(file, 1) != b"\n":
            os.write(file, b"\n")
    return file


def _object(fields: Mapping[str, str]) -> str:
    return f"{{{','.join(f'{_json(name)}:{text}' for name, text in fields.items())}}}"


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _numbers(values: Sequence[float]) -> str:
    """Seven digits, what single precision has; nan is null, an infinity is text.

    >>> _numbers([0.1, 12345678.0, float("nan"), float("-inf")])
    '0.1,1.234568e+07,null,"-inf"'
    """
    text = ",".join(map(_seven_digits, values))
    if "n" not in text:
        return text
    return ",".join("null" if math.isnan(value) else _seven_digits(value) if math.isfinite(value) else f'"{value}"' for value in values)
