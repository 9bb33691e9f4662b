"""Console, loggers, fan-out: real logging, real Lightning loggers, and what a sink that fails does to the others."""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

from collapse_monitor.records import Alert, Severity, Snapshot
from collapse_monitor.report import ConsoleSink, LoggerSink, Sinks, headlines, read, summarise
from collapse_monitor.report.naming import ALERTS, DENSE_ONLY, dense_tag
from collapse_monitor.testing import MemorySink
from tests.report.logdirs import accumulate
from tests.synthetic import make_alert, make_snapshot


class TestConsole:
    def test_the_level_is_the_severity(self, caplog: pytest.LogCaptureFixture) -> None:
        alerts = [make_alert(severity=severity, message=f"it is {severity}") for severity in Severity]
        with caplog.at_level(logging.INFO):
            ConsoleSink().write(make_snapshot(), alerts)
        assert [(record.name, record.levelno, record.getMessage()) for record in caplog.records] == [
            ("collapse_monitor", logging.INFO, "step 10: it is info"),
            ("collapse_monitor", logging.WARNING, "step 10: it is warning"),
            ("collapse_monitor", logging.CRITICAL, "step 10: it is critical"),
        ]

    def test_to_a_logger_of_ones_own(self, caplog: pytest.LogCaptureFixture) -> None:
        ConsoleSink(logging.getLogger("mine")).write(make_snapshot(), [make_alert(message="100 % %s")])
        assert [(record.name, record.getMessage()) for record in caplog.records] == [("mine", "step 10: 100 % %s")]

    def test_no_handler_is_installed(self) -> None:
        before = [list(logging.getLogger(name).handlers) for name in (None, "collapse_monitor")]
        sink = ConsoleSink()
        sink.write(make_snapshot(), [make_alert()])
        sink.close()
        assert [list(logging.getLogger(name).handlers) for name in (None, "collapse_monitor")] == before
        assert logging.getLogger("collapse_monitor").handlers == []


class Broken:
    def __init__(self) -> None:
        self.calls = 0

    def write(self, snapshot: Snapshot, alerts: Sequence[Alert]) -> None:
        self.calls += 1
        raise OSError("disk full")

    def close(self) -> None:
        raise OSError("still full")


class TestSinks:
    def test_one_that_raises_is_switched_off_and_the_others_go_on(self) -> None:
        broken, memory = Broken(), MemorySink()
        sinks = Sinks([broken, memory])
        for step in range(3):
            sinks.write(make_snapshot(step), [])
        assert broken.calls == 1
        assert memory.steps == [0, 1, 2]
        assert [(name, str(error)) for name, error in sinks.faults] == [("Broken", "disk full")]

    def test_closing_goes_on_too_and_says_what_is_new(self, caplog: pytest.LogCaptureFixture) -> None:
        reported, silent, memory = Broken(), Broken(), MemorySink()
        sinks = Sinks([reported, memory])
        sinks.write(make_snapshot(), [])
        sinks.close()
        assert memory.closed
        assert caplog.records == []
        Sinks([silent]).close()
        assert [record.getMessage() for record in caplog.records] == ["closing Broken: OSError: still full"]

    def test_closing_twice_closes_once(self) -> None:
        memory = MemorySink()
        sinks = Sinks([memory])
        sinks.close()
        memory.closed = False
        sinks.close()
        assert not memory.closed

    def test_a_keyboard_interrupt_is_not_swallowed(self) -> None:
        class Interrupted(MemorySink):
            def write(self, snapshot: Snapshot, alerts: Sequence[Alert]) -> None:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Sinks([Interrupted()]).write(make_snapshot(), [])

    @pytest.mark.parametrize("sink", [object(), "runs/mine", len])
    def test_what_is_no_sink_is_refused(self, sink: object) -> None:
        with pytest.raises(ValueError, match=r"a sink is an object with write\(snapshot, alerts\) and close\(\), got"):
            Sinks([sink])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="expected a list"):
            Sinks(MemorySink())  # type: ignore[arg-type]


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, float], int]] = []

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.calls.append((values, step))

    @property
    def experiment(self) -> object:
        raise AssertionError("asking for the experiment may start one")


class TestLoggers:
    def test_one_call_per_step_with_finite_floats(self) -> None:
        logger = Recorder()
        sink = LoggerSink([logger])
        snapshot = make_snapshot(50, similarity=[0.1, np.nan, 0.3, 0.4], nonfinite=[0, 1, 0, 0], blocks={"branch_ratio": np.inf})
        sink.write(snapshot, [make_alert()])
        ((values, step),) = logger.calls
        assert step == 50
        assert all(type(value) is float and np.isfinite(value) for value in values.values())
        assert all(re.fullmatch(r"[a-z0-9_]+/[a-z0-9_]+", name) for name in values)
        assert values["collapse_summary/token_similarity_max"] == pytest.approx(0.4)
        assert values["collapse_summary/nonfinite_layers"] == 1
        assert not [name for name in values if "branch_ratio" in name]

    def test_csv(self, tmp_path: Path) -> None:
        logger = CSVLogger(tmp_path)
        sink = LoggerSink([logger])
        for step in (0, 50):
            sink.write(make_snapshot(step, rank=step + 1.0), [])
        sink.close()
        logger.save()
        rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
        assert [(row["step"], float(row["collapse_summary/effective_rank_min"])) for row in rows] == [("0", 1.0), ("50", 51.0)]

    @pytest.mark.parametrize("package", ["pytorch_lightning.loggers", "lightning.pytorch.loggers", "lightning.fabric.loggers"])
    def test_a_tensorboard_logger_gets_the_tensors_and_alerts(self, package: str, tmp_path: Path) -> None:
        logger = __import__(package, fromlist=["x"]).TensorBoardLogger(tmp_path)
        sink = LoggerSink([logger])
        for step in (0, 50):
            sink.write(make_snapshot(step), [make_alert(step=step)])
        logger.log_metrics({"loss": 1.0}, step=50)
        logger.finalize("success")
        log = accumulate(Path(logger.log_dir))
        assert {dense_tag("token_similarity"), ALERTS} <= set(log.Tags()["tensors"])
        assert "collapse_summary/token_similarity_max" in log.Tags()["scalars"]
        assert [event.step for event in log.Scalars("collapse_summary/token_similarity_max")] == [0, 50], "and once only"
        assert [event.step for event in log.Scalars("loss")] == [50]
        run = read(logger.log_dir)
        assert list(run.steps) == [0, 50]
        assert len(run.alerts) == 2

    def test_one_that_raises_is_left_out_with_one_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        class Failing(Recorder):
            def log_metrics(self, values: dict[str, float], step: int) -> None:
                super().log_metrics(values, step)
                raise ConnectionError("no route")

        failing, working = Failing(), Recorder()
        sink = LoggerSink([failing, working])
        for step in range(3):
            sink.write(make_snapshot(step), [])
        assert (len(failing.calls), len(working.calls)) == (1, 3)
        assert [record.getMessage() for record in caplog.records] == ["Failing gets no more readings: ConnectionError: no route"]
        assert [name for name, _ in sink.faults] == ["Failing"]

    def test_no_loggers(self) -> None:
        LoggerSink([]).write(make_snapshot(), [make_alert()])

    def test_what_is_no_logger_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"a logger has log_metrics\(values, step=\.\.\.\), int has not"):
            LoggerSink([3])

    def test_a_tensorboard_logger_that_has_another_writer_gets_scalars(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        logger = TensorBoardLogger(tmp_path)
        calls = Recorder()
        monkeypatch.setattr(type(logger), "experiment", object())
        monkeypatch.setattr(type(logger), "log_metrics", lambda _self, values, step: calls.log_metrics(values, step))
        LoggerSink([logger]).write(make_snapshot(5), [])
        assert [step for _, step in calls.calls] == [5]


class TestSummary:
    def test_statistics_against_numpy(self) -> None:
        random = np.random.default_rng(0)
        values = random.normal(size=(7,))
        values[[1, 4]] = np.nan, np.inf
        found = summarise(make_snapshot(layers=7, blocks={"branch_ratio": values}))
        finite = values[np.isfinite(values)]
        for name, expected in {"min": finite.min(), "median": np.median(finite), "max": finite.max()}.items():
            assert found[f"collapse_summary/branch_ratio_{name}"] == pytest.approx(expected)

    def test_about_fifty_scalars_for_all_metrics(self) -> None:
        from collapse_monitor.metrics import DEFAULT_METRICS

        names = {metric.name for metric in DEFAULT_METRICS}
        assert names >= DENSE_ONLY
        blocks = dict.fromkeys(names, 1.0)
        assert 40 <= len(summarise(make_snapshot(blocks=blocks))) <= 52

    def test_the_keys_do_not_depend_on_the_values(self) -> None:
        assert list(summarise(make_snapshot(similarity=0.3))) == list(summarise(make_snapshot(similarity=np.nan, nonfinite=1.0)))

    def test_headlines(self) -> None:
        found = headlines(
            make_snapshot(rank=[30, 4, 20, np.nan], similarity=[0.1, 0.9, 0.2, 0.3], attention={"max_logit": [[1.0, 99.0]] * 4})
        )
        assert found == {"min_rank": 4.0, "max_similarity": 0.9, "max_logit": 99.0}
        assert headlines(make_snapshot(layers=0)) == {}
