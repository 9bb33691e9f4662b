"""Small real trainings for the verdict benchmark: digits with a ViT, bytes with a GPT, sorting with an encoder-decoder and with a BERT,
sentences with a trained MiniLM, and what healthy runs go through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pydoc_data import topics
from typing import Any

import torch
from models import EncoderDecoder, bert, post_norm, trained_minilm
from torch import Tensor, nn
from torch.nn import functional as F

from collapse_monitor.testing import tiny_gpt, tiny_vit

CONTEXT = 32
LENGTH, VALUES = 16, 16
"""Of the sequences to be sorted; value 0 is padding, and what the decoder starts with."""

IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """What one call of the model is given, and what it should answer."""

    args: tuple[Tensor, ...]
    targets: Tensor
    kwargs: dict[str, Tensor] = field(default_factory=dict)


def decay(step: int, steps: int) -> float:
    """Warm-up, then down to a tenth in a straight line."""
    return min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)


def constant(_step: int, _steps: int) -> float:
    """The full rate from the first step on."""
    return 1.0


@dataclass(frozen=True)
class Training:
    """One way to train.

    Attributes:
        name: how the tables call it.
        kind: `vit`, `gpt`, `seq2seq`, `bert` or `minilm`.
        seed: of weights and batches.
        steps: optimiser steps.
        lr: peak learning rate.
        schedule: factor on the rate at a step of so many.
        batch: sequences in a batch.
        data: changes a batch at a step.
        dropout: probability in the MLPs.
        samples: how many different samples there are; None: all.
        autocast: bf16 autocast.
        accumulate: micro-batches per step.
        rebuilt: replaces the blocks of the model.
    """

    name: str
    kind: str
    seed: int
    steps: int = 300
    lr: float = 2e-3
    schedule: Callable[[int, int], float] = decay
    batch: int = 16
    data: Callable[[int, Batch], Batch] | None = None
    dropout: float = 0.0
    samples: int | None = None
    autocast: bool = False
    accumulate: int = 1
    rebuilt: Callable[[Any], None] | None = None

    def model(self) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model: Any = _BUILD[self.kind](self.seed)
            if self.rebuilt is not None:
                self.rebuilt(model)
        if self.dropout and self.kind == "bert":
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = self.dropout
        elif self.dropout:
            for block in model.blocks:
                block.mlp.append(nn.Dropout(self.dropout))
        return model.train()

    def batches(self, *, held_out: bool = False) -> Iterator[Batch]:
        """For ever; the held-out part shares no sample with the other."""
        inputs, targets = _DATA[self.kind]()
        cut = len(inputs) * 4 // 5
        part = slice(cut, None) if held_out else slice(0, min(cut, self.samples or cut))
        inputs, targets = inputs[part], targets[part]
        generator = torch.Generator().manual_seed(1000 + self.seed)
        step = 0
        while True:
            chosen = torch.randint(0, len(inputs), (self.batch,), generator=generator)
            batch = _CALL[self.kind](inputs[chosen], targets[chosen])
            yield batch if self.data is None else self.data(step, batch)
            step += 1

    def loss(self, model: Any, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            output = model(*batch.args, **batch.kwargs)
        if self.kind == "minilm":
            return _contrast(output.last_hidden_state.float(), batch.kwargs["attention_mask"])
        logits = getattr(output, "logits", output).float()
        return F.cross_entropy(logits.flatten(0, -2), batch.targets.flatten(), ignore_index=IGNORED)


def _contrast(hidden: Tensor, mask: Tensor) -> Tensor:
    """The first half of the sentences against the second half, which follow them in the text."""
    weights = mask.float().unsqueeze(-1)
    pooled = F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)
    first, second = pooled.chunk(2)
    return F.cross_entropy(first @ second.T / 0.05, torch.arange(len(first)))


_BUILD: dict[str, Callable[[int], Any]] = {
    "vit": lambda seed: tiny_vit(patch=2, dim=32, depth=4, seed=seed),
    "gpt": lambda seed: tiny_gpt(vocabulary=256, context=CONTEXT, dim=32, depth=4, seed=seed),
    "seq2seq": lambda _seed: EncoderDecoder(vocabulary=VALUES, context=2 * LENGTH),
    "bert": lambda _seed: bert(VALUES, 4 * LENGTH),
    "minilm": lambda _seed: trained_minilm(),
}


@cache
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    images = torch.as_tensor(pixels, dtype=torch.float32).unflatten(1, (1, 8, 8))
    return (images - images.mean()) / images.std(), torch.as_tensor(labels)


@cache
def _bytes() -> tuple[Tensor, Tensor]:
    text = torch.tensor(list("".join(topics.topics.values()).encode()[:200_000]))
    windows = text.unfold(0, CONTEXT + 1, 16)
    return windows[:, :-1], windows[:, 1:]


@cache
def _sequences() -> tuple[Tensor, Tensor]:
    """Random values, and the same sorted."""
    values = torch.randint(1, VALUES, (20_000, LENGTH), generator=torch.Generator().manual_seed(0))
    return values, values.sort(dim=1).values


@cache
def _sentences() -> tuple[Tensor, Tensor]:
    """Token ids of sentences and of those that follow them, padded with 0."""
    from models import minilm_ids

    text = [line.strip() for topic in topics.topics.values() for line in topic.replace("\n", " ").split(". ")]
    ids = minilm_ids([line for line in text if 20 < len(line) < 200][:1500])
    return ids[:-1], ids[1:]


_DATA: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "vit": _digits,
    "gpt": _bytes,
    "seq2seq": _sequences,
    "bert": _sequences,
    "minilm": _sentences,
}


def _to_decoder(inputs: Tensor, targets: Tensor) -> Batch:
    return Batch((inputs, F.pad(targets[:, :-1], (1, 0))), targets)


def _to_bert(inputs: Tensor, targets: Tensor) -> Batch:
    return Batch((), targets, {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)})


def _to_minilm(inputs: Tensor, targets: Tensor) -> Batch:
    ids = torch.cat([inputs, targets])
    ids = ids[:, : int((ids > 0).sum(1).max())]
    return Batch((), ids, {"input_ids": ids, "attention_mask": (ids > 0).long()})


def _plain(inputs: Tensor, targets: Tensor) -> Batch:
    return Batch((inputs,), targets)


_CALL: dict[str, Callable[[Tensor, Tensor], Batch]] = {
    "vit": _plain,
    "gpt": _plain,
    "seq2seq": _to_decoder,
    "bert": _to_bert,
    "minilm": _to_minilm,
}


def restarts(step: int, _steps: int) -> float:
    """The rate falls to a tenth and jumps back, every 100 steps."""
    return min(1.0, (step + 1) / 20) * (1 - 0.9 * (step % 100) / 100)


def shifted(step: int, batch: Batch) -> Batch:
    """Other data from step 200 on: negative images, bytes in reverse order, small values only."""
    if step < 200:
        return batch
    first = batch.kwargs.get("input_ids", batch.args[0] if batch.args else None)
    assert first is not None
    if first.is_floating_point():
        return replace(batch, args=(-first,))
    if batch.targets.shape == first.shape and not batch.kwargs and len(batch.args) == 1:
        return replace(batch, args=(first.flip(1),))
    values = first % 5 + 1
    make = _to_bert if batch.kwargs else _to_decoder
    return make(values, values.sort(1).values)


def short_now_and_then(step: int, batch: Batch) -> Batch:
    """Every seventh batch has three samples, as the last one of an epoch may."""
    if step % 7 != 6:
        return batch
    kwargs = {name: value[:3] for name, value in batch.kwargs.items()}
    return Batch(tuple(value[:3] for value in batch.args), batch.targets[:3], kwargs)


def mixed_lengths(step: int, batch: Batch) -> Batch:
    """Bytes: every seventh batch is a third as long. Sequences to be sorted: each has a length of its own, the rest is padding."""
    if not batch.kwargs and len(batch.args) == 1:
        size = CONTEXT // 3 if step % 7 == 6 else CONTEXT
        return Batch((batch.args[0][:, :size],), batch.targets[:, :size])
    return _padded(step, batch, LENGTH // 4, LENGTH, LENGTH)


def heavy_padding(step: int, batch: Batch) -> Batch:
    """Three quarters of all tokens are padding."""
    return _padded(step, batch, LENGTH // 4, 3 * LENGTH // 4, 2 * LENGTH)


def _padded(step: int, batch: Batch, shortest: int, longest: int, width: int) -> Batch:
    values = batch.kwargs["input_ids"] if batch.kwargs else batch.args[0]
    lengths = torch.randint(shortest, longest + 1, (len(values), 1), generator=torch.Generator().manual_seed(step))
    values = F.pad(values, (0, width - values.shape[1]))
    real = torch.arange(width) < lengths
    # Padding sorts behind every value.
    ordered = torch.where(real, values, VALUES).sort(1).values
    values, targets = torch.where(real, values, 0), torch.where(real, ordered, IGNORED)
    if batch.kwargs:
        return Batch((), targets, {"input_ids": values, "attention_mask": real.long()})
    start = F.pad(torch.where(real, ordered, 0)[:, :-1], (1, 0))
    return Batch((values, start), targets, {"src_key_padding_mask": ~real, "tgt_key_padding_mask": ~real})


def nulls(kind: str, seed: int) -> tuple[Training, ...]:
    """Healthy runs of a small model."""
    plain = Training("warm-up and decay", kind, seed, steps=260)
    changes: dict[str, dict[str, Any]] = {
        "learning-rate restarts": {"schedule": restarts},
        "rate x 2, no warm-up": {"lr": 4e-3, "schedule": constant},
        "data shift": {"data": shifted, "schedule": restarts},
        "short last batch": {"data": short_now_and_then},
        "dropout .5": {"dropout": 0.5},
        "bf16": {"autocast": True},
        "accumulation": {"accumulate": 2, "batch": 8},
    }
    if kind != "vit":
        changes["mixed lengths"] = {"data": mixed_lengths}
    if kind in ("seq2seq", "bert"):
        changes["heavy padding"] = {"data": heavy_padding}
    if kind == "vit":
        changes["DeepNorm, 24 layers"] = {"rebuilt": deep_norm, "lr": 1e-3}
    return (plain, *(replace(plain, name=name, **change) for name, change in changes.items()))


def deep_norm(model: Any) -> None:
    post_norm(model, 24, deep=True)


def fine_tune(seed: int) -> Training:
    """A trained MiniLM learns which sentence follows which."""
    return Training("MiniLM fine-tune", "minilm", seed, steps=240, lr=5e-5, batch=4)
