"""Popular claims about collapse, put to the test at initialisation: the figures of docs/claims.md, in a few seconds.

    python benchmarks/claims.py

Everything is seeded and runs in double precision on the CPU. Widths and depths are small where the effect does not depend on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from collapse_monitor import metrics

TOKENS, WIDTH, HEADS = 64, 64, 4
Tokens = Float[Tensor, "token dim"]


def weights(*shape: int, seed: int, gain: float = 1.0) -> Tensor:
    """Gaussian, variance gain^2 / fan-in."""
    return gain * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) / math.sqrt(shape[0])


def attention(x: Tokens, matrices: tuple[Tensor, Tensor, Tensor], causal: bool = False) -> Tokens:
    """Several heads, without an output projection."""
    q, k, v = ((x @ matrix).unflatten(-1, (HEADS, -1)).transpose(0, 1) for matrix in matrices)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(0, 1).flatten(1)


def matrices(layer: int, width: int = WIDTH) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (weights(width, width, seed=3 * layer + part) for part in range(3))
    return q, k, v


def nearly_alike(residual: float) -> Tokens:
    """Tokens that share one direction and differ by so much."""
    common = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return common + residual * torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


def slope(reading: Callable[[float], float]) -> float:
    """d log(reading) / d log(residual) between 1e-3 and 1e-4."""
    return math.log10(reading(1e-3) / reading(1e-4))


def residual(x: Tokens) -> float:
    return float(metrics.relative_residual(x))


def cosine(x: Tokens) -> float:
    return float(metrics.token_similarity(x))


def rate(causal: bool) -> float:
    """How the residual after one attention layer depends on the one before: 3 is a doubly exponential fall over layers, 1 exponential."""
    return slope(lambda size: residual(attention(nearly_alike(size), matrices(0), causal)))


def gradient_rate(of: int) -> float:
    """How the gradient of W_Q (0), W_K (1) or W_V (2) depends on what is left between tokens."""
    readout = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)

    def size(left: float) -> float:
        learned = tuple(matrix.requires_grad_() for matrix in matrices(0))
        assert len(learned) == 3
        (attention(nearly_alike(left), learned) * readout).sum().backward()
        gradient = learned[of].grad
        assert gradient is not None
        return float(gradient.norm())

    return slope(size)


def after_layers(depth: int, skip: bool) -> float:
    """Relative residual of independent tokens after layers of attention alone, or each with its skip."""
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for layer in range(depth):
        branch = attention(x, matrices(layer))
        x = x + branch if skip else branch
    return residual(x)


def deep(norm: str, depth: int = 128, width: int = 128) -> float:
    """Token cosine after 128 blocks of attention and a ReLU MLP, at initialisation."""
    x = torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    skip, gain = ((2 * depth) ** 0.25, (8 * depth) ** -0.25) if norm == "deepnorm" else (1.0, 1.0)

    def normed(y: Tokens) -> Tokens:
        return F.layer_norm(y, (width,))

    for layer in range(depth):
        q, k, v = matrices(layer, width)
        up = weights(width, 4 * width, seed=10_000 + layer, gain=gain)
        down = weights(4 * width, width, seed=20_000 + layer, gain=gain)
        out = weights(width, width, seed=30_000 + layer, gain=gain)

        def attend(y: Tokens, q: Tensor = q, k: Tensor = k, v: Tensor = v, out: Tensor = out) -> Tokens:
            return attention(y, (q, k, v * gain)) @ out

        def mix(y: Tokens, up: Tensor = up, down: Tensor = down) -> Tokens:
            return F.relu(y @ up) @ down

        for branch in (attend, mix):
            x = x + branch(normed(x)) if norm == "pre" else normed(skip * x + branch(x))
    return cosine(x)


def cosine_after_mlp(activation: Callable[[Tensor], Tensor], gain: float, layers: int = 4) -> float:
    """Token cosine after MLPs without skips, of tokens that start with a cosine of one half."""
    x = nearly_alike(1.0)
    for layer in range(layers):
        width = 4 * WIDTH
        x = activation(x @ weights(x.shape[1], width, seed=40_000 + layer, gain=gain))
        x = x @ weights(width, WIDTH, seed=50_000 + layer, gain=gain)
    return cosine(x)


def offset(reading: Callable[[Tokens], Tensor], by: float = 20.0) -> float:
    """A reading of independent tokens of which one dimension has a large common offset."""
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    x[:, 0] += by
    return float(reading(x))


def uniformity_at_initialisation() -> float:
    """Attention of a fresh layer on independent tokens: logits of small spread."""
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    q, k = (x @ weights(WIDTH, WIDTH, seed=part, gain=0.5) for part in range(2))
    maps = (q @ k.mT / WIDTH**0.5).softmax(-1)
    return float(metrics.attention_uniformity(maps[None, None]).mean())


FIGURES: dict[str, Callable[[], float]] = {
    "rate of one attention layer, bidirectional": lambda: rate(causal=False),
    "rate of one attention layer, causal": lambda: rate(causal=True),
    "residual after 4 layers of attention alone": lambda: after_layers(4, skip=False),
    "residual after 4 layers of attention with skips": lambda: after_layers(4, skip=True),
    "rate of the gradient of W_Q": lambda: gradient_rate(0),
    "rate of the gradient of W_V": lambda: gradient_rate(2),
    "cosine before the MLPs": lambda: cosine(nearly_alike(1.0)),
    "cosine after 4 ReLU MLPs": lambda: cosine_after_mlp(F.relu, 2**0.5),
    "cosine after 4 tanh MLPs with large weights": lambda: cosine_after_mlp(torch.tanh, 4.0),
    "cosine after 128 blocks, Post-LN": lambda: deep("post"),
    "cosine after 128 blocks, Pre-LN": lambda: deep("pre"),
    "cosine after 128 blocks, DeepNorm": lambda: deep("deepnorm"),
    "cosine of tokens with one offset dimension": lambda: offset(metrics.token_similarity),
    "effective rank of the same tokens": lambda: offset(metrics.effective_rank),
    "effective rank without the offset": lambda: offset(metrics.effective_rank, by=0.0),
    "uniformity of fresh attention": uniformity_at_initialisation,
}


def main() -> None:
    for name, figure in FIGURES.items():
        print(f"{name:50} {figure():.3g}", flush=True)


if __name__ == "__main__":
    main()
