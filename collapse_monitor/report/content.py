"""What a log says, checked before it is believed: others may write under our name, and disks fail."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from collapse_monitor.records import FORMAT_VERSION, Alert


def parse_json(text: str | bytes) -> Any:
    """JSON, with None for what is none, and for the numbers that JSON does not know.

    >>> parse_json('{"a": NaN}'), parse_json(b"\\xff"), parse_json("[" * 100_000)
    ({'a': None}, None, None)
    """
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None


def printable(text: str) -> str:
    """Text of others on one line and without a command to a terminal: control characters are spelled out.

    >>> print(printable("block\x1b[31m\\n7"))
    block\\x1b[31m\\x0a7
    """
    return _CONTROL.sub(
        lambda found: found[0].encode("ascii", "backslashreplace").decode() if found[0] > "\xff" else f"\\x{ord(found[0]):02x}", text
    )


def read_about(data: bytes) -> dict[str, Any]:
    """What a log says about one of our tags; empty where it was not written by us, and without what is not as we write it.

    >>> read_about(b'{"v":1,"metric":"max_logit","layers":["block",7],"collapse":"high"}')
    {'v': 1, 'metric': 'max_logit', 'collapse': 'high'}
    >>> read_about(b'{"v":"one","metric":"max_logit"}')
    {}
    """
    content = parse_json(data)
    if not isinstance(content, dict) or not _is_whole(content.get("v")) or not isinstance(content.get("metric"), str):
        return {}
    return {key: value for key, value in content.items() if key not in _SOUND or _SOUND[key](value)}


def read_alerts(text: str | bytes) -> list[dict[str, Any]]:
    """The alerts of one step as they were written; those of a newer version are not looked into.

    >>> read_alerts('[{"version":2},{"version":1},3]')
    [{'version': 2}]
    """
    found = parse_json(text)
    return [record for record in found if _is_alert(record)] if isinstance(found, list) else []


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Commands, ends of lines, changes of the direction, and bytes of file names that are no text."""


def _is_alert(record: Any) -> bool:
    if not isinstance(record, dict):
        return False
    version = record.get("version", FORMAT_VERSION)
    if not _is_whole(version):
        return False
    if version > FORMAT_VERSION:
        return True
    try:
        alert = Alert.from_dict(record)
    except (KeyError, TypeError, ValueError, AttributeError):
        return False
    texts = (alert.rule, alert.state, alert.metric, alert.message)
    return _is_whole(alert.step) and _is_whole(alert.since) and _all_whole(list(alert.layers)) and _all_text(list(texts))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _all_text(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _all_whole(value: Any) -> bool:
    return isinstance(value, list) and all(_is_whole(one) and one >= 0 for one in value)


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(bound is None or isinstance(bound, int | float) for bound in value)


_SOUND: dict[str, Callable[[Any], bool]] = {
    "layers": _all_text,
    "sites": _all_text,
    "site_layers": lambda value: isinstance(value, list) and all(layer is None or _is_whole(layer) for layer in value),
    "range": _is_range,
    "unit": _is_text,
    "meaning": _is_text,
    "collapse": lambda value: value in (None, "low", "high"),
    "kind": _is_text,
}
"""What each entry has to be."""
