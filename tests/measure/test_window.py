"""A window takes anything, measures what is asked for, and says what it could not measure and why."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from collapse_monitor import metrics
from collapse_monitor.measure import Window
from collapse_monitor.metrics import Metric, select
from collapse_monitor.observation import AttentionObservation, BlockObservation, TokenSample
from collapse_monitor.records import Site, Snapshot
from tests.measure.windows import (
    MEASURED,
    attention_key,
    block_key,
    launched,
    normal,
    see_chain,
    sites_of,
    snapshot_of,
)


def sample(seed: int = 0, tokens: int = 12, dim: int = 20) -> TokenSample:
    return TokenSample(normal(2, tokens, dim, seed=seed).float())


def attention(seed: int = 0, heads: int = 3) -> AttentionObservation:
    logits = normal(2, heads, 5, 9, seed=seed).float()
    return AttentionObservation(logits.softmax(-1), None, logits, same_rows="rows")


def watched(layers: int = 3, *, window: Window | None = None, **kwargs: Any) -> tuple[Window, Snapshot]:
    """A plain Transformer, everything of it heard."""
    window = window or Window(MEASURED)
    samples = [sample(seed) for seed in range(layers + 1)]
    for index in range(layers):
        window.attention(attention_key(index), attention(index))
        window.branch(attention_key(index), samples[index].hidden, samples[index + 1].hidden)
        window.qv_gradient(attention_key(index), "v", samples[index].hidden)
        window.qv_gradient(attention_key(index), "q", samples[index + 1].hidden)
        window.gradient(block_key(index), samples[index].hidden)
    see_chain(window, samples)
    gradients = {block_key(index): [samples[index].hidden, samples[index + 1].hidden[0]] for index in range(layers)}
    window.parameters(gradients, {attention_key(i): ([samples[i].hidden], [samples[i + 1].hidden] * 2) for i in range(layers)})
    return window, window.launch(7, sites_of(layers, layers, 3), {}, **kwargs).snapshot()


class TestSnapshot:
    def test_everything_heard(self) -> None:
        window, snapshot = watched(notes=["a note"], source="probe", context={"train_loss": 0.5})
        assert window.faults == []
        assert (snapshot.step, snapshot.notes, snapshot.source, snapshot.context) == (7, ("a note",), "probe", {"train_loss": 0.5})
        assert snapshot.sites == tuple(sites_of(3, 3, 3).values())
        assert set(snapshot.metrics) == {metric.name for metric in MEASURED}
        for metric in MEASURED:
            values = snapshot.series(metric.name)
            if metric.name == "pooled_rank":  # no history
                assert snapshot.missing["pooled_rank"] == "fewer sequences seen so far than a rank can be read from"
            else:
                assert [math.isnan(value) for value in values] == [metric.name == "layer_similarity", False, False], metric.name
        assert set(snapshot.missing) == {"pooled_rank", "layer.0.attention/layer_similarity"}

    def test_it_can_be_written_and_read(self) -> None:
        snapshot = watched()[1]
        assert Snapshot.from_dict(snapshot.to_dict()).attention["max_logit"] == snapshot.attention["max_logit"]

    def test_it_is_worked_out_once(self) -> None:
        pending = launched(blocks=[BlockObservation(sample())])[1]
        assert pending.ready()
        assert pending.snapshot() is pending.snapshot()
        assert pending.ready()

    def test_order_is_that_of_the_sites(self) -> None:
        window = Window(select(["residual_norm", "max_logit"]))
        for index in (2, 0, 1):
            window.block(block_key(index), BlockObservation(TokenSample(sample().hidden * 10**index)))
            window.attention(
                attention_key(index), AttentionObservation(torch.full((1, 2, 3, 4), 0.25), None, torch.full((1, 2, 3, 4), index + 0.5))
            )
        snapshot = window.launch(0, sites_of(3, 3), {}).snapshot()
        assert snapshot.series("residual_norm") == sorted(snapshot.series("residual_norm"))
        assert snapshot.heads("max_logit") == [[0.5, 0.5], [1.5, 1.5], [2.5, 2.5]]

    def test_observations_under_other_keys_are_dropped(self) -> None:
        window = Window(MEASURED)
        see_chain(window, [sample(seed) for seed in range(4)])
        window.attention(attention_key(5), attention())
        window.gradient(block_key(5), sample().hidden)
        snapshot = window.launch(0, sites_of(blocks=2), {}).snapshot()
        assert len(snapshot.series("effective_rank")) == 2
        assert snapshot.attention["max_logit"] == ()

    def test_sites_that_were_not_called(self) -> None:
        window = Window(select(["effective_rank", "max_logit", "branch_ratio"]))
        window.block(block_key(0), BlockObservation(sample()))
        snapshot = window.launch(0, sites_of(2, 2, heads=4), {"layer.1": "it raised"}).snapshot()
        assert snapshot.missing == {
            "layer.0.attention": "not called in this forward",
            "layer.1.attention": "not called in this forward",
            "layer.1": "it raised",
        }
        assert [len(heads) for heads in snapshot.heads("max_logit")] == [4, 4]
        assert [len(heads) for heads in snapshot.heads("branch_ratio")] == [1, 1]
        assert math.isnan(snapshot.series("effective_rank")[1])
        assert snapshot.attainable_rank == (12, 0)
        assert math.isnan(snapshot.tokens[1])

    def test_nothing_heard_at_all(self) -> None:
        snapshot = Window(MEASURED).launch(0, {}, {}).snapshot()
        assert set(snapshot.metrics) == {metric.name for metric in MEASURED}
        assert snapshot.series("effective_rank") == []

    def test_the_first_firing_counts(self) -> None:
        window, first = Window(MEASURED), watched(1)[1]
        watched(1, window=window)
        second = Window(MEASURED)
        for index in (0, 9):
            second.attention(attention_key(0), attention(index))
            second.block(block_key(0), BlockObservation(sample(1 + index), sample(index)))
            second.branch(attention_key(0), sample(index).hidden, sample(index + 1).hidden)
            second.gradient(block_key(0), sample(index).hidden)
            second.qv_gradient(attention_key(0), "v", sample(index).hidden)
            second.qv_gradient(attention_key(0), "q", sample(index + 1).hidden)
        again = second.launch(7, sites_of(1, 1, 3), {}).snapshot()
        for name in ("effective_rank", "block_influence", "max_logit", "branch_ratio", "gradient_norm", "qk_to_v_gradient"):
            assert again.series(name) == first.series(name), name

    def test_only_what_is_asked_for_is_computed(self) -> None:
        called: list[str] = []
        spy = Metric("spy", "hidden", lambda hidden, mask: called.append("spy") or hidden.sum((-1, -2)))
        _, pending = launched([spy], [BlockObservation(sample())], [attention()])
        assert set(pending.snapshot().metrics) == {"spy"}
        assert called == ["spy"]
        assert Window(()).launch(0, {}, {}).bytes == 0

    def test_block_readings_without_block_metrics(self) -> None:
        snapshot = snapshot_of(metrics=select(["max_logit"]), blocks=[BlockObservation(sample())], attentions=[attention()])
        assert snapshot.blocks == {}
        assert (snapshot.attainable_rank, snapshot.tokens) == ((12,), (12,))

    def test_weights_are_not_read_here(self) -> None:
        snapshot = snapshot_of(metrics=select(["qk_spectral_norm"]), attentions=[attention()])
        assert snapshot.missing == {"qk_spectral_norm": "weights are not read on this step"}


class TestGradients:
    def test_norms_and_ratios(self) -> None:
        snapshot = watched()[1]
        hidden = [sample(seed).hidden.double() for seed in range(4)]
        norms = [float(each.norm()) for each in hidden]
        assert snapshot.series("gradient_norm") == pytest.approx(norms[:3], rel=1e-6)
        assert snapshot.series("branch_ratio") == pytest.approx([norms[i] / norms[i + 1] for i in range(3)], rel=1e-6)
        assert snapshot.series("qk_to_v_gradient") == pytest.approx([norms[i + 1] / norms[i] for i in range(3)], rel=1e-6)
        assert snapshot.series("qk_to_v_weight_gradient") == pytest.approx([norms[i] / norms[i + 1] / 2**0.5 for i in range(3)], rel=1e-6)
        joined = [math.hypot(norms[i], float(hidden[i + 1][0].norm())) for i in range(3)]
        assert snapshot.series("parameter_gradient_norm") == pytest.approx(joined, rel=1e-6)

    def test_the_loss_scale_is_taken_off_norms_and_not_off_ratios(self) -> None:
        plain, scaled = watched()[1], watched(window=Window(MEASURED, loss_scale=1024.0))[1]
        for name in ("gradient_norm", "parameter_gradient_norm"):
            assert scaled.series(name) == pytest.approx([value / 1024 for value in plain.series(name)], rel=1e-6)
        for name in ("qk_to_v_gradient", "qk_to_v_weight_gradient", "branch_ratio"):
            assert scaled.series(name) == plain.series(name)

    def test_parameters_that_are_unscaled_already(self) -> None:
        window = Window(MEASURED, loss_scale=1024.0)
        window.parameters({block_key(0): [torch.tensor([3.0, 4.0])]}, {}, loss_scale=1.0)
        assert window.launch(0, sites_of(1), {}).snapshot().series("parameter_gradient_norm") == [5.0]

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
    def test_dtypes(self, dtype: torch.dtype) -> None:
        """The square of this gradient does not fit into fp16."""
        gradient = torch.full((4, 8, 16), 1000.0, dtype=dtype)
        window = Window(MEASURED)
        window.gradient(block_key(0), gradient)
        window.parameters({block_key(0): [gradient, gradient.double(), gradient.float()]}, {})
        snapshot = window.launch(0, sites_of(1), {}).snapshot()
        assert snapshot.series("gradient_norm") == pytest.approx([1000 * 512**0.5], rel=1e-6)
        assert snapshot.series("parameter_gradient_norm") == pytest.approx([1000 * 1536**0.5], rel=1e-6)

    def test_undefined(self) -> None:
        window = Window(MEASURED)
        window.gradient(block_key(0), torch.tensor([1.0, torch.inf]))
        window.branch(attention_key(0), torch.ones(3), torch.zeros(3))
        for role in "qv":
            window.qv_gradient(attention_key(0), role, torch.zeros(3))
        window.qv_gradient(attention_key(1), "q", torch.ones(3))
        window.parameters({block_key(0): [], block_key(1): [torch.zeros(0)]}, {attention_key(0): ([torch.ones(2)], [])})
        window.block(block_key(0), BlockObservation(sample()))
        window.attention(attention_key(0), attention())
        snapshot = window.launch(0, sites_of(1, 1), {}).snapshot()
        assert window.faults == []
        for name in ("gradient_norm", "branch_ratio", "qk_to_v_gradient", "parameter_gradient_norm", "qk_to_v_weight_gradient"):
            assert math.isnan(snapshot.series(name)[0]), name
        assert snapshot.missing["gradient_norm"] == "the gradient holds NaN or Inf"
        assert snapshot.missing["branch_ratio"] == "the stream is zero, or the values hold NaN or Inf"

    def test_gradients_that_never_came(self) -> None:
        window = Window(select(["gradient_norm", "parameter_gradient_norm", "qk_to_v_gradient"]))
        for index in range(2):
            window.block(block_key(index), BlockObservation(sample(index)))
            window.attention(attention_key(index), attention(index))
        window.gradient(block_key(1), torch.ones(3))
        known = {"parameter_gradient_norm": "probe runs no backward", "layer.0.attention/qk_to_v_gradient": "it was checkpointed"}
        assert window.launch(0, sites_of(2, 2), known).snapshot().missing == known | {
            "layer.0/gradient_norm": "no gradient came while the window was open",
            "qk_to_v_gradient": "no gradient came while the window was open",
        }

    def test_a_zero_gradient_is_a_reading(self) -> None:
        window = Window(MEASURED)
        window.gradient(block_key(0), torch.zeros(3))
        window.qv_gradient(attention_key(0), "q", torch.zeros(3))
        window.qv_gradient(attention_key(0), "v", torch.ones(3))
        snapshot = window.launch(0, sites_of(1, 1), {}).snapshot()
        assert snapshot.series("gradient_norm") == snapshot.series("qk_to_v_gradient") == [0.0]


STRANGE: dict[str, Callable[[], Tensor]] = {
    "integer": lambda: torch.ones(2, 3, 4, dtype=torch.int64),
    "boolean": lambda: torch.ones(2, 3, 4, dtype=torch.bool),
    "complex": lambda: torch.ones(2, 3, 4, dtype=torch.complex64),
    "meta": lambda: torch.ones(2, 3, 4, device="meta"),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged),
    "empty": lambda: torch.ones(2, 0, 4),
    "a vector": lambda: torch.ones(5),
}


@pytest.mark.parametrize("kind", STRANGE)
class TestStrangeTensors:
    def test_as_tokens(self, kind: str) -> None:
        strange = TokenSample(STRANGE[kind]())
        window, pending = launched(
            blocks=[BlockObservation(sample()), BlockObservation(strange, sample()), BlockObservation(sample(1), strange)]
        )
        snapshot = pending.snapshot()
        assert window.faults == []
        assert snapshot.missing["layer.1"].startswith("its output is a")
        assert [math.isnan(value) for value in snapshot.series("effective_rank")] == [False, True, False]
        assert math.isnan(snapshot.series("contraction")[2])

    def test_as_attention(self, kind: str) -> None:
        window, pending = launched(attentions=[AttentionObservation(STRANGE[kind]()), attention()][::-1])
        snapshot = pending.snapshot()
        assert window.faults == []
        assert snapshot.missing["layer.1.attention"].startswith("its attention weights are a")
        assert all(math.isnan(value) for value in snapshot.heads("max_logit")[1])

    def test_as_gradient(self, kind: str) -> None:
        if kind == "a vector":
            pytest.skip("a gradient may have any shape")
        window = Window(MEASURED)
        strange = STRANGE[kind]()
        window.gradient(block_key(0), strange)
        window.qv_gradient(attention_key(0), "q", strange)
        window.branch(attention_key(0), strange, strange)
        window.block(block_key(0), BlockObservation(sample()))
        window.parameters({block_key(0): [torch.ones(2), strange], block_key(1): [torch.tensor([3.0, 4.0])]}, {})
        snapshot = window.launch(0, sites_of(2, 1), {}).snapshot()
        assert window.faults == []
        assert math.isnan(snapshot.series("gradient_norm")[0])
        if kind != "empty":  # a parameter without values adds nothing
            assert math.isnan(snapshot.series("parameter_gradient_norm")[0])
            assert snapshot.missing["layer.0/parameter_gradient_norm"].startswith("a")
        assert snapshot.series("parameter_gradient_norm")[1] == 5


class TestOwnMetrics:
    def test_each_kind_gets_what_the_catalogue_promises(self) -> None:
        """The built-in functions once more under other names, so that they take the road of a user's metric."""
        own = [Metric(f"own_{m.name}", m.reads, lambda *given, compute=m.compute: compute(*given), m.range) for m in MEASURED]
        window, snapshot = watched(window=Window([*MEASURED, *own]))
        assert window.faults == []
        for metric in MEASURED:
            # values are fp32, and `contraction` is given one mask for input and output
            assert snapshot.series(f"own_{metric.name}") == pytest.approx(snapshot.series(metric.name), rel=1e-5, abs=1e-6, nan_ok=True)

    def test_outliers_are_masked_for_them_too(self) -> None:
        seen = []
        spy = Metric("spy", "hidden", lambda hidden, mask: seen.append(mask) or hidden[..., 0].sum(-1))
        hidden = sample().hidden
        hidden[0, 3] *= 1000
        launched([spy], [BlockObservation(TokenSample(hidden))])
        expected = torch.ones(2, 12, dtype=torch.bool)
        expected[0, 3] = False
        assert torch.equal(seen[0], expected)

    def test_gradients_come_unscaled(self) -> None:
        own = [
            Metric("largest", "gradient", lambda gradient: gradient.abs().amax()),
            Metric("difference", "qv_gradient", lambda query, value: (query - value).sum()),
            Metric("number", "parameter_gradients", lambda gradients: sum(g.sum() for g in gradients)),
            Metric("mean", "qv_weight_gradient", lambda query, value: query.mean() - value.mean()),
        ]
        window = Window(own, loss_scale=8.0)
        window.gradient(block_key(0), torch.full((3,), 16.0))
        window.qv_gradient(attention_key(0), "q", torch.full((2,), 24.0))
        window.qv_gradient(attention_key(0), "v", torch.full((2,), 8.0))
        window.parameters(
            {block_key(0): [torch.full((2,), 8.0)]}, {attention_key(0): ([torch.full((2,), 8.0)] * 2, [torch.full((3,), 80.0)])}
        )
        snapshot = window.launch(0, sites_of(1, 1), {}).snapshot()
        assert [snapshot.series(name) for name in ("largest", "difference", "number", "mean")] == [[2], [4], [2], [-9]]

    @pytest.mark.parametrize(
        "reads", ["hidden", "transition", "attention", "attention_pair", "attention_batch", "logits", "gradient", "branch"]
    )
    @pytest.mark.parametrize(
        ("compute", "reason"),
        [
            (lambda *given: 1 / 0, "ZeroDivisionError: division by zero"),
            (lambda *given: torch.ones(17), "ValueError: returned a tensor of shape [17]; expected a tensor of shape ["),
            (lambda *given: 0.5, "ValueError: returned a float; expected a tensor of shape ["),
        ],
        ids=["raises", "wrong shape", "no tensor"],
    )
    def test_a_fault_is_told_once_and_stops_nothing(self, reads: Any, compute: Callable[..., Any], reason: str) -> None:
        window, snapshot = watched(window=Window([*MEASURED, Metric("custom", reads, compute)]))
        assert [name for name, _ in window.faults] == ["custom"]
        assert snapshot.missing["custom"].startswith(reason)
        assert all(math.isnan(value) for value in snapshot.series("custom"))
        assert not math.isnan(snapshot.series("effective_rank")[1])
        assert not math.isnan(snapshot.series("layer_similarity")[1])

    def test_a_fault_of_our_own_is_a_fault_too(self) -> None:
        """A mask that does not fit the rows."""
        broken = AttentionObservation(attention().weights, torch.ones(7, 1, 1, 9, dtype=torch.bool))
        window, pending = launched(attentions=[broken, attention()])
        snapshot = pending.snapshot()
        assert [name for name, _ in window.faults] == ["attention readings"]
        assert snapshot.missing["layer.0.attention/max_logit"].startswith("RuntimeError")
        assert not math.isnan(snapshot.heads("max_logit")[1][0])

    def test_a_reading_that_is_nan_is_given_a_reason(self) -> None:
        snapshot = snapshot_of(
            metrics=MEASURED, attentions=[attention(heads=1)], blocks=[BlockObservation(TokenSample(torch.zeros(2, 3, 4)))]
        )
        assert snapshot.missing["head_similarity"] == "fewer than two heads with a row that sees two keys"
        assert snapshot.missing["effective_rank"] == "all values are zero"


class TestObserving:
    """Nothing of the run is kept or changed."""

    def test_inputs_stay_as_they_are(self) -> None:
        block, rows = BlockObservation(sample(1), sample(0)), attention()
        before = [tensor.clone() for tensor in (block.output.hidden, rows.weights, rows.logits) if tensor is not None]
        launched(blocks=[block], attentions=[rows])[1].snapshot()
        after = (block.output.hidden, rows.weights, rows.logits)
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))

    def test_tensors_are_let_go(self) -> None:
        window = Window(MEASURED)
        rows, block, gradient = attention(), BlockObservation(sample(1), sample(0)), torch.ones(3)
        references = [weakref.ref(tensor) for tensor in (rows.weights, rows.logits, block.output.hidden, gradient) if tensor is not None]
        window.attention(attention_key(0), rows)
        window.qv_gradient(attention_key(0), "q", gradient)
        window.block(block_key(0), block)
        pending = window.launch(0, sites_of(1, 1), {})
        del rows, block, gradient
        gc.collect()
        assert [reference() for reference in references] == [None] * 4
        assert pending.snapshot() is not None

    def test_a_fault_keeps_no_tensor(self) -> None:
        def fail(hidden: Tensor, mask: Tensor) -> Tensor:
            kept = hidden + 1
            references.append(weakref.ref(kept))
            raise ValueError("no")

        references: list[weakref.ref[Tensor]] = []
        window, _ = launched([Metric("custom", "hidden", fail)], [BlockObservation(sample())])
        assert [str(error) for _, error in window.faults] == ["no"]
        gc.collect()
        assert references[0]() is None

    def test_the_global_generator_and_settings_are_left_alone(self) -> None:
        torch.manual_seed(3)
        state = torch.get_rng_state()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                strange = watched()[1]
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(torch.get_rng_state(), state)
        plain = watched()[1]
        assert all(strange.series(name) == pytest.approx(plain.series(name), nan_ok=True) for name in plain.metrics)

    def test_under_autocast_and_with_gradients_on(self) -> None:
        plain = watched()[1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = watched()[1]
        assert all(inside.series(name) == pytest.approx(plain.series(name), nan_ok=True) for name in plain.metrics)

    def test_in_inference_mode(self) -> None:
        with torch.inference_mode():
            inside = watched()[1]
        assert inside.series("effective_rank") == watched()[1].series("effective_rank")

    def test_under_deterministic_algorithms(self) -> None:
        torch.use_deterministic_algorithms(True)
        try:
            assert watched()[0].faults == []
        finally:
            torch.use_deterministic_algorithms(False)


def test_series_of_two_attentions_in_one_block() -> None:
    """Self-attention only: readings of a cross-attention are shown by head."""
    sites = {
        attention_key(0): Site("layer.self", "attention", 0, 3, cross=False),
        attention_key(1): Site("layer.cross", "attention", 0, 3, cross=True),
        block_key(0): Site("layer", "block", 0),
    }
    window = Window(select(["max_logit", "branch_ratio"]))
    for index in range(2):
        window.attention(attention_key(index), attention(index))
        window.branch(attention_key(index), torch.full((3,), 2.0 + index), torch.ones(3))
    window.block(block_key(0), BlockObservation(sample()))
    snapshot = window.launch(0, sites, {}).snapshot()
    assert snapshot.series("branch_ratio") == pytest.approx([2])
    assert snapshot.heads("branch_ratio") == [pytest.approx([2]), pytest.approx([3])]
    assert snapshot.series("max_logit") == pytest.approx([sum(snapshot.heads("max_logit")[0]) / 3])
    logits = attention(0).logits
    assert logits is not None
    assert snapshot.heads("max_logit")[0] == pytest.approx(metrics.max_logit(logits).mean(0).tolist())
