"""Checkpoints, further fits, and copies."""

from __future__ import annotations

import copy
import csv
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from collapse_monitor.integrations.lightning import CollapseCallback
from collapse_monitor.records import Snapshot
from tests.integrations.lit import (
    FORMS,
    QUIET,
    changed,
    fires_at,
    form,
    loader,
    loss_of,
    module,
    trainer,
    watch,
)

pytestmark = [pytest.mark.slow, QUIET]


def losses_alike(snapshot: Snapshot, other: Snapshot) -> bool:
    return snapshot.series("effective_rank") == other.series("effective_rank")


def test_a_resumed_run_goes_on_where_the_first_stopped(tmp_path: Path) -> None:
    def run(callback: CollapseCallback, **options: Any) -> Any:
        made = trainer([callback], max_epochs=3, default_root_dir=tmp_path)
        lit = module()
        made.fit(lit, loader(), **options)
        return made

    whole, whole_sink = watch(every=3, rules=[fires_at(3)])
    run(whole)
    first, _ = watch(every=3, rules=[fires_at(3)])
    made = trainer([first], max_epochs=1)
    made.fit(module(), loader())
    made.save_checkpoint(tmp_path / "first.ckpt")
    second, sink = watch(every=3, rules=[fires_at(3)])
    run(second, ckpt_path=tmp_path / "first.ckpt")
    assert whole_sink.steps == [0, 3, 6, 9, 12, 15, 18, 21]
    assert sink.steps == [9, 12, 15, 18, 21]
    assert all(losses_alike(a, b) for a, b in zip(sink.snapshots, whole_sink.snapshots[3:], strict=True))
    assert [alert.step for alert in whole_sink.alerts] == [3]
    assert sink.alerts == [], "what fired before does not fire again"
    assert second.monitor is not None
    assert whole.monitor is not None
    assert [alert.step for alert in second.monitor.alerts] == [3]
    histories = [callback.monitor.state_dict()["judge"]["history"] for callback in (second, whole) if callback.monitor is not None]
    for history in histories:
        history["layers"].pop("pooled_rank")  # the sequences it is read from are tensors, in no checkpoint: they are collected anew
    assert histories[0] == histories[1]


@pytest.mark.filterwarnings(
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create", "ignore:Using ModelCheckpoint with manual optimization"
)
@pytest.mark.parametrize("name", FORMS)
def test_a_run_resumed_within_an_epoch_counts_on_as_its_loss_does(name: str, tmp_path: Path) -> None:
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.loggers import CSVLogger

    saved = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}", auto_insert_metric_name=False)
    trainer([watch()[0], saved], enable_checkpointing=True, **FORMS[name]).fit(form(name), loader(12))
    logger = CSVLogger(tmp_path / "log")
    callback, sink = watch()
    trainer([callback], logger=logger, **FORMS[name]).fit(form(name), loader(12), ckpt_path=tmp_path / "2.ckpt")
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    steps = [int(row["step"]) for row in rows if row["loss"]]
    assert sink.steps == steps
    assert steps[0] == (1 if name == "by hand" else 2), "by hand, two optimisers make two global steps of one batch"


def test_a_headline_is_there_before_the_first_sample_of_a_resumed_run(tmp_path: Path) -> None:
    from pytorch_lightning.callbacks import EarlyStopping

    first, _ = watch(every=1000)
    made = trainer([first], max_epochs=1)
    made.fit(module(), loader(2))
    made.save_checkpoint(tmp_path / "first.ckpt")
    second, sink = watch(every=1000)
    run = trainer([second, EarlyStopping("collapse/min_rank", mode="max", patience=10)], max_epochs=2)
    run.fit(module(), loader(2), ckpt_path=tmp_path / "first.ckpt")
    assert sink.steps == []
    assert float(run.callback_metrics["collapse/min_rank"]) == pytest.approx(float(made.callback_metrics["collapse/min_rank"]))


@pytest.mark.parametrize("name", FORMS)
def test_the_step_goes_on_although_the_checkpoint_knows_nothing_of_the_callback(name: str, tmp_path: Path) -> None:
    before = trainer([], max_epochs=1, **FORMS[name])
    before.fit(form(name), loader())
    before.save_checkpoint(tmp_path / "plain.ckpt")
    callback, sink = watch()
    trainer([callback], max_epochs=2, **FORMS[name]).fit(form(name), loader(), ckpt_path=tmp_path / "plain.ckpt")
    assert sink.steps == ([2, 3] if name == "accumulated" else list(range(8, 16)))


def test_a_test_with_an_older_checkpoint_does_not_reset_a_later_fit(tmp_path: Path) -> None:
    callback, sink = watch(rules=[fires_at(3)])
    run = trainer([callback], max_epochs=1)
    lit = module()
    run.fit(lit, loader(2))
    run.save_checkpoint(tmp_path / "old.ckpt")
    run.fit_loop.max_epochs = 4
    run.fit(lit, loader(2))
    run.validate(lit, loader(2), ckpt_path=tmp_path / "old.ckpt", verbose=False)
    run.fit_loop.max_epochs = 6
    run.fit(lit, loader(2))
    assert sink.steps == list(range(12))
    assert [alert.step for alert in sink.alerts] == [3], "a second fit of the same Trainer goes on with the same verdict"


def test_a_new_trainer_starts_afresh() -> None:
    callback, sink = watch(every=3, rules=[fires_at(3)])
    for _ in range(2):
        trainer([callback]).fit(module(), loader())
    assert sink.steps == [0, 3, 6] * 2
    assert [alert.step for alert in sink.alerts] == [3, 3]


def test_the_state_is_plain_data(tmp_path: Path) -> None:
    import json

    callback, _ = watch(every=2)
    run = trainer([callback])
    run.fit(module(), loader())
    run.save_checkpoint(tmp_path / "run.ckpt")
    state = torch.load(tmp_path / "run.ckpt", weights_only=True)["callbacks"][callback.state_key]
    assert json.loads(json.dumps(state, allow_nan=False)) == state


def test_the_callback_is_picklable_and_a_copy_is_inert() -> None:
    callback, sink = watch(every=2)
    copies: list[Any] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self(batch[0][:, :-1]), batch[0])
        if batch_idx == 2:
            copies.append(copy.deepcopy(callback))
            copies.append(pickle.loads(pickle.dumps(callback)))
        return loss

    trainer([callback]).fit(changed("pytorch_lightning", training_step=training_step), loader())
    assert sink.steps == [0, 2, 4, 6]
    assert [one.monitor for one in copies] == [None, None]
    fresh = pickle.loads(pickle.dumps(watch()[0]))
    trainer([fresh]).fit(module(), loader())
    assert fresh.monitor.latest.step == 7
