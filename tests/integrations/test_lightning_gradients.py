"""Gradients are those of the user's loss, whatever Lightning multiplies it with; the losses lie beside the readings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from collapse_monitor.records import Snapshot
from tests.integrations.lit import (
    QUIET,
    by_hand,
    changed,
    form,
    loader,
    module,
    trainer,
    watch,
)

pytestmark = [pytest.mark.slow, QUIET]


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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("plain", {}, id="plain"),
        pytest.param("plain", {"accumulate_grad_batches": 2}, id="accumulated"),
        pytest.param("by hand", {}, id="by hand"),
    ],
)
def test_the_loss_scale_is_not_in_the_readings(name: str, options: dict[str, Any]) -> None:
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
    run = trainer([callback], accumulate_grad_batches=2, val_check_interval=4, num_sanity_val_steps=2)
    run.fit(lit, loader(), loader(2))
    assert [snapshot.context["train_loss"] for snapshot in sink.snapshots] == pytest.approx(lit.losses[::2], rel=1e-6)
    with_validation = [snapshot.step for snapshot in sink.snapshots if "val_loss" in snapshot.context]
    assert with_validation == [1, 3], "the snapshot before each validation is settled after it; the sanity check is none"
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
            trainer(callbacks, limit_train_batches=batches).fit(module(), loader(12))
        return mode.count

    plain = reads([], 12) - reads([], 4)
    watched = reads([watch(every=100)[0]], 12) - reads([watch(every=100)[0]], 4)
    assert watched == plain
