"""Our part of a TensorBoard event file. TensorBoard's own readers check every byte in Python; this loop is ten times faster."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from collapse_monitor.report.content import read_about, read_alerts
from collapse_monitor.report.naming import ALERT_PLUGIN, PLUGIN

_KINDS = {1: np.float32, 19: np.float16}
"""By number in TensorFlow's `DataType`: DT_FLOAT and DT_HALF."""

_LARGEST_RECORD = 1 << 30
"""Bytes. A longer one is no record but a broken file."""


@dataclass(frozen=True, slots=True)
class LoggedTensor:
    """One metric at one step, `[layer]` or `[site, head]`, and what the log says about it."""

    metric: str
    values: NDArray[Any]
    about: dict[str, Any]


def read_events(path: Path, damaged: list[int] | None = None) -> Iterator[tuple[int, list[LoggedTensor], list[dict[str, Any]]]]:
    """Step, tensors and alert records of every event of ours, in the order written.

    A torn tail ends the file quietly. What cannot be decoded, and what is not as we write it, is passed over; `damaged` is given the
    number of each record that could not be decoded, counted from 0.

    Raises:
        ImportError: `tensorboard` is not installed.
        OSError: the file cannot be opened.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError as error:
        raise ImportError(f"reading {path} needs tensorboard, which is not installed: pip install tensorboard") from error
    from google.protobuf.message import DecodeError

    about: dict[str, tuple[str, dict[str, Any]]] = {}
    with path.open("rb") as file:
        for number, record in enumerate(_records(file)):
            if b"collapse" not in record:
                continue
            try:
                event = Event.FromString(record)
            except DecodeError:
                # Noughts, such as a crash of the machine leaves behind.
                if damaged is not None:
                    damaged.append(number)
                continue
            tensors: list[LoggedTensor] = []
            alerts: list[dict[str, Any]] = []
            for value in event.summary.value:
                known = about.get(value.tag)
                if known is None:
                    if not value.HasField("metadata"):
                        continue
                    known = about[value.tag] = _owner(value.metadata.plugin_data)
                owner, content = known
                if owner == PLUGIN:
                    array = _array(value.tensor)
                    if array is not None:
                        tensors.append(LoggedTensor(content["metric"], array, content))
                elif owner == ALERT_PLUGIN:
                    alerts.extend(alert for text in value.tensor.string_val for alert in read_alerts(text))
            if tensors or alerts:
                yield event.step, tensors, alerts


def _owner(plugin: Any) -> tuple[str, dict[str, Any]]:
    """Whose a tag is, and what is said about it. Nobody's where others wrote under our name."""
    if plugin.plugin_name != PLUGIN:
        return plugin.plugin_name, {}
    content = read_about(plugin.content)
    return (PLUGIN, content) if content else ("", {})


def _records(file: BinaryIO) -> Iterator[bytes]:
    """TFRecords: length, its checksum, data, its checksum. Only the first checksum is looked at: it tells when the file is out of step."""
    while len(header := file.read(12)) == 12:
        length, checksum = struct.unpack("<QI", header)
        if checksum != _masked_crc(header[:8]) or length > _LARGEST_RECORD:
            return
        record = file.read(length + 4)
        if len(record) < length + 4:
            return
        yield record[:length]


def _array(tensor: Any) -> NDArray[Any] | None:
    """`[layer]` or `[site, head]`; None where the tensor is neither, or not whole."""
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    if len(shape) not in (1, 2):
        return None
    kind, content = _KINDS.get(tensor.dtype), tensor.tensor_content
    try:
        if kind is not None and content:
            return np.frombuffer(content, kind).reshape(shape)
        # Rewritten by somebody: the value in another of the fields a TensorProto has, or empty.
        from tensorboard.util.tensor_util import make_ndarray

        return np.asarray(make_ndarray(tensor), dtype=np.float64).reshape(shape)
    except (TypeError, ValueError):
        return None


def _masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC_TABLE = _crc_table()
"""CRC-32C (Castagnoli), reflected."""
