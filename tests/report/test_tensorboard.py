"""What the TensorBoard sink writes, read by TensorBoard and by TensorBoard's own data provider for plugins."""

from __future__ import annotations

import copy
import json
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from tensorboard.backend.event_processing import data_provider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR
from tensorboard.context import RequestContext
from torch.utils.tensorboard import SummaryWriter

from collapse_monitor.records import Alert, Severity
from collapse_monitor.report import TensorBoardSink
from collapse_monitor.report.naming import ALERT_PLUGIN, ALERTS, PLUGIN, dense_tag, head_tag
from tests.report.logdirs import accumulate, content, tensors
from tests.synthetic import make_alert, make_snapshot

DENSE = dense_tag("token_similarity")


def write(sink: TensorBoardSink, *steps: int, **readings: Any) -> None:
    for step in steps:
        sink.write(make_snapshot(step, similarity=[0.1, 0.2, 0.3, step / 1000], **readings), [])


def test_one_float_tensor_per_metric_and_step(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path)
    write(TensorBoardSink(writer), 0, 50, 100)
    writer.close()
    log = accumulate(tmp_path)
    found = tensors(log, DENSE)
    assert list(found) == [0, 50, 100]
    np.testing.assert_array_equal(found[50], np.float32([0.1, 0.2, 0.3, 0.05]))
    assert found[50].dtype == np.float32
    metrics = make_snapshot().metrics
    assert {dense_tag(metric) for metric in metrics} <= set(log.Tags()["tensors"])


def test_a_tag_says_what_it_is(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path)
    write(TensorBoardSink(writer), 0, 1)
    writer.close()
    log = accumulate(tmp_path)
    metadata = log.SummaryMetadata(DENSE)
    assert metadata.plugin_data.plugin_name == PLUGIN == "collapse_monitor"
    assert metadata.data_class == DATA_CLASS_TENSOR
    assert content(log, DENSE) == {
        "v": 1,
        "metric": "token_similarity",
        "meaning": "Mean cosine between all pairs of distinct tokens",
        "unit": "",
        "range": [-1, 1],
        "collapse": "high",
        "layers": ["blocks.0", "blocks.1", "blocks.2", "blocks.3"],
    }
    heads = content(log, head_tag("max_logit"))
    assert heads["sites"] == [f"blocks.{layer}.attention" for layer in range(4)]
    assert (heads["site_layers"], heads["range"], heads["unit"]) == ([0, 1, 2, 3], [None, None], "nats")


def test_heads_now_and_then_in_half_precision(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path)
    sink = TensorBoardSink(writer, heads_every=3)
    ragged = {"attention_uniformity": [[0.5, 0.25, 0.125], [1.0], [0.75, 0.0], []], "max_logit": [[1e5, -1.0, 2.0]] * 4}
    write(sink, *range(0, 80, 10), attention=ragged)
    writer.close()
    found = tensors(accumulate(tmp_path), head_tag("attention_uniformity"))
    assert list(found) == [0, 30, 60]
    nan = np.nan
    np.testing.assert_array_equal(found[30], np.float16([[0.5, 0.25, 0.125], [1, nan, nan], [0.75, 0, nan], [nan, nan, nan]]))
    assert found[30].dtype == np.float16
    assert tensors(accumulate(tmp_path), head_tag("max_logit"))[0][0, 0] == np.inf


def test_aggregates_as_scalars(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path)
    sink = TensorBoardSink(writer)
    sink.write(make_snapshot(7, similarity=[0.1, np.nan, 0.4, 0.9], nonfinite=[0, 0.5, 0, 0], blocks={"branch_ratio": np.nan}), [])
    writer.close()
    log = accumulate(tmp_path)
    scalars = {tag: log.Scalars(tag)[0].value for tag in log.Tags()["scalars"]}
    assert scalars["collapse_summary/token_similarity_min"] == pytest.approx(0.1)
    assert scalars["collapse_summary/token_similarity_median"] == pytest.approx(0.4)
    assert scalars["collapse_summary/token_similarity_max"] == pytest.approx(0.9)
    assert scalars["collapse_summary/nonfinite_layers"] == 1
    assert not [tag for tag in scalars if "branch_ratio" in tag], "nothing to draw where nothing was read"
    assert dense_tag("branch_ratio") in log.Tags()["tensors"], "but its tag is there from the first step on"
    assert all(re.fullmatch(r"[a-z0-9_]+/[a-z0-9_]+", tag) for tags in (log.Tags()["scalars"], log.Tags()["tensors"]) for tag in tags)


def test_alerts_of_a_step_are_one_list_and_one_text(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path)
    sink = TensorBoardSink(writer)
    alerts = [make_alert(step=3), make_alert("oversmoothing", 3, Severity.WARNING, "in 'a_b.<img src=x>' *bold* [link](x)")]
    sink.write(make_snapshot(3), alerts)
    sink.write(make_snapshot(4), [])
    writer.close()
    log = accumulate(tmp_path)
    assert log.SummaryMetadata(ALERTS).plugin_data.plugin_name == ALERT_PLUGIN
    (event,) = log.Tensors(ALERTS)
    (text,) = event.tensor_proto.string_val
    assert [Alert.from_dict(record) for record in json.loads(text)] == alerts
    assert {record["version"] for record in json.loads(text)} == {1}
    (shown,) = tensors(log, "collapse_alerts/text/text_summary").values()
    markdown = shown.item().decode()
    assert markdown.startswith(r"**rank\_collapse** firing (critical): tokens are alike")
    assert r"in 'a\_b.&lt;img src=x&gt;' \*bold\* \[link\](x)" in markdown


def test_tensorboards_data_provider_hands_it_to_a_plugin(tmp_path: Path) -> None:
    """The way a plugin gets its data: tensors without `data_class` are not listed there."""
    writer = SummaryWriter(tmp_path / "run")
    sink = TensorBoardSink(writer)
    for step in range(5):
        sink.write(make_snapshot(step, similarity=step / 10), [make_alert(step=step)])
    writer.close()
    multiplexer = EventMultiplexer(tensor_size_guidance=None, size_guidance={"tensors": 0})
    multiplexer.AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(tmp_path))
    listed = provider.list_tensors(RequestContext(), experiment_id="", plugin_name=PLUGIN)
    assert DENSE in listed["run"]
    data = provider.read_tensors(RequestContext(), experiment_id="", plugin_name=PLUGIN, downsample=1000)
    assert [(datum.step, float(datum.numpy[2])) for datum in data["run"][DENSE]] == [(step, pytest.approx(step / 10)) for step in range(5)]
    assert list(provider.list_tensors(RequestContext(), experiment_id="", plugin_name=ALERT_PLUGIN)["run"]) == [ALERTS]


def test_the_users_writer_stays_open_and_its_data_stays_whole(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path)
    sink = TensorBoardSink(writer)
    for step in range(20):
        writer.add_scalar("loss", step, step)
        write(sink, step)
    sink.close()
    writer.add_scalar("loss", 20, 20)
    writer.close()
    assert len(list(tmp_path.iterdir())) == 1, "one file for both"
    log = accumulate(tmp_path)
    assert [event.step for event in log.Scalars("loss")] == list(range(21))
    assert list(tensors(log, DENSE)) == list(range(20))


def test_a_writer_reopened_by_its_user_is_described_again(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path)
    sink = TensorBoardSink(writer)
    write(sink, 0)
    writer.close()
    time.sleep(1.1)  # event files are named by the second
    write(sink, 1)
    writer.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    assert content(accumulate(files[1]), DENSE)["metric"] == "token_similarity"


def test_steps_rise_strictly_and_no_alert_is_lost(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path)
    sink = TensorBoardSink(writer)
    for step in (10, 20, 20, 5, 30):
        sink.write(make_snapshot(step), [make_alert(step=step)])
    writer.close()
    log = accumulate(tmp_path)
    assert list(tensors(log, DENSE)) == [10, 20, 30]
    found = {event.step: [record["step"] for record in json.loads(event.tensor_proto.string_val[0])] for event in log.Tensors(ALERTS)}
    assert found == {10: [10], 20: [20], 30: [20, 5, 30]}


def test_a_critical_alert_is_on_disk_at_once(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path, flush_secs=1000, max_queue=1000)
    sink = TensorBoardSink(writer)
    sink.write(make_snapshot(0), [make_alert(severity=Severity.CRITICAL)])
    assert len(accumulate(tmp_path).Tensors(ALERTS)) == 1
    writer.close()


def test_a_folder_gets_a_writer_with_the_first_snapshot(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "runs" / "mine")
    assert not (tmp_path / "runs").exists()
    write(sink, 0, 1)
    sink.close()
    sink.close()
    assert list(tensors(accumulate(tmp_path / "runs" / "mine"), DENSE)) == [0, 1]


def test_a_sink_with_a_folder_can_be_copied_and_pickled(tmp_path: Path) -> None:
    sink = TensorBoardSink(str(tmp_path / "a"))
    write(sink, 0)
    again = pickle.loads(pickle.dumps(copy.deepcopy(sink)))
    sink.close()
    time.sleep(1.1)  # event files are named by the second
    write(again, 1)
    again.close()
    assert list(tensors(accumulate(tmp_path / "a"), DENSE)) == [0, 1]


class ScalarsOnly:
    """As tensorboardX: add_scalar, and a file writer of other proto classes."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[str] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.texts.append(text)

    def _get_file_writer(self) -> object:
        raise AssertionError("its protos are not tensorboard's")


def test_other_writers_get_the_scalars(tmp_path: Path) -> None:
    writer = ScalarsOnly()
    sink = TensorBoardSink(writer)
    for step in (1, 2, 2):
        sink.write(make_snapshot(step), [make_alert()])
    sink.close()
    assert ("collapse_summary/effective_rank_min", 30.0, 2) in writer.scalars
    assert len({(tag, step) for tag, _, step in writer.scalars}) == len(writer.scalars)
    assert len(writer.texts) == 3


def test_dummies_are_accepted() -> None:
    from pytorch_lightning.loggers.logger import DummyExperiment

    for writer in (None, DummyExperiment()):
        sink = TensorBoardSink(writer)
        sink.write(make_snapshot(), [make_alert()])
        sink.close()


def test_what_is_no_writer_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a SummaryWriter or the path of a folder, got int"):
        TensorBoardSink(3)
    with pytest.raises(ValueError, match="heads_every=0, expected a whole number from 1 on"):
        TensorBoardSink(None, heads_every=0)


def test_without_tensorboard_the_remedy_is_named() -> None:
    code = "import sys; sys.modules['tensorboard'] = None\nfrom collapse_monitor import TensorBoardSink; TensorBoardSink('runs')"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr
    assert said.splitlines()[-1] == (
        "ImportError: TensorBoardSink('runs') needs tensorboard, which is not installed: pip install tensorboard"
    )


def test_the_way_to_the_pinned_curves_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = SummaryWriter(tmp_path)
    with caplog.at_level("INFO", logger="collapse_monitor"):
        write(TensorBoardSink(writer), 0, 1, 2)
    writer.close()
    (said,) = [record.getMessage() for record in caplog.records if "pinnedCards" in record.getMessage()]
    cards = json.loads(parse_qs(urlsplit(said.split()[-1]).query)["pinnedCards"][0])
    assert urlsplit(said.split()[-1]).fragment == "timeseries"
    assert 0 < len(cards) <= 10
    assert {card["plugin"] for card in cards} == {"scalars"}
    assert {card["tag"] for card in cards} <= set(accumulate(tmp_path).Tags()["scalars"]), "only curves that are there"


def test_no_layers_and_no_metrics(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path)
    sink = TensorBoardSink(writer)
    sink.write(make_snapshot(0, layers=0), [])
    sink.write(make_snapshot(1, without=make_snapshot().metrics), [])
    writer.close()
    assert tensors(accumulate(tmp_path), DENSE)[0].shape == (0,)


def test_a_step_of_48_layers_and_12_metrics_costs_a_millisecond_and_five_kilobytes(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path, max_queue=1000)
    sink = TensorBoardSink(writer)
    random = np.random.default_rng(0)
    more = ("branch_ratio", "block_influence", "massive_activation")
    spread = {name: random.random((60, 48)) for name in ("similarity", "rank", "contraction", "uniformity", "max_logit", *more)}
    snapshots = [
        make_snapshot(
            step,
            layers=48,
            heads=16,
            blocks={name: spread[name][step] for name in more},
            **{name: values[step] for name, values in spread.items() if name not in more},
        )
        for step in range(60)
    ]
    assert len(snapshots[0].metrics) == 12
    took, sizes = [], []
    for snapshot in snapshots:
        started = time.thread_time()
        sink.write(snapshot, [])
        took.append(time.thread_time() - started)
        writer.flush()
        sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))
    writer.close()
    per_step = np.diff(sizes)
    assert np.median(per_step) < 5000
    assert per_step.mean() < 5000, "with the heads of every 20th step"
    # About .8 ms on an idle machine; the quickest of many, because the machine has other things to do.
    assert min(took[1:]) < 1e-3
