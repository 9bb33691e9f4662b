"""The plugin in a real TensorBoard, without a browser: what it serves, what it keeps, and that it takes nothing down."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from argparse import Namespace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, Summary
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.context import RequestContext
from torch.utils.tensorboard import SummaryWriter

from collapse_monitor.report import TensorBoardSink, naming, read
from collapse_monitor.tensorboard_plugin import loader
from collapse_monitor.tensorboard_plugin.store import Store
from tests.synthetic import make_alert, make_snapshot
from tests.tensorboard_plugin import trainings
from tests.tensorboard_plugin.servers import fetch, fetch_json, index_of, serve, until

pytestmark = pytest.mark.slow
PLUGIN = "data/plugin/collapse_monitor"


def series(address: str, run: str, metric: str, **more: Any) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """Header, steps and `[column, row]`, decoded as the format is described."""
    query = "&".join(f"{key}={quote(str(value))}" for key, value in {"run": run, "metric": metric, **more}.items())
    status, body = fetch(f"{address}{PLUGIN}/{'heads' if 'layer' in more else 'series'}?{query}")
    assert status == 200, body
    (size,) = struct.unpack_from("<I", body)
    header = json.loads(body[4 : 4 + size])
    columns, rows = header["columns"], header["rows"]
    steps = np.frombuffer(body, "<f8", columns, 4 + size)
    values = np.frombuffer(body, "<f4", columns * rows, 4 + size + 16 * columns).reshape(columns, rows)
    return header, steps, values


def test_the_names_in_the_loader_are_those_in_the_log() -> None:
    assert (loader.NAME, loader.ALERT_NAME) == (naming.PLUGIN, naming.ALERT_PLUGIN)


def test_the_loader_asks_for_more_readings_and_all_alerts_unless_the_user_has_spoken() -> None:
    flags = Namespace(samples_per_plugin={"images": 3})
    loader.CollapseLoader().fix_flags(flags)
    assert flags.samples_per_plugin == {"images": 3, "collapse_monitor": 4000, "collapse_monitor_alerts": 0}
    flags = Namespace(samples_per_plugin={"collapse_monitor": 7, "collapse_monitor_alerts": 8})
    loader.CollapseLoader().fix_flags(flags)
    assert flags.samples_per_plugin == {"collapse_monitor": 7, "collapse_monitor_alerts": 8}


class Hostile:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_nothing_leaves_the_loader(caplog: pytest.LogCaptureFixture) -> None:
    made = loader.CollapseLoader()
    made.fix_flags(Hostile())
    made.fix_flags(None)
    assert made.load(Hostile()) is None  # type: ignore[arg-type]
    assert "the tab Collapse could not be made" in caplog.text


def test_neither_the_loader_nor_the_plugin_needs_torch(package: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from types import SimpleNamespace\n"
        "from collapse_monitor.tensorboard_plugin.loader import CollapseLoader\n"
        "print(len([name for name in sys.modules if name.startswith('collapse_monitor')]))\n"
        "plugin = CollapseLoader().load(SimpleNamespace(data_provider=None, flags=None))\n"
        "print(sorted(plugin.get_plugin_apps()))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(package)}).stdout
    loaded, routes = said.splitlines()
    assert int(loaded) == 3, "the package, the folder and the loader"
    assert "/static/view.js" in routes
    assert "/series" in routes


def test_every_file_of_the_tab_is_in_the_wheel(package: Path) -> None:
    static = Path(loader.__file__).parent / "static"
    shipped = package / "collapse_monitor" / "tensorboard_plugin" / "static"
    assert {file.name: file.read_bytes() for file in shipped.iterdir()} == {file.name: file.read_bytes() for file in static.iterdir()}
    assert (shipped / "index.js").exists()


def test_the_tab_is_listed_and_served(address: str) -> None:
    listed = fetch_json(f"{address}data/plugins_listing")["collapse_monitor"]
    assert (listed["tab_name"], listed["enabled"]) == ("Collapse", True)
    assert b"export async function render" in fetch(f"{address}{PLUGIN}/static/index.js")[1]
    assert fetch(f"{address}{PLUGIN}/static/..%2Fplugin.py")[0] == 404


def test_what_is_served_is_what_was_read(address: str, logdir: Path) -> None:
    run = read(logdir / "collapsing")
    for metric in ("token_similarity", "attention_uniformity", "gradient_norm"):
        header, steps, values = series(address, "collapsing", metric)
        np.testing.assert_array_equal(steps, run.steps)
        np.testing.assert_array_equal(values, run.series(metric).astype(np.float32))
        assert header["kept"] == len(run.steps)
    header, steps, values = series(address, "collapsing", "attention_uniformity", layer=2)
    logged, heads = run.logged_heads("attention_uniformity")
    np.testing.assert_array_equal(steps, logged)
    np.testing.assert_array_equal(values, heads[:, 2])
    assert header["labels"] == [f"{run.sites[2]} head {head}" for head in range(heads.shape[2])]
    served = fetch_json(f"{address}{PLUGIN}/alerts?run=collapsing")
    assert [alert["step"] for alert in served] == [alert.step for alert in run.alerts]
    assert {alert["rule"] for alert in served if alert["severity"] == "critical"} >= {"rank_collapse"}


def test_a_range_of_steps_and_few_columns(address: str, logdir: Path) -> None:
    whole = read(logdir / "healthy").series("token_similarity").astype(np.float32)
    header, steps, values = series(address, "healthy", "token_similarity", **{"from": 10, "to": 29, "columns": 5})
    assert (header["kept"], list(steps)) == (20, [10, 14, 18, 22, 26])
    np.testing.assert_array_equal(values, whole[10:30].reshape(5, 4, -1).max(axis=1))


def test_what_is_not_there_is_said_and_tensorboard_serves_on(address: str) -> None:
    status, body = fetch(f"{address}{PLUGIN}/series?run=no&metric=such")
    assert status == 404
    assert json.loads(body)["error"] == "run 'no' has no readings under 'collapse/such'"
    status, body = fetch(f"{address}{PLUGIN}/alerts?run=no")
    assert (status, json.loads(body)["error"]) == (404, "there is no run 'no' with data of collapse_monitor")
    assert fetch_json(f"{address}{PLUGIN}/alerts?run=healthy") == []
    assert fetch_json(f"{address}data/plugin/scalars/tags")["healthy"]


WHOLE_HEALTHY = "run=healthy&metric=token_similarity"


@pytest.mark.parametrize(
    ("route", "said"),
    [
        ("series", "run is missing: /index lists the runs and their metrics"),
        ("series?run=healthy", "metric is missing: /index lists the runs and their metrics"),
        (f"series?{WHOLE_HEALTHY}&from=x", "from='x': expected a number"),
        (f"series?{WHOLE_HEALTHY}&to=nan", "to='nan': expected a number"),
        (f"series?{WHOLE_HEALTHY}&columns=-5", "columns='-5': expected a whole number from 1 to 4096"),
        (f"series?{WHOLE_HEALTHY}&columns={'9' * 60}", f"columns='{'9' * 40}': expected a whole number from 1 to 4096"),
        ("heads?run=healthy&metric=max_logit", "layer is missing: the index of a layer, from 0 on"),
        ("heads?run=healthy&metric=max_logit&layer=1.5", "layer='1.5': expected a whole number from 0 to 1000000"),
        ("alerts?run=", "run is missing: /index lists the runs and their metrics"),
    ],
)
def test_a_request_that_cannot_be_meant_is_answered_with_a_sentence(route: str, said: str, address: str) -> None:
    status, body = fetch(f"{address}{PLUGIN}/{route}")
    assert (status, json.loads(body)["error"]) == (400, said)


@pytest.mark.parametrize("route", ["index", f"series?{WHOLE_HEALTHY}", "alerts?run=healthy", "static/index.js"])
def test_only_reading_is_allowed(route: str, address: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="405") as refused:
        urllib.request.urlopen(urllib.request.Request(f"{address}{PLUGIN}/{route}", method="DELETE"))
    assert refused.value.headers["Allow"] == "GET, HEAD"
    assert json.load(refused.value)["error"] == "DELETE changes nothing here: everything is read with GET"


@pytest.mark.parametrize("load_fast", ["true", "false"])
def test_both_loaders_keep_readings_and_alerts(load_fast: str, package: Path, tmp_path: Path) -> None:
    """By default the fast one keeps 100 readings of a tag and the slow one 10."""
    trainings.write_big(tmp_path / "logs" / "run", 600, layers=3)
    flags = (f"--load_fast={load_fast}", "--path_prefix=/some/where")
    with serve(tmp_path / "logs", package, tmp_path / "log", *flags) as address:
        assert address.endswith("/some/where/")
        index_of(address, {"run"})
        header, steps, _ = until(lambda: (found := series(address, "run", "token_similarity"))[0]["kept"] == 600 and found, "600 readings")
        assert list(steps) == list(range(600))
        assert len(fetch_json(f"{address}{PLUGIN}/alerts?run=run")) == 50
    assert load_fast == "false" or header["columns"] == 600


def test_a_users_number_of_samples_wins_and_the_spike_is_put_back(package: Path, tmp_path: Path) -> None:
    trainings.write_big(tmp_path / "logs" / "run", 3000, layers=3, spike=(1717, 1))
    with serve(tmp_path / "logs", package, tmp_path / "log", "--samples_per_plugin=collapse_monitor=50") as address:
        assert index_of(address, {"run"})["limit"] == 50
        until(lambda: len(fetch_json(f"{address}{PLUGIN}/alerts?run=run")) == 50, "all alerts")
        _, steps, values = series(address, "run", "token_similarity")
        assert len(steps) == 50
        column = np.searchsorted(steps, 1717, side="right") - 1
        assert values[column, 1] == np.float32(0.99)
        assert (values == np.float32(0.99)).sum() == 1


def broken(package: Path, folder: Path, file: str, text: str) -> Path:
    shutil.copytree(package, folder)
    (folder / "collapse_monitor" / "tensorboard_plugin" / file).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("plugin.py", "raise RuntimeError('broken')"),
        ("store.py", "class Store:\n    def __init__(self, *_): raise ValueError"),
        ("plugin.py", "("),
    ],
)
def test_tensorboard_serves_when_the_plugin_is_broken(file: str, text: str, package: Path, tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path / "logs" / "run")
    writer.add_scalar("loss", 1.0, 0)
    writer.close()
    with serve(tmp_path / "logs", broken(package, tmp_path / "broken", file, text), tmp_path / "log", "--load_fast=false") as address:
        assert "collapse_monitor" not in fetch_json(f"{address}data/plugins_listing")
        until(lambda: fetch_json(f"{address}data/plugin/scalars/tags").get("run"), "the user's own curves")


def test_a_resumed_run_shows_each_step_once(package: Path, tmp_path: Path) -> None:
    trainings.train(tmp_path / "logs" / "run", steps=12)
    (first,) = (tmp_path / "logs" / "run").iterdir()
    until(lambda: str(int(time.time())) not in first.name, "the next second: event files are named by it")
    trainings.train(tmp_path / "logs" / "run", start=8, steps=12)
    with serve(tmp_path / "logs", package, tmp_path / "log", "--load_fast=false") as address:
        index_of(address, {"run"})
        _, steps, values = until(lambda: (found := series(address, "run", "token_similarity"))[1][-1] == 19 and found, "the second part")
    assert list(steps) == list(range(20))
    np.testing.assert_array_equal(values, read(tmp_path / "logs" / "run").series("token_similarity").astype(np.float32))


def test_a_file_torn_by_a_kill_is_served_up_to_there(package: Path, tmp_path: Path) -> None:
    trainings.write_big(tmp_path / "logs" / "run", 101, layers=3)
    (file,) = (tmp_path / "logs" / "run").iterdir()
    file.write_bytes(file.read_bytes()[:-57])
    with serve(tmp_path / "logs", package, tmp_path / "log") as address:
        index_of(address, {"run"})
        until(lambda: list(series(address, "run", "token_similarity")[1]) == list(range(100)), "100 whole events")


def test_what_others_wrote_under_our_name_is_passed_over(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path / "run")
    sink = TensorBoardSink(writer)
    for step in range(3):
        sink.write(make_snapshot(step), [make_alert(step=step)])
        summary = Summary()
        for tag, plugin, content, text in [
            ("collapse/x", naming.PLUGIN, b"no json", b"1"),
            ("collapse/y", naming.PLUGIN, b"[1]", b"1"),
            ("collapse/z", naming.PLUGIN, b'{"v":"one","metric":["z"],"layers":7}', b"1"),
            ("collapse_heads/token_similarity", naming.PLUGIN, b'{"v":1,"metric":"token_similarity","site_layers":[0]}', b"1"),
            ("other", naming.ALERT_PLUGIN, b"", b"x"),
        ]:
            value = summary.value.add(tag=tag)
            value.metadata.data_class = DATA_CLASS_TENSOR
            value.metadata.plugin_data.plugin_name, value.metadata.plugin_data.content = plugin, content
            value.tensor.dtype = DT_STRING
            value.tensor.tensor_shape.dim.add(size=1)
            value.tensor.string_val.append(text)
        writer._get_file_writer().add_summary(summary, step)
    writer.close()
    multiplexer = EventMultiplexer(tensor_size_guidance=None, size_guidance={"tensors": 0})
    multiplexer.AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    store = Store(MultiplexerDataProvider(multiplexer, str(tmp_path)))
    (run,) = store.index(RequestContext(), "")["runs"]
    assert set(run["metrics"]) == set(make_snapshot().metrics)
    assert [alert["step"] for alert in store.alerts(RequestContext(), "", "run")] == [0, 1, 2]
    found = store.series(RequestContext(), "", "run", "token_similarity", None, None, 10)
    assert found.values.shape == (3, 4)
    assert store.series(RequestContext(), "", "run", "x", None, None, 10).values.size == 0
