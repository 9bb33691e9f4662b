"""The report in a real browser, opened from the disk: it draws, it asks for nothing, and it runs nothing of a log's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("selenium", reason="NO BROWSER TESTS: selenium is not installed (pip install selenium)")

from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from collapse_monitor.report import JSONLSink, read
from collapse_monitor.report.html import blocks, write_report
from tests.synthetic import make_alert, make_snapshot
from tests.tensorboard_plugin import trainings
from tests.tensorboard_plugin.browsers import ABSENT, REASON, complaints, open_browser, wait

pytestmark = [pytest.mark.slow, pytest.mark.skipif(ABSENT, reason=REASON)]

MARKUP = "</script><img src=x onerror=window.hacked=1><script>window.hacked=2</script>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def open_report(browser: Any, file: Path, fragment: str = "") -> None:
    complaints(browser)
    browser.get("about:blank")
    browser.get(f"{file.as_uri()}{fragment}")
    wait(browser, "return document.querySelector('.collapse[data-painted]') !== null", why="the first picture")


def text_of(browser: Any, selector: str) -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0]).textContent", selector))


def test_the_first_page_and_all_views(browser: Any, logdir: Path, tmp_path: Path) -> None:
    write_report([logdir], tmp_path / "report.html")
    open_report(browser, tmp_path / "report.html")
    collapsing = read(logdir / "collapsing")
    grave = next(alert for alert in collapsing.alerts if alert.severity == "critical")
    first = browser.find_element(By.CSS_SELECTOR, "section.run").text
    assert first.startswith("collapsing\nCritical: "), "the gravest run comes first"
    assert f"since step {grave.since}, confirmed at step {grave.step}" in first
    for word in ("When", "Where", "Why", "What to do"):
        assert word in first
    browser.find_element(By.CSS_SELECTOR, "a[data-show]").click()
    wait(browser, f"return document.querySelector('.profile h3').textContent.includes('step {grave.step}')")
    assert text_of(browser, ".curve h3").startswith(f"Layer {grave.layers[0]}")
    Select(browser.find_elements(By.CSS_SELECTOR, ".choice select")[1]).select_by_visible_text("healthy")
    wait(browser, "return document.querySelector('.heatmap .front[data-name=second]').offsetParent !== null")
    assert complaints(browser) == []
    assert browser.execute_script("return performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length") == 0


def test_a_link_into_the_report(browser: Any, logdir: Path, tmp_path: Path) -> None:
    write_report([logdir / "collapsing"], tmp_path / "report.html")
    open_report(browser, tmp_path / "report.html", "#metric=attention_uniformity&step=33&layer=3")
    assert text_of(browser, ".collapse h2").startswith("attention uniformity")
    assert text_of(browser, ".curve h3").startswith("Layer 3")
    wait(browser, "return document.querySelector('.heads h3').textContent.startsWith('Heads of layer 3')")
    assert complaints(browser) == []


def test_names_and_words_of_a_log_run_nowhere(browser: Any, logdir: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    sink = JSONLSink(path)
    for step in range(3):
        sink.write(make_snapshot(step), [make_alert(step=step, message=MARKUP)])
    sink.close()
    path.write_text(path.read_text().replace("blocks.1", json.dumps(MARKUP)[1:-1]).replace("a remedy", json.dumps(MARKUP)[1:-1]))
    write_report([path, logdir / trainings.HOSTILE_RUN], tmp_path / "report.html")
    open_report(browser, tmp_path / "report.html", "#run=run.jsonl&metric=token_similarity&layer=1&step=1")
    assert MARKUP in text_of(browser, ".curve h3")
    browser.execute_script("document.querySelector('.alert details').open = true")
    assert MARKUP in wait(browser, "const e = document.querySelector('.alert'); return e.querySelector('h4') && e.textContent")
    assert MARKUP in text_of(browser, "section.run.critical")
    assert trainings.HOSTILE_RUN in text_of(browser, "main")
    assert browser.execute_script("return window.hacked === undefined && document.querySelectorAll('img[src=x], svg').length === 0")
    assert complaints(browser) == []


def test_the_policy_refuses_what_is_not_the_reports(browser: Any, logdir: Path, tmp_path: Path) -> None:
    """Were something to slip in, it would not run and could ask nobody."""
    write_report([logdir / "healthy"], tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    slipped = "<script>window.hacked=1</script><img src='data:image/png;base64,AA' onerror='window.hacked=2'>"
    (tmp_path / "worse.html").write_text(text.replace("<main>", f"<main>{slipped}"))
    open_report(browser, tmp_path / "worse.html")
    assert browser.execute_script("return window.hacked === undefined")
    asked = "const done = arguments[0]; fetch('http://localhost:1/').then(() => done('let out'), () => done('refused'))"
    assert browser.execute_async_script(asked) == "refused"
    assert any("Content Security Policy" in message for message in complaints(browser))


@pytest.mark.parametrize("scale", [1.0, 1e4], ids=["linear", "logarithmic"])
def test_rounded_readings_unpack_to_what_was_logged(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """Beyond a size readings are rounded to 12 bits, logarithmic where they span orders of magnitude."""
    path, layers = tmp_path / "run.jsonl", 5
    random = np.random.default_rng(0).uniform(0, 1, (40, layers))
    values = np.float32(0.1 + random if scale == 1 else scale**random)
    values[3, 1], values[7, 2], values[8, 2] = np.nan, np.inf, -np.inf
    sink = JSONLSink(path)
    for step, row in enumerate(values):
        sink.write(make_snapshot(step, layers, rank=list(map(float, row))), [])
    sink.close()
    monkeypatch.setattr(blocks, "EXACT", 0)
    write_report([path], tmp_path / "report.html")
    open_report(browser, tmp_path / "report.html")
    source = "_source_embedded.embeddedSource().series('run.jsonl', 'effective_rank')"
    ask = f"const done = arguments[0]; {source}.then(s => done([...s.values].map(String)))"
    shown = np.array([float(text.replace("Infinity", "inf")) for text in browser.execute_async_script(ask)]).reshape(values.shape)
    special = ~np.isfinite(values)
    np.testing.assert_array_equal(shown[special], values[special])
    of = np.log if scale > 1 else np.asarray
    finite = of(values[~special])
    assert np.abs(of(shown[~special]) - finite).max() <= np.ptp(finite) / 8184 * 1.01


def test_many_steps_share_columns_and_a_spike_stays(browser: Any, tmp_path: Path) -> None:
    trainings.write_big(tmp_path / "run", 3200, layers=20, spike=(2345, 17))
    write_report([tmp_path / "run"], tmp_path / "report.html")
    open_report(browser, tmp_path / "report.html", "#step=2345&layer=17")
    assert "layer 17 (blocks.17): token similarity 0.99" in text_of(browser, ".readout")
    assert "3\u202f200 steps kept, in 1500 columns by the worst value" in text_of(browser, ".kept")
