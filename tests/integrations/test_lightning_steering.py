"""Readings that stop a run, save it, or are monitored by Lightning's own callbacks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from collapse_monitor.records import Severity
from tests.integrations.lit import (
    EITHER,
    QUIET,
    fires_at,
    loader,
    module,
    package,
    trainer,
    watch,
)

pytestmark = [pytest.mark.slow, QUIET]


@pytest.mark.parametrize("pl", EITHER)
def test_early_stopping_and_model_checkpoint_can_monitor_a_headline(pl: str, tmp_path: Path) -> None:
    callbacks = package(f"{pl}.callbacks")
    stop = callbacks.EarlyStopping("collapse/min_rank", mode="max", stopping_threshold=0.5, strict=True)
    best = callbacks.ModelCheckpoint(tmp_path, monitor="collapse/max_similarity", mode="min", save_top_k=1)
    callback, sink = watch(every=50, on_error="warn")
    run = trainer([callback, stop, best], package(pl), max_epochs=5, enable_checkpointing=True)
    run.fit(module(pl), loader(1), loader(1))
    assert run.current_epoch == 1, "stopped after the first of five epochs, which had one batch"
    assert float(best.best_model_score) == pytest.approx(max(sink.snapshots[0].series("token_similarity")), rel=1e-6)
    assert Path(best.best_model_path).exists()


def test_an_alert_stops_training_after_a_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback, sink = watch(rules=[fires_at(3)], stop_on="critical")
    run = trainer([callback], default_root_dir=tmp_path, max_epochs=3)
    lit = module()
    run.fit(lit, loader())
    assert run.global_step == 4
    assert [alert.step for alert in sink.alerts] == [3]
    (saved,) = tmp_path.glob("collapse-step*.ckpt")
    assert saved.name == "collapse-step3.ckpt"
    checkpoint = torch.load(saved, weights_only=True)
    assert checkpoint["global_step"] == 4
    assert all(torch.equal(checkpoint["state_dict"][name], tensor) for name, tensor in lit.state_dict().items())
    assert [r.getMessage() for r in caplog.records if "training is stopped" in r.getMessage()] == [
        "training is stopped at step 3: an alert reached critical (stop_on)"
    ]


@pytest.mark.slow
def test_a_postponed_stop_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback, _ = watch(rules=[fires_at(2)], stop_on="warning")
    run = trainer([callback], default_root_dir=tmp_path, max_epochs=3, min_epochs=2)
    run.fit(module(), loader())
    assert run.global_step == 16
    said = [record.getMessage() for record in caplog.records if "training is stopped" in record.getMessage()]
    assert len(said) == 1
    assert said[0].endswith("Lightning goes on until min_steps=None and min_epochs=2 are reached")


def test_a_checkpoint_without_a_stop_and_a_mild_alert(tmp_path: Path) -> None:
    callback, _ = watch(rules=[fires_at(2, Severity.WARNING)], stop_on="critical", checkpoint_on="warning")
    run = trainer([callback], default_root_dir=tmp_path)
    run.fit(module(), loader())
    assert run.global_step == 8
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["collapse-step2.ckpt"]


def test_preflight_prints_the_table_once(capsys: pytest.CaptureFixture[str]) -> None:
    callback, sink = watch(preflight=True)
    trainer([callback]).fit(module(), loader())
    printed = capsys.readouterr().out
    assert printed.count("at initialisation:") == 1
    assert sink.snapshots[0].table().splitlines()[-1] in printed
