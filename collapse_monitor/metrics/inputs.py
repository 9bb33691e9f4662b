"""What every metric does before its maths: refuse wrong arguments, switch autocast off, promote, and take masked values out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

P = ParamSpec("P")


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Hidden states ready for maths. Masked tokens, and all tokens of a sequence that holds a NaN or Inf, are zero."""

    rows: Float[Tensor, "*batch token dim"]
    valid: Bool[Tensor, "*batch token"]
    count: Float[Tensor, "*batch"]  # valid tokens
    scale: Float[Tensor, "*batch"]  # largest absolute value, 1 for a zero matrix; carries no gradient
    finite: Bool[Tensor, "*batch"]  # no NaN or Inf among the valid values
    nonzero: Bool[Tensor, "*batch"]

    @property
    def scaled(self) -> Float[Tensor, "*batch token dim"]:
        """Rows with largest value 1: their squares neither overflow nor vanish."""
        return self.rows / self.scale[..., None, None]

    @property
    def readable(self) -> Bool[Tensor, "*batch"]:
        """Where a number can be given: finite, two valid tokens, not all zero."""
        return self.finite & (self.count >= 2) & self.nonzero


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Attention rows ready for maths: zero at invisible keys, summing to one over the visible keys of every live row."""

    weights: Float[Tensor, "*batch head query key"]
    visible: Bool[Tensor, "*batch head query key"]
    keys: Float[Tensor, "*batch head query"]  # visible keys; 0 for a dead row: nothing visible, or no weight on what is
    live: Bool[Tensor, "*batch head query"]
    finite: Bool[Tensor, "*batch head"]  # no NaN, Inf or negative weight at a visible key

    @property
    def readable(self) -> Bool[Tensor, "*batch head"]:
        """Where a number can be given: finite, and some row sees two keys."""
        return self.finite & (self.keys >= 2).any(-1)


def full_precision(metric: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Run a metric with autocast off on the device of its first tensor."""

    @functools.wraps(metric)
    def run(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        device = next((value.device.type for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), "cpu")
        if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
            return metric(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return metric(*args, **kwargs)

    return run


def promote(tensor: Float[Tensor, " ..."]) -> Float[Tensor, " ..."]:
    """To float64, the precision all maths is done in; to float32 on MPS, which has no float64."""
    return tensor.to(wide_dtype(tensor))


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of `promote`."""
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def report(value: Float[Tensor, " ..."], readable: Bool[Tensor, " ..."], *sources: Float[Tensor, " ..."]) -> Float[Tensor, " ..."]:
    """The value where it is defined and nan elsewhere, without a gradient there; float32 unless a source is float64."""
    dtype = torch.float64 if any(source.dtype == torch.float64 for source in sources) else torch.float32
    return torch.where(readable, value, torch.nan).to(dtype)


def divide(numerator: Float[Tensor, " ..."], denominator: Float[Tensor, " ..."]) -> Float[Tensor, " ..."]:
    """The quotient, with a divisor of one in place of zero: no NaN enters a value or a gradient that `report` leaves out."""
    return numerator / torch.where(denominator == 0, 1, denominator)


def read_tokens(hidden: Float[Tensor, "*batch token dim"], mask: Bool[Tensor, "*batch token"] | None, name: str = "hidden") -> Tokens:
    """Check hidden states and their mask and make them ready.

    Raises:
        TypeError: not a tensor, not a floating dtype, or a mask that is not boolean.
        ValueError: fewer than two axes, no features, or a mask of another shape or device.
    """
    check_float(hidden, name)
    if hidden.ndim < 2 or hidden.shape[-1] == 0:
        raise ValueError(
            f"{name} has shape {list(hidden.shape)}; expected [*batch, token, dim] with dim >= 1: pass one matrix of tokens per sequence"
        )
    if mask is not None:
        check_mask(mask, hidden, name)
        if mask.shape != hidden.shape[:-1]:
            raise ValueError(
                f"mask has shape {list(mask.shape)}, but {name} has shape {list(hidden.shape)}; expected {list(hidden.shape[:-1])}: "
                "one value per token, True where it is valid"
            )
    valid = torch.ones(hidden.shape[:-1], dtype=torch.bool, device=hidden.device) if mask is None else mask
    if hidden.shape[-2] == 0:  # one masked token in place of none: no reduction below meets an empty axis
        hidden, valid = hidden.new_zeros(*hidden.shape[:-2], 1, hidden.shape[-1]), valid.new_zeros(*valid.shape[:-1], 1)
    finite = (hidden.isfinite().all(-1) | ~valid).all(-1)
    rows = promote(torch.where((valid & finite[..., None])[..., None], hidden, 0))
    peak = rows.detach().abs().amax((-2, -1))
    return Tokens(rows, valid, valid.sum(-1).to(rows.dtype), torch.where(peak > 0, peak, 1), finite, peak > 0)


def read_visible(weights: Float[Tensor, "*batch head query key"], mask: Bool[Tensor, " ..."] | None, name: str) -> Bool[Tensor, " ..."]:
    """Check per-head rows and their mask; returns the mask in full shape.

    Raises:
        TypeError: not a tensor, not a floating dtype, or a mask that is not boolean.
        ValueError: fewer than three axes, or a mask that does not broadcast to the rows or lies on another device.
    """
    check_float(weights, name)
    if weights.ndim < 3:
        raise ValueError(
            f"{name} has shape {list(weights.shape)}; expected [*batch, head, query, key]: add an axis of one head with {name}[None]"
        )
    if mask is None:
        return torch.ones(weights.shape, dtype=torch.bool, device=weights.device)
    check_mask(mask, weights, name)
    try:
        return mask.expand(weights.shape)
    except RuntimeError as error:
        raise ValueError(
            f"mask has shape {list(mask.shape)}, which does not broadcast to {name} of shape {list(weights.shape)}; expected "
            "[*batch, head, query, key] or axes of length 1, True where a query sees a key: mask[:, None, None, :] for a mask of keys"
        ) from error


def read_rows(weights: Float[Tensor, "*batch head query key"], mask: Bool[Tensor, " ..."] | None, name: str = "weights") -> Rows:
    """Check attention rows and make them ready. Every row is divided by its sum over the visible keys."""
    visible = read_visible(weights, mask, name)
    if 0 in weights.shape[-2:]:  # one row that sees nothing in place of none
        shape = [*weights.shape[:-2], max(weights.shape[-2], 1), max(weights.shape[-1], 1)]
        weights, visible = weights.new_zeros(shape), visible.new_zeros(shape)
    lawful = weights.isfinite() & (weights >= 0)
    mass = promote(torch.where(visible & lawful, weights, 0))
    total = mass.sum(-1, keepdim=True)
    live = total.squeeze(-1) > 0
    keys = torch.where(live, visible.sum(-1), 0).to(mass.dtype)
    return Rows(divide(mass, total), visible & live[..., None], keys, live, (lawful | ~visible).all(-1).all(-1))


def frobenius_norm(tensor: Float[Tensor, " ..."], name: str) -> Float[Tensor, ""]:
    """The norm over all values, summed in double precision without a copy in it; nan for no values, NaN or Inf.

    Raises:
        TypeError: not a tensor, or not a floating dtype.
    """
    check_float(tensor, name)
    wide = wide_dtype(tensor)
    if tensor.numel() == 0:
        return torch.full((), torch.nan, dtype=wide, device=tensor.device)
    scale = torch.ones((), dtype=wide, device=tensor.device)
    if tensor.dtype == wide:  # squares of narrower values fit, those of equally wide ones may not
        peak = tensor.detach().abs().amax()
        scale = torch.where((peak > 0) & peak.isfinite(), peak, 1)
        tensor = tensor / scale
    norm = torch.linalg.vector_norm(tensor, dtype=wide) * scale
    return torch.where(norm.isfinite(), norm, torch.nan)


def median(values: Float[Tensor, "*batch item"], valid: Bool[Tensor, "*batch item"]) -> Float[Tensor, "*batch"]:
    """The middle of the valid values, the mean of the two middle ones for an even number; inf for none."""
    ordered = torch.where(valid, values, torch.inf).sort(-1).values
    count = valid.sum(-1, keepdim=True)
    middle = torch.cat([(count - 1).clamp(min=0) // 2, (count // 2).clamp(max=ordered.shape[-1] - 1)], -1)
    return ordered.gather(-1, middle).mean(-1)


def centre(rows: Float[Tensor, "*batch token dim"], valid: Bool[Tensor, "*batch token"]) -> Float[Tensor, "*batch token dim"]:
    """Rows minus the mean of the valid rows; zero at the others.

    The first valid row is taken off beforehand: identical rows then give exact zeros, and a large mean costs no digits.
    """
    first = rearrange(valid.to(torch.uint8).argmax(-1), "... -> ... 1 1").expand(*rows.shape[:-2], 1, rows.shape[-1])
    shifted = torch.where(valid[..., None], rows - rows.detach().gather(-2, first), 0)
    mean = shifted.sum(-2, keepdim=True) / valid.sum(-1).clamp(min=1)[..., None, None]
    return torch.where(valid[..., None], shifted - mean, 0)


def check_float(tensor: object, name: str) -> None:
    """Refuse what is no floating tensor.

    Raises:
        TypeError: says what came and what to pass.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; expected a floating tensor: convert it with torch.as_tensor")
    if not tensor.is_floating_point():
        raise TypeError(
            f"{name} has dtype {tensor.dtype}; expected a floating dtype (float16, bfloat16, float32, float64): "
            "pass values of the model, not indices, or convert with .float()"
        )


def check_mask(mask: object, tensor: Tensor, name: str) -> None:
    """Refuse a mask that is not boolean or lies on another device.

    Raises:
        TypeError: the mask is no boolean tensor.
        ValueError: the devices differ.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = f"dtype {mask.dtype}" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
        raise TypeError(
            f"mask has {got}; expected a boolean tensor, True where a token is valid or a key visible: convert 0/1 with mask.bool()"
        )
    if mask.device != tensor.device:
        raise ValueError(f"mask is on {mask.device}, {name} on {tensor.device}: move the mask with mask.to({name}.device)")
