"""Whether an event file is whole: how far it can be read, and when it was written."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from collapse_monitor.report.events import _LARGEST_RECORD, _masked_crc


@dataclass(frozen=True, slots=True)
class Integrity:
    """An event file from outside.

    Attributes:
        records: how many can be read.
        first: when the first one was written, in seconds since 1970; nan without any.
        last: when the last one was.
        size: bytes of the file.
        readable: bytes up to the end of the last whole record.
        torn: whether the file ends in the middle of a record.
        broken: whether something that is no record follows the last whole one.
    """

    records: int
    first: float
    last: float
    size: int
    readable: int
    torn: bool
    broken: bool


def inspect_events(path: Path) -> Integrity:
    """Go through the records of a file without reading what is in them."""
    size = path.stat().st_size
    records, position, torn, broken = 0, 0, False, False
    first = last = float("nan")
    with path.open("rb") as file:
        while position < size:
            header = file.read(12)
            if len(header) < 12:
                torn = True
                break
            length, checksum = struct.unpack("<QI", header)
            if checksum != _masked_crc(header[:8]) or length > _LARGEST_RECORD:
                broken = True
                break
            if position + 16 + length > size:
                torn = True
                break
            last = _time_of(file.read(min(length, 9)), last)
            first = last if records == 0 else first
            records, position = records + 1, position + 16 + length
            file.seek(position)
    return Integrity(records, first, last, size, position, torn, broken)


def _time_of(record: bytes, otherwise: float) -> float:
    """An event begins with its time: field 1, eight bytes."""
    return float(struct.unpack("<d", record[1:9])[0]) if len(record) == 9 and record[0] == 0x09 else otherwise
