"""A small heat map as a PNG, for a page that is printed or read without JavaScript."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from collapse_monitor.report.columns import Columns, bin_worst
from collapse_monitor.report.html.blocks import about_metric
from collapse_monitor.report.html.story import Story

WIDTH = 300
MISSING = 0

_ANCHORS = np.array(
    [[68, 1, 84], [65, 68, 135], [42, 120, 142], [34, 168, 132], [122, 209, 81], [253, 231, 37]], dtype=np.float64
)  # viridis (van der Walt and Smith, CC0)


def picture(story: Story, blocks: Mapping[str, Columns]) -> tuple[str, str] | None:
    """The metric of the gravest finding, else token_similarity, and its heat map as base64; None if there is no such reading.

    `blocks` holds the readings of the run per metric.
    """
    wanted = [*(chapter.alert.metric for chapter in story.chapters), "token_similarity"]
    for metric in wanted:
        if metric in blocks:
            collapse = about_metric(story.run, metric).get("collapse")
            values = bin_worst(blocks[metric].first, blocks[metric].values, collapse, WIDTH).values
            if np.isfinite(values).any():
                return metric, base64.b64encode(encode_png(_shades(values, collapse))).decode()
    return None


def encode_png(shades: NDArray[np.uint8]) -> bytes:
    """`[row, column]` of palette indices, the first row on top: 0 is transparent, 1 to 255 run from dark to bright."""
    at = np.linspace(0, len(_ANCHORS) - 1, 255)
    palette = np.stack([np.interp(at, range(len(_ANCHORS)), _ANCHORS[:, part]) for part in range(3)], axis=1).round().astype(np.uint8)
    height, width = shades.shape
    rows = np.concatenate([np.zeros((height, 1), dtype=np.uint8), shades], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    chunks = [
        (b"IHDR", header),
        (b"PLTE", b"\0\0\0" + palette.tobytes()),
        (b"tRNS", b"\0"),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _shades(values: NDArray[np.float32], collapse: str | None) -> NDArray[np.uint8]:
    finite = values[np.isfinite(values)]
    low, high = np.quantile(finite, [0.01, 0.99])
    share = np.clip((values - low) / ((high - low) or 1.0), 0, 1)
    if collapse == "low":
        share = 1 - share
    shades = np.where(np.isnan(share), MISSING, 1 + np.nan_to_num(share) * 254).astype(np.uint8)
    return np.ascontiguousarray(shades.T[::-1])
