"""Write docs/models.md: what is found in every model of the test zoo, and how it is read.

Run from the root of the repository, with the zoo's libraries installed: `python docs/generate_models.py`
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from collapse_monitor import Site, find_sites  # noqa: E402
from tests.zoo.catalogue import SHELVES, installed  # noqa: E402
from tests.zoo.registry import Model, Shelf, seed_everything  # noqa: E402

PAGE = ROOT / "docs" / "models.md"

HEAD = """\
# Models

Which models are read, and how. This page is written by `python docs/generate_models.py` from one forward of every model in the
test zoo; the tests compare the same models with a truth written by hand from their architecture, their rows with the maps that their
kernels used, and their training, bit by bit, with a run that nobody watched.

Nothing below is known to the package by name: blocks and attention are found by following the data through one forward. A model
that is not on this page is read in the same way. `find_sites(model, *args)` shows what is found in yours.

- **Blocks** are executions of a unit that carries the residual stream; a block that runs three times counts three times.
- **Attentions** are executions of a distribution over tokens; **cross** of them take their keys from another sequence.
- **Heads** and **queries × keys** are those of the first attention.
- **Read from** is where the distribution comes from: `sdpa` and `flex` are fused kernels, whose rows are computed again from the
  arguments they got, as are those of `external` ones (see below); `softmax` and `exp` are written out in the model, and what they
  returned is read.
"""

TAIL = """\
## What is not read, and why

A normalisation that is no attention over tokens is left out, and `snapshot.missing` or the list of sites says nothing of it:

| seen | why it is no attention |
|---|---|
| mixture-of-experts routers, codebooks, memory banks | the keys are weights, not tokens |
| squeeze-excite and selective kernels, sequence pooling, separable attention, predicted sampling weights of deformable attention | one linear layer scores tokens or channels: there are no keys |
| cross-covariance and channel attention | features look at features; its blocks are found and read all the same |
| InfoNCE, class and vocabulary softmax, pointers | nothing is averaged with the weights |

Attention without a distribution has no rows to read. Its blocks are found and all block readings go on:

| seen | why there are no rows |
|---|---|
| linear and kernel attention, state-space layers, recurrences, Fourier and MLP mixing, pooling | no matrix of weights exists |
| sigmoid attention | rows are not normalised |
| graph attention by scatter | weights belong to edges, not to rows |

What remains:

- Several maps in one attention (differential attention, global and local parts): the first one is read, and the snapshot says so.
  Queries that come in chunks over the same keys, or over all keys up to the chunk, are read as one map; the ratio of the gradients of q
  and v is that of the first chunk.
- A map that heads are mixed in after the softmax (talking heads, re-attention) is read before the mixing.
- Slot attention, whose softmax runs over the queries: rows come with the second sampled step, since only the first one shows it.
- Nested tensors in the jagged layout are read sequence by sequence through `scaled_dot_product_attention`; other nested tensors are not.
- Kernels that PyTorch cannot see into (compiled extensions, TorchScript): blocks are read, attention is not, but for the functions below.
  A scripted function between the scores and the softmax does no harm.
- Compiled models are read from a separate forward; see `source` in the [reference](reference.md).

### Attention functions of other packages

If one of these packages is loaded, its functions are heard where the model calls them (read from `external`), also packed sequences and
operands in one tensor, and their rows are computed again from the arguments. An argument that is not listed, at another value than its
default, makes the site missing, with the reason. They are tested with functions of the same signature that run on a CPU.

| package | functions | arguments that are understood |
|---|---|---|
| flash-attn 2, 3 and 4 | `flash_attn_func`, `flash_attn_kvpacked_func`, `flash_attn_qkvpacked_func` and their `varlen` forms, also through Hugging Face `flash_attention_2` | scale, causal, window, soft cap, ALiBi slopes, sinks, offsets of sequences, grouped queries |
| xformers | `memory_efficient_attention` | scale; a tensor as bias; causal, local and block-diagonal masks |
"""  # noqa: E501 - a row of a table is one line


def look(model: Model) -> tuple[Site, ...]:
    """What is found in one forward."""
    module, (args, kwargs) = model.made(), model.call()
    seed_everything(2)
    with torch.set_grad_enabled(model.trains), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return find_sites(module, *args, **kwargs)


def row_of(model: Model, sites: tuple[Site, ...]) -> str:
    """One line of the table."""
    attentions = [site for site in sites if site.kind == "attention"]
    cells = [model.name, str(len(sites) - len(attentions)), str(len(attentions))]
    if attentions:
        first = attentions[0]
        cross = sum(bool(site.cross) for site in attentions)
        how = " ".join(f"`{how}`" for how in sorted({site.how for site in attentions}))
        cells += [str(cross or ""), str(first.heads), f"{first.query_length} × {first.key_length}{', causal' if first.causal else ''}", how]
    else:
        cells += ["", "", "", ""]
    return "| " + " | ".join([*cells, model.note]) + " |"


def table_of(shelf: Shelf) -> Iterator[str]:
    """The section of one library."""
    yield f"## {shelf.library}\n"
    yield "| model | blocks | attentions | cross | heads | queries × keys | read from | |"
    yield "|---|---|---|---|---|---|---|---|"
    for model in shelf.models:
        yield row_of(model, look(model))
    yield ""


def main() -> None:
    absent = [shelf.library for shelf in SHELVES if not installed(shelf.library)]
    if absent:
        raise SystemExit(f"not installed: {', '.join(absent)}; pip install -e '.[dev,zoo]'")
    torch.set_num_threads(1)
    lines = [line for shelf in SHELVES for line in table_of(shelf)]
    PAGE.write_text("\n".join([HEAD, *lines, TAIL]))


if __name__ == "__main__":
    main()
