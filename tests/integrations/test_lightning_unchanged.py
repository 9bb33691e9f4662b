"""The run that is watched is the run that would have been, in every precision, compiled or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.lit import (
    BLOCKS,
    QUIET,
    assert_same,
    by_hand,
    changed,
    form,
    loader,
    module,
    trained,
    trainer,
    watch,
)

pytestmark = [pytest.mark.slow, QUIET]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("plain", {}, id="plain"),
        pytest.param("by hand", {}, id="by hand"),
        pytest.param("plain", {"accumulate_grad_batches": 2}, id="accumulated", marks=pytest.mark.slow),
        pytest.param("plain", {"precision": "bf16-mixed"}, id="bf16-mixed", marks=pytest.mark.slow),
        pytest.param("plain", {"precision": "bf16-true"}, id="bf16-true", marks=pytest.mark.slow),
        pytest.param("plain", {"gradient_clip_val": 0.1, "validate": True}, id="clipped and validated", marks=pytest.mark.slow),
    ],
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
    assert sink.steps == ([0, 2, 4] if "accumulate_grad_batches" in options else [0, 2, 4, 6, 8, 10])


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


@pytest.mark.slow
def test_a_compiled_network_inside_is_probed() -> None:
    def lit() -> Any:
        torch._dynamo.reset()
        made = module()
        made.net = torch.compile(made.net, backend="eager")
        return made

    callback, sink = watch(every=4)
    assert_same(trained(lit(), []), trained(lit(), [callback]))
    assert sink.steps == [0, 4, 8]
    assert {snapshot.source for snapshot in sink.snapshots} == {"probe"}
    assert [site.name for site in sink.snapshots[0].block_sites] == BLOCKS


def test_a_probe_runs_between_forward_and_backward() -> None:
    """Then no gradient is there yet that it could disturb, and buffers are those that the forward has seen."""
    order: list[str] = []

    def forward(self: Any, ids: Tensor) -> Tensor:
        order.append("forward" if torch.is_grad_enabled() else "probe")
        return self.net(ids)

    def on_after_backward(self: Any) -> None:
        order.append("backward")

    callback, _ = watch(every=2, source="probe")
    trainer([callback]).fit(changed("pytorch_lightning", forward=forward, on_after_backward=on_after_backward), loader(3))
    assert order == ["forward", "probe", "backward", "forward", "backward", "forward", "probe", "backward"]


COMPILED_STEP = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
"""Dynamo looks at it where a graph breaks, as in `self.log`."""


@COMPILED_STEP
@pytest.mark.slow
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
        run.fit(torch.compile(lit, backend="eager"), loader(6))
        state = {n: t.clone() for n, t in lit.state_dict().items()}
        return lit.losses, state, torch.get_rng_state(), {"loss": float(run.callback_metrics["loss"])}, run.global_step

    callback, sink = watch(every=4)
    assert_same(run([]), run([callback]))
    assert sink.steps == [0, 4, 8]
    for snapshot in sink.snapshots:
        assert snapshot.source == "probe"
        assert [site.name for site in snapshot.block_sites] == BLOCKS
        assert min(snapshot.series("parameter_gradient_norm")) > 0


@COMPILED_STEP
@pytest.mark.slow
def test_a_compiled_step_that_optimises_by_hand_says_that_it_cannot_be_read(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    callback, sink = watch()
    trainer([callback], limit_train_batches=3).fit(torch.compile(by_hand(), backend="eager"), loader())
    assert sink.steps == []
    said = [record.getMessage() for record in caplog.records if record.name == "collapse_monitor"]
    assert len(said) == 1
    assert "cannot be read" in said[0]
