"""Alerts to a webhook, or to any callable, from a thread of its own: training never waits for a network."""

from __future__ import annotations

import json
import logging
import queue
import threading
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from collapse_monitor.records import Alert, Severity, Snapshot

_log = logging.getLogger("collapse_monitor")


class WebhookSink:
    """Posts each alert as JSON, `{"text": message, "alert": {...}}`, in the background.

    At most `capacity` alerts wait; while the queue is full new ones are dropped and counted. The first delivery that fails switches the
    sink off, with one warning: what is at the other end must not matter to the run.

    Args:
        target: an http or https address, or a callable that is given each alert (in the background thread).
        severity: the mildest severity that is sent; resolved alerts are sent with those that fired.
        capacity: alerts that may wait.
        timeout: seconds for one delivery, and at most for the rest of them at `close`.

    Raises:
        ValueError: `target` is neither, `capacity` is below 1 or `timeout` is not positive.

    >>> heard = []
    >>> sink = WebhookSink(heard.append)
    >>> sink.close()
    """

    def __init__(
        self, target: str | Callable[[Alert], Any], severity: str = "warning", *, capacity: int = 100, timeout: float = 10.0
    ) -> None:
        if not callable(target) and not str(target).startswith(("http://", "https://")):
            raise ValueError(f"target={target!r}: give an address that begins with http:// or https://, or a callable that takes an alert")
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: at least one alert must be able to wait")
        if timeout <= 0:
            raise ValueError(f"timeout={timeout}: give a positive number of seconds")
        self._deliver = target if callable(target) else _poster(str(target), timeout)
        self._severity, self._timeout = Severity(severity), timeout
        self._waiting: queue.Queue[Alert | None] = queue.Queue(capacity)
        self._sent: set[str] = set()
        self._thread: threading.Thread | None = None
        self._closed = self._off = False
        self.dropped = 0

    def write(self, snapshot: Snapshot, alerts: Sequence[Alert]) -> None:
        """Queue what is severe enough; never blocks."""
        for alert in alerts:
            if not self._wanted(alert) or self._off or self._closed:
                continue
            if self._thread is None:
                # A daemon: an interpreter that ends does not wait for a server that hangs.
                self._thread = threading.Thread(target=self._work, name="collapse-monitor webhook", daemon=True)
                self._thread.start()
            try:
                self._waiting.put_nowait(alert)
            except queue.Full:
                self.dropped += 1

    def close(self) -> None:
        """Send what waits, for at most `timeout` seconds. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            try:
                self._waiting.put(None, timeout=self._timeout)
            except queue.Full:
                self._off = True
            self._thread.join(self._timeout)
        if self.dropped:
            _log.warning("webhook: %d alerts were dropped because %d were waiting", self.dropped, self._waiting.maxsize)

    def _wanted(self, alert: Alert) -> bool:
        if alert.state == "resolved":
            told = alert.rule in self._sent
            self._sent.discard(alert.rule)
            return told
        wanted = alert.severity.rank >= self._severity.rank
        if wanted and alert.state == "firing":
            self._sent.add(alert.rule)
        return wanted

    def _work(self) -> None:
        while (alert := self._waiting.get()) is not None and not self._off:
            try:
                self._deliver(alert)
            except Exception as error:
                self._off = True
                _log.warning("webhook was switched off: %s: %s", type(error).__name__, error)


def _poster(address: str, timeout: float) -> Callable[[Alert], None]:
    def post(alert: Alert) -> None:
        body = json.dumps({"text": alert.message, "alert": alert.to_dict()}, allow_nan=False).encode()
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=timeout):
            pass

    return post
