"""Samples of the residual stream: the true inputs and outputs of every block, at the stride midpoints over real tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from collapse_monitor.capture.masks import longest_document
from tests.capture.hearing import Heard, batch_major, both_ways, calls_of, first_hidden, hear, named, strided, valid_positions
from tests.capture.models import BATCH, CASES, DIM, TOKENS, Case, case_named, each, encoder, hidden, lengths_mask

LIMITS = [pytest.param((None, None), id="all"), pytest.param((2, 4), id="sampled")]


def assert_sample(sample: Any, truth: Tensor, limits: tuple[int | None, int | None], valid: list[list[int]]) -> None:
    """The sample holds, bit for bit, the true hidden states at the chosen positions and nothing else that counts."""
    sequences = strided(list(range(truth.shape[0])), limits[0])
    assert sample.hidden.shape[0] == len(sequences)
    assert sample.hidden.dtype == truth.dtype
    for place, b in enumerate(sequences):
        expected = truth[b, strided(valid[b], limits[1])]
        counted = sample.hidden[place] if sample.mask is None else sample.hidden[place][sample.mask[place]]
        assert torch.equal(counted, expected)


def true_stream(case: Case, calls: dict[str, list[tuple[Any, Any, Any]]]) -> list[tuple[Tensor, Tensor]]:
    """Input and output of every block. Where the caller adds the residual, the output is the sum."""
    pairs = []
    for name in case.blocks:
        args, kwargs, output = calls[name][0]
        before, after = first_hidden(args, kwargs), first_hidden(output)
        pairs.append((batch_major(case, before), batch_major(case, before + after if case.name == "pure-residual" else after)))
    return pairs


@each()
@pytest.mark.parametrize("limits", LIMITS)
def test_blocks_are_sampled_at_the_stride_midpoints(case: Case, limits: tuple[int | None, int | None]) -> None:
    model = case.model()
    blocks = named(model, list(case.blocks))
    for _, step, run in both_ways(model, case.call, limits=(*limits, None)):
        with calls_of(blocks) as calls:
            heard = run()
        valid = valid_positions(case.call(step)[1], BATCH, calls_length(case, calls))
        for name, (before, after) in zip(case.blocks, true_stream(case, calls), strict=True):
            observation = heard.sample(name)
            assert_sample(observation.output, after, limits, _for(valid, after))
            assert observation.input is not None
            assert_sample(observation.input, before, limits, _for(valid, before))


def calls_length(case: Case, calls: dict[str, list[tuple[Any, Any, Any]]]) -> int:
    return batch_major(case, first_hidden(calls[case.blocks[0]][0][2])).shape[1]


def _for(valid: list[list[int]], truth: Tensor) -> list[list[int]]:
    return valid if truth.shape[1] == max(map(len, valid)) else [list(range(truth.shape[1]))] * truth.shape[0]


@each([case for case in CASES if not case.name.startswith(("pure", "transformer"))])
def test_the_input_of_a_block_is_the_output_before_it_not_a_second_sample(case: Case) -> None:
    model = case.model()
    for _, _, run in both_ways(model, case.call):
        heard = run()
        for earlier, later in zip(case.blocks, case.blocks[1:], strict=False):
            assert heard.sample(later).input is heard.sample(earlier).output


@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch_first", "token_first"])
@pytest.mark.parametrize("limits", LIMITS)
def test_padding_never_enters_a_sample(left: bool, batch_first: bool, limits: tuple[int | None, int | None]) -> None:
    lengths = (TOKENS, 1, 7)
    mask = lengths_mask(lengths, left=left)
    torch.manual_seed(0)
    model = encoder(batch_first, True).train()

    def call(step: int) -> Any:
        x = hidden(step, BATCH, TOKENS, DIM)
        return (x if batch_first else x.transpose(0, 1).contiguous(),), {"src_key_padding_mask": mask == 0}

    valid = [[i for i in range(TOKENS) if row[i]] for row in mask]
    blocks = named(model, ["layers.0", "layers.1"])
    for _, _, run in both_ways(model, call, limits=(*limits, None)):
        with calls_of(blocks) as calls:
            heard = run()
        for name in blocks:
            after = first_hidden(calls[name][0][2])
            assert_sample(heard.sample(name).output, after if batch_first else after.transpose(0, 1), limits, valid)


def test_a_sequence_of_padding_only_has_no_token_that_counts() -> None:
    torch.manual_seed(0)
    model = encoder(True, True)
    padding = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    padding[1] = True
    for _, _, run in both_ways(model, lambda step: ((hidden(step, BATCH, TOKENS, DIM),), {"src_key_padding_mask": padding})):
        sample = run().sample("layers.0").output
        assert sample.mask is not None
        assert sample.mask.any(1).tolist() == [True, False, True]


def test_two_sequences_that_were_packed_as_tokens_of_one() -> None:
    """Unbatched input: the tokens of one sequence."""
    torch.manual_seed(0)
    model = encoder(True, True)
    for _, step, run in both_ways(model, lambda step: ((hidden(step, TOKENS, DIM),), {})):
        with calls_of(named(model, ["layers.0"])) as calls:
            heard = run()
        after = calls["layers.0"][0][2]
        assert torch.equal(heard.sample("layers.0").output.hidden, after[None])
        assert step in (0, 1)


class EditsInPlace(nn.Module):
    """A model that overwrites what its blocks return."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(DIM, 4, 64, dropout=0.0, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x *= 2
            x.relu_()
        return x


def test_what_the_model_does_to_its_tensors_later_does_not_reach_a_sample() -> None:
    torch.manual_seed(0)
    model = EditsInPlace()
    blocks = named(model, [f"layers.{i}" for i in range(3)])
    for _, _, run in both_ways(model, lambda step: ((hidden(step, BATCH, TOKENS, DIM),), {})):
        with calls_of(blocks) as calls:
            heard = run()
        for name in blocks:
            args, _, output = calls[name][0]
            assert torch.equal(heard.sample(name).output.hidden, output)
            before = heard.sample(name).input
            assert before is None or torch.equal(before.hidden, args[0])


class Branches:
    """For every attention: the module whose output is the branch, and the module whose input or output is the stream it joins."""

    def __init__(self, case: Case) -> None:
        self.of: dict[str, tuple[str, str, str]] = {}
        for site, block in ((site, case.blocks[site.layer or 0]) for site in case.attentions):
            self.of[site.name] = self._of(case, site.name, block)

    @staticmethod
    def _of(case: Case, site: str, block: str) -> tuple[str, str, str]:
        if case.name.startswith(("encoder", "decoder", "transformer")):
            if not site.endswith("multihead_attn"):
                return f"{block}.dropout1", block, "input"
            # the stream of the cross attention is the sum before it: what enters norm2, or what norm1 returned
            return f"{block}.dropout2", *((f"{block}.norm2", "input") if "pre_norm" in case.name else (f"{block}.norm1", "output"))
        branch = {
            "torchvision": f"{block}.dropout",
            "timm": f"{block}.drop_path1",
            "gpt": f"{block}.drop",
            "pure": block,
            "bert": f"{block}.attention.output.dropout",
            "gpt2": f"{block}.attn",
            "llama": f"{block}.self_attn",
        }[case.name.split("-")[0]]
        return branch, block, "input"


@each([case for case in CASES if case.name != "pure-plain"])
def test_the_branch_is_what_is_added_to_the_stream(case: Case) -> None:
    model = case.model()
    branches = Branches(case).of
    wanted = {name for branch, stream, _ in branches.values() for name in (branch, stream)}
    for _, step, run in both_ways(model, case.call):
        with calls_of(named(model, sorted(wanted))) as calls:
            heard = run()
        for name, (branch, stream, side) in branches.items():
            args, kwargs, output = calls[stream][0]
            true_branch = batch_major(case, first_hidden(calls[branch][0][2]))
            true_stream = batch_major(case, first_hidden(args, kwargs) if side == "input" else first_hidden(output))
            got = heard.joined(name)
            valid = _for(valid_positions(case.call(step)[1], BATCH, true_branch.shape[1]), true_branch)
            assert_values(got[0], true_branch, valid)
            assert_values(got[1], true_stream, valid)


def assert_values(got: Tensor, truth: Tensor, valid: list[list[int]]) -> None:
    for b, places in enumerate(valid):
        assert torch.equal(got[b][: len(places)], truth[b, places])
        assert not got[b][len(places) :].any(), "neither padding nor a repeated token takes part in a norm"


class Convolving(nn.Module):
    """A block on [batch, feature, row, column] whose mixing of positions is a convolution, or attention over all of them."""

    def __init__(self, attends: bool) -> None:
        super().__init__()
        self.mix = nn.Conv2d(DIM, 3 * DIM if attends else DIM, 1 if attends else 3, padding=0 if attends else 1)
        self.attends, self.wide = attends, nn.Conv2d(DIM, DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(x)
        if self.attends:
            q, k, v = mixed.flatten(2).mT.chunk(3, -1)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v).mT.reshape(x.shape)
        x = x + mixed
        return x + self.wide(x)


def test_maps_of_rows_and_columns_are_read_before_anything_attends_to_them() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, DIM, 4, 4), nn.Sequential(*(Convolving(attends) for attends in (False, False, True))))
    image = torch.randn(BATCH, 3, 32, 32)
    blocks = named(model, ["1.0", "1.1", "1.2"])
    with calls_of(blocks) as calls:
        heard = hear(model, (image,), {}, None, (None, None, None))
    for name in blocks:
        truth = calls[name][0][2].flatten(2).mT
        assert torch.equal(heard.sample(name).output.hidden, truth)


def test_without_an_addition_there_is_no_branch() -> None:
    case = case_named("pure-plain")
    model = case.model()
    for _, _, run in both_ways(model, case.call):
        heard: Heard = run()
        assert not heard.branch_of


def test_the_models_own_tensors_are_handed_on_untouched() -> None:
    """The model returns the very object it made, not a view or a copy."""

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.kept = encoder(True, True), None

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.inner(x)
            return self.kept

    model = Returns()
    heard = hear(model, (hidden(0, BATCH, TOKENS, DIM),), {})
    assert heard.output is model.kept


def test_positions_that_never_rise_are_no_documents() -> None:
    """Some models are given the position zero for every token; packed documents begin anew at zero."""
    assert longest_document(torch.zeros(2, 5, dtype=torch.long)).all()
    assert longest_document(torch.arange(5).expand(2, 5)).all()
    assert longest_document(torch.tensor([[0, 1, 0, 1, 2, 0]])).tolist() == [[False, False, True, True, True, False]]
    assert longest_document(torch.tensor([[0, 0, 0], [0, 1, 2]])).all()
