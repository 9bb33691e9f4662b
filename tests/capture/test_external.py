"""Attention kernels of other packages: found where they are called, read as they compute, and left alone afterwards."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from collapse_monitor.once import find_sites
from tests.capture.hearing import Heard, assert_rows, both_ways, strided
from tests.capture.kernel_packages import packages
from tests.capture.models import BATCH, DIM, HEADS, TOKENS, bert, hidden, lengths_mask, llama, loss_of, words
from tests.watching import flat, second_step, strict

LENGTHS = (4, 10, 7)
LIMITS = [pytest.param(None, id="all_rows", marks=pytest.mark.slow), pytest.param(4, id="sampled_rows")]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[types.ModuleType]:
    with packages(tmp_path) as module:
        yield module


def imported(module: str, name: str = "") -> Any:
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


class Attention(nn.Module):
    """Projections around a kernel that takes [batch, token, head, dim]."""

    def __init__(self, attend: Attend, key_heads: int = HEADS) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, heads * DIM // HEADS) for heads in (HEADS, key_heads, key_heads))
        self.out = nn.Linear(DIM, DIM)
        self.attend = attend

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        other = x if memory is None else memory
        q, k, v = (
            rearrange(p(of), "... n (h d) -> ... n h d", d=DIM // HEADS) for p, of in ((self.q, x), (self.k, other), (self.v, other))
        )
        return self.out(rearrange(self.attend(q, k, v), "... n h d -> ... n (h d)"))


class Block(nn.Module):
    def __init__(self, attend: Attend, **options: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention(attend, **options)
        self.mlp = nn.Sequential(nn.Linear(DIM, DIM), nn.GELU(), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), memory)
        return x + self.mlp(self.norm2(x))


class Tower(nn.Module):
    def __init__(self, attend: Attend, depth: int = 2, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(attend, **options) for _ in range(depth))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, memory)
        return x


def of_sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    heads_first = [rearrange(tensor, "b n h d -> b h n d") for tensor in (q, k, v)]
    return rearrange(F.scaled_dot_product_attention(*heads_first, **options), "b h n d -> b n h d")


def calls(*shape: int) -> Callable[[int], Any]:
    return lambda step: ((hidden(step, *shape),), {})


def check(
    slow: types.ModuleType,
    model: nn.Module,
    call: Callable[[int], Any],
    wanted: int | None = None,
    heads: int = HEADS,
    fold: Callable[[Tensor], Tensor] = lambda truth: truth,
) -> Heard:
    """In the discovery window and in the lean one after it, the rows of every attention are those of the map its kernel used."""
    heard = None
    for _, _, run in both_ways(model, call, limits=(None, None, wanted), backward=True):
        slow.MAPS.clear()
        heard = run()
        sites = [key for key in heard.names if key[0] == "attention"]
        assert [name for _, name in sites] == ["blocks.0.attention", "blocks.1.attention"]
        for (_, name), maps in zip(sites, slow.MAPS, strict=False):
            assert_rows(heard.rows(name), fold(torch.stack(maps)).float(), wanted)
            assert heard.rows(name).weights.shape[1] == heads
        assert {role for _, role in heard.operand_of} == {"q", "v"}
    assert heard is not None
    return heard


FLASH: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.9},
    "window": {"window_size": (3, 1)},
    "causal_window": {"causal": True, "window_size": (3, 0)},
    "cap": {"softcap": 0.7, "causal": True},
    "distances": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]), "causal": True},
    "distances_per_sequence": {"alibi_slopes": torch.rand(BATCH, HEADS, generator=torch.Generator().manual_seed(3))},
}


@pytest.mark.parametrize("wanted", LIMITS)
@pytest.mark.parametrize("options", list(FLASH))
def test_arguments_of_the_kernel(slow: types.ModuleType, options: str, wanted: int | None) -> None:
    kernel = imported("flash_attn", "flash_attn_func")
    check(slow, Tower(lambda q, k, v: kernel(q, k, v, **FLASH[options])), calls(BATCH, TOKENS, DIM), wanted)


def test_positional_arguments_and_grouped_queries(slow: types.ModuleType) -> None:
    kernel = imported("flash_attn", "flash_attn_func")
    check(slow, Tower(lambda q, k, v: kernel(q, k, v, 0.0, 0.4, True), key_heads=2), calls(BATCH, TOKENS, DIM))


@pytest.mark.parametrize("options", ["causal", "window", "distances"])
def test_cross_attention_is_aligned_at_the_last_key(slow: types.ModuleType, options: str) -> None:
    kernel = imported("flash_attn", "flash_attn_func")
    model = Tower(lambda q, k, v: kernel(q, k, v, **FLASH[options]))
    check(slow, model, lambda step: ((hidden(step, BATCH, 5, DIM), hidden(step + 50, BATCH, 8, DIM)), {}))
    sites = find_sites(model, hidden(0, BATCH, 5, DIM), hidden(50, BATCH, 8, DIM))
    attentions = [site for site in sites if site.kind == "attention"]
    assert [(site.query_length, site.key_length, site.cross, site.how) for site in attentions] == [(5, 8, True, "external")] * 2


@pytest.mark.parametrize("name", ["flash_attn_qkvpacked_func", "flash_attn_kvpacked_func"])
def test_operands_in_one_tensor(slow: types.ModuleType, name: str) -> None:
    kernel = imported("flash_attn", name)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = (torch.stack((q, k, v), 2),) if "qkv" in name else (q, torch.stack((k, v), 2))
        return kernel(*packed, causal=True)

    heard = check(slow, Tower(attend), calls(BATCH, TOKENS, DIM))
    twin = check(slow, Tower(lambda q, k, v: imported("flash_attn", "flash_attn_func")(q, k, v, causal=True)), calls(BATCH, TOKENS, DIM))
    for (_, role), gradient in heard.operand_of.items():
        name = "blocks.0.attention"
        torch.testing.assert_close(
            heard.operand_of[heard.names["attention", name], role], twin.operand_of[twin.names["attention", name], role]
        )
        assert gradient.shape == (BATCH, TOKENS, HEADS, DIM // HEADS)


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("flash_attn_interface", {"causal": True, "return_attn_probs": True}),
        ("flash_attn.cute", {"causal": True, "window_size": (2, None)}),
    ],
)
def test_later_versions(slow: types.ModuleType, module: str, options: dict[str, Any]) -> None:
    kernel = imported(module, "flash_attn_func")
    check(slow, Tower(lambda q, k, v: kernel(q, k, v, **options)[0]), calls(BATCH, TOKENS, DIM))


def test_a_sink_takes_its_share(slow: types.ModuleType) -> None:
    kernel, sink = imported("flash_attn.cute", "flash_attn_func"), torch.tensor([0.0, 1.0, -2.0, 0.5])
    heard = check(slow, Tower(lambda q, k, v: kernel(q, k, v, causal=True, learnable_sink=sink)[0]), calls(BATCH, TOKENS, DIM))
    observation = heard.rows("blocks.0.attention")
    assert observation.logits is not None
    assert observation.sink is not None
    first = observation.logits[:, :, 0, 0].exp()  # the first query sees one key and the sink
    torch.testing.assert_close(observation.sink[:, :, 0], sink.exp() / (sink.exp() + first))


# -- sequences behind each other


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def assert_packed_rows(heard: Heard, name: str, maps: list[Tensor], wanted: int | None) -> None:
    """One entry per packed sequence, in the rows and keys it has."""
    observation = heard.rows(name)
    assert observation.visible is not None
    assert observation.query_index is not None
    visible = observation.visible.expand_as(observation.weights)
    assert len(observation.weights) == len(maps)
    for sequence, truth in enumerate(maps):
        queries, keys = truth.shape[1:]
        rows = strided(list(range(queries)), wanted)
        assert observation.query_index[sequence].tolist()[: len(rows)] == rows
        seen = visible[sequence][:, : len(rows), :keys]
        got = torch.where(seen, observation.weights[sequence][:, : len(rows), :keys], 0)
        torch.testing.assert_close(got, truth[:, rows].float(), atol=1e-5, rtol=0)
        assert not visible[sequence][:, len(rows) :].any()
        assert not visible[sequence][..., keys:].any()


@pytest.mark.parametrize("wanted", LIMITS)
@pytest.mark.parametrize("options", ["plain", "causal", "causal_window", "cap", "distances", "distances_per_sequence"])
def test_packed_sequences(slow: types.ModuleType, options: str, wanted: int | None) -> None:
    kernel, starts = imported("flash_attn", "flash_attn_varlen_func"), offsets(LENGTHS)
    model = Tower(lambda q, k, v: kernel(q, k, v, starts, starts, max(LENGTHS), max(LENGTHS), **FLASH[options]))
    for _, _, run in both_ways(model, calls(sum(LENGTHS), DIM), limits=(None, None, wanted), backward=True):
        slow.MAPS.clear()
        heard = run()
        for layer in range(2):
            assert_packed_rows(heard, f"blocks.{layer}.attention", slow.MAPS[layer], wanted)
    sites = [site for site in find_sites(model, hidden(0, sum(LENGTHS), DIM)) if site.kind == "attention"]
    causal = "causal" in FLASH[options]
    assert [(s.heads, s.query_length, s.key_length, s.causal, s.cross) for s in sites] == [(HEADS, 10, 10, causal, False)] * 2


@pytest.mark.parametrize("name", ["flash_attn_varlen_qkvpacked_func", "flash_attn_varlen_kvpacked_func", "cross"])
def test_packed_sequences_in_one_tensor_and_of_two_lengths(slow: types.ModuleType, name: str) -> None:
    starts, other = offsets(LENGTHS), offsets((6, 10, 9))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flash = imported("flash_attn")
        if name == "cross":
            return flash.flash_attn_varlen_func(q, k, v, starts, other, 10, 10, causal=True)
        if "qkv" in name:
            return flash.flash_attn_varlen_qkvpacked_func(torch.stack((q, k, v), 1), starts, 10, causal=True)
        return flash.flash_attn_varlen_kvpacked_func(q, torch.stack((k, v), 1), starts, starts, 10, 10, causal=True)

    model = Tower(attend)
    for _, _, run in both_ways(
        model, lambda step: ((hidden(step, sum(LENGTHS), DIM), *((hidden(9, 25, DIM),) if name == "cross" else ())), {}), backward=True
    ):
        slow.MAPS.clear()
        heard = run()
        for layer in range(2):
            assert_packed_rows(heard, f"blocks.{layer}.attention", slow.MAPS[layer], None)


# -- the other package


def mask_named(name: str, *args: Any) -> Any:
    return getattr(imported("xformers.ops"), name)(*args)


MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "causal": lambda: mask_named("LowerTriangularMask"),
    "causal_at_end": lambda: mask_named("LowerTriangularFromBottomRightMask"),
    "causal_window": lambda: mask_named("LowerTriangularFromBottomRightLocalAttentionMask", 3),
    "window": lambda: mask_named("LocalAttentionFromBottomRightMask", 2, 1),
    "added": lambda: torch.randn(BATCH, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)),
}


@pytest.mark.parametrize("wanted", LIMITS)
@pytest.mark.parametrize("mask", list(MASKS))
def test_masks_of_the_other_package(slow: types.ModuleType, mask: str, wanted: int | None) -> None:
    kernel, bias = imported("xformers.ops", "memory_efficient_attention"), MASKS[mask]()
    check(slow, Tower(lambda q, k, v: kernel(q, k, v, bias, scale=0.3)), calls(BATCH, TOKENS, DIM), wanted)


def test_a_causal_mask_of_the_other_package_is_aligned_at_the_first_key(slow: types.ModuleType) -> None:
    kernel, bias = imported("xformers.ops", "memory_efficient_attention"), MASKS["causal"]()
    model = Tower(lambda q, k, v: kernel(q, k, v, attn_bias=bias))
    check(slow, model, lambda step: ((hidden(step, BATCH, 5, DIM), hidden(step + 50, BATCH, 8, DIM)), {}))


def test_heads_in_the_batch_and_in_groups(slow: types.ModuleType) -> None:
    kernel = imported("xformers.ops", "memory_efficient_attention")

    def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed = kernel(*(rearrange(part, "b n h d -> (b h) n d") for part in (q, k, v)))
        return rearrange(mixed, "(b h) n d -> b n h d", h=HEADS)

    def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel(*(part.unflatten(2, (2, 2)) for part in (q, k, v))).flatten(2, 3)

    in_batch = lambda truth: rearrange(truth, "(b h) 1 i j -> b h i j", h=HEADS)  # noqa: E731
    check(slow, Tower(folded), calls(BATCH, TOKENS, DIM), fold=in_batch)
    check(slow, Tower(grouped), calls(BATCH, TOKENS, DIM))


@pytest.mark.parametrize("kind", ["BlockDiagonalMask", "BlockDiagonalCausalMask"])
def test_blocks_on_the_diagonal_are_sequences(slow: types.ModuleType, kind: str) -> None:
    kernel, bias = imported("xformers.ops", "memory_efficient_attention"), mask_named(kind, list(LENGTHS))
    model = Tower(lambda q, k, v: kernel(q, k, v, bias))
    for _, _, run in both_ways(model, calls(1, sum(LENGTHS), DIM), backward=True):
        slow.MAPS.clear()
        heard = run()
        for layer in range(2):
            assert_packed_rows(heard, f"blocks.{layer}.attention", slow.MAPS[layer], None)


# -- a library that keeps the functions in its own globals


def through(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the library does when these packages are installed and there is an accelerator: it keeps their functions."""
    library = pytest.importorskip("transformers.modeling_flash_attention_utils")
    flash = imported("flash_attn")
    kept = {
        "_flash_fn": flash.flash_attn_func,
        "_flash_varlen_fn": flash.flash_attn_varlen_func,
        "_pad_fn": library._pad_input,
        "_unpad_fn": library._unpad_input,
        "_process_flash_kwargs_fn": library._lazy_define_process_function(flash.flash_attn_varlen_func),
        "_loaded_implementation": "flash_attention_2",
    }
    for name, value in kept.items():
        monkeypatch.setattr(library, name, value)


@pytest.mark.zoo
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("build", [bert, llama])
def test_models_of_hugging_face(
    slow: types.ModuleType, monkeypatch: pytest.MonkeyPatch, build: Callable[[str], nn.Module], padded: bool
) -> None:
    """With padding the library packs the sequences; what is read of them is what the fused kernel of torch is read as."""
    through(monkeypatch)
    given = {"input_ids": words(0), **({"attention_mask": lengths_mask(LENGTHS)} if padded else {})}
    snapshots = []
    for kernel in ("flash_attention_2", "sdpa"):
        torch.manual_seed(0)
        model: Any = build("sdpa").eval()
        model.config._attn_implementation = kernel
        snapshots.append(second_step(model, lambda _: ((), given), source="train", max_queries=None))
    one, other = snapshots
    assert [(s.name, s.heads, s.query_length, s.causal) for s in one.sites] == [
        (s.name, s.heads, s.query_length, s.causal) for s in other.sites
    ]
    assert {site.how for site in one.sites if site.kind == "attention"} == {"external"}
    same = ("attention_uniformity", "max_logit", "effective_rank", "branch_ratio")  # gradients of padding are not
    for name in same if padded else (*same, "gradient_norm"):
        assert flat(one, name) == pytest.approx(flat(other, name), rel=1e-3, abs=1e-5), name


# -- what cannot be read


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (
            lambda q, k, v: imported("xformers.ops").memory_efficient_attention(q, k, v, mask_named("PagedBlockDiagonalMask")),
            "memory_efficient_attention: a mask of type PagedBlockDiagonalMask is not understood",
        ),
        (
            lambda q, k, v: imported("flash_attn_interface").flash_attn_func(q, k, v, attention_chunk=4),
            "flash_attn_func: its argument 'attention_chunk' is not understood",
        ),
    ],
)
def test_what_is_not_understood_is_missing_and_blocks_go_on(slow: types.ModuleType, attend: Attend, reason: str) -> None:
    imported("xformers.ops"), imported("flash_attn_interface")
    model = Tower(attend)
    monitor = strict(model)
    for step in range(2):
        with monitor.observe(step):
            loss_of(model(hidden(step, BATCH, TOKENS, DIM))).backward()
        snapshot = monitor.latest
        assert snapshot is not None
        assert {name: snapshot.missing[name] for name in snapshot.missing if name.endswith(".attention")} == dict.fromkeys(
            ("blocks.0.attention", "blocks.1.attention"), reason
        )
        assert not any(map(math.isnan, [*snapshot.series("effective_rank"), *snapshot.series("gradient_norm")]))
        assert not any(map(math.isnan, flat(snapshot, "branch_ratio") + flat(snapshot, "qk_to_v_gradient")))
    monitor.close()


# -- whoever holds the function


class Holder:
    """Keeps the kernel where no module's globals show it."""

    def __init__(self, kernel: Callable[..., Tensor]) -> None:
        self.kernel = kernel


def holders(kernel: Callable[..., Tensor]) -> dict[str, Attend]:
    held = Holder(kernel)
    return {
        "a closure": lambda q, k, v: kernel(q, k, v, causal=True),
        "a partial": functools.partial(kernel, causal=True),
        "an attribute": lambda q, k, v: held.kernel(q, k, v, causal=True),
        "the package": lambda q, k, v: imported("flash_attn").flash_attn_func(q, k, v, causal=True),
        "its module": lambda q, k, v: imported("flash_attn.flash_attn_interface").flash_attn_func(q=q, k=k, v=v, causal=True),
        "a checkpoint": lambda q, k, v: torch.utils.checkpoint.checkpoint(kernel, q, k, v, 0.0, None, True, use_reentrant=False),
    }


@pytest.mark.parametrize("holder", ["a closure", "a partial", "an attribute", "the package", "its module", "a checkpoint"])
def test_it_is_heard_whoever_holds_it(slow: types.ModuleType, holder: str) -> None:
    attend = holders(imported("flash_attn", "flash_attn_func"))[holder]
    check(slow, Tower(attend), calls(BATCH, TOKENS, DIM))


def test_readings_are_those_of_the_same_model_with_the_kernel_of_torch(slow: types.ModuleType) -> None:
    kernel = imported("flash_attn", "flash_attn_func")
    external = Tower(lambda q, k, v: kernel(q, k, v, causal=True))
    fused = Tower(lambda q, k, v: of_sdpa(q, k, v, is_causal=True))
    one, other = (second_step(model, calls(BATCH, TOKENS, DIM)) for model in (external, fused))
    assert [(s.name, s.heads, s.causal, s.cross) for s in one.sites] == [(s.name, s.heads, s.causal, s.cross) for s in other.sites]
    assert set(one.missing) == set(other.missing)
    for name in one.metrics:
        assert flat(one, name) == pytest.approx(flat(other, name), rel=1e-3, abs=1e-5, nan_ok=True), name


def test_a_package_that_the_first_forward_loads_is_heard_from_then_on(slow: types.ModuleType) -> None:
    model = Tower(lambda q, k, v: imported("xformers.ops").memory_efficient_attention(q, k, v))
    monitor = strict(model)
    read = []
    for step in range(4):
        with monitor.observe(step):
            model(hidden(step, BATCH, TOKENS, DIM))
        snapshot = monitor.latest
        assert snapshot is not None
        read.append(not any(map(math.isnan, flat(snapshot, "attention_uniformity"))) and len(snapshot.heads("attention_uniformity")) == 2)
    assert read == [False, False, True, True]
    monitor.close()


def test_the_run_is_the_same_bit_for_bit(slow: types.ModuleType) -> None:
    kernel = imported("flash_attn", "flash_attn_func")

    def course(watched: bool) -> list[Tensor]:
        model = Tower(lambda q, k, v: kernel(q, k, v, causal=True))
        monitor = strict(model, every=1 if watched else 10**6)
        left = []
        for step in range(1, 4):
            with monitor.observe(step):
                output = model(hidden(step, BATCH, TOKENS, DIM))
                loss_of(output).backward()
            left += [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        monitor.close()
        return left

    alone, watched = course(False), course(True)
    assert len(alone) == len(watched) > 0
    assert all(torch.equal(one, other) for one, other in zip(alone, watched, strict=True))


# -- nothing stays


def state_of(function: Any) -> tuple[object, ...]:
    return function.__code__, dict(vars(function)), function.__defaults__, str(inspect.signature(function))


def test_the_function_is_itself_again_after_the_window_and_after_an_exception(slow: types.ModuleType) -> None:
    kernel = imported("flash_attn", "flash_attn_func")
    before = state_of(kernel)
    inside: list[tuple[object, ...]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inside.append(state_of(kernel))
        return kernel(q, k, v)

    model = Tower(attend)
    monitor = strict(model)
    with monitor.observe(0):
        loss_of(model(hidden(0, BATCH, TOKENS, DIM))).backward()
        assert state_of(kernel) == before, "the forward is over"
    assert all(state[0] is not before[0] for state in inside), "it was stood in for"
    assert {state[3] for state in inside} == {before[3]}, "its signature is its own all the time"
    with pytest.raises(TypeError, match="causl"), monitor.observe(1):
        kernel(hidden(0, 1, 2, 1, 4), hidden(0, 1, 2, 1, 4), hidden(0, 1, 2, 1, 4), causl=True)
    assert state_of(kernel) == before
    model.blocks[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(MemoryError("full")))
    with pytest.raises(MemoryError, match="full"), monitor.observe(2):
        model(hidden(0, BATCH, TOKENS, DIM))
    assert state_of(kernel) == before
    monitor.close()


def test_an_unsampled_step_leaves_the_function_alone(slow: types.ModuleType) -> None:
    kernel = imported("flash_attn", "flash_attn_func")
    before = state_of(kernel)
    model = Tower(lambda q, k, v: kernel(q, k, v))
    monitor = strict(model, every=10)
    with monitor.observe(0):
        model(hidden(0, BATCH, TOKENS, DIM))
    with monitor.observe(1):
        assert state_of(kernel) == before


def test_windows_of_two_monitors_may_end_in_any_order(slow: types.ModuleType) -> None:
    kernel = imported("flash_attn", "flash_attn_func")
    before = state_of(kernel)
    models = [Tower(lambda q, k, v: kernel(q, k, v)) for _ in range(2)]
    monitors = [strict(model) for model in models]
    first, second = (monitor.observe(0) for monitor in monitors)
    first.__enter__()
    second.__enter__()
    models[0](hidden(0, BATCH, TOKENS, DIM))
    first.__exit__(None, None, None)
    assert state_of(kernel) != before, "the other one still listens"
    models[1](hidden(0, BATCH, TOKENS, DIM))
    second.__exit__(None, None, None)
    assert state_of(kernel) == before
    for monitor in monitors:
        snapshot = monitor.latest
        assert snapshot is not None
        assert not any(map(math.isnan, flat(snapshot, "attention_uniformity")))


def test_calls_of_another_thread_are_its_own(slow: types.ModuleType) -> None:
    kernel = imported("flash_attn", "flash_attn_func")
    model, other = Tower(lambda q, k, v: kernel(q, k, v)), Tower(lambda q, k, v: kernel(q, k, v, causal=True))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        thread = threading.Thread(target=lambda: other(hidden(7, BATCH, TOKENS, DIM)))
        thread.start()
        thread.join()
        return kernel(q, k, v)

    model.blocks[1].attention.attend = attend  # type: ignore[union-attr]
    sites = [site for site in find_sites(model, hidden(0, BATCH, TOKENS, DIM)) if site.kind == "attention"]
    assert [(site.name, site.causal) for site in sites] == [("blocks.0.attention", False), ("blocks.1.attention", False)]
