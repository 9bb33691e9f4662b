"""A real Trainer with the callback: where the readings land, and what is read of every form of training step."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collapse_monitor.integrations.lightning import CollapseCallback
from tests.integrations.lit import (
    BLOCKS,
    EITHER,
    FORMS,
    QUIET,
    changed,
    form,
    hooks_on,
    loader,
    loss_of,
    modes,
    module,
    network,
    package,
    trainer,
    watch,
)

pytestmark = QUIET


def x_values(folder: Path, tag: str) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("pl", EITHER)
def test_readings_lie_on_the_x_axis_of_the_loss(pl: str, name: str, tmp_path: Path) -> None:
    loggers = package(f"{pl}.loggers")
    logger = loggers.TensorBoardLogger(tmp_path)
    callback, sink = watch()
    run = trainer([callback], package(pl), logger=logger, max_epochs=2, **FORMS[name])
    run.fit(form(name, pl), loader(5))
    expected = x_values(Path(logger.log_dir), "loss")
    assert expected == list(range({"accumulated": 4}.get(name, 10)))
    assert x_values(Path(logger.log_dir), "collapse_summary/effective_rank_min") == expected
    assert sink.steps == expected


def test_a_function_is_asked_once_for_each_optimiser_step() -> None:
    asked: list[int] = []

    def every(step: int) -> bool:
        asked.append(step)
        return True

    callback, sink = watch(every=every)
    trainer([callback], accumulate_grad_batches=3).fit(module(), loader(6))
    assert asked == sink.steps == [0, 1]


def test_a_csv_file_has_the_readings_in_the_rows_of_their_steps(tmp_path: Path) -> None:
    from pytorch_lightning.loggers import CSVLogger

    logger = CSVLogger(tmp_path)
    callback, sink = watch(every=3)
    trainer([callback], logger=logger).fit(module(), loader())
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    column = "collapse_summary/effective_rank_min"
    written = {int(row["step"]): float(row[column]) for row in rows if row.get(column)}
    assert list(written) == sink.steps == [0, 3, 6]
    assert written == pytest.approx({s.step: min(s.series("effective_rank")) for s in sink.snapshots}, rel=1e-6)


def test_every_logger_gets_the_readings(tmp_path: Path) -> None:
    from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

    loggers = [CSVLogger(tmp_path / "a"), TensorBoardLogger(tmp_path / "b"), CSVLogger(tmp_path / "c")]
    trainer([watch(every=4)[0]], logger=loggers).fit(module(), loader())
    for one in (loggers[0], loggers[2]):
        assert "collapse_summary/effective_rank_min" in (Path(one.log_dir) / "metrics.csv").read_text()
    assert x_values(Path(loggers[1].log_dir), "collapse_summary/effective_rank_min") == [0, 4]


def test_without_a_logger_readings_reach_sinks_only() -> None:
    callback, sink = watch(every=4)
    trainer([callback]).fit(module(), loader())
    assert sink.steps == [0, 4]
    assert sink.closed


def test_fast_dev_run_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    callback, sink = watch()
    with caplog.at_level(logging.INFO, "collapse_monitor"):
        trainer([callback], fast_dev_run=3, logger=True).fit(module(), loader(), loader(2))
    assert sink.steps == []
    assert not list(tmp_path.rglob("*"))
    assert not [record for record in caplog.records if record.name == "collapse_monitor"]
    assert callback.monitor is not None
    assert callback.monitor.latest is not None
    assert callback.monitor.latest.step == 2


def test_a_bare_trainer_is_watched_too() -> None:
    import pytorch_lightning

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self(batch[0][:, :-1]), batch[0])  # a bare Trainer warns of every `self.log`

    callback, sink = watch()
    run = pytorch_lightning.Trainer(barebones=True, callbacks=[callback], max_epochs=1, accelerator="cpu", devices=1)
    run.fit(changed("pytorch_lightning", training_step=training_step), loader(2))
    assert sink.steps == [0, 1]


@pytest.mark.parametrize("pl", EITHER)
def test_only_training_is_observed(pl: str) -> None:
    seen: list[tuple[str, int]] = []

    def note(stage: str) -> Any:
        def step(self: Any, batch: Any, batch_idx: int) -> Tensor:
            seen.append((stage, hooks_on(self) + len(modes())))
            return self.net(batch[0]) if stage == "predict" else self.net(batch[0]).mean()

        return step

    lit = changed(pl, validation_step=note("validation"), predict_step=note("predict"), test_step=note("test"))
    callback, sink = watch()
    run = trainer([callback], package(pl), num_sanity_val_steps=2, val_check_interval=4)
    run.fit(lit, loader(), loader(2))
    run.validate(lit, loader(2), verbose=False)
    run.test(lit, loader(2), verbose=False)
    run.predict(lit, loader(2))
    assert sink.steps == list(range(8))
    assert {stage for stage, _ in seen} == {"validation", "predict", "test"}
    assert not any(attached for _, attached in seen)


def test_a_network_built_in_configure_model_is_found() -> None:
    callback, sink = watch(every=4, sites=["net.blocks.1"])
    trainer([callback]).fit(module(late=True), loader())
    assert [site.name for site in sink.snapshots[0].block_sites] == ["net.blocks.1"]


def test_a_wrong_name_is_an_error_before_training() -> None:
    lit = module()
    with pytest.raises(ValueError, match=r"the model has no module 'net.blocks.7'; did you mean 'net.blocks.[01]'"):
        trainer([CollapseCallback(sites=["net.blocks.7"])]).fit(lit, loader())
    assert lit.losses == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, r"every=0: must be at least 1"),
        ({"budget": 3}, r"budget=3"),
        ({"metrics": ["rank_of_effect"]}, r"rank_of_effect"),
        ({"rules": ["no_rule"]}, r"Unknown rule 'no_rule'"),
        ({"mute": ["no_rule"]}, r"mute: unknown rule 'no_rule'"),
        ({"source": "ear"}, r"source='ear': allowed are 'auto', 'train', 'probe'"),
        ({"stop_on": "fatal"}, r"stop_on='fatal': allowed are 'info', 'warning', 'critical' and None"),
        ({"checkpoint_on": "fatal"}, r"checkpoint_on='fatal'"),
        ({"sinks": ["no_package.Sink"]}, r"sinks: cannot make 'no_package.Sink' \(ModuleNotFoundError"),
        ({"sinks": ["collapse_monitor.JSONLSink"]}, r"path.*class_path"),
        ({"sinks": [{"init_args": {}}]}, r"has no class_path"),
        ({"sinks": "collapse_monitor.ConsoleSink"}, r"give a list"),
    ],
)
def test_mistakes_show_when_the_callback_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CollapseCallback(**options)


def test_unsampled_steps_have_nothing_attached() -> None:
    attached: list[int] = []

    def on_after_backward(self: Any) -> None:
        attached.append(hooks_on(self))

    callback, _ = watch(every=4)
    trainer([callback]).fit(changed("pytorch_lightning", on_after_backward=on_after_backward), loader())
    assert [index for index, count in enumerate(attached) if count] == []
    # Hooks on modules go with the forward; before it they are there at sampled steps.
    attached.clear()
    callback, _ = watch(every=4)

    def forward(self: Any, ids: Tensor) -> Tensor:
        attached.append(hooks_on(self))
        return self.net(ids)

    trainer([callback]).fit(changed("pytorch_lightning", forward=forward), loader())
    assert [index for index, count in enumerate(attached) if count] == [0, 4]


# -- training steps of every form


def sites_of(lit: Any, **options: Any) -> list[str]:
    callback, sink = watch(every=1, **options)
    trainer([callback], limit_train_batches=3).fit(lit, loader())
    assert sink.steps == [0, 1, 2]
    assert all(not snapshot.series("effective_rank").count(float("nan")) for snapshot in sink.snapshots)
    first, last = ([site.name for site in snapshot.block_sites] for snapshot in (sink.snapshots[0], sink.snapshots[-1]))
    assert first == last
    return last


@pytest.mark.parametrize("source", ["train", "probe"])
@pytest.mark.parametrize("calls", ["self", "net", "parts", "twice"])
def test_the_blocks_of_one_forward_are_read(calls: str, source: str) -> None:
    def net(self: Any, ids: Tensor) -> Tensor:
        return self.net(ids)

    def parts(self: Any, ids: Tensor) -> Tensor:
        hidden = self.net.embed(ids) + self.net.position.weight[: ids.shape[1]]
        for block in self.net.blocks:
            hidden = block(hidden)
        return self.net.head(self.net.norm(hidden))

    def twice(self: Any, ids: Tensor) -> Tensor:
        return self.net(ids) + self.net(ids.flip(1))

    lit = module() if calls == "self" else changed("pytorch_lightning", logits={"net": net, "parts": parts, "twice": twice}[calls])
    assert sites_of(lit, source=source) == BLOCKS


class Averages(nn.Module):
    """What torchmetrics does: each call is counted."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        return value.mean() * self.weight

    def update(self) -> None: ...

    def compute(self) -> None: ...


def test_a_metric_is_not_called_again_by_a_probe() -> None:
    def logits(self: Any, ids: Tensor) -> Tensor:
        found = self.net(ids)
        self.average(found.detach())
        return found

    lit = changed("pytorch_lightning", logits=logits)
    lit.average = Averages()
    assert sites_of(lit, source="probe") == BLOCKS
    assert lit.average.calls == 3


def test_the_first_of_two_networks_and_all_of_its_parts_are_named() -> None:
    def logits(self: Any, ids: Tensor) -> Tensor:
        return self.net(ids) + self.other(ids)

    lit = changed("pytorch_lightning", logits=logits)
    lit.other = network(depth=1, seed=1)
    assert sites_of(lit) == [*BLOCKS, "other.blocks.0"]
