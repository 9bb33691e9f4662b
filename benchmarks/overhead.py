"""What watching costs: plain and watched training steps of one model, interleaved in one process.

    python benchmarks/overhead.py            # a ViT and a GPT, several minutes
    python benchmarks/overhead.py --short    # seconds: shows that it runs, its figures mean nothing

Plain and watched steps take turns, in changing order, so that a busy machine slows both alike. The ratio of each pair is kept;
medians and quartiles are over pairs. The monitor runs without a budget (`budget=None`): this is the raw cost.

    sampled     ratio of a step on which the monitor listens, evaluation included (every=1)
    unsampled   seconds of entering and leaving `observe` on a step on which it does not listen; its ratio is printed as a check
    cost        what that makes of a run: (sampled - 1) / every + unsampled / plain (1 - 1 / every)
    direct      total time of all watched steps over that of all plain ones, minus 1: the check of `cost`, with more noise

`ops` are the operations that one sampled step dispatches beyond a plain one, evaluation included, and `held` the bytes that the
monitor still holds when its window closes. Both are exact.

Two ways of doing without a monitor stand beside it, each on every step: `naive` (singular values and an N x N cosine matrix of
each block's output, in a hook) and `weights requested` (attention written out so that its weights exist, and their entropy).
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from statistics import median, quantiles
from time import perf_counter, process_time
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import collapse_monitor as cm

Watch = Callable[[int], AbstractContextManager[Any]]


class Attention(nn.Module):
    """Self-attention through the fused kernel or, with `written_out`, step by step, so that `weights` exist."""

    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.written_out = heads, causal, False
        self.weights: Tensor | None = None
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "batch token (three head dim) -> three batch head token dim", three=3, head=self.heads)
        if self.written_out:
            logits = q @ k.mT / q.shape[-1] ** 0.5
            if self.causal:
                logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), float("-inf"))
            self.weights = logits.softmax(-1)
            mixed = self.weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(rearrange(mixed, "batch head token dim -> batch token (head dim)"))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A ViT over patches (`embed` is a Linear) or a GPT over ids (`embed` is an Embedding)."""

    def __init__(self, embed: nn.Module, *, tokens: int, dim: int, depth: int, heads: int, causal: bool, outputs: int) -> None:
        super().__init__()
        self.embed, self.pool = embed, not causal
        self.position = nn.Parameter(0.02 * torch.randn(tokens, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, causal) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs) + self.position
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x.mean(1) if self.pool else x)


@dataclass
class Case:
    """One model with its data and optimiser."""

    name: str
    model: Transformer
    inputs: Tensor
    labels: Tensor
    optimiser: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, watch: AbstractContextManager[Any]) -> tuple[float, float]:
        """One training step; its CPU and wall seconds."""
        cpu, wall = process_time(), perf_counter()
        with watch:
            logits = self.model(self.inputs)
            F.cross_entropy(logits.flatten(0, -2), self.labels.flatten()).backward()
        self.optimiser.step()
        self.optimiser.zero_grad()
        return process_time() - cpu, perf_counter() - wall


def vit(*, batch: int = 8, tokens: int = 256, dim: int = 192, depth: int = 6) -> Case:
    model = Transformer(nn.Linear(48, dim), tokens=tokens, dim=dim, depth=depth, heads=dim // 32, causal=False, outputs=100)
    return Case("ViT", model, torch.randn(batch, tokens, 48), torch.randint(100, (batch,)))


def gpt(*, batch: int = 8, tokens: int = 256, dim: int = 192, depth: int = 6) -> Case:
    model = Transformer(nn.Embedding(256, dim), tokens=tokens, dim=dim, depth=depth, heads=dim // 32, causal=True, outputs=256)
    return Case("GPT", model, torch.randint(256, (batch, tokens)), torch.randint(256, (batch, tokens)))


def naive(model: Transformer) -> Watch:
    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        hidden = output.detach()
        share = torch.linalg.svdvals(hidden)
        share = share / share.sum(-1, keepdim=True)
        torch.special.entr(share).sum(-1).exp().mean().item()
        unit = F.normalize(hidden, dim=-1)
        (unit @ unit.mT).mean().item()

    @contextmanager
    def watch(_step: int) -> Iterator[None]:
        handles = [block.register_forward_hook(hook) for block in model.blocks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    return watch


def weights_requested(model: Transformer) -> Watch:
    attentions = [module for module in model.modules() if isinstance(module, Attention)]

    @contextmanager
    def watch(_step: int) -> Iterator[None]:
        for attention in attentions:
            attention.written_out = True
        try:
            yield
            for attention in attentions:
                torch.special.entr(attention.weights.detach()).sum(-1).mean((0, 2)).tolist()
        finally:
            for attention in attentions:
                attention.written_out, attention.weights = False, None

    return watch


@dataclass
class Pairs:
    """Seconds of plain and watched steps side by side: `plain[i]` and `watched[i]` ran one after the other."""

    plain: list[float] = field(default_factory=list)
    watched: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        return [watched / plain for plain, watched in zip(self.plain, self.watched, strict=True)]

    @property
    def direct(self) -> float:
        return sum(self.watched) / sum(self.plain) - 1

    def __str__(self) -> str:
        low, middle, high = quantiles(self.ratios, n=4)
        return f"{middle:.3f} [{low:.3f} {high:.3f}]"


def interleave(case: Case, watch: Watch, pairs: int, *, first: int = 1) -> tuple[Pairs, Pairs]:
    """`pairs` plain steps between as many watched ones, numbered from `first`: CPU and wall seconds."""
    cpu, wall = Pairs(), Pairs()
    for i in range(pairs):
        turns = [(nullcontext(), "plain"), (watch(first + i), "watched")]
        for context, name in turns if i % 2 else reversed(turns):
            for seconds, kept in zip(case.step(context), (cpu, wall), strict=True):
                getattr(kept, name).append(seconds)
    return cpu, wall


class Tally(TorchDispatchMode):
    """Counts dispatched operations and remembers which storages they made."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.ops += 1
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self.storages[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def held(self) -> int:
        """Bytes of the storages made that are still alive."""
        return sum(size for reference, size in self.storages.values() if not reference.expired())


def exact_costs(case: Case, monitor: cm.Monitor, step: int) -> tuple[int, int]:
    """Operations and bytes that one sampled step adds to a plain one."""

    def tally(window: AbstractContextManager[Any], finish: Callable[[], Any]) -> tuple[int, int]:
        counted = Tally()
        with counted:
            with window:
                F.cross_entropy(case.model(case.inputs).flatten(0, -2), case.labels.flatten()).backward()
            held = counted.held()
            finish()
        case.optimiser.zero_grad()
        return counted.ops, held

    plain = tally(nullcontext(), lambda: None)
    watched = tally(monitor.observe(step), lambda: monitor.latest)
    return watched[0] - plain[0], watched[1] - plain[1]


def unsampled_seconds(monitor: cm.Monitor, calls: int = 1000) -> tuple[float, float]:
    """CPU and wall seconds of one window on a step that is not sampled."""
    cpu, wall = process_time(), perf_counter()
    for _ in range(calls):
        with monitor.observe(3):
            pass
    return (process_time() - cpu) / calls, (perf_counter() - wall) / calls


def measure(case: Case, counts: dict[str, int]) -> None:
    """Measure one model and print its table."""
    for _ in range(3):
        seconds = case.step(nullcontext())

    with cm.Monitor(case.model, every=1, budget=None) as monitor:
        discovery = case.step(monitor.observe(0))
        case.step(monitor.observe(1))
        sampled = interleave(case, monitor.observe, counts["every=1"], first=2)
        ops, held = exact_costs(case, monitor, 2 + counts["every=1"])
        sites = len(monitor.latest.attention_sites)
    sparse = {}
    unsampled = Pairs(), Pairs()
    for every in (10, 50):
        with cm.Monitor(case.model, every=every, budget=None) as monitor:
            case.step(monitor.observe(0))
            case.step(monitor.observe(1))
            idle = unsampled_seconds(monitor)
            sparse[every] = interleave(case, monitor.observe, counts[f"every={every}"], first=2)
        for pool, pairs in zip(unsampled, sparse[every], strict=True):
            for i, (plain, watched) in enumerate(zip(pairs.plain, pairs.watched, strict=True)):
                # The step after a sampled one pays for the evaluation: it belongs to neither kind.
                if (2 + i) % every > 1:
                    pool.plain.append(plain)
                    pool.watched.append(watched)
    others = {
        "naive": interleave(case, naive(case.model), counts["others"]),
        "weights requested": interleave(case, weights_requested(case.model), counts["others"]),
    }

    plain = [median(pairs.plain) for pairs in sampled]
    shape = f"{len(case.model.blocks)} blocks, {sites} attentions, width {case.model.position.shape[1]}, batch {tuple(case.inputs.shape)}"
    print(f"\n{case.name}: {shape}; a plain step takes {plain[0]:.3f} s CPU, {plain[1]:.3f} s wall")
    print(f"the first step, which looks for the sites, takes {discovery[0] / seconds[0]:.2f} x a plain one")
    print(f"a sampled step: {ops} ops ({ops / len(case.model.blocks):.1f} per block) and {held / 1024:.0f} KiB held")
    print(f"sampled steps, ratio:   CPU {sampled[0]}   wall {sampled[1]}   median [quartiles] of {len(sampled[0].plain)} pairs")
    print(f"unsampled steps, ratio: CPU {unsampled[0]}   wall {unsampled[1]}   median [quartiles] of {len(unsampled[0].plain)} pairs")
    print(f"unsampled steps, window alone: {1e6 * idle[0]:.1f} us CPU, {1e6 * idle[1]:.1f} us wall")
    print(f"{'':20}{'CPU cost':>10}{'direct':>10}{'wall cost':>12}{'direct':>10}")
    for every, pairs in {1: sampled, **sparse}.items():
        cost = [
            (median(pool.ratios) - 1) / every + seconds_idle / seconds_plain * (1 - 1 / every)
            for pool, seconds_idle, seconds_plain in zip(sampled, idle, plain, strict=True)
        ]
        print(f"{f'every={every}':20}{cost[0]:>10.2%}{pairs[0].direct:>10.2%}{cost[1]:>12.2%}{pairs[1].direct:>10.2%}")
    for name, pairs in others.items():
        cost = [median(kept.ratios) - 1 for kept in pairs]
        print(f"{name:20}{cost[0]:>10.2%}{pairs[0].direct:>10.2%}{cost[1]:>12.2%}{pairs[1].direct:>10.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="tiny models and few steps: shows that it runs")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (default: %(default)s)")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s), {platform.machine()}, Python {platform.python_version()}")
    if options.short:
        sizes: dict[str, int] = {"batch": 2, "tokens": 32, "dim": 64, "depth": 2}
        counts = {"every=1": 4, "every=10": 12, "every=50": 52, "others": 2}
    else:
        sizes, counts = {}, {"every=1": 24, "every=10": 40, "every=50": 100, "others": 8}
    for build in (vit, gpt):
        measure(build(**sizes), counts)


if __name__ == "__main__":
    main()
