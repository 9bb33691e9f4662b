"""Stand-ins for attention packages that need an accelerator: their names and signatures, computed slowly inside an opaque function.

Every call leaves the maps it used, [sequence][head, query, key] in double precision and element by element, in the package's `MAPS`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

SLOW = '''
import math
import torch

MAPS = []


class Opaque(torch.autograd.Function):
    """What happens in here no function mode sees, like a compiled kernel."""

    @staticmethod
    def forward(ctx, compute, *tensors):
        ctx.compute = compute
        ctx.save_for_backward(*tensors)
        with torch._C.DisableTorchFunction():
            return compute(*[tensor.detach() for tensor in tensors])

    @staticmethod
    def backward(ctx, gradient):
        with torch._C.DisableTorchFunction(), torch.enable_grad():
            tensors = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            return (None, *torch.autograd.grad(ctx.compute(*tensors), tensors, gradient))


def one(q, k, v, scale, sees, bias, cap, sink=None):
    """[query, head, dim] of one sequence. `sees(i, j)`: whether a query sees a key; `bias(h, i, j)`: what is added to its score."""
    heads = range(q.shape[1])
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    scores = torch.einsum("ihd,jhd->hij", q, k).double() * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    added = torch.tensor([[[bias(h, i, j) for j in range(len(k))] for i in range(len(q))] for h in heads], dtype=torch.double)
    hidden = torch.tensor([[not sees(i, j) for j in range(len(k))] for i in range(len(q))])
    scores = (scores + added).masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1)
    MAPS[-1].append(weights.detach())
    if sink is not None:
        column = sink.double()[:, None, None].expand(-1, len(q), 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return torch.einsum("hij,jhd->ihd", weights.nan_to_num(), v.double()).to(q.dtype)


def each(q, k, v, scale, sees, bias, cap, sink=None):
    """[sequence, query, head, dim]; `sees` and `bias` also get the number of the sequence, and the lengths."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale

    def compute(q, k, v):
        MAPS.append([])
        parts = []
        for b in range(len(q)):
            n, m = q.shape[1], k.shape[1]
            parts.append(one(q[b], k[b], v[b], scale, lambda i, j: sees(b, i, j, n, m), lambda h, i, j: bias(b, h, i, j, n, m), cap, sink))
        return torch.stack(parts)

    return Opaque.apply(compute, q, k, v)


def packed(q, k, v, starts_q, starts_k, scale, sees, bias, cap):
    """[token, head, dim] with the sequences behind each other."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    a, b = starts_q.tolist(), starts_k.tolist()

    def compute(q, k, v):
        MAPS.append([])
        parts = []
        for s in range(len(a) - 1):
            n, m = a[s + 1] - a[s], b[s + 1] - b[s]
            parts.append(
                one(
                    q[a[s] : a[s + 1]], k[b[s] : b[s + 1]], v[b[s] : b[s + 1]], scale,
                    lambda i, j: sees(s, i, j, n, m), lambda h, i, j: bias(s, h, i, j, n, m), cap,
                )
            )
        return torch.cat(parts)

    return Opaque.apply(compute, q, k, v)
'''

FLASH = """
from flash_attn.slow import each, packed

__version__ = "2.8.3"


def band(causal, window):
    left, right = window

    def sees(b, i, j, n, m):
        at = i + m - n
        return (left < 0 or j >= at - left) and (right < 0 or j <= at + right) and (not causal or j <= at)

    return sees


def distance(slopes):
    def bias(b, h, i, j, n, m):
        if slopes is None:
            return 0.0
        return -float(slopes[h] if slopes.ndim == 1 else slopes[b, h]) * abs(i + m - n - j)

    return bias


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                    deterministic=False, return_attn_probs=False):
    return each(q, k, v, softmax_scale, band(causal, window_size), distance(alibi_slopes), softcap)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False):
    return each(q, *kv.unbind(2), softmax_scale, band(causal, window_size), distance(alibi_slopes), softcap)


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False):
    return each(*qkv.unbind(2), softmax_scale, band(causal, window_size), distance(alibi_slopes), softcap)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                           causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                           return_attn_probs=False, block_table=None):
    return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, band(causal, window_size), distance(alibi_slopes), softcap)


def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                                    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                                    return_attn_probs=False):
    k, v = kv.unbind(1)
    return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, band(causal, window_size), distance(alibi_slopes), softcap)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                                     softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False):
    return packed(*qkv.unbind(1), cu_seqlens, cu_seqlens, softmax_scale, band(causal, window_size), distance(alibi_slopes), softcap)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None):
    raise NotImplementedError
"""

FLASH_THREE = """
from flash_attn.flash_attn_interface import band
from flash_attn.slow import each, packed


def nothing(*_):
    return 0.0


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
                    return_attn_probs=False):
    out = each(q, k, v, softmax_scale, band(causal, window_size), nothing, softcap)
    return (out, out.detach().sum(-1)) if return_attn_probs else out


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
                           softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                           window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
                           sm_margin=0, return_attn_probs=False):
    return packed(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, band(causal, window_size), nothing, softcap)
"""

FLASH_FOUR = """
from flash_attn.flash_attn_interface import band
from flash_attn.slow import each


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
                    pack_gqa=None, deterministic=False, mask_mod=None, return_lse=False):
    window = tuple(-1 if side is None else side for side in window_size)
    out = each(q, k, v, softmax_scale, band(causal, window), lambda *_: 0.0, softcap, learnable_sink)
    return out, None
"""

XFORMERS = """
import torch
from flash_attn.slow import each, packed


class AttentionBias:
    pass


class LowerTriangularMask(AttentionBias):
    def sees(self, b, i, j, n, m):
        return j <= i


class LowerTriangularFromBottomRightMask(AttentionBias):
    def sees(self, b, i, j, n, m):
        return j <= i + m - n


class LowerTriangularFromBottomRightLocalAttentionMask(AttentionBias):
    def __init__(self, window_size):
        self._window_size = window_size

    def sees(self, b, i, j, n, m):
        return i + m - n - self._window_size < j <= i + m - n


class LocalAttentionFromBottomRightMask(AttentionBias):
    def __init__(self, window_left, window_right):
        self.window_left, self.window_right = window_left, window_right

    def sees(self, b, i, j, n, m):
        return -self.window_left <= j - (i + m - n) <= self.window_right


class Seqinfo:
    def __init__(self, lengths):
        self.seqstart_py = [0]
        for length in lengths:
            self.seqstart_py.append(self.seqstart_py[-1] + length)
        self.seqstart = torch.tensor(self.seqstart_py, dtype=torch.int32)
        self.max_seqlen, self.min_seqlen = max(lengths), min(lengths)


class BlockDiagonalMask(AttentionBias):
    def __init__(self, lengths):
        self.q_seqinfo = self.k_seqinfo = Seqinfo(lengths)

    def sees(self, b, i, j, n, m):
        return True


class BlockDiagonalCausalMask(BlockDiagonalMask):
    def sees(self, b, i, j, n, m):
        return j <= i


class PagedBlockDiagonalMask(AttentionBias):
    def sees(self, b, i, j, n, m):
        return True


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    sees, added = lambda *_: True, lambda *_: 0.0
    if isinstance(attn_bias, AttentionBias):
        sees = attn_bias.sees
    if isinstance(attn_bias, BlockDiagonalMask):
        starts = attn_bias.q_seqinfo.seqstart
        return packed(query[0], key[0], value[0], starts, starts, scale, sees, added, 0)[None]
    if isinstance(attn_bias, torch.Tensor):
        single = query.ndim == 3
        added = lambda b, h, i, j, n, m: float(attn_bias[b, i, j] if single else attn_bias[b, h, i, j])
    if query.ndim == 3:
        return each(query[:, :, None], key[:, :, None], value[:, :, None], scale, sees, added, 0)[:, :, 0]
    if query.ndim == 5:
        groups = [part.flatten(2, 3) for part in (query, key, value)]
        return each(*groups, scale, sees, added, 0).unflatten(2, query.shape[2:4])
    return each(query, key, value, scale, sees, added, 0)
"""

FILES = {
    "flash_attn/slow.py": SLOW,
    "flash_attn/flash_attn_interface.py": FLASH,
    "flash_attn/__init__.py": "from flash_attn.flash_attn_interface import *\n",
    "flash_attn/cute/interface.py": FLASH_FOUR,
    "flash_attn/cute/__init__.py": "from flash_attn.cute.interface import flash_attn_func\n",
    "flash_attn/bert_padding.py": "",
    "flash_attn_interface.py": FLASH_THREE,
    "xformers/__init__.py": "",
    "xformers/ops/__init__.py": "from xformers.ops.fmha import *\n",
    "xformers/ops/fmha.py": XFORMERS,
}


@contextmanager
def packages(folder: Path) -> Iterator[ModuleType]:
    """Write the packages into a folder and make them importable; none is left in `sys.modules`. Yields what they compute with."""
    for name, source in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield importlib.import_module("flash_attn.slow")
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_interface", "xformers")]:
            del sys.modules[name]
