"""A real Trainer with the callback: where the readings land, what the run notices of it (nothing), and what is left behind (nothing)."""

from __future__ import annotations

import copy
import csv
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from collapse_monitor.integrations.lightning import CollapseCallback
from collapse_monitor.records import Condition, Severity, Snapshot
from collapse_monitor.testing import MemorySink
from tests.integrations.lit import PACKAGES, by_hand, changed, loader, loss_of, module, network, package, trainer

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)

FORMS = {"plain": {}, "accumulated": {"accumulate_grad_batches": 4}, "by hand": {}}


def watch(every: Any = 1, **options: Any) -> tuple[CollapseCallback, MemorySink]:
    sink = MemorySink()
    return CollapseCallback(every=every, sinks=[sink], **{"budget": None, "on_error": "raise", **options}), sink


def hooks_on(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(part, kind)) for part in model.modules() for kind in kinds)


def modes() -> list[Any]:
    return torch.overrides._get_current_function_mode_stack()


def form(name: str, pl: Any = "pytorch_lightning") -> Any:
    return by_hand(pl) if name == "by hand" else module(pl)


# -- where readings land


def x_values(folder: Path, tag: str) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [event.step for event in events.Scalars(tag)]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("pl", PACKAGES)
def test_readings_lie_on_the_x_axis_of_the_loss(pl: str, name: str, tmp_path: Path) -> None:
    loggers = package(f"{pl}.loggers")
    logger = loggers.TensorBoardLogger(tmp_path)
    callback, sink = watch()
    run = trainer([callback], package(pl), logger=logger, max_epochs=2, **FORMS[name])
    run.fit(form(name, pl), loader(6))
    expected = x_values(Path(logger.log_dir), "loss")
    assert expected == list(range({"accumulated": 4}.get(name, 12)))
    assert x_values(Path(logger.log_dir), "collapse_summary/effective_rank_min") == expected
    assert sink.steps == expected


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


@pytest.mark.parametrize("pl", PACKAGES)
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


BLOCKS = ["net.blocks.0", "net.blocks.1"]


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


# -- the run is the run that would have been


def trained(lit: Any, callbacks: list[Any], validate: bool = False, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(3)
    ids = loader(8).dataset
    data = torch.utils.data.DataLoader(ids, batch_size=2, shuffle=True)
    run = trainer(callbacks, max_epochs=2, **options)
    run.fit(lit, data, loader(2) if validate else None)
    metrics = {name: float(value) for name, value in run.callback_metrics.items() if not name.startswith("collapse/")}
    return lit.losses, {n: t.clone() for n, t in lit.state_dict().items()}, torch.get_rng_state(), metrics, run.global_step


def assert_same(plain: tuple[Any, ...], watched: tuple[Any, ...]) -> None:
    assert plain[0] == watched[0]
    assert plain[0][-1] != plain[0][0]
    assert list(plain[1]) == list(watched[1])
    assert all(torch.equal(plain[1][name], watched[1][name]) for name in plain[1])
    assert torch.equal(plain[2], watched[2])
    assert plain[3:] == watched[3:]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain", {}),
        ("by hand", {}),
        ("plain", {"accumulate_grad_batches": 3}),
        ("plain", {"precision": "bf16-mixed"}),
        ("plain", {"precision": "bf16-true"}),
        ("plain", {"gradient_clip_val": 0.1, "validate": True}),
    ],
    ids=["plain", "by hand", "accumulated", "bf16-mixed", "bf16-true", "clipped and validated"],
)
@pytest.mark.parametrize("source", ["train", "probe"])
def test_training_is_bitwise_the_same(name: str, options: dict[str, Any], source: str) -> None:
    def lit() -> Any:
        made = form(name)
        made.drop.p = 0.2
        return made

    callback, sink = watch(every=2, source=source, stop_on="critical")
    plain, watched = trained(lit(), [], **options), trained(lit(), [callback], **options)
    assert_same(plain, watched)
    assert len(sink.steps) == (3 if "accumulate_grad_batches" in options else 8)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_is_read_in_full(precision: str) -> None:
    readings = {}
    for chosen in ("32-true", precision):
        callback, sink = watch()
        trainer([callback], precision=chosen, limit_train_batches=1).fit(module(), loader())
        readings[chosen] = sink.snapshots[0]
        assert torch.get_default_dtype() is torch.float32
    for metric in ("effective_rank", "token_similarity", "gradient_norm", "parameter_gradient_norm"):
        assert readings[precision].series(metric) == pytest.approx(readings["32-true"].series(metric), rel=0.06, abs=0.02)


def test_a_compiled_network_inside_is_probed() -> None:
    def lit() -> Any:
        torch._dynamo.reset()
        made = module()
        made.net = torch.compile(made.net, backend="eager")
        return made

    callback, sink = watch(every=4)
    assert_same(trained(lit(), []), trained(lit(), [callback]))
    assert sink.steps == [0, 4, 8, 12]
    assert {snapshot.source for snapshot in sink.snapshots} == {"probe"}
    assert [site.name for site in sink.snapshots[0].block_sites] == BLOCKS


COMPILED_STEP = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""Dynamo looks at it where a graph breaks, as in `self.log`."""


@COMPILED_STEP
@pytest.mark.parametrize("calls", ["self", "net"])
def test_a_compiled_lightning_module_is_probed_before_backward(calls: str) -> None:
    def logits(self: Any, ids: Tensor) -> Tensor:
        return self(ids) if calls == "self" else self.net(ids)

    def run(callbacks: list[Any]) -> tuple[Any, ...]:
        torch._dynamo.reset()
        lit = changed("pytorch_lightning", logits=logits)
        lit.drop.p = 0.2
        torch.manual_seed(3)
        run = trainer(callbacks, max_epochs=2)
        run.fit(torch.compile(lit, backend="eager"), loader())
        state = {n: t.clone() for n, t in lit.state_dict().items()}
        return lit.losses, state, torch.get_rng_state(), {"loss": float(run.callback_metrics["loss"])}, run.global_step

    callback, sink = watch(every=4)
    assert_same(run([]), run([callback]))
    assert sink.steps == [0, 4, 8, 12]
    for snapshot in sink.snapshots:
        assert snapshot.source == "probe"
        assert [site.name for site in snapshot.block_sites] == BLOCKS
        assert min(snapshot.series("parameter_gradient_norm")) > 0


@COMPILED_STEP
def test_a_compiled_step_that_optimises_by_hand_says_that_it_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    callback, sink = watch()
    trainer([callback], limit_train_batches=3).fit(torch.compile(by_hand(), backend="eager"), loader())
    assert sink.steps == []
    said = [record.getMessage() for record in caplog.records if record.name == "collapse_monitor"]
    assert len(said) == 1
    assert "cannot be read" in said[0]


# -- gradients


def gradients(snapshot: Snapshot) -> dict[str, list[float]]:
    return {metric: snapshot.series(metric) for metric in ("gradient_norm", "parameter_gradient_norm")}


class NormsOfBlocks:
    """The norm of each block's own parameter gradients, taken by the module itself before the first optimiser step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def hook(self) -> Any:
        def on_after_backward(lit: Any) -> None:
            if not self.norms:
                squares = [sum(float((p.grad**2).sum()) for p in block.parameters()) for block in lit.net.blocks]
                self.norms = [square**0.5 for square in squares]

        return on_after_backward


def first_snapshot(lit: Any, **options: Any) -> Snapshot:
    callback, sink = watch()
    trainer([callback], limit_train_batches=4, **options).fit(lit, loader())
    return sink.snapshots[0]


def test_gradient_norms_are_those_of_the_loss() -> None:
    own = NormsOfBlocks()
    snapshot = first_snapshot(changed("pytorch_lightning", on_after_backward=own.hook()))
    assert snapshot.series("parameter_gradient_norm") == pytest.approx(own.norms, rel=1e-5)
    assert min(snapshot.series("gradient_norm")) > 0


def test_accumulation_does_not_shrink_gradients() -> None:
    """Lightning divides the loss by the number of micro batches; the first one is read alone."""
    alone = gradients(first_snapshot(module()))
    shared = gradients(first_snapshot(module(), accumulate_grad_batches=4))
    for metric, values in alone.items():
        assert shared[metric] == pytest.approx(values, rel=1e-5)


class Scaled:
    """Mixed precision with a loss scale, on a CPU."""

    def __new__(cls, scale: float = 2.0**10) -> Any:
        from pytorch_lightning.plugins.precision import MixedPrecision

        return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["plain", "accumulated"])
@pytest.mark.parametrize("name", ["plain", "by hand"])
def test_the_loss_scale_is_not_in_the_readings(name: str, options: dict[str, Any]) -> None:
    if name == "by hand" and options:
        pytest.skip("Lightning does not accumulate for those who optimise by hand")
    plain = gradients(first_snapshot(form(name), **options))
    scaled = gradients(first_snapshot(form(name), plugins=[Scaled()], **options))
    for metric, values in plain.items():
        assert scaled[metric] == pytest.approx(values, rel=0.05)


def test_a_block_of_two_optimisers_is_unscaled_in_all_its_parts() -> None:
    """The window closes when the first of them steps: only its gradients have been unscaled then."""

    def configure_optimizers(self: Any) -> Any:
        halves = [[p for p in self.parameters() if p.ndim > 1], [p for p in self.parameters() if p.ndim == 1]]
        return [torch.optim.SGD(half, 0.1) for half in halves]

    def lit() -> Any:
        made = by_hand()
        made.__class__ = type("Halves", (type(made),), {"configure_optimizers": configure_optimizers})
        return made

    plain, scaled = gradients(first_snapshot(lit())), gradients(first_snapshot(lit(), plugins=[Scaled()]))
    assert scaled["parameter_gradient_norm"] == pytest.approx(plain["parameter_gradient_norm"], rel=0.05)


# -- the losses beside the readings


def test_snapshots_carry_the_losses() -> None:
    callback, sink = watch(every=1, on_error="warn")
    lit = module()
    run = trainer([callback], accumulate_grad_batches=2, val_check_interval=4)
    run.fit(lit, loader(), loader(2))
    assert [snapshot.context["train_loss"] for snapshot in sink.snapshots] == pytest.approx(lit.losses[::2], rel=1e-6)
    with_validation = [snapshot.step for snapshot in sink.snapshots if "val_loss" in snapshot.context]
    assert with_validation == [1, 3], "the snapshot before each validation is settled after it"
    assert sink.snapshots[-1].context["val_loss"] == pytest.approx(float(run.callback_metrics["val_loss"]))


class HostReads(TorchDispatchMode):
    """How often a tensor was read by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_unsampled_steps_wait_for_no_device() -> None:
    def reads(callbacks: list[Any], batches: int) -> int:
        with HostReads() as mode:
            trainer(callbacks, limit_train_batches=batches).fit(module(), loader(24))
        return mode.count

    plain = reads([], 24) - reads([], 4)
    watched = reads([watch(every=100)[0]], 24) - reads([watch(every=100)[0]], 4)
    assert watched == plain


# -- ends


class Boom(Exception):
    """The user's own."""


def explode(place: str, error: BaseException) -> Any:
    """A module that raises at batch 2: before, in or after the forward, in backward, or in the optimiser step."""
    count = {"batches": 0}

    def at(where: str) -> None:
        if where == place and count["batches"] == 3:
            raise error

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        count["batches"] += 1
        at("before")
        if place == "inside" and count["batches"] == 3:
            handle = self.net.blocks[1].register_forward_hook(lambda *_: at("inside"))
            try:
                self(batch[0][:, :-1])
            finally:
                handle.remove()
        loss = loss_of(self(batch[0][:, :-1]), batch[0])
        at("after")
        return loss

    def on_after_backward(self: Any) -> None:
        at("backward")

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        at("step")

    return changed(
        "pytorch_lightning",
        training_step=training_step,
        on_after_backward=on_after_backward,
        on_before_optimizer_step=on_before_optimizer_step,
    )


@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.parametrize("place", ["before", "inside", "after", "backward", "step"])
def test_the_users_exception_passes_and_nothing_stays(place: str, on_error: str) -> None:
    error = Boom()
    lit = explode(place, error)
    callback, sink = watch(on_error=on_error)
    with pytest.raises(Boom) as caught:
        trainer([callback]).fit(lit, loader())
    assert caught.value is error
    assert hooks_on(lit) == 0
    assert modes() == []
    assert sink.closed
    assert sink.steps[:2] == [0, 1]
    again, sink = watch()
    trainer([again]).fit(module(), loader())
    assert sink.steps == list(range(8)), "a following fit starts clean"


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    from pytorch_lightning.loggers import CSVLogger

    lit, logger = explode("after", KeyboardInterrupt()), CSVLogger(tmp_path)
    callback, sink = watch()
    with pytest.raises(SystemExit):  # what Lightning makes of it
        trainer([callback], logger=logger).fit(lit, loader())
    assert hooks_on(lit) == 0
    assert modes() == []
    assert sink.closed
    assert (Path(logger.log_dir) / "metrics.csv").read_text().count("\n") >= 3, "what was read before is on disk"


def test_a_skipped_epoch_leaves_no_mode_and_no_complaint(caplog: pytest.LogCaptureFixture) -> None:
    stacks: list[int] = []

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 or batch_idx == 2 else None

    def on_train_epoch_end(self: Any) -> None:
        stacks.append(len(modes()) + hooks_on(self))

    callback, sink = watch(every=50)
    lit = changed("pytorch_lightning", on_train_batch_start=on_train_batch_start, on_train_epoch_end=on_train_epoch_end)
    trainer([callback], max_epochs=3).fit(lit, loader())
    assert stacks == [0, 0, 0]
    assert sink.steps == [0], "the first step that was trained is read, although an earlier batch had its number"
    assert not [record for record in caplog.records if record.name == "collapse_monitor"]


def test_a_step_without_a_loss_is_survived() -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor | None:
        loss = loss_of(self(batch[0][:, :-1]), batch[0])
        return None if batch_idx == 1 else loss

    callback, sink = watch()
    with pytest.warns(UserWarning, match="returned `None`"):
        trainer([callback], limit_train_batches=3).fit(changed("pytorch_lightning", training_step=training_step), loader())
    assert sink.steps == [0, 1, 2]
    assert "gradient_norm" in sink.snapshots[1].missing
    assert sink.snapshots[2].series("gradient_norm")[0] > 0


def test_modes_of_the_user_survive_a_window_that_closes_inside_them() -> None:
    """Who optimises by hand may hold a function mode open while the optimiser step closes the window."""
    devices: list[list[str]] = []

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        with torch.device("cpu"):
            loss = loss_of(self(batch[0][:, :-1]), batch[0])
            first, second = self.optimizers()
            self.manual_backward(loss)
            first.step()
            devices.append([type(mode).__name__ for mode in modes()])
            second.step()
        devices.append([type(mode).__name__ for mode in modes()])

    lit = by_hand()
    lit.__class__ = type("Inside", (type(lit),), {"training_step": training_step})
    callback, sink = watch()
    trainer([callback], limit_train_batches=2).fit(lit, loader())
    assert devices == [["DeviceContext"], []] * 2
    assert sink.steps == [0, 1]


# -- steering


@pytest.mark.parametrize("pl", PACKAGES)
def test_early_stopping_and_model_checkpoint_can_monitor_a_headline(pl: str, tmp_path: Path) -> None:
    callbacks = package(f"{pl}.callbacks")
    stop = callbacks.EarlyStopping("collapse/min_rank", mode="max", stopping_threshold=0.5, strict=True)
    best = callbacks.ModelCheckpoint(tmp_path, monitor="collapse/max_similarity", mode="min", save_top_k=1)
    callback, sink = watch(every=50)
    run = trainer([callback, stop, best], package(pl), max_epochs=5, enable_checkpointing=True)
    run.fit(module(pl), loader(1), loader(1))
    assert run.current_epoch == 1, "stopped after the first of five epochs, which had one batch"
    assert float(best.best_model_score) == pytest.approx(max(sink.snapshots[0].series("token_similarity")), rel=1e-6)
    assert Path(best.best_model_path).exists()


def fires_at(step: int, severity: Severity = Severity.CRITICAL) -> Any:
    def fault(snapshot: Snapshot, history: Any) -> list[Condition]:
        return [Condition(0, "effective_rank", 1.0, 2.0, severity=severity)] if snapshot.step >= step else []

    fault.for_checks = 1  # type: ignore[attr-defined]
    return fault


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


# -- faults of our own


class Broken:
    """A sink that fails."""

    def write(self, snapshot: Snapshot, alerts: Any) -> None:
        raise OSError("disk full")

    def close(self) -> None:
        raise OSError("still full")


def test_a_broken_sink_rule_or_schedule_never_stops_the_run(caplog: pytest.LogCaptureFixture) -> None:
    def broken_rule(snapshot: Snapshot, history: Any) -> list[Condition]:
        raise RuntimeError("no")

    def broken_schedule(step: int) -> bool:
        if step == 3:
            raise RuntimeError("never")
        return True

    plain = trained(module(), [])
    callback = CollapseCallback(every=broken_schedule, budget=None, sinks=[Broken()], rules=[broken_rule])
    assert_same(plain, trained(module(), [callback]))
    said = [record.getMessage() for record in caplog.records if record.name == "collapse_monitor"]
    assert [sentence for sentence in said if "disk full" in sentence and "switched off" in sentence]
    assert [sentence for sentence in said if "broken_rule was switched off" in sentence]
    assert sum("on_train_batch_start: RuntimeError: never" in sentence for sentence in said) == 1


def test_a_broken_reading_never_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from collapse_monitor.capture.listen import Listening

    def fails(*_: Any) -> None:
        raise RuntimeError("a fault inside")

    monkeypatch.setattr(Listening, "finish", fails)
    plain = trained(module(), [])
    callback, _ = watch(on_error="warn")
    assert_same(plain, trained(module(), [callback]))
    with pytest.raises(RuntimeError, match="a fault inside"):
        trained(module(), [watch(on_error="raise")[0]])
    assert modes() == []


# -- states


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
    assert second.monitor.state_dict()["judge"]["history"] == whole.monitor.state_dict()["judge"]["history"]


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
