"""Tiny LightningModules of every shape a training step can have, for both Lightning packages, and Trainers that run them quietly."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from collapse_monitor.integrations.lightning import CollapseCallback
from collapse_monitor.records import Condition, Severity, Snapshot
from collapse_monitor.testing import MemorySink

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
EITHER = ["pytorch_lightning", pytest.param("lightning.pytorch", marks=pytest.mark.slow)]
"""The same, where a quick look at one of them will do."""
WORDS, TOKENS = 64, 9
QUIET = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)
"""What these small runs make Lightning warn of, and mean to."""


def package(name: str) -> Any:
    return pytest.importorskip(name)


def loader(batches: int = 8, size: int = 2, seed: int = 0) -> Any:
    ids = torch.randint(0, WORDS, (batches * size, TOKENS), generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids), batch_size=size)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, hidden: Tensor) -> Tensor:
        split = "batch token (three head dim) -> three batch head token dim"
        query, key, value = rearrange(self.qkv(self.norm1(hidden)), split, three=3, head=self.heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(rearrange(mixed, "batch head token dim -> batch token (head dim)"))
        return hidden + self.mlp(self.norm2(hidden))


class GPT(nn.Module):
    """Two blocks of width 16 unless told otherwise; without the run-time checks of shapes that our own test models have."""

    def __init__(self, depth: int = 2, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, dim), nn.Embedding(TOKENS, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def network(depth: int = 2, seed: int = 0) -> GPT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT(depth)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def module(
    pl: Any = "pytorch_lightning", *, late: bool = False, dropout: float = 0.0, boom: tuple[int, BaseException] | None = None
) -> Any:
    """`training_step` calls `self(x)`. With `late` the network is built in `configure_model`; `boom` raises at a batch."""

    class Lit((importlib.import_module(pl) if isinstance(pl, str) else pl).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = None if late else network()
            self.drop = nn.Dropout(dropout)
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if self.net is None:
                self.net = network()

        def forward(self, ids: Tensor) -> Tensor:
            return self.net(ids)

        def logits(self, ids: Tensor) -> Tensor:
            return self(ids)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if boom is not None and batch_idx == boom[0]:
                raise boom[1]
            loss = loss_of(self.drop(self.logits(batch[0][:, :-1])), batch[0])
            self.log("loss", loss)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", loss_of(self(batch[0][:, :-1]), batch[0]))

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Lit()


def changed(pl: Any, **methods: Callable[..., Any]) -> Any:
    """The module with other methods, as a subclass would have them."""
    plain = module(pl)
    plain.__class__ = type("Changed", (type(plain),), methods)
    return plain


def by_hand(pl: Any = "pytorch_lightning") -> Any:
    """Two optimisers that the training step runs itself."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self(batch[0][:, :-1]), batch[0])
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self: Any) -> Any:
        return [torch.optim.SGD(self.net.blocks.parameters(), 0.1), torch.optim.SGD(self.net.head.parameters(), 0.1)]

    lit = changed(pl, training_step=training_step, configure_optimizers=configure_optimizers)
    lit.automatic_optimization = False
    return lit


def trainer(callbacks: list[Any], pl: Any = "pytorch_lightning", **options: Any) -> Any:
    quiet = {
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
    }
    return (importlib.import_module(pl) if isinstance(pl, str) else pl).Trainer(callbacks=callbacks, **{**quiet, **options})


# -- the callback and what it is held against


def watch(every: Any = 1, **options: Any) -> tuple[CollapseCallback, MemorySink]:
    sink = MemorySink()
    return CollapseCallback(every=every, sinks=[sink], **{"budget": None, "on_error": "raise", **options}), sink


def hooks_on(model: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(part, kind)) for part in model.modules() for kind in kinds)


def modes() -> list[Any]:
    return torch.overrides._get_current_function_mode_stack()


BLOCKS = ["net.blocks.0", "net.blocks.1"]

FORMS: dict[str, dict[str, Any]] = {"plain": {}, "accumulated": {"accumulate_grad_batches": 4}, "by hand": {}}
"""Ways to count steps, and what they need of the Trainer."""


def form(name: str, pl: Any = "pytorch_lightning") -> Any:
    return by_hand(pl) if name == "by hand" else module(pl)


def fires_at(step: int, severity: Severity = Severity.CRITICAL) -> Any:
    def fault(snapshot: Snapshot, history: Any) -> list[Condition]:
        return [Condition(0, "effective_rank", 1.0, 2.0, severity=severity)] if snapshot.step >= step else []

    fault.for_checks = 1  # type: ignore[attr-defined]
    return fault


def trained(lit: Any, callbacks: list[Any], validate: bool = False, **options: Any) -> tuple[Any, ...]:
    """Two shuffled epochs: losses, parameters, the global generator, what was logged, and the step reached."""
    torch.manual_seed(3)
    data = torch.utils.data.DataLoader(loader(6).dataset, batch_size=2, shuffle=True)
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
