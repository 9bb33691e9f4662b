"""Serves the tab: its files, and the logged readings as binary columns."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from importlib import resources
from typing import Any

from tensorboard.backend import http_util
from tensorboard.plugins import base_plugin
from werkzeug import wrappers

from collapse_monitor.report import naming
from collapse_monitor.report.columns import COLUMNS, pack_columns
from collapse_monitor.tensorboard_plugin.store import Store

MOST_LAYERS = 1_000_000
"""More than any model has."""

_METHODS = ("GET", "HEAD")
_TYPES = {".js": "text/javascript", ".css": "text/css"}
_log = logging.getLogger("collapse_monitor")


class CollapsePlugin(base_plugin.TBPlugin):
    """The tab Collapse. TensorBoard hands its readings over through the data provider, whichever loader read them."""

    plugin_name = naming.PLUGIN

    def __init__(self, context: base_plugin.TBContext) -> None:
        kept = getattr(context.flags, "samples_per_plugin", None) or {}
        self._store = Store(context.data_provider, kept.get(naming.PLUGIN))
        static = resources.files("collapse_monitor") / "tensorboard_plugin" / "static"
        # Only files that were there at the start are served: no path of a request reaches the file system.
        self._files = {file.name: file.read_bytes() for file in static.iterdir() if file.is_file()}

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        served = {f"/static/{name}": _app(self._file(name)) for name in self._files}
        return {
            **served,
            "/index": _app(self._index),
            "/series": _app(self._series),
            "/heads": _app(self._heads),
            "/alerts": _app(self._alerts),
        }

    def is_active(self) -> bool:
        return False  # TensorBoard then asks the data provider whether a run has data of ours

    def data_plugin_names(self) -> tuple[str, ...]:
        return (naming.PLUGIN, naming.ALERT_PLUGIN)

    def frontend_metadata(self) -> base_plugin.FrontendMetadata:
        return base_plugin.FrontendMetadata(es_module_path="/static/index.js", tab_name="Collapse")

    def _file(self, name: str) -> Callable[[wrappers.Request], Any]:
        kind = _TYPES.get(name[name.rfind(".") :], "application/octet-stream")
        return lambda request: http_util.Respond(request, self._files[name], kind)

    def _index(self, request: wrappers.Request) -> Any:
        return http_util.Respond(request, self._store.index(_context(request), _experiment(request)), "application/json")

    def _series(self, request: wrappers.Request) -> Any:
        run, metric = _text(request, "run"), _text(request, "metric")
        start, end = (_number(request, name, float, -math.inf, math.inf, None) for name in ("from", "to"))
        columns = _number(request, "columns", int, 1, COLUMNS, COLUMNS)
        found = self._store.series(_context(request), _experiment(request), run, metric, start, end, columns)
        return _binary(request, pack_columns(found, run=run, metric=metric))

    def _heads(self, request: wrappers.Request) -> Any:
        run, metric = _text(request, "run"), _text(request, "metric")
        layer = _number(request, "layer", int, 0, MOST_LAYERS, None)
        if layer is None:
            raise Refused("layer is missing: the index of a layer, from 0 on")
        found, labels = self._store.heads(_context(request), _experiment(request), run, metric, layer)
        return _binary(request, pack_columns(found, run=run, metric=metric, layer=layer, labels=labels))

    def _alerts(self, request: wrappers.Request) -> Any:
        found = self._store.alerts(_context(request), _experiment(request), _text(request, "run"))
        return http_util.Respond(request, found, "application/json")


class Refused(ValueError):
    """A request that cannot be meant; its text says what would be."""


def _app(answer: Callable[[wrappers.Request], Any]) -> Callable[..., Any]:
    """A WSGI application. Whatever goes wrong is told to the tab; TensorBoard serves on."""

    @wrappers.Request.application
    def application(request: wrappers.Request) -> Any:
        if request.method not in _METHODS:
            return _error(request, 405, f"{request.method} changes nothing here: everything is read with GET")
        try:
            return answer(request)
        except Refused as error:
            return _error(request, 400, str(error))
        except LookupError as error:
            return _error(request, 404, str(error.args[0] if error.args else error))
        except Exception as error:
            _log.warning("collapse_monitor: %s", request.path, exc_info=True)
            return _error(request, 500, f"{type(error).__name__}: {error}")

    return application


def _error(request: wrappers.Request, status: int, sentence: str) -> Any:
    headers = [("Allow", ", ".join(_METHODS))] if status == 405 else None
    return http_util.Respond(request, {"error": sentence}, "application/json", code=status, headers=headers)


def _binary(request: wrappers.Request, content: bytes) -> Any:
    return http_util.Respond(request, content, "application/octet-stream")


def _text(request: wrappers.Request, name: str) -> str:
    """What must be there. TensorBoard calls a run that lies in the folder itself `.`, so that none has an empty name."""
    given = request.args.get(name, "")
    if not given:
        raise Refused(f"{name} is missing: /index lists the runs and their metrics")
    return given


def _number(request: wrappers.Request, name: str, kind: type[int] | type[float], least: float, most: float, otherwise: Any) -> Any:
    """A number within bounds; `otherwise` where none is given."""
    given = request.args.get(name)
    if given is None:
        return otherwise
    try:
        number = kind(given)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        expected = "a number" if kind is float else f"a whole number from {least} to {most}"
        raise Refused(f"{name}={given[:40]!r}: expected {expected}")
    return number


# TensorBoard's module of both functions warns when it is imported, about a package in it: only TensorBoard itself needs it.
def _context(request: wrappers.Request) -> Any:
    from tensorboard import plugin_util

    return plugin_util.context(request.environ)


def _experiment(request: wrappers.Request) -> str:
    from tensorboard import plugin_util

    return str(plugin_util.experiment_id(request.environ))
