"""The report as a file: what it says first, what it lets through, how large it is, and what it cannot be made of."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from collapse_monitor.records import Severity
from collapse_monitor.report import JSONLSink, TensorBoardSink, read
from collapse_monitor.report.html import write_report
from collapse_monitor.report.html.picture import encode_png
from collapse_monitor.report.html.script import bundle
from collapse_monitor.report.html.story import tell
from tests.synthetic import make_alert, make_snapshot


class Page(HTMLParser):
    """Scripts by id and the text that a reader sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: dict[str, str] = {}
        self.run: list[str] = []
        self.styles: list[str] = []
        self.policy = self.text = ""
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.handlers: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.handlers += [name for name in found if name.startswith("on") or name == "style"]
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        if tag in ("script", "style"):
            self._open = [(tag, found)]

    def handle_endtag(self, tag: str) -> None:
        self._open = []
        self.text += " "

    def handle_data(self, data: str) -> None:
        if not self._open:
            self.text += data
            return
        tag, attributes = self._open[0]
        if tag == "style":
            self.styles.append(data)
        elif "id" in attributes:
            self.scripts[attributes["id"] or ""] = data
        else:
            self.run.append(data)


def log(folder: Path, steps: int = 5, **readings: object) -> Path:
    writer = SummaryWriter(folder)
    sink = TensorBoardSink(writer, heads_every=2)
    for step in range(steps):
        alerts = [make_alert(step=step)] if step == 2 else []
        sink.write(make_snapshot(step * 10, similarity=[0.1, 0.2, step / 10, 0.4]), alerts)
    sink.close()
    writer.close()
    return folder


def report(tmp_path: Path, *logs: Path) -> Page:
    write_report(logs, tmp_path / "out" / "report.html")
    return Page((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))


def unpack(text: str) -> tuple[dict[str, object], np.ndarray, bytes]:
    data = gzip.decompress(base64.b64decode(text))
    (size,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + size])
    start = 4 + size
    return header, np.frombuffer(data, "<f8", header["columns"], start), data[start + 16 * header["columns"] :]


def test_the_readings_are_those_of_the_log(tmp_path: Path) -> None:
    page = report(tmp_path, log(tmp_path / "run"))
    run = read(tmp_path / "run")
    header, steps, data = unpack(page.scripts["series/0/token_similarity"])
    np.testing.assert_array_equal(steps, run.steps)
    values = np.frombuffer(data, "<f4", 20).reshape(5, 4)
    np.testing.assert_array_equal(values, run.series("token_similarity").astype(np.float32))
    header, steps, data = unpack(page.scripts["heads/0/attention_uniformity"])
    assert (list(steps), header["rows"]) == ([0, 20, 40], 8)
    assert header["layers"] == [0, 0, 1, 1, 2, 2, 3, 3]
    index = json.loads(page.scripts["index"])
    assert index["runs"][0]["layers"] == [f"blocks.{layer}" for layer in range(4)]
    assert index["runs"][0]["metrics"]["token_similarity"] == {
        "meaning": "Mean cosine between all pairs of distinct tokens",
        "unit": "",
        "range": [-1, 1],
        "collapse": "high",
        "layers": True,
        "heads": False,
    }
    assert index["runs"][0]["alerts"] == [alert.to_dict() for alert in run.alerts]


def test_a_jsonl_log_gives_the_same(tmp_path: Path) -> None:
    sink = JSONLSink(tmp_path / "run.jsonl")
    for step in range(5):
        sink.write(make_snapshot(step * 10, similarity=[0.1, 0.2, step / 10, 0.4]), [make_alert(step=step)] if step == 2 else [])
    sink.close()
    lines, events = report(tmp_path, tmp_path / "run.jsonl"), report(tmp_path, log(tmp_path / "run"))
    assert unpack(lines.scripts["series/0/token_similarity"])[2] == unpack(events.scripts["series/0/token_similarity"])[2]
    described = [json.loads(page.scripts["index"])["runs"][0] for page in (lines, events)]
    assert described[0]["metrics"] == described[1]["metrics"]
    assert described[0]["alerts"] == described[1]["alerts"]


def test_the_first_page_says_verdict_when_where_why_and_what_to_do(tmp_path: Path) -> None:
    text = " ".join(report(tmp_path, log(tmp_path / "run")).text.split())
    assert "Critical: rank collapse. 5 readings from step 0 to 40." in text
    assert "When since step -3, confirmed at step 2, still so at the end of the log" in text
    assert "Where layers 1-2, blocks.1 first" in text
    assert "Why All tokens of a sequence have become nearly the same" in text
    assert re.search(r"What to do First: check the residual path.*a remedy another", text)


def test_a_finding_that_is_over_and_a_healthy_run(tmp_path: Path) -> None:
    from dataclasses import replace

    run = read(log(tmp_path / "run"))
    fired = make_alert("oversmoothing", 10, Severity.WARNING)
    over = replace(run, alerts=(fired, replace(fired, state="resolved", step=30)))
    assert tell(over).verdict.startswith("Worth a look: oversmoothing (over).")
    assert "over at step 30" in tell(over).chapters[0].when
    note = replace(run, alerts=(make_alert("attention_sink", 10, Severity.INFO),))
    assert tell(note).verdict == "Healthy: nothing was found in 5 readings from step 0 to 40."
    both = replace(run, alerts=(make_alert("a", 5, Severity.WARNING), make_alert("b", 9), make_alert("c", 7)))
    assert [chapter.alert.rule for chapter in tell(both).chapters] == ["c", "b", "a"]


def test_only_the_pages_own_script_and_style_are_allowed(tmp_path: Path) -> None:
    page = report(tmp_path, log(tmp_path / "run"))
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in (*page.run, *page.styles)}
    assert len(page.run) == len(page.styles) == 1
    policy = dict(part.strip().split(" ", 1) for part in page.policy.split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy["script-src"], policy["style-src"]} == hashes
    assert "unsafe" not in page.policy
    assert page.handlers == []
    assert not re.search(r"https?://", page.run[0] + page.styles[0]), "nothing is fetched from elsewhere"


def test_markup_in_a_log_is_text(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><b onclick=x>"
    path = log(tmp_path / "a<b>&")
    page_text = (write_report([path], tmp_path / "report.html"), (tmp_path / "report.html").read_text())[1]
    assert "a&lt;b&gt;&amp;" in page_text
    assert "a<b>&" not in page_text.replace("a\\u003cb>&", "")
    sink = JSONLSink(tmp_path / "run.jsonl")
    sink.write(make_snapshot(0), [make_alert(evil, message=evil)])
    sink.close()
    page = report(tmp_path, tmp_path / "run.jsonl")
    assert len(page.run) == 1
    assert evil.replace("_", " ") in html.unescape(page.text)
    assert json.loads(page.scripts["index"])["runs"][0]["alerts"][0]["message"] == evil


@pytest.mark.slow
def test_two_runs_of_1500_steps_and_12_metrics_with_heads_take_less_than_6_megabytes(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    more = ("branch_ratio", "block_influence", "massive_activation")
    for name in ("a", "b"):
        writer = SummaryWriter(tmp_path / "logs" / name, max_queue=10_000)
        sink = TensorBoardSink(writer)
        spread = random.random((1500, 8, 48)).cumsum(axis=0) / 40 % 1
        heads = random.random((2, 48, 16))
        for step in range(1500):
            similarity, rank, contraction, uniformity, logit, *rest = spread[step]
            snapshot = make_snapshot(
                step,
                layers=48,
                heads=16,
                similarity=similarity,
                rank=rank,
                contraction=contraction,
                blocks=dict(zip(more, rest, strict=True)),
                attention={"attention_uniformity": heads[0] * uniformity[:, None], "max_logit": heads[1] * logit[:, None]},
            )
            sink.write(snapshot, [])
        writer.close()
    assert len(read(tmp_path / "logs" / "a").metrics) == 12
    write_report([tmp_path / "logs"], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 6_000_000


def test_what_no_report_can_be_made_of(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no/such: no such file or folder"):
        write_report(["no/such"], tmp_path / "report.html")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="nothing written by collapse_monitor in it"):
        write_report([tmp_path / "empty"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_a_newer_log_is_refused_with_both_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("collapse_monitor.report.naming.FORMAT_VERSION", 2)
        log(tmp_path / "run")
    with pytest.raises(ValueError, match="log format 2 is newer than this collapse_monitor reads .1.: upgrade"):
        write_report([tmp_path / "run"], tmp_path / "report.html")


def test_runs_bear_names_that_tell_them_apart(tmp_path: Path) -> None:
    log(tmp_path / "x" / "one"), log(tmp_path / "x" / "two"), log(tmp_path / "y" / "one")
    page = report(tmp_path, tmp_path / "x", tmp_path / "y" / "one")
    names = [run["name"] for run in json.loads(page.scripts["index"])["runs"]]
    assert sorted(names) == sorted([(tmp_path / "x" / "one").as_posix(), "two", (tmp_path / "y" / "one").as_posix()])


def test_modules_become_one_script_in_the_order_they_need_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text('import { two } from "./b.js";\n\nexport function render() {\n  return two();\n}\n')
    (tmp_path / "b.js").write_text("const hidden = 1;\n\nexport const two = () => hidden + 1;\n")
    script = bundle("a", tmp_path)
    assert script.index("_b = ") < script.index("_a = ") < script.index("_a.render();")
    assert "import" not in script
    assert "export" not in script
    (tmp_path / "b.js").write_text('import { render } from "./a.js";\n')
    with pytest.raises(ValueError, match="in a circle: a > b > a"):
        bundle("a", tmp_path)
    (tmp_path / "b.js").write_text('import * as all from "./c.js";\n')
    with pytest.raises(ValueError, match="no import or export that the report can bundle"):
        bundle("a", tmp_path)


def test_the_small_picture_is_a_png(tmp_path: Path) -> None:
    shades = np.arange(12, dtype=np.uint8).reshape(3, 4)
    data = encode_png(shades)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        (size,) = struct.unpack_from(">I", data, at)
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", data, at + 8 + size)[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + size
    assert struct.unpack(">II", chunks[b"IHDR"][:8]) == (4, 3)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(3, 5)
    np.testing.assert_array_equal(rows[:, 1:], shades)
    assert len(chunks[b"PLTE"]) == 3 * 256
