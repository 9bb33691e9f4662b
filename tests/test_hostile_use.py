"""Situations of real training code that once led to a wrong number, a crash of the run, or a change of it."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F
from torch.utils import checkpoint as checkpointing

import collapse_monitor as cm

ATEN = torch.ops.aten


class Attention(nn.Module):
    def __init__(self, written_out: bool = False) -> None:
        super().__init__()
        self.qkv, self.out, self.written_out = nn.Linear(16, 48), nn.Linear(16, 16), written_out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = (q @ k.mT / 8**0.5).softmax(-1) @ v if self.written_out else F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """`form` is how the attention's result joins the stream; `extra` adds something else "before" the attention or "after" it."""

    def __init__(self, written_out: bool = False, form: str = "add") -> None:
        super().__init__()
        self.attention, self.norm, self.mlp = Attention(written_out), nn.LayerNorm(16), nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16))
        self.form, self.extra = form, ""
        self.ratio = float("nan")

    def forward(self, x: Tensor) -> Tensor:
        if self.extra == "before":
            x = x + torch.zeros_like(x)
        branch = self.attention(self.norm(x))
        if self.extra == "after":
            x = x + torch.zeros_like(x)
        with torch.no_grad():
            self.ratio = float((branch * (0.1 if self.form == "alpha" else 1)).norm() / x.norm())
        if self.form == "alpha":
            x = torch.add(x, branch, alpha=0.1)
        elif self.form == "in place":
            x = x.clone().add_(branch)
        else:
            x = x + branch
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, depth: int = 2, policy: Any = None, **block: Any) -> None:
        super().__init__()
        self.blocks, self.policy = nn.ModuleList(Block(**block) for _ in range(depth)), policy

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            if self.policy is None:
                x = block(x)
            else:
                contexts = partial(checkpointing.create_selective_checkpoint_contexts, self.policy)
                x = checkpointing.checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


def batch(sequences: int = 2, tokens: int = 8) -> Tensor:
    return torch.randn(sequences, tokens, 16, generator=torch.Generator().manual_seed(0))


def watch(model: nn.Module, steps: int = 2, **options: Any) -> cm.Monitor:
    monitor = cm.Monitor(model, every=1, budget=None, **options)
    for step in range(steps):
        with monitor.observe(step):
            model(batch()).pow(2).mean().backward()
    return monitor


@pytest.mark.parametrize("written_out", [False, True])
@pytest.mark.parametrize(
    "saved", [{ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default}, {ATEN.add.Tensor}, None], ids=["products", "sums", "all"]
)
def test_selective_checkpointing_runs_as_without_us(written_out: bool, saved: set[Any] | None) -> None:
    policies = checkpointing.CheckpointPolicy

    def policy(_: Any, operation: Any, *__: Any, **___: Any) -> Any:
        return policies.MUST_SAVE if saved is None or operation in saved else policies.PREFER_RECOMPUTE

    gradients = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = Model(policy=policy, written_out=written_out)
        if watched:
            assert len(watch(model, steps=1).latest.sites) == 4
        else:
            model(batch()).pow(2).mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(plain, seen) for plain, seen in zip(*gradients, strict=True))


@pytest.mark.parametrize("form", ["add", "alpha", "in place"])
def test_the_branch_is_measured_as_it_was_added(form: str) -> None:
    model = Model(form=form)
    for steps in (1, 2):  # the watched forward, and a lean one
        found = watch(model, steps).latest.series("branch_ratio")
        assert found == pytest.approx([block.ratio for block in model.blocks], rel=1e-4)


def test_more_sums_before_the_attention_do_not_move_its_branch() -> None:
    model = Model()
    monitor = watch(model)
    for block in model.blocks:
        block.extra = "before"
    with monitor.observe(2):
        model(batch()).sum().backward()
    assert monitor.latest.series("branch_ratio") == pytest.approx([block.ratio for block in model.blocks], rel=1e-4)


def test_another_course_of_the_same_block_is_missing_and_not_wrong() -> None:
    model = Model()
    monitor = watch(model)
    for block in model.blocks:
        block.extra = "after"
    with monitor.observe(2):
        model(batch()).sum().backward()
    assert all(value != value for value in monitor.latest.series("branch_ratio"))
    assert any("branch_ratio" in name for name in monitor.latest.missing)
    assert all(value == value for value in monitor.latest.series("effective_rank"))


def half() -> Tensor:
    mask = torch.ones(2, 8)
    mask[:, 4:] = 0
    return mask


def test_a_mask_that_comes_later_counts() -> None:
    model = Model()
    monitor = watch(model)
    with monitor.observe(2):
        model(batch(), attention_mask=half()).sum().backward()
    assert monitor.latest.tokens == (4.0, 4.0)


@pytest.mark.parametrize(
    ("mask", "tokens"),
    [
        (half(), 4.0),
        (half().bool(), 4.0),
        (torch.zeros(2, 8).masked_fill(half() == 0, -1e9), 4.0),
        (torch.zeros(2, 8), 8.0),
    ],
    ids=["numbers", "bool", "additive", "additive without padding"],
)
def test_masks_of_every_form(mask: Tensor, tokens: float) -> None:
    assert cm.probe(Model(), batch(), attention_mask=mask).tokens == (tokens, tokens)


def test_a_square_causal_mask_is_no_padding() -> None:
    assert cm.probe(Model(), batch(8), attention_mask=torch.ones(8, 8).tril()).tokens == (8.0, 8.0)


def test_of_packed_documents_the_longest_is_read() -> None:
    positions = torch.tensor([[0, 1, 0, 1, 2, 3, 4, 0], [0, 1, 2, 3, 4, 0, 1, 2]])
    found = cm.probe(Model(), batch(), position_ids=positions)
    alone = [cm.probe(Model(), batch()[row : row + 1, start : start + 5]) for row, start in ((0, 2), (1, 0))]
    assert found.tokens == (5.0, 5.0)
    assert len(alone) == 2


def test_encoder_and_decoder_keep_their_own_padding() -> None:
    model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
    source, target = torch.zeros(2, 8, dtype=torch.bool), torch.zeros(2, 8, dtype=torch.bool)
    source[:, 5:] = target[:, 7:] = True
    monitor = cm.Monitor(model, every=1, budget=None)
    for step in range(2):
        with monitor.observe(step):
            model(
                batch(), batch(), src_key_padding_mask=source, tgt_key_padding_mask=target, memory_key_padding_mask=source
            ).sum().backward()
        assert monitor.latest.tokens == (5.0, 5.0, 7.0, 7.0)


@pytest.mark.parametrize("given", [lambda args, kwargs: [1], lambda args, kwargs: torch.ones(2, 3)], ids=["a list", "another length"])
def test_a_token_mask_that_is_none_is_said_and_left_out(given: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "collapse_monitor"):
        monitor = watch(Model(), token_mask=given)
    assert monitor.latest.tokens == (8.0, 8.0)
    assert len([record for record in caplog.records if "token_mask" in record.message]) == 1


def test_a_call_without_padding_may_have_no_token_mask() -> None:
    assert watch(Model(), token_mask=lambda args, kwargs: None).latest.tokens == (8.0, 8.0)


def test_gradients_of_an_earlier_step_are_not_this_ones() -> None:
    model = Model()
    monitor = cm.Monitor(model, every=1, budget=None, source="probe")
    for step in range(2):
        with monitor.observe(step):
            loss = model(batch()).sum()
        loss.backward()
        assert all(value != value for value in monitor.latest.series("parameter_gradient_norm"))
    with monitor.observe(2):
        model(batch()).sum().backward()
    assert all(value > 0 for value in monitor.latest.series("parameter_gradient_norm"))


def test_another_models_attention_is_not_ours() -> None:
    whole = nn.ModuleDict({"embedding": nn.Linear(16, 16), "body": Model()})
    teacher = Model()
    monitor = cm.Monitor(whole, every=1, budget=None)
    for step in range(2):
        with monitor.observe(step):
            embedded = whole["embedding"](batch())
            whole["body"](embedded + teacher(embedded.detach())).sum().backward()
        assert {site.name.split(".")[0] for site in monitor.latest.sites} == {"body"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_scripted_part_takes_no_hooks_and_the_rest_is_read() -> None:
    model = Model()
    model.blocks[0].mlp = torch.jit.script(model.blocks[0].mlp)
    assert all(value == value for value in watch(model).latest.series("effective_rank"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
def test_a_model_traced_in_a_window_holds_nothing_of_ours() -> None:
    model = Model()
    plain = torch.jit.trace(model, batch())
    monitor = cm.Monitor(model, every=1, budget=None)
    with monitor.observe(0):
        traced = torch.jit.trace(model, batch())
    assert [node.kind() for node in traced.graph.nodes()] == [node.kind() for node in plain.graph.nodes()]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it where the graph breaks
def test_a_step_compiled_as_a_whole_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    counter = CompileCounter()
    step_function = torch.compile(lambda x: model(x).pow(2).mean(), backend=counter)
    step_function(batch()).backward()
    graphs = counter.frame_count
    monitor = cm.Monitor(model, every=1, budget=None)
    with caplog.at_level(logging.WARNING, "collapse_monitor"):
        for step in range(2):
            with monitor.observe(step):
                step_function(batch()).backward()
    assert counter.frame_count == graphs
    assert "compiled as a whole" in caplog.text


def test_the_users_compile_stance_is_his_own() -> None:
    model = Model()
    monitor = cm.Monitor(model, every=1, budget=None)
    import torch._dynamo.eval_frame as frames

    before = frames._stance.stance
    with monitor.observe(0), torch.compiler.set_stance("force_eager"):
        model(batch()).sum().backward()
        assert frames._stance.stance == "force_eager"
    assert frames._stance.stance == before


@pytest.mark.parametrize("step", ["a", None, 1.5])
def test_a_step_is_a_whole_number(step: Any) -> None:
    with pytest.raises(ValueError, match="must be a whole number"):
        cm.Monitor(Model()).observe(step)


def test_a_schedule_that_raises_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: int) -> bool:
        raise ZeroDivisionError("no")

    monitor = cm.Monitor(Model(), every=broken)
    with caplog.at_level(logging.WARNING, "collapse_monitor"):
        for step in range(3):
            with monitor.observe(step):
                pass
    assert [record.message for record in caplog.records] == ["every: ZeroDivisionError: no"]


def test_context_that_is_no_number_loses_no_snapshot() -> None:
    model = Model()
    monitor = cm.Monitor(model, every=1, budget=None)
    for step in range(2):
        with monitor.observe(step):
            model(batch()).sum().backward()
        monitor.log(step, train_loss=torch.ones((), dtype=torch.complex64), val_loss=torch.ones((), device="meta"))
    assert monitor.latest.step == 1


def test_a_sink_class_is_not_a_sink() -> None:
    with pytest.raises(ValueError, match="give an instance"):
        cm.Monitor(Model(), sinks=[cm.JSONLSink])


class Dropping(Model):
    """Skips the blocks named."""

    skipped: tuple[int, ...] = ()

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index not in self.skipped:
                x = block(x)
        return x


def test_a_block_skipped_at_first_is_read_when_it_runs_and_its_attention_after_that() -> None:
    model = Dropping(depth=3)
    monitor = cm.Monitor(model, every=1, budget=None)
    sites = []
    for step, skipped in enumerate([(1,), (), (), (), (1,)]):
        model.skipped = skipped
        with monitor.observe(step):
            model(batch()).sum().backward()
        ranks = monitor.latest.series("effective_rank")
        assert [index for index, rank in enumerate(ranks) if rank != rank] == list(skipped)
        assert ("blocks.1" in monitor.latest.missing) == bool(skipped)
        sites.append(len(monitor.latest.attention_sites))
    assert sites == [2, 2, 3, 3, 3]


class Unused(torch.autograd.Function):
    """A result of which backward says that it does not depend on what was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        return None


@pytest.mark.parametrize("written_out", [False, True])
def test_a_backward_that_has_no_gradient_to_give_goes_through(written_out: bool) -> None:
    """Torch calls a hook on such a tensor with None."""
    model = Model(written_out=written_out)
    monitor = cm.Monitor(model, every=1, budget=None, on_error="raise")
    for step in range(2):
        with monitor.observe(step):
            Unused.apply(model(batch())).backward()
        assert monitor.latest is not None
        assert all(math.isnan(value) for value in monitor.latest.series("gradient_norm"))
