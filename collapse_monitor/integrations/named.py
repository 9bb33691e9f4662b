"""Sinks as text: what a configuration file can hold in place of an object."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def resolve_sinks(sinks: Sequence[Any]) -> list[Any]:
    """Sinks from objects, import paths of classes, and mappings with `class_path` and `init_args`.

    Raises:
        ValueError: something cannot be imported or made; the message says why and what the forms are.

    >>> [type(sink).__name__ for sink in resolve_sinks([{"class_path": "collapse_monitor.JSONLSink", "init_args": {"path": "log.jsonl"}}])]
    ['JSONLSink']
    """
    if isinstance(sinks, str | Mapping) or not isinstance(sinks, Iterable):
        raise ValueError(f"sinks={sinks!r}: give a list, as in sinks=[{sinks!r}]")
    return [_made(sink) for sink in sinks]


def _made(sink: Any) -> Any:
    path = sink.get("class_path") if isinstance(sink, Mapping) else sink
    if not isinstance(path, str):
        if isinstance(sink, Mapping):
            raise ValueError(
                f"sinks: {sink!r} has no class_path, as in {{'class_path': 'collapse_monitor.JSONLSink', 'init_args': {{...}}}}"
            )
        return sink
    arguments = sink.get("init_args") or {} if isinstance(sink, Mapping) else {}
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)(**arguments)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"sinks: cannot make {path!r} ({type(error).__name__}: {error}). Give the import path of a class, with what it must be given "
            "as {class_path: ..., init_args: {...}}"
        ) from error
