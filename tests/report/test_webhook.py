"""Alerts over HTTP to a real server: delivered in order, without ever making the run wait, and switched off once when it fails."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from collapse_monitor.records import Alert, Severity, Snapshot
from collapse_monitor.report import WebhookSink
from tests.synthetic import make_alert, make_snapshot

SNAPSHOT: Snapshot = make_snapshot()


class Server:
    """A local HTTP server that keeps what it is sent."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        owner = self

        class Respond(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                owner.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(owner.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Silent."""

        self.http = HTTPServer(("127.0.0.1", 0), Respond)
        self.address = f"http://127.0.0.1:{self.http.server_port}/hook"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.http.shutdown()
    server.thread.join()
    server.http.server_close()


def test_alerts_arrive_in_order_as_json(server: Server) -> None:
    sink = WebhookSink(server.address)
    alerts = [make_alert(step=step, message=f"message {step}") for step in range(5)]
    sink.write(SNAPSHOT, alerts)
    sink.close()
    assert [body["text"] for body in server.bodies] == [f"message {step}" for step in range(5)]
    assert Alert.from_dict(server.bodies[0]["alert"]) == alerts[0]


def test_only_what_is_severe_enough_is_sent_and_what_ends_with_it(server: Server) -> None:
    sink = WebhookSink(server.address, "critical")
    mild, severe = make_alert("oversmoothing", severity=Severity.WARNING), make_alert("rank_collapse", severity=Severity.CRITICAL)

    def resolved(rule: str) -> Alert:
        return Alert(rule, "resolved", Severity.INFO, 90, 5, (1,), "token_similarity", 0.3, 0.3, 0.99, f"{rule} resolved")

    sink.write(SNAPSHOT, [mild, severe])
    sink.write(SNAPSHOT, [resolved("oversmoothing"), resolved("rank_collapse")])
    sink.close()
    assert [(body["alert"]["rule"], body["alert"]["state"]) for body in server.bodies] == [
        ("rank_collapse", "firing"),
        ("rank_collapse", "resolved"),
    ]


def test_a_server_that_refuses_switches_the_sink_off_once(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.status = 500
    sink = WebhookSink(server.address)
    with caplog.at_level(logging.WARNING, "collapse_monitor"):
        sink.write(SNAPSHOT, [make_alert()] * 3)
        sink.close()
    assert len(server.bodies) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "webhook was switched off: HTTPError: HTTP Error 500: Internal Server Error"
    ]


def test_a_slow_receiver_never_makes_the_run_wait() -> None:
    release, heard = threading.Event(), []

    def slow(alert: Alert) -> None:
        release.wait(5)
        heard.append(alert.step)

    sink = WebhookSink(slow, capacity=2)
    started = time.perf_counter()
    for step in range(10):
        sink.write(SNAPSHOT, [make_alert(step=step)])
    assert time.perf_counter() - started < 1
    assert sink.dropped >= 7  # two wait, and one may be on its way
    release.set()
    sink.close()
    assert heard == sorted(heard)
    assert len(heard) == 10 - sink.dropped


def test_nothing_is_started_before_the_first_alert_or_left_after_the_last() -> None:
    before = threading.active_count()
    sink = WebhookSink(lambda _: None)
    sink.write(SNAPSHOT, [])
    assert threading.active_count() == before
    sink.write(SNAPSHOT, [make_alert()])
    sink.close()
    sink.close()
    sink.write(SNAPSHOT, [make_alert()])
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"target": "ftp://nowhere"}, "give an address that begins with http"),
        ({"target": "http://x", "capacity": 0}, "capacity=0"),
        ({"target": "http://x", "timeout": 0}, "timeout=0"),
        ({"target": "http://x", "severity": "grave"}, "grave"),
    ],
)
def test_wrong_arguments_are_refused_with_the_right_ones(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        WebhookSink(**arguments)
