"""However a fit ends, nothing stays behind; and what is broken in the monitor breaks nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from collapse_monitor.integrations.lightning import CollapseCallback
from collapse_monitor.records import Condition, Snapshot
from tests.integrations.lit import (
    QUIET,
    assert_same,
    by_hand,
    changed,
    hooks_on,
    loader,
    loss_of,
    modes,
    module,
    trained,
    trainer,
    watch,
)

pytestmark = [pytest.mark.slow, QUIET]


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


SLOW = pytest.mark.slow


@pytest.mark.parametrize("on_error", ["warn", pytest.param("raise", marks=SLOW)])
@pytest.mark.parametrize(
    "place", [pytest.param("before", marks=SLOW), "inside", pytest.param("after", marks=SLOW), "backward", pytest.param("step", marks=SLOW)]
)
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
    trainer([again]).fit(module(), loader(2))
    assert sink.steps == [0, 1], "a following fit starts clean"


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
    assert sum("RuntimeError: never" in sentence for sentence in said) == 1


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
