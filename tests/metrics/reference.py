"""The metrics once more in float64 NumPy: plain loops, one sequence at a time, from the formulas, sharing no code with the package.

Token functions take the valid tokens of one sequence `x` [token, dim]. Attention functions take the maps of one sequence as nested lists:
`maps[h][i]` is the dictionary {key: weight} of the visible keys of row i. Sums go through `math.fsum`, which rounds once.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np

Row = dict[int, float]


def norm(values: np.ndarray) -> float:
    return math.sqrt(math.fsum(float(value) ** 2 for value in np.ravel(values)))


def mean_token(x: np.ndarray) -> np.ndarray:
    return np.array([math.fsum(column) / len(x) for column in x.T])


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return math.fsum(p * q for p, q in zip(a, b, strict=True)) / (norm(a) * norm(b))


def spectrum(x: np.ndarray, eps: float) -> list[float]:
    """Singular values from the eigenvalues of the symmetric matrix [[0, X], [X', 0]]: no digits are lost by squaring."""
    n, d = x.shape
    embedded = np.zeros((n + d, n + d))
    embedded[:n, n:] = x
    embedded[n:, :n] = x.T
    values = sorted(np.linalg.eigvalsh(embedded), reverse=True)[: min(n, d)]
    floor = eps / 2 * norm(x) * (1 / math.sqrt(n) + 1 / math.sqrt(d)) / math.sqrt(3)
    return [float(value) for value in values if value > floor]


def effective_rank(x: np.ndarray, eps: float) -> float:
    sigma = spectrum(x, eps)
    total = math.fsum(sigma)
    return math.exp(-math.fsum(s / total * math.log(s / total) for s in sigma))


def stable_rank(x: np.ndarray, eps: float) -> float:
    sigma = spectrum(x, eps)
    return math.fsum(s**2 for s in sigma) / max(sigma) ** 2


def participation_ratio(x: np.ndarray, eps: float) -> float:
    sigma = spectrum(x, eps)
    return math.fsum(s**2 for s in sigma) ** 2 / math.fsum(s**4 for s in sigma)


def pooled_rank(x: np.ndarray, eps: float) -> float:
    centred = x - mean_token(x)
    floor = eps / 2 * norm(x) * (1 / math.sqrt(x.shape[0]) + 1 / math.sqrt(x.shape[1])) / math.sqrt(3)
    sigma = [s for s in spectrum(centred, 0.0) if s > floor]
    total = math.fsum(sigma)
    return math.exp(-math.fsum(s / total * math.log(s / total) for s in sigma))


def token_dissimilarity(x: np.ndarray) -> float:
    """One minus the mean cosine, from half the squared distance of every pair of directions."""
    units = [token / norm(token) for token in x if norm(token) > 0]
    pairs = list(combinations(units, 2))
    return math.fsum(norm(a - b) ** 2 / 2 for a, b in pairs) / len(pairs)


def relative_residual(x: np.ndarray) -> float:
    return norm(x - mean_token(x)) / norm(x)


def composite_residual(x: np.ndarray) -> float:
    def composite(matrix: np.ndarray) -> float:
        columns = max(math.fsum(abs(value) for value in column) for column in matrix.T)
        rows = max(math.fsum(abs(value) for value in row) for row in matrix)
        return math.sqrt(columns * rows)

    return composite(x - mean_token(x)) / composite(x)


def residual_norm(x: np.ndarray) -> float:
    return norm(x - mean_token(x)) / math.sqrt(len(x))


def massive_activation(x: np.ndarray) -> float:
    return float(np.max(np.abs(x)) / np.median(np.abs(x)))


def dead_tokens(x: np.ndarray) -> float:
    dead = 0
    for i, token in enumerate(x):
        twin = any(j != i and np.array_equal(token, other) for j, other in enumerate(x))
        dead += twin or not np.any(token)
    return dead / len(x)


def outlier_tokens(x: np.ndarray) -> float:
    norms = [norm(token) for token in x]
    return sum(value > 10 * float(np.median(norms)) for value in norms) / len(norms)


def contraction(x: np.ndarray, y: np.ndarray) -> float:
    return relative_residual(y) / relative_residual(x)


def block_influence(x: np.ndarray, y: np.ndarray) -> float:
    return math.fsum(norm(a / norm(a) - b / norm(b)) ** 2 / 2 for a, b in zip(x, y, strict=True)) / len(x)


def lived(head: list[Row]) -> list[Row]:
    """The rows that see something, each divided by its sum."""
    return [{key: weight / math.fsum(row.values()) for key, weight in row.items()} for row in head if math.fsum(row.values()) > 0]


def entropy(values: list[float]) -> float:
    return -math.fsum(p * math.log(p) for p in values if p > 0)


def attention_uniformity(head: list[Row]) -> float:
    values = [entropy(list(row.values())) / math.log(len(row)) for row in lived(head) if len(row) >= 2]
    return math.fsum(values) / len(values)


def effective_keys(head: list[Row]) -> float:
    values = [1 / math.fsum(p**2 for p in row.values()) for row in lived(head)]
    return math.fsum(values) / len(values)


def dominant_column(head: list[Row]) -> float:
    rows = lived(head)
    return max(math.fsum(row.get(key, 0.0) for row in rows) / len(rows) for row in rows for key in row)


def sink_mass(head: list[Row]) -> float:
    rows = lived(head)
    first = sorted({key for row in rows for key in row})[:4]
    means = []
    for key in first:
        seen = [row[key] for row in rows if key in row]
        means.append(math.fsum(seen) / len(seen))
    return max(means)


def dobrushin(head: list[Row]) -> float:
    rows = lived(head)
    keys = {key for row in rows for key in row}
    wide = [row for row in rows if len(row) >= len(keys) / 2]
    return max(math.fsum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in keys) / 2 for a, b in combinations(wide, 2))


def head_similarity(maps: list[list[Row]], h: int) -> float:
    keys = {key for head in maps for row in head for key in row}

    def flat(head: list[Row]) -> np.ndarray:
        values = []
        for row in head:
            total = math.fsum(row.values())
            values += [row.get(key, 0.0) / total if total > 0 else 0.0 for key in keys]
        return np.array(values)

    others = [cosine(flat(maps[h]), flat(maps[g])) for g in range(len(maps)) if g != h]
    return math.fsum(others) / len(others)


def layer_similarity(head: list[Row], previous: list[Row]) -> float:
    values = []
    for a, b in zip(lived(head), lived(previous), strict=True):
        keys = list(a)
        values.append(cosine(np.array([a[key] for key in keys]), np.array([b[key] for key in keys])))
    return math.fsum(values) / len(values)


def input_dependence(batch: list[list[Row]]) -> float:
    """Of one head in all sequences, as the mean divergence of a sequence's row from the mean row."""
    values = []
    for rows in zip(*batch, strict=True):
        keys = set(rows[0])
        if not keys or any(set(row) != keys for row in rows):
            continue
        live = [{key: weight / math.fsum(row.values()) for key, weight in row.items()} for row in rows]
        mean = {key: np.longdouble(0) + sum(np.longdouble(row[key]) for row in live) / len(live) for key in keys}
        terms = [np.longdouble(row[key]) * np.log(np.longdouble(row[key]) / mean[key]) for row in live for key in keys if row[key] > 0]
        values.append(float(sum(terms)) / len(live))
    return math.fsum(values) / len(values) / math.log(len(batch))


def max_logit(head: list[Row]) -> float:
    return max(value for row in head for value in row.values())


def logit_std(head: list[Row]) -> float:
    values = [float(np.std(list(row.values()))) for row in head if len(row) >= 2]
    return math.fsum(values) / len(values)
