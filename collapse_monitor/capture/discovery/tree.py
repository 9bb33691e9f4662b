"""The model as a tree of dotted names: which are containers, which belong to one class, how much weight they hold."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_PREFIXES = ("module.", "base_model.model.")


def canonical(name: str) -> str:
    """A module path without what wrappers put into it (compile, FSDP, DDP, checkpoint, adapters)."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    plain = ".".join(parts)
    for prefix in _PREFIXES:
        while plain.startswith(prefix):
            plain = plain[len(prefix) :]
    return plain


def prefixes(name: str) -> Iterator[str]:
    """The name itself, its parent, ... down to the first part; innermost first."""
    parts = name.split(".") if name else []
    for length in range(len(parts), 0, -1):
        yield ".".join(parts[:length])


def parent_of(name: str) -> str:
    return name.rpartition(".")[0]


class ModuleTree:
    """Look-ups by dotted name; a module registered under several names is found under each."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self._weights: dict[str, int] = {}

    def is_container(self, name: str) -> bool:
        return isinstance(self._plain(name), _CONTAINERS)

    def class_of(self, name: str) -> type | None:
        module = self._plain(name)
        return None if module is None else type(module)

    def children(self, name: str) -> list[str]:
        module = self.modules.get(name)
        if module is None:
            return []
        return [f"{name}.{child}" if name else child for child, _ in module.named_children()]

    def weight(self, name: str) -> int:
        """Number of parameters below."""
        if name not in self._weights:
            module = self.modules.get(name)
            self._weights[name] = sum(p.numel() for p in module.parameters()) if module is not None else 0
        return self._weights[name]

    def _plain(self, name: str) -> nn.Module | None:
        module = self.modules.get(name)
        for wrapper in _WRAPPERS:
            inner = getattr(module, wrapper, None) if module is not None else None
            if isinstance(inner, nn.Module):
                module = inner
        return module
