"""The tab in a real browser: what a person sees, points at, presses and reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

pytest.importorskip("selenium", reason="NO BROWSER TESTS: selenium is not installed (pip install selenium)")

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select
from torch.utils.tensorboard import SummaryWriter

from collapse_monitor.records import FORMAT_VERSION
from collapse_monitor.report import Run, TensorBoardSink, naming, read
from tests.synthetic import make_snapshot
from tests.tensorboard_plugin import trainings
from tests.tensorboard_plugin.browsers import ABSENT, REASON, complaints, enter_tab, open_browser, open_tab, wait
from tests.tensorboard_plugin.servers import index_of, serve

pytestmark = [pytest.mark.slow, pytest.mark.skipif(ABSENT, reason=REASON)]

FIRST = ".heatmap .front[data-name=first]"
SECOND = ".heatmap .front[data-name=second]"
TIP = ".maps > .heatmap:not([hidden]) .tip:not([hidden])"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with open_browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture(autouse=True)
def nothing_to_complain(browser: Any) -> Iterator[None]:
    """No test may leave an error in the browser's log: refused content is one."""
    complaints(browser)
    yield
    assert complaints(browser) == []


@pytest.fixture(scope="module")
def collapsing(logdir: Path) -> Run:
    return read(logdir / "collapsing")


def link(**state: Any) -> str:
    return "&".join(("collapse_monitor", *(f"p.collapse_monitor.{name}={quote(str(value), safe='')}" for name, value in state.items())))


def shown(browser: Any, selector: str) -> Any:
    return wait(browser, "const e = document.querySelector(arguments[0]); return e && e.offsetParent !== null && e", selector, why=selector)


def text_of(browser: Any, selector: str) -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0]).textContent", selector))


def place(browser: Any, canvas: Any, share_x: float, share_y: float) -> tuple[int, int]:
    """Offset from the middle of a canvas, for a point of its plot given as shares, from the left and from the bottom."""
    width, height = browser.execute_script("return [arguments[0].clientWidth, arguments[0].clientHeight]", canvas)
    left, right, top, bottom = 52, 14, 8, 24  # the margins of every drawing
    x, y = left + share_x * (width - left - right), top + (1 - share_y) * (height - top - bottom)
    return round(x - width / 2), round(y - height / 2)


def point(browser: Any, canvas: Any, share_x: float, share_y: float) -> ActionChains:
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", canvas)
    return ActionChains(browser, duration=10).move_to_element_with_offset(canvas, *place(browser, canvas, share_x, share_y))


def cell_share(run: Run, step: int, layer: int) -> tuple[float, float]:
    """Where a step and a layer lie in a map of a whole run that was sampled at every step."""
    return (step + 0.5 - run.steps[0]) / (run.steps[-1] + 1 - run.steps[0]), (layer + 0.5) / len(run.layers)


def numbers_in(text: str, metric: str) -> float:
    return float(text.split(f"{metric} ")[1].split(",")[0].split(" ")[0])


def colours(browser: Any, selector: str) -> set[tuple[int, ...]]:
    """The colours in the plot of a canvas."""
    script = """
    const c = document.querySelector(arguments[0]), x = c.getContext("2d"), r = c.width / c.clientWidth;
    const d = x.getImageData(52 * r, 8 * r, c.width - 66 * r, c.height - 32 * r).data, found = new Set();
    for (let i = 0; i < d.length; i += 4) found.add(d[i] * 65536 + d[i + 1] * 256 + d[i + 2]);
    return [...found];
    """
    return {(value >> 16, value >> 8 & 255, value & 255) for value in browser.execute_script(script, selector)}


def test_the_tab_appears_and_draws_a_real_training(browser: Any, address: str, collapsing: Run) -> None:
    browser.get(address)
    tabs = "return [...document.querySelectorAll('.plugin-name, [role=tab]')].find(e => e.textContent.trim() === 'Collapse')"
    wait(browser, tabs, why="the tab's title").click()
    enter_tab(browser)
    runs = Select(browser.find_element(By.CSS_SELECTOR, ".choice select"))
    assert [option.text for option in runs.options] == sorted(["collapsing", "healthy", trainings.HOSTILE_RUN])
    runs.select_by_visible_text("collapsing")
    wait(browser, "return parent.location.hash.includes('run=collapsing')")
    wait(browser, "return document.querySelector('.collapse').dataset.painted > 1")
    assert text_of(browser, "h2").startswith("token similarity")
    assert "60 steps kept" in text_of(browser, ".kept")
    assert len(colours(browser, ".heatmap .picture")) > 30
    said = text_of(browser, ".colours")
    assert "the high end is collapse" in said
    assert "towards collapse" in said
    assert text_of(browser, ".meaning") == "Mean cosine between all pairs of distinct tokens"


def test_pointing_at_a_cell_reads_the_value_that_was_measured(browser: Any, address: str, collapsing: Run) -> None:
    open_tab(browser, address, link(run="collapsing", metric="token_similarity", layer=1, step=0))
    values = collapsing.series("token_similarity")
    for step, layer in ((0, 0), (37, 2), (59, 3)):
        point(browser, shown(browser, FIRST), *cell_share(collapsing, step, layer)).perform()
        said = wait(browser, f"const t = document.querySelector('{TIP}'); return t && t.textContent")
        assert said.startswith(f"step {step}, layer {layer} ({collapsing.layers[layer]}): token similarity ")
        assert numbers_in(said, "similarity") == pytest.approx(values[step, layer], rel=1e-3)


def test_a_cell_opens_its_layer_its_heads_and_the_depth_profile(browser: Any, address: str, collapsing: Run) -> None:
    open_tab(browser, address, link(run="collapsing", metric="attention_uniformity", layer=0, step=0))
    point(browser, shown(browser, FIRST), *cell_share(collapsing, 50, 2)).click().perform()
    wait(browser, "return document.querySelector('.curve h3').textContent.startsWith('Layer 2')")
    assert collapsing.layers[2] in text_of(browser, ".curve h3")
    wait(browser, "return document.querySelector('.heads h3').textContent.startsWith('Heads of layer 2')")
    assert text_of(browser, ".profile h3") == "Depth profile at step 50"
    assert "before the first alert" in text_of(browser, ".profile .soft")
    shown(browser, ".heads .front")
    steps, heads = collapsing.logged_heads("attention_uniformity")
    assert text_of(browser, ".heads .soft").startswith(f"{len(steps)} steps kept")
    share = ((steps[3] + 1) / (collapsing.steps[-1] + 1), 1.5 / heads.shape[2])
    point(browser, shown(browser, ".heads .front"), *share).perform()
    said = wait(browser, "const t = document.querySelector('.heads .tip:not([hidden])'); return t && t.textContent")
    assert said.startswith(f"step {steps[3]}, {collapsing.sites[2]} head 1: ")
    assert numbers_in(said, "uniformity") == pytest.approx(heads[3, 2, 1], rel=1e-3)
    browser.find_element(By.CSS_SELECTOR, ".heads .front").send_keys(Keys.HOME)
    assert f"step 0, {collapsing.sites[2]} head 0: attention uniformity" in text_of(browser, ".readout")
    browser.find_element(By.CSS_SELECTOR, ".heads .front").send_keys(Keys.ARROW_UP, Keys.ARROW_RIGHT)
    said = text_of(browser, ".readout")
    assert said.startswith(f"step {steps[1]}, {collapsing.sites[2]} head 1: ")
    assert numbers_in(said, "uniformity") == pytest.approx(heads[1, 2, 1], rel=1e-3)
    point(browser, shown(browser, FIRST), *cell_share(collapsing, 50, 2)).click().perform()
    wait(browser, "return parent.location.hash.includes('step=50')")
    assert "layer=2" in browser.execute_script("return parent.location.hash")
    assert "step=50" in browser.execute_script("return parent.location.hash")
    for canvas in (".curve canvas", ".profile canvas", ".heads .picture"):
        assert len(colours(browser, canvas)) > 3, canvas


def test_dragging_zooms_and_a_double_click_shows_all(browser: Any, address: str, collapsing: Run) -> None:
    open_tab(browser, address, link(run="collapsing", metric="token_similarity", layer=1, step=30))
    canvas = shown(browser, FIRST)
    start, end = place(browser, canvas, 0.25, 0.5), place(browser, canvas, 0.75, 0.5)
    chain = point(browser, canvas, 0.25, 0.5).click_and_hold()
    chain.move_by_offset(end[0] - start[0], 0).release().perform()
    zoomed = wait(browser, "return parent.location.hash.match(/from=(\\d+).*to=(\\d+)/)")
    assert abs(int(zoomed[1]) - 15) <= 1
    assert abs(int(zoomed[2]) - 45) <= 1
    said = ""
    point(browser, canvas, 0.01, 0.1).perform()
    said = wait(browser, f"const t = document.querySelector('{TIP}'); return t && t.textContent")
    assert said.startswith((f"step {zoomed[1]},", f"step {int(zoomed[1]) - 1},"))
    point(browser, canvas, 0.5, 0.5).double_click().perform()
    wait(browser, "return !parent.location.hash.includes('from=')")


def test_two_runs_and_their_difference(browser: Any, address: str, logdir: Path, collapsing: Run) -> None:
    healthy = read(logdir / "healthy")
    open_tab(browser, address, link(run="collapsing", metric="relative_residual", layer=2, step=50))
    chosen = Select(browser.find_elements(By.CSS_SELECTOR, ".choice select")[1])
    chosen.select_by_visible_text("healthy")
    shown(browser, SECOND)
    assert "collapsing: 60 steps kept" in text_of(browser, ".kept")
    assert "healthy: 60 steps kept" in text_of(browser, ".kept")
    point(browser, shown(browser, SECOND), *cell_share(healthy, 50, 2)).perform()
    said = wait(browser, f"const t = document.querySelector('{TIP}'); return t && t.textContent")
    assert said.startswith("healthy, step 50")
    assert numbers_in(said, "residual") == pytest.approx(healthy.series("relative_residual")[50, 2], rel=1e-3)
    Select(browser.find_elements(By.CSS_SELECTOR, ".choice select")[2]).select_by_value("difference")
    wait(browser, "return document.querySelector('h2').textContent.includes('collapsing minus healthy')")
    assert text_of(browser, ".kept") == "60 steps that both runs kept"
    point(browser, shown(browser, FIRST), *cell_share(collapsing, 50, 2)).perform()
    said = wait(browser, f"const t = document.querySelector('{TIP}'); return t && t.textContent.includes('difference') && t.textContent")
    expected = collapsing.series("relative_residual")[50, 2] - healthy.series("relative_residual")[50, 2]
    assert numbers_in(said, "residual") == pytest.approx(expected, rel=1e-3)
    ends = browser.execute_script("return [...document.querySelectorAll('.colours > span')].map(e => e.textContent)")
    assert ends[:2] == ["collapsing nearer to collapse", "healthy nearer to collapse"], "the low end of a residual is collapse"


def test_a_walk_with_the_keyboard_alone(browser: Any, address: str, collapsing: Run) -> None:
    open_tab(browser, address, link(run="collapsing", metric="token_similarity", layer=1, step=30))
    reached = False
    for _ in range(40):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        if browser.execute_script("return document.activeElement.dataset.name === 'first'"):
            reached = True
            break
    assert reached, "the heat map can be reached by Tab"
    keys = ActionChains(browser)
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_UP):
        keys.send_keys(key)
    keys.perform()
    said = text_of(browser, ".readout[aria-live=polite]")
    assert said.startswith(f"step 32, layer 2 ({collapsing.layers[2]}): token similarity")
    assert numbers_in(said, "similarity") == pytest.approx(collapsing.series("token_similarity")[32, 2], rel=1e-3)
    ActionChains(browser).send_keys("+").perform()
    wait(browser, "return parent.location.hash.includes('from=')")
    ActionChains(browser).send_keys("0").perform()
    wait(browser, "return !parent.location.hash.includes('from=')")
    ActionChains(browser).send_keys("n").perform()
    first = collapsing.alerts[0]
    wait(browser, f"return parent.location.hash.includes('step={first.step}')")
    wait(browser, f"return document.querySelector('.readout').textContent.includes('alert at step {first.step}')")
    label = browser.execute_script("return document.activeElement.getAttribute('aria-label')")
    assert "Arrow keys" in label
    unlabelled = """return [...document.querySelectorAll("canvas, select, button")].filter(e => e.offsetParent !== null
        && e.getAttribute("aria-hidden") !== "true" && !e.getAttribute("aria-label") && !e.closest("label") && !e.textContent).length"""
    assert browser.execute_script(unlabelled) == 0


def test_alerts_are_listed_with_evidence_and_remedies(browser: Any, address: str, collapsing: Run) -> None:
    open_tab(browser, address, link(run="collapsing"))
    assert text_of(browser, ".aside h2") == f"Alerts ({len(collapsing.alerts)})"
    grave = next(alert for alert in collapsing.alerts if alert.rule == "rank_collapse")
    entry = browser.execute_script(
        "return [...document.querySelectorAll('.alert')].filter(e => e.textContent.includes('rank collapse')).pop()"
    )
    entry.find_element(By.TAG_NAME, "summary").click()
    said = wait(browser, "return arguments[0].querySelector('h4') && arguments[0].innerText", entry)
    assert grave.message in said
    assert grave.finding is not None
    for sentence in (*grave.finding.remedies, *grave.finding.causes):
        assert sentence in said
    assert grave.finding.evidence[0].metric.replace("_", " ") in said
    entry.find_element(By.CSS_SELECTOR, "button").click()
    wait(browser, f"return parent.location.hash.includes('step={grave.step}')")
    wait(browser, f"return document.querySelector('h2').textContent.startsWith('{grave.metric.replace('_', ' ')}')")


def test_dark_mode_follows_tensorboard(browser: Any, address: str) -> None:
    open_tab(browser, address, link(run="collapsing"), query="?darkMode=true")
    wait(browser, "return document.documentElement.dataset.theme === 'dark'")
    brightness = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + Number(b), 0)"
    assert browser.execute_script(brightness) < 300
    browser.execute_script("parent.document.body.classList.remove('dark-mode')")
    wait(browser, "return document.documentElement.dataset.theme === 'light'")
    assert browser.execute_script(brightness) > 600


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_what_it_stands_on(browser: Any, address: str, theme: str) -> None:
    """WCAG 2.1: a contrast of 4.5 for text, 3 for lines."""
    open_tab(browser, address, link(run="collapsing"), query="?darkMode=true" if theme == "dark" else "")
    wait(browser, f"return document.documentElement.dataset.theme === '{theme}'")
    read_colour = "return getComputedStyle(document.documentElement).getPropertyValue('--' + arguments[0]).trim()"

    def luminance(name: str) -> float:
        text = browser.execute_script(read_colour, name).lstrip("#")
        digits = text if len(text) == 6 else "".join(2 * digit for digit in text)
        parts = np.array([int(digits[at : at + 2], 16) for at in (0, 2, 4)]) / 255
        return float(np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722])

    def contrast(name: str, ground: str) -> float:
        low, high = sorted((luminance(name), luminance(ground)))
        return (high + 0.05) / (low + 0.05)

    for ground in ("page", "panel"):
        assert min(contrast(name, ground) for name in ("text", "soft")) >= 4.5
        assert min(contrast(name, ground) for name in ("accent", "second", "critical", "warning", "info", "focus", "faint")) >= 3
    assert contrast("text", "chosen") >= 4.5


def test_a_deep_link_survives_reloading_and_other_tabs(browser: Any, address: str) -> None:
    state = {"run": "collapsing", "compare": "healthy", "metric": "effective_rank", "mode": "difference", "step": 41, "layer": 2}
    open_tab(browser, address, link(**state))
    for _ in range(2):
        assert "effective rank" in text_of(browser, "h2")
        assert "collapsing minus healthy" in text_of(browser, "h2")
        assert text_of(browser, ".curve h3").startswith("Layer 2")
        assert "step 41" in text_of(browser, ".profile h3")
        browser.switch_to.default_content()
        browser.refresh()
        enter_tab(browser)
    browser.switch_to.default_content()
    title = (
        "return [...document.querySelectorAll('.plugin-name, [role=tab]')].find(e => e.textContent.trim().toLowerCase() === arguments[0])"
    )
    wait(browser, title, "scalars").click()
    wait(browser, "return location.hash.startsWith('#scalars')")
    wait(browser, title, "collapse").click()
    enter_tab(browser)
    assert text_of(browser, ".curve h3").startswith("Layer 2")


def test_hostile_names_are_text(browser: Any, address: str) -> None:
    open_tab(browser, address, link(run=trainings.HOSTILE_RUN, compare="healthy", metric="token_similarity", layer=0, step=5))
    assert trainings.HOSTILE_LAYER in text_of(browser, ".curve h3")
    assert trainings.HOSTILE_RUN in text_of(browser, ".collapse")
    point(browser, shown(browser, FIRST), 0.05, 0.1).perform()
    said = wait(browser, f"const t = document.querySelector('{TIP}'); return t && t.textContent")
    assert trainings.HOSTILE_LAYER in said
    assert browser.execute_script("return document.querySelectorAll('img, svg').length") == 0
    assert browser.execute_script("return window.top.hacked === undefined")


def test_a_narrow_window_scrolls_in_one_direction_only(browser: Any, address: str) -> None:
    size = browser.get_window_size()
    try:
        browser.switch_to.default_content()
        browser.set_window_size(520, 900)
        open_tab(browser, address, link(run="collapsing", compare="healthy", metric="attention_uniformity", layer=1, step=20))
        shown(browser, SECOND)
        assert browser.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        assert browser.execute_script("return document.querySelector('.metrics select').size") == 1
    finally:
        browser.switch_to.default_content()
        browser.set_window_size(size["width"], size["height"])


def test_the_slow_loader_behind_a_path(browser: Any, logdir: Path, package: Path, tmp_path: Path) -> None:
    with serve(logdir, package, tmp_path / "log", "--load_fast=false", "--path_prefix=/behind/a/proxy") as address:
        index_of(address, {"collapsing", "healthy"})
        open_tab(browser, address, link(run="collapsing", metric="token_similarity", step=50, layer=2))
        reload = "document.dispatchEvent(new Event('visibilitychange'))"  # as when somebody comes back to look
        wait(browser, f"{reload}; return document.querySelector('.kept').textContent.startsWith('60 steps kept')")
        assert len(colours(browser, ".heatmap .picture")) > 30
        assert text_of(browser, ".curve h3").startswith("Layer 2")
        browser.switch_to.default_content()
        browser.get("about:blank")


def test_the_maps_keep_their_order_in_grey(browser: Any, address: str) -> None:
    """Colour-blind safe: lightness alone tells the order, and infinite values are no colour of the map."""
    open_tab(browser, address, link(run="collapsing"))
    script = """
    const done = arguments[arguments.length - 1];
    import(new URL("static/colours.js", document.baseURI)).then((m) => {
      const series = { values: Float32Array.from({ length: 256 }, (_, i) => i) };
      const scale = m.orderedScale([series], { collapse: "high" }, true);
      done([Array.from({ length: 256 }, (_, i) => m.colourOf(scale, i)), m.colourOf(scale, Infinity)]);
    });
    """
    table, infinite = browser.execute_async_script(script)
    lightness = np.array(table) @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(lightness) > -0.5).all()
    assert lightness[-1] - lightness[0] > 180
    assert np.abs(np.array(table) - infinite).sum(axis=1).min() > 80


def test_without_the_tab_the_link_pins_the_telling_curves(browser: Any, address: str, collapsing: Run) -> None:
    browser.switch_to.default_content()
    browser.get(naming.pinned_url(collapsing.metrics, address))
    pinned = "return [...document.querySelectorAll('metrics-pinned-view card-view, metrics-pinned-view card-lazy-loader')].length"
    wait(browser, f"{pinned} >= 9", why="the pinned cards")


def test_new_steps_appear_and_the_choice_stays(browser: Any, package: Path, tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path / "logs" / "run")
    sink = TensorBoardSink(writer)
    for step in range(5):
        sink.write(make_snapshot(step), [])
    writer.flush()
    with serve(tmp_path / "logs", package, tmp_path / "log") as address:
        index_of(address, {"run"})
        open_tab(browser, address, link(run="run", metric="token_similarity", step=3, layer=2))
        wait(browser, "return document.querySelector('.kept').textContent.startsWith('5 steps kept')")
        for step in range(5, 9):
            sink.write(make_snapshot(step), [])
        writer.flush()
        browser.switch_to.default_content()
        # TensorBoard's own button tells its plugins.
        reload = "const b = document.querySelector('.reload-button, button[title*=Reload i]'); if (b && !b.disabled) b.click();"
        frame = "const d = document.querySelector('iframe[src*=collapse_monitor]').contentDocument;"
        wait(browser, f"{reload} {frame} return d.querySelector('.kept').textContent.startsWith('9 steps kept')", why="new steps")
        enter_tab(browser)
        assert text_of(browser, ".curve h3").startswith("Layer 2")
        assert text_of(browser, ".profile h3") == "Depth profile at step 3"
        browser.switch_to.default_content()
        browser.get("about:blank")
    writer.close()


def test_a_newer_log_and_no_log_are_said(browser: Any, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    with serve(tmp_path / "empty", package, tmp_path / "log") as address:
        browser.switch_to.default_content()
        browser.get(f"{address}{'data/plugin_entry.html?name=collapse_monitor'}")
        wait(browser, "const m = document.querySelector('.message'); return m && m.textContent.includes('No readings')")
    monkeypatch.setattr(naming, "FORMAT_VERSION", FORMAT_VERSION + 1)
    writer = SummaryWriter(tmp_path / "new" / "run")
    TensorBoardSink(writer).write(make_snapshot(0), [])
    writer.close()
    with serve(tmp_path / "new", package, tmp_path / "log") as address:
        index_of(address, {"run"})
        browser.get(f"{address}{'data/plugin_entry.html?name=collapse_monitor'}")
        said = "const m = document.querySelector('.message'); return m && m.textContent.includes('newer') && m.textContent"
        assert "log format 2, this tab reads 1" in wait(browser, said)
        browser.get("about:blank")


def test_48_layers_and_4000_steps_are_painted_as_fast_as_so_many_rectangles(browser: Any, package: Path, tmp_path: Path) -> None:
    trainings.write_big(tmp_path / "logs" / trainings.BIG, 4000, spike=(2345, 17))
    with serve(tmp_path / "logs", package, tmp_path / "log") as address:
        index_of(address, {trainings.BIG})
        open_tab(browser, address, link(run=trainings.BIG, metric="token_similarity", step=0, layer=0, scale="whole"))
        wait(browser, "return document.querySelector('.kept').textContent.startsWith('4\\u202f000 steps kept')")
        took = browser.execute_script("return performance.getEntriesByName('collapse-paint')[0].duration")
        naive = """
        const c = document.createElement("canvas"); c.width = 4000; c.height = 480; const x = c.getContext("2d");
        const start = performance.now();
        for (let i = 0; i < 4000; i++) for (let j = 0; j < 48; j++) {
          x.fillStyle = `rgb(${i & 255} ${j} 9)`; x.fillRect(i, j * 10, 1, 10);
        }
        x.getImageData(0, 0, 1, 1);
        return performance.now() - start;
        """
        assert took < 3 * browser.execute_script(naive)
        brightest = (253, 231, 37)
        assert brightest in colours(browser, ".heatmap .picture"), "a spike of one step and one layer is in sight"
        browser.switch_to.default_content()
        browser.get("about:blank")
