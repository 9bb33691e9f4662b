"""Finding the tensors in what modules take and return, and telling which of them can be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from collapse_monitor.capture.packing import is_jagged
from collapse_monitor.observation import reason_against

Path = tuple[object, ...]
"""Where a tensor sits in a returned structure: indices, keys and field names."""

_DEPTH = 4


def leaves(structure: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Every tensor in nested tuples, lists, mappings and dataclasses, with its path, in order."""
    if isinstance(structure, Tensor):
        yield path, structure
    elif len(path) >= _DEPTH or structure is None or isinstance(structure, str | bytes | int | float):
        return
    elif isinstance(structure, Mapping):
        for key, item in structure.items():
            yield from leaves(item, (*path, key))
    elif isinstance(structure, tuple | list):
        for index, item in enumerate(structure):
            yield from leaves(item, (*path, index))
    elif dataclasses.is_dataclass(structure):
        for entry in dataclasses.fields(structure):
            yield from leaves(getattr(structure, entry.name, None), (*path, entry.name))


def at_path(structure: Any, path: Path) -> Tensor | None:
    """The tensor at `path`, None where the structure has changed."""
    for step in path:
        try:
            indexed: Any = structure
            structure = indexed[step] if isinstance(structure, Mapping | tuple | list) else getattr(structure, str(step))
        except (LookupError, AttributeError, TypeError):
            return None
    return structure if isinstance(structure, Tensor) else None


def is_plain(tensor: Tensor) -> bool:
    """A dense tensor with values that belongs to this process: not fake, meta, sparse, quantised, distributed or inside vmap."""
    return (
        (type(tensor) is Tensor or type(tensor) is torch.nn.Parameter or type(tensor) is torch.nn.Buffer)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and not isinstance(tensor, FakeTensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def is_sampled(tensor: Tensor) -> bool:
    """Readable, or a jagged tensor of readable values: its tokens can be sampled."""
    return is_readable(tensor.values() if is_jagged(tensor) else tensor)


def is_readable(tensor: Tensor) -> bool:
    """Plain, floating point, with something in it."""
    return reason_against(tensor) is None
