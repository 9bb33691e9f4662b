"""From the moments of token samples to readings: fp64 on the host, one value per sequence, nan where undefined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]
else:
    Array = np.ndarray  # jaxtyping takes the bare class


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the samples that the moments were taken from, and the machine epsilon of the dtype the model used."""

    tokens: int
    dim: int
    eps: float


@dataclass(frozen=True, slots=True)
class Residuals:
    """What is known of every sequence, input or output. Values are in units of `scale`."""

    counted: Bool[Array, "batch token"]
    count: Float[Array, " batch"]
    residual: Float[Array, " batch"]
    mean: Float[Array, " batch"]
    scale: Float[Array, " batch"]
    finite: Bool[Array, " batch"]

    @classmethod
    def of(cls, moments: Mapping[str, Array]) -> Residuals:
        values = {name: moments[name].astype(np.float64) for name in ("weight", "residual", "mean_norm", "scale")}
        counted = values["weight"] > 0
        finite = np.isfinite(moments["peak"])
        return cls(counted, counted.sum(-1).astype(np.float64), values["residual"], values["mean_norm"], values["scale"], finite)

    @property
    def norm(self) -> Float[Array, " batch"]:
        """Frobenius norm before the mean was subtracted."""
        return np.sqrt(self.residual**2 + self.count * self.mean**2)

    @property
    def readable(self) -> Bool[Array, " batch"]:
        """Finite, two tokens that count, not all zero: what every metric of alikeness needs."""
        return self.finite & (self.count >= 2) & (self.norm > 0)

    @property
    def relative(self) -> Float[Array, " batch"]:
        """`relative_residual`."""
        return np.where(self.readable, _divide(self.residual, self.norm), np.nan)

    def part(self, start: int) -> Residuals:
        """The same without the first `start` sequences."""
        return Residuals(*(getattr(self, name)[start:] for name in Residuals.__slots__))


def token_readings(moments: Mapping[str, Array], base: Residuals, shape: Shape) -> dict[str, Float[Array, " batch"]]:
    """Every quantity that these moments give, one value per sequence. Names are those of the functions in `collapse_monitor.metrics`."""
    with np.errstate(all="ignore"):
        readings: dict[str, Array] = {}
        if "gram" in moments:
            readings |= ranks(_drop_noise(_roots(_uncentred(moments, base, shape), base.readable), base, shape))
        if "unit_sum" in moments:
            readings["token_similarity"] = _similarity(moments)
        if "composite" in moments:
            column, row, column_before, row_before = np.moveaxis(moments["composite"].astype(np.float64), -1, 0)
            readings["composite_residual"] = np.sqrt(_divide(column * row, column_before * row_before))
        if "middle" in moments:
            middle = moments["middle"].astype(np.float64)
            readings["massive_activation"] = np.where(middle > 0, _divide(moments["peak"] * base.scale, middle), np.nan)
        readings["relative_residual"] = base.relative
        readings["residual_norm"] = base.residual / np.sqrt(base.count) / base.scale
        readings = {name: np.where(base.readable, values, np.nan) for name, values in readings.items()}
        return readings | _shares(moments, base, shape)


def ranks(sigma: Float[Array, "batch value"]) -> dict[str, Float[Array, " batch"]]:
    """The three ranks of a spectrum, 0 at dropped values; an empty spectrum has effective rank 1, as the exponential of no entropy."""
    share = _divide(sigma, sigma.sum(-1, keepdims=True))
    entropy = -(share * np.log(np.where(share > 0, share, 1.0))).sum(-1)
    energy = sigma**2
    return {
        "effective_rank": np.exp(entropy),
        "stable_rank": _divide(energy.sum(-1), energy.max(-1)),
        "participation_ratio": _divide(energy.sum(-1) ** 2, (energy**2).sum(-1)),
    }


def centred_rank(moments: Mapping[str, Array], shape: Shape) -> Float[Array, " batch"]:
    """`pooled_rank`: the effective rank of the centred rows alone, above the rounding noise of the rows as they came."""
    with np.errstate(all="ignore"):
        base = Residuals.of(moments)
        sigma = _drop_noise(_roots(moments["gram"].astype(np.float64), base.readable), base, shape)
        return np.where(base.readable, ranks(sigma)["effective_rank"], np.nan)


def _shares(moments: Mapping[str, Array], base: Residuals, shape: Shape) -> dict[str, Float[Array, " batch"]]:
    """Shares that all valid tokens enter, outliers too."""
    valid = moments["valid"] > 0 if "valid" in moments else np.ones_like(base.counted)
    number = valid.sum(-1).astype(np.float64)
    plural = base.finite & (number >= 2)
    shares = {"outlier_tokens": np.where(plural, _divide((valid & ~base.counted).sum(-1), number), np.nan)}
    if "broken" in moments:
        shares["nonfinite"] = np.where(number >= 1, _divide(moments["broken"].astype(np.float64), number * shape.dim), np.nan)
    if "fingerprints" in moments:
        shares["dead_tokens"] = np.where(plural, _divide(_dead(moments["fingerprints"]), number), np.nan)
    return shares


def _dead(fingerprints: Float[Array, "batch token 2"]) -> Int[Array, " batch"]:
    """Valid tokens that are zero, fingerprint (0, 0), or have a twin; padding carries -1."""
    code = fingerprints[..., 0].astype(np.int64) * 2**24 + fingerprints[..., 1].astype(np.int64)
    order = np.argsort(code, -1)
    ordered = np.take_along_axis(code, order, -1)
    same = ordered[:, 1:] == ordered[:, :-1]
    edge = np.zeros_like(same[:, :1], shape=(len(code), 1))
    dead = np.concatenate([edge, same], -1) | np.concatenate([same, edge], -1) | (ordered == 0)
    return (dead & (ordered >= 0)).sum(-1)


def _uncentred(moments: Mapping[str, Array], base: Residuals, shape: Shape) -> Float[Array, "batch entry"]:
    """The packed Gram matrix of the tokens themselves: that of the centred ones plus the rank-one terms of the mean."""
    centred = moments["gram"].astype(np.float64)
    if shape.tokens <= shape.dim:
        row, column = _triangle(shape.tokens)
        along, weight = moments["along_mean"].astype(np.float64), base.counted.astype(np.float64)
        # Tokens that do not count are zero rows: only pairs of counted ones see the mean.
        share = along + weight * (base.mean**2)[:, None] / 2
        return centred + share[:, row] * weight[:, column] + weight[:, row] * share[:, column]
    row, column = _triangle(shape.dim)
    mean = moments["mean"].astype(np.float64)
    return centred + base.count[:, None] * mean[:, row] * mean[:, column]


def _roots(packed: Float[Array, "batch entry"], readable: Bool[Array, " batch"]) -> Float[Array, "batch value"]:
    """Roots of the eigenvalues of packed symmetric matrices; zero where they hold a NaN, which LAPACK must not meet.

    Such a matrix has no negative eigenvalue, so the lowest one shows what fp32 did to it: eigenvalues of that size are noise as well.
    """
    size = int((8 * packed.shape[-1] + 1) ** 0.5 - 1) // 2
    row, column = _triangle(size)
    lower = np.zeros((len(packed), size, size))
    lower[:, column, row] = np.where(readable[:, None] & np.isfinite(packed).all(-1, keepdims=True), packed, 0.0)
    values = np.linalg.eigvalsh(lower)
    return np.sqrt(np.where(values > np.maximum(-values[:, :1], 0.0), values, 0.0))


def _drop_noise(sigma: Float[Array, "batch value"], base: Residuals, shape: Shape) -> Float[Array, "batch value"]:
    """Zero at and below what rounding to the observed dtype could have made."""
    floor = shape.eps / 2 * base.norm * (1 / np.sqrt(np.maximum(base.count, 1)) + shape.dim**-0.5) / np.sqrt(3)
    return np.where(sigma > floor[:, None], sigma, 0.0)


def _similarity(moments: Mapping[str, Array]) -> Float[Array, " batch"]:
    """Mean cosine of distinct pairs, from the sum of the unit tokens, or where that would lose digits, from their spread."""
    number, total, spread = (moments[name].astype(np.float64) for name in ("unit_count", "unit_sum", "unit_spread"))
    by_sum = _divide(total**2 - number, number * (number - 1))
    by_spread = 1 - _divide(spread**2, number - 1)
    return np.where(number >= 2, np.where(by_sum < 0.5, by_sum, by_spread), np.nan)


@lru_cache(maxsize=16)
def _triangle(size: int) -> tuple[Int[Array, " entry"], Int[Array, " entry"]]:
    """Row and column of each packed entry of an upper triangle."""
    row, column = np.triu_indices(size)
    return row, column


def _divide(numerator: Array, denominator: Array) -> Array:
    return numerator / np.where(denominator == 0, 1.0, denominator)
