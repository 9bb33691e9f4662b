"""What is worked out on the device for a stack of token samples: elementwise work and one product, no decomposition, no fp64.

Every sequence is divided by a power of two near its largest value, which rounds nothing, so squares neither overflow nor vanish.
Then its first counted token is subtracted and the rest centred: after that, differences of 1e-6 between tokens keep their digits in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from collapse_monitor.measure.demand import RANKS
from collapse_monitor.measure.precision import gram, only_where
from collapse_monitor.metrics.tokens import OUTLIER_FACTOR

MEDIAN_VALUES = 2048
"""The median of |x| is exact for sequences of up to this many values; a longer one is read from about as many, of evenly spaced tokens."""

EXPONENT_BITS = 0x7F800000


@dataclass(frozen=True, slots=True, eq=False)
class Centred:
    """Sequences ready for moments, multiplied with `scale`. `rows` is zero at tokens that do not count: padding and outliers."""

    mask: Bool[Tensor, "batch token"] | None
    peak: Float[Tensor, " batch"]  # largest absolute value before scaling; NaN and Inf show here
    scale: Float[Tensor, " batch"]
    scaled: Float[Tensor, "batch token dim"]  # zero at padding; fp32, or fp64 if observed so
    norms: Float[Tensor, "batch token"]
    counted: Bool[Tensor, "batch token"]
    weight: Float[Tensor, "batch token"]  # `counted` as 1 and 0
    count: Float[Tensor, " batch"]
    rows: Float[Tensor, "batch token dim"]  # minus their mean
    mean: Float[Tensor, "batch dim"]

    def part(self, start: int) -> Centred:
        """The same without the first `start` sequences."""
        if start == 0:
            return self
        mask = None if self.mask is None else self.mask[start:]
        return Centred(mask, *(getattr(self, field.name)[start:] for field in fields(self)[1:]))


def centre_tokens(
    hidden: Float[Tensor, "batch token dim"], mask: Bool[Tensor, "batch token"] | None, keep_outliers: bool = False
) -> Centred:
    """Scale, find outliers, subtract the first counted token, centre. `hidden` must be the caller's own copy: it is overwritten."""
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    if mask is not None:
        wide = only_where(mask[..., None], wide, 0.0)
    peak = wide.abs().amax((-2, -1)).float()
    scale = _power_of_two(peak)
    scaled = wide.mul_(scale.to(wide.dtype)[:, None, None])
    norms = torch.linalg.vector_norm(scaled, dim=-1).float()
    counted = norms < torch.inf if keep_outliers else norms <= OUTLIER_FACTOR * _median(norms, mask)[:, None]
    if mask is not None:
        counted = counted & mask
    weight = counted.float()
    count = weight.sum(-1)
    first = scaled[torch.arange(len(scaled), device=scaled.device), weight.argmax(-1)]
    rows = (scaled - first[:, None]).float()
    rows.mul_(weight[..., None])
    offset = rows.sum(-2) / count[:, None]
    rows.sub_(offset[:, None]).mul_(weight[..., None])
    return Centred(mask, peak, scale, scaled, norms, counted, weight, count, rows, first.float() + offset)


def common_moments(centred: Centred) -> dict[str, Tensor]:
    """What is read of inputs and outputs alike: enough for the relative residual."""
    return {
        "peak": centred.peak,
        "scale": centred.scale,
        "weight": centred.weight,
        "residual": _frobenius(centred.rows),
        "mean_norm": torch.linalg.vector_norm(centred.mean, dim=-1),
    }


def output_moments(centred: Centred, wanted: frozenset[str]) -> dict[str, Tensor]:
    """What else the wanted quantities need. Work of the size of the stack goes through one spare copy: memory stays flat.

    `centred.rows` is used up.
    """
    moments: dict[str, Tensor] = {}
    _, tokens, dim = centred.rows.shape
    spare = torch.empty_like(centred.rows)
    if centred.mask is not None:
        moments["valid"] = centred.mask.float()
    if wanted & RANKS:
        moments["gram"] = _upper_triangle(gram(centred.rows if tokens <= dim else centred.rows.mT))
        if tokens <= dim:
            moments["along_mean"] = torch.mul(centred.rows, centred.mean[:, None], out=spare).sum(-1)
        else:
            moments["mean"] = centred.mean
    if "token_similarity" in wanted:
        moments |= _directions(centred, spare)
    if "composite_residual" in wanted:
        after = _largest_sums(torch.abs(centred.rows, out=spare))
        before = _largest_sums(spare.copy_(centred.scaled).abs_().mul_(centred.weight[..., None]))
        moments["composite"] = torch.stack([*after, *before], -1)
    if "massive_activation" in wanted:
        moments["middle"] = _middle_size(centred.scaled, centred.mask)
    if "nonfinite" in wanted:
        moments["broken"] = tokens * dim - spare.copy_(centred.scaled).abs_().lt_(torch.inf).sum((-2, -1))
    if "dead_tokens" in wanted:
        code = fingerprints(centred.scaled, spare, centred.rows)  # last: `rows` is not needed any more
        moments["fingerprints"] = code if centred.mask is None else only_where(centred.mask[..., None], code, -1.0)
    return moments


def fingerprints(tokens: Float[Tensor, "batch token dim"], *spare: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token 2"]:
    """Two whole numbers below 2^24 per token: equal for equal tokens, (0, 0) for a zero token, and else equal once in 2^48.

    Integer sums do not depend on the order of addition, which differs between the rows of one tensor. Two `spare` tensors are overwritten.
    """
    first, second = (space if space.dtype == tokens.dtype else torch.empty_like(tokens) for space in spare)
    bits, high = torch.add(tokens, 0.0, out=first).view(torch.int32), second.view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    bits ^= torch.bitwise_right_shift(bits, 16, out=high)  # half-precision values have high bits only; products carry upwards
    place = torch.arange(1, bits.shape[-1] + 1, dtype=torch.int32, device=bits.device)
    for factor in (-2048144789, -1028477387):  # the finaliser of MurmurHash3
        place = (place ^ (place >> 16)) * factor
    odd = (place ^ (place >> 13)) | 1
    sums = [bits.mul_(odd).sum(-1, dtype=torch.int32) for _ in range(2)]  # weighted with `odd`, then with its squares
    return ((torch.stack(sums, -1) >> 8) & 0xFFFFFF).float()


def turning(before: Float[Tensor, "batch token dim"], after: Float[Tensor, "batch token dim"]) -> Float[Tensor, "batch token"]:
    r"""Distance of the directions of each token in and out, $\|\hat x_i - \hat y_i\|$; NaN where one of them is zero.

    Both must be the caller's own copies: they are overwritten.
    """
    x, y = (side if side.dtype == torch.float64 else side.float() for side in (before, after))
    x, y = (side.div_(torch.linalg.vector_norm(side, dim=-1, keepdim=True)) for side in (x, y))
    return torch.linalg.vector_norm(x.sub_(y), dim=-1)


def _power_of_two(peak: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """One over the largest power of two up to `peak`; 1 for zero, 0 for NaN and Inf."""
    power = (peak.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    return power.reciprocal().nan_to_num(posinf=1.0)


def _median(values: Float[Tensor, "batch item"], mask: Bool[Tensor, "batch item"] | None) -> Float[Tensor, " batch"]:
    """The mean of the two middle values. By sorting: `torch.median` raises on CUDA where the user asked for deterministic algorithms."""
    if mask is None:
        items = values.shape[-1]
        return values.sort(-1).values[:, (items - 1) // 2 : items // 2 + 1].mean(-1)
    ordered = only_where(mask, values, torch.inf).sort(-1).values
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    middle = torch.cat([(count - 1) // 2, count // 2], -1)
    return ordered.gather(-1, middle).mean(-1)


def _upper_triangle(matrices: Float[Tensor, "batch row row"]) -> Float[Tensor, "batch entry"]:
    size = matrices.shape[-1]
    row, column = torch.triu_indices(size, size, device=matrices.device).unbind()
    return matrices[:, row, column]


def _frobenius(rows: Float[Tensor, "batch token dim"]) -> Float[Tensor, " batch"]:
    """By rows first: one long sum of equal squares, as half precision gives them, would lose digits."""
    return torch.linalg.vector_norm(torch.linalg.vector_norm(rows, dim=-1), dim=-1)


def _largest_sums(sizes: Float[Tensor, "batch token dim"]) -> tuple[Tensor, Tensor]:
    """Largest column sum and largest row sum of absolute values."""
    return sizes.sum(-2).amax(-1), sizes.sum(-1).amax(-1)


def _directions(centred: Centred, spare: Float[Tensor, "batch token dim"]) -> dict[str, Tensor]:
    """Sum and spread of the tokens that count and are not zero, each at length one."""
    live = centred.weight * (centred.norms > 0)
    inverse = live / centred.norms.clamp(min=torch.finfo(torch.float32).tiny)
    unit = spare.copy_(centred.scaled).mul_(inverse[..., None])
    number = live.sum(-1)
    total = unit.sum(-2)
    unit.sub_((total / number[:, None])[:, None]).mul_(live[..., None])
    return {
        "unit_count": number,
        "unit_sum": torch.linalg.vector_norm(total, dim=-1),
        "unit_spread": _frobenius(unit),
    }


def _middle_size(hidden: Float[Tensor, "batch token dim"], mask: Bool[Tensor, "batch token"] | None) -> Float[Tensor, " batch"]:
    """Median of |x|; of a sequence of more than `MEDIAN_VALUES` values an estimate from evenly spaced tokens (then channels)."""
    batch, tokens, dim = hidden.shape
    taken = tokens if tokens * dim <= MEDIAN_VALUES else min(tokens, max(8, MEDIAN_VALUES // dim))
    stride = -(-taken * dim // MEDIAN_VALUES)
    if mask is None:
        picked, valid = hidden[:, tokens // taken // 2 :: tokens // taken, ::stride][:, :taken], None
    else:
        place, valid = _spread(mask, taken)
        picked = hidden[:, :, ::stride].take_along_dim(place[..., None], 1)
    sizes = picked.abs().float()
    values = sizes.reshape(batch, -1)
    if valid is not None:
        valid = valid[..., None].expand(sizes.shape).reshape(batch, -1)
    if hidden.device.type == "cpu" and tokens * dim > MEDIAN_VALUES:  # an estimate anyway: selection is cheaper than sorting
        return torch.nanmedian(values if valid is None else only_where(valid, values, torch.nan), -1).values
    return _median(values, valid)


def _spread(mask: Bool[Tensor, "batch token"], taken: int) -> tuple[Int[Tensor, "batch taken"], Bool[Tensor, "batch taken"]]:
    """Places of `taken` evenly spaced valid tokens of each sequence, all of them where there are no more."""
    count = mask.sum(-1, keepdim=True)
    step = torch.arange(taken, device=mask.device)
    nth = torch.where(count > taken, ((2 * step + 1) * count) // (2 * taken), step)
    order = mask.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return order.gather(-1, nth.clamp(max=mask.shape[-1] - 1)), step < count
