"""What the user chose: which sites, which tokens, and from which forward."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from collapse_monitor.capture.compiled import CompileCheck, outside_graphs
from collapse_monitor.capture.discovery.tree import canonical
from collapse_monitor.capture.masks import argument, read_mask
from collapse_monitor.capture.plan import BlockPlan, Place, Plan
from collapse_monitor.capture.sampling import default_layout
from collapse_monitor.records import Site

TokenMask = str | Callable[[tuple[Any, ...], dict[str, Any]], Tensor] | None


def _has_fused_evaluation(model: nn.Module) -> bool:
    """Whether torch may run a fused encoder kernel here: it does so in evaluation mode, and not while anything listens."""
    return any(not module.training and isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer) for module in model.modules())


class Selection:
    """The user's choice, checked against the model once.

    Raises:
        ValueError: `sites` names something that is not a module of the model, or `token_mask` is neither a name nor a function.
    """

    def __init__(self, model: nn.Module, sites: Sequence[str | Site] | None, token_mask: TokenMask, source: str) -> None:
        if token_mask is not None and not isinstance(token_mask, str) and not callable(token_mask):
            raise ValueError(
                f"token_mask={token_mask!r}: give the name of a keyword of the model call, or a function (args, kwargs) -> mask"
            )
        if isinstance(sites, str | Site):
            raise ValueError(f"sites={sites!r}: give a list, sites=[{sites!r}]")
        if sites is not None and (not isinstance(sites, Iterable) or any(not isinstance(site, str | Site) for site in sites)):
            raise ValueError(f"sites={sites!r}: give a list of names of modules, or of Site records as find_sites returns them")
        self._token_mask, self.source = token_mask, source
        self._compiled = CompileCheck()
        self._names: tuple[str, ...] | None = None
        if sites is not None:
            known = {canonical(name): name for name, _ in model.named_modules()}
            self._names = tuple(_checked(site, known) for site in sites)

    def probes(self, model: nn.Module) -> bool:
        """Whether to read a separate forward: asked for, or listening to the model's own would change what it computes."""
        return self.source == "probe" or (self.source == "auto" and (self._compiled(model) or _has_fused_evaluation(model)))

    def callers(self, model: nn.Module) -> list[nn.Module]:
        """Whose calls are the model's: what `torch.compile` made of it (a hook further in would be compiled), else the model itself."""
        return self._compiled.wrappers or [model]

    def parts(self, model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        """What may be called in place of the model, as training steps do that use its parts: eager modules and compiled ones.

        None of them runs inside a compiled graph, where hooks would change what is compiled.
        """
        return ([], []) if self._compiled.wrappers else outside_graphs(model)

    def token_mask(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """True at real tokens, where the user said how to tell.

        Raises:
            ValueError: the named keyword was not in the call.
        """
        if self._token_mask is None:
            return None
        if isinstance(self._token_mask, str):
            mask: object = argument(module, self._token_mask, args, kwargs)
            if mask is None:
                raise ValueError(f"token_mask={self._token_mask!r}, but the model was not called with a tensor of that name")
        else:
            mask = self._token_mask(args, kwargs)
        if mask is None:
            return None  # this call has no padding
        if not isinstance(mask, Tensor) or mask.ndim < 2:
            shown = f"a tensor of shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
            raise ValueError(f"token_mask gave {shown}: a tensor [sequences, tokens] that is True at real tokens is needed")
        return read_mask(mask.detach().reshape(mask.shape[0], -1), padding=False)

    def apply(self, plan: Plan, model: nn.Module) -> Plan:
        """The plan restricted to the chosen sites; a chosen module that discovery did not find is read as a block."""
        if self._names is None:
            return plan
        blocks = [block for block in plan.blocks if self._chosen(block.site.name)]
        attentions = [attention for attention in plan.attentions if self._chosen(attention.site.name)]
        found = {canonical_execution(site.name) for site in (*(p.site for p in plan.blocks), *(p.site for p in plan.attentions))}
        raw = {canonical(name): name for name, _ in model.named_modules()}
        for order, name in enumerate(self._names):
            if not any(site == name or site.startswith(name + ".") for site in found):
                place = Place(raw[name], 0, "output")
                blocks.append(BlockPlan(("block", 10**9 + order, order), Site(name, "block", 0), raw[name], place, None, default_layout(3)))
        blocks = [replace(block, site=replace(block.site, layer=layer)) for layer, block in enumerate(blocks)]
        layers = {block.key: block.site.layer for block in blocks}
        attentions = [replace(a, site=replace(a.site, layer=layers.get(a.block) if a.block is not None else None)) for a in attentions]
        frames = plan.frames | {block.module for block in blocks}
        return replace(plan, blocks=tuple(blocks), attentions=tuple(attentions), frames=frames)

    def _chosen(self, site: str) -> bool:
        assert self._names is not None
        plain = canonical_execution(site)
        return any(plain == name or plain.startswith(name + ".") or site == name for name in self._names)


def canonical_execution(site: str) -> str:
    """The module name of a site, without the number of its execution."""
    return site.split("@")[0]


def _checked(site: str | Site, known: dict[str, str]) -> str:
    name = site.name if isinstance(site, Site) else site
    plain = canonical(canonical_execution(name))
    if plain not in known:
        close = difflib.get_close_matches(plain, known, n=3)
        hint = f"; did you mean {', '.join(map(repr, close))}?" if close else ""
        raise ValueError(f"sites: the model has no module {name!r}{hint} Names are those of model.named_modules()")
    return plain
