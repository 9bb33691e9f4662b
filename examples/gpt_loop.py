"""A byte-level GPT on the text of Python's own documentation, in a plain training loop watched by `Monitor`.

    python examples/gpt_loop.py
    tensorboard --logdir logs/gpt

The text is `pydoc_data.topics`, which ships with Python: what `help("if")` prints.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

import collapse_monitor as cm


class Block(nn.Module):
    """Pre-norm causal attention and MLP, both added to the stream."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x))
        q, k, v = rearrange(qkv, "batch token (three head dim) -> three batch head token dim", three=3, head=self.heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(rearrange(attended, "batch head token dim -> batch token (head dim)"))
        return x + self.mlp(self.norm2(x))


class ByteGPT(nn.Module):
    """Predicts the next byte from those before it."""

    def __init__(self, *, context: int = 128, dim: int = 96, depth: int = 6, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(256, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10, help="sample each so many steps")
    parser.add_argument("--logdir", type=Path, default=Path("logs/gpt"))
    parser.add_argument("--short", action="store_true", help="20 steps: enough to see that it runs")
    options = parser.parse_args()

    context, batch = 128, 16
    torch.manual_seed(0)
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    model = ByteGPT(context=context)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    writer = SummaryWriter(options.logdir)
    sinks = [cm.TensorBoardSink(writer), cm.JSONLSink(options.logdir / "collapse.jsonl"), cm.ConsoleSink()]

    # Steps this short cannot pay for a reading out of 1 % of their time: this toy switches the budget off.
    with cm.Monitor(model, every=options.every, sinks=sinks, budget=None) as monitor:
        for step in range(20 if options.short else options.steps):
            starts = torch.randint(len(text) - context - 1, (batch,))
            windows = torch.stack([text[start : start + context + 1] for start in starts])

            with monitor.observe(step):  # listens on every tenth step; on the others it does nothing
                logits = model(windows[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
                loss.backward()  # inside, so that the gradients are read too
            optimiser.step()
            optimiser.zero_grad()

            monitor.log(step, train_loss=loss)
            if step % options.every == 0:
                writer.add_scalar("train_loss", loss.item(), step)
                print(f"step {step:4d}  loss {loss.item():.3f}")

    writer.close()
    print(monitor.latest.table())
    run = cm.read(options.logdir / "collapse.jsonl")
    print(f"{len(run.steps)} snapshots in {options.logdir / 'collapse.jsonl'}")
    print(f"tensorboard --logdir {options.logdir}")


if __name__ == "__main__":
    main()
