"""The list of metrics: what each reads, its range, which end is collapse, and where it is from."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from math import inf
from typing import Any

import torch
from torch import Tensor

from collapse_monitor.metrics import attention, gradients, logits, ranks, tokens, transitions, weights
from collapse_monitor.metrics.metric import Metric, Reads

DONG = "Dong et al. 2021, arXiv 2103.03404"
NOCI = "Noci et al. 2022, arXiv 2206.03126"
ZHAI = "Zhai et al. 2023, arXiv 2303.06296"
GIORLANDINO = "Giorlandino & Goldt 2025, arXiv 2505.24333"
MASSIVE = "Sun et al. 2024, arXiv 2402.17762"

DEFAULT_METRICS: tuple[Metric, ...] = (
    Metric("effective_rank", "hidden", ranks.effective_rank, (1, inf), "low", "directions", "Roy & Vetterli 2007, EUSIPCO"),
    Metric("stable_rank", "hidden", ranks.stable_rank, (1, inf), "low", "directions", "Rudelson & Vershynin 2007, arXiv math/0503442"),
    Metric("participation_ratio", "hidden", ranks.participation_ratio, (1, inf), "low", "directions", "Gao et al. 2017, bioRxiv 214262"),
    Metric("token_similarity", "hidden", tokens.token_similarity, (-1, 1), "high", "", "Shi et al. 2022, arXiv 2202.08625"),
    Metric("relative_residual", "hidden", tokens.relative_residual, (0, 1), "low", "", DONG),
    Metric("composite_residual", "hidden", tokens.composite_residual, (0, 2), "low", "", DONG),
    Metric("residual_norm", "hidden", tokens.residual_norm, (0, inf), "low", "stream", "Wu et al. 2024, arXiv 2405.18781"),
    Metric("massive_activation", "hidden", tokens.massive_activation, (1, inf), "high", "", MASSIVE),
    Metric("nonfinite", "hidden", tokens.nonfinite, (0, 1), "high", "share"),
    Metric("dead_tokens", "hidden", tokens.dead_tokens, (0, 1), "high", "share"),
    Metric("outlier_tokens", "hidden", tokens.outlier_tokens, (0, 0.5), None, "share", MASSIVE),
    Metric("contraction", "transition", transitions.contraction, (0, inf), "low", "", DONG),
    Metric("block_influence", "transition", transitions.block_influence, (0, 2), "low", "", "Men et al. 2024, arXiv 2403.03853"),
    Metric("branch_ratio", "branch", transitions.branch_ratio, (0, inf), "low", "", "Sun et al. 2025, arXiv 2502.05795"),
    Metric("attention_uniformity", "attention", attention.attention_uniformity, (0, 1), None, "", ZHAI),
    Metric("effective_keys", "attention", attention.effective_keys, (1, inf), None, "keys", GIORLANDINO),
    Metric("dominant_column", "attention", attention.dominant_column, (0, 1), "high", "", "Sanyal et al. 2024, arXiv 2404.08634"),
    Metric("sink_mass", "attention", attention.sink_mass, (0, 1), None, "", "Gu et al. 2024, arXiv 2410.10781"),
    Metric("dobrushin", "attention", attention.dobrushin, (0, 1), "low", "", "Dobrushin 1956, doi 10.1137/1101006"),
    Metric("head_similarity", "attention", attention.head_similarity, (0, 1), "high", "", "Li et al. 2018, arXiv 1810.10183"),
    Metric("layer_similarity", "attention_pair", attention.layer_similarity, (0, 1), "high", "", "Zhou et al. 2021, arXiv 2103.11886"),
    Metric("input_dependence", "attention_batch", attention.input_dependence, (0, 1), "low", "", "Lin 1991, doi 10.1109/18.61115"),
    Metric("max_logit", "logits", logits.max_logit, (-inf, inf), "high", "nats", "Wortsman et al. 2023, arXiv 2309.14322"),
    Metric("logit_std", "logits", logits.logit_std, (0, inf), None, "nats", GIORLANDINO),
    Metric("gradient_norm", "gradient", gradients.gradient_norm, (0, inf), "low", "loss / stream", NOCI),
    Metric("qk_to_v_gradient", "qv_gradient", gradients.qk_to_v_gradient, (0, inf), "low", "", NOCI),
    Metric("parameter_gradient_norm", "parameter_gradients", gradients.parameter_gradient_norm, (0, inf), "low", "loss / parameter", NOCI),
    Metric("qk_to_v_weight_gradient", "qv_weight_gradient", gradients.qk_to_v_weight_gradient, (0, inf), "low", "", NOCI),
    Metric("pooled_rank", "features", ranks.pooled_rank, (1, inf), "low", "directions", "Garrido et al. 2023, arXiv 2210.02885"),
    Metric("qk_spectral_norm", "qk_weights", weights.qk_spectral_norm, (0, inf), "high", "nats / stream^2", ZHAI),
    Metric("value_condition", "value_weights", weights.value_condition, (1, inf), "high"),
)

GRADIENT_READINGS = tuple(metric.name for metric in DEFAULT_METRICS if "gradient" in metric.reads)
"""Metrics that need a backward pass."""
"""Every metric of the package, in the order of the documentation."""


def select(metrics: Iterable[str | Metric]) -> tuple[Metric, ...]:
    """The metrics that a list of names and records stands for, in its order.

    Raises:
        ValueError: an unknown name, a name that occurs twice, or something that is neither a name nor a `Metric`.

    >>> [metric.reads for metric in select(["effective_rank", "max_logit"])]
    ['hidden', 'logits']
    """
    if isinstance(metrics, str | Metric) or not isinstance(metrics, Iterable):
        raise ValueError(
            f"metrics is {_shown(metrics)}; expected a list of names and Metric records, for example metrics=[*DEFAULT_METRICS, my_metric]"
        )
    chosen: dict[str, Metric] = {}
    for entry in metrics:
        metric = _look_up(entry)
        if metric.name in chosen:
            raise ValueError(
                f"metric {metric.name!r} is listed twice; names must be unique because they become series names: drop or rename one"
            )
        chosen[metric.name] = metric
    return tuple(chosen.values())


def validate(metric: Metric) -> None:
    """Run a metric once on tiny tensors and refuse it if it cannot be called or returns the wrong shape.

    An exception raised by the metric itself is no error here: it may need other values, and is reported when it happens in a run.

    Raises:
        ValueError: says what the metric takes or returns and what is expected.
    """
    arguments, shape = _example(metric.reads)
    try:
        inspect.signature(metric.compute).bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"Metric {metric.name!r}: compute cannot be called with what {metric.reads!r} gives, {_described(arguments)}: {error}"
        ) from error
    except ValueError:  # a builtin without a signature
        pass
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            value = metric.compute(*arguments)
    except Exception:  # a fault of these values or of the metric: the run will tell
        return
    got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        raise ValueError(
            f"Metric {metric.name!r} reads {metric.reads!r} and returned {got} for {_described(arguments)}; "
            f"expected a tensor of shape {list(shape)}: {_EXPECTED[metric.reads]}"
        )


_EXPECTED: dict[Reads, str] = {
    "hidden": "one value per sequence, reduce over [token, dim]",
    "transition": "one value per sequence, reduce over [token, dim]",
    "branch": "one value, reduce over all axes",
    "attention": "one value per sequence and head, reduce over [query, key]",
    "logits": "one value per sequence and head, reduce over [query, key]",
    "attention_pair": "one value per sequence and head, reduce over [query, key]",
    "attention_batch": "one value per head, reduce over [batch, query, key]",
    "gradient": "one value, reduce over all axes",
    "qv_gradient": "one value, reduce over all axes",
    "parameter_gradients": "one value over all tensors of the list",
    "qv_weight_gradient": "one value, reduce over all axes",
    "features": "one value, reduce over [sample, dim]",
    "qk_weights": "one value per head, reduce over [head_dim, dim]",
    "value_weights": "one value per head, reduce over [head_dim, dim]",
}


def _example(reads: Reads) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Arguments for a dry run, no two axes of equal length, and the shape that must come back."""
    hidden, after = _values(2, 5, 7), _values(2, 5, 7).cos()
    rows, before = _values(2, 3, 5, 7).softmax(-1), _values(2, 3, 5, 7).cos().softmax(-1)
    token_mask = torch.ones(2, 5, dtype=torch.bool, device="cpu")
    key_mask = torch.ones(2, 3, 5, 7, dtype=torch.bool, device="cpu")
    examples: dict[Reads, tuple[tuple[Any, ...], tuple[int, ...]]] = {
        "hidden": ((hidden, token_mask), (2,)),
        "transition": ((hidden, after, token_mask), (2,)),
        "branch": ((hidden, after), ()),
        "attention": ((rows, key_mask), (2, 3)),
        "logits": ((_values(2, 3, 5, 7), key_mask), (2, 3)),
        "attention_pair": ((rows, before, key_mask), (2, 3)),
        "attention_batch": ((rows, key_mask), (3,)),
        "gradient": ((hidden,), ()),
        "qv_gradient": ((hidden, after), ()),
        "parameter_gradients": (([hidden, _values(7)],), ()),
        "qv_weight_gradient": ((_values(5, 7), _values(5, 7).cos()), ()),
        "features": ((_values(5, 7),), ()),
        "qk_weights": ((_values(3, 5, 7), _values(3, 5, 7).cos()), (3,)),
        "value_weights": ((_values(3, 5, 7),), (3,)),
    }
    return examples[reads]


def _values(*shape: int) -> Tensor:
    """Values between -1 and 1 that look random and are not: the generator of the run stays as it is."""
    count = torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.float32, device="cpu")
    return (count * count * 0.7).sin().reshape(shape)


def _look_up(entry: object) -> Metric:
    if isinstance(entry, Metric):
        return entry
    known = {metric.name: metric for metric in DEFAULT_METRICS}
    if not isinstance(entry, str):
        raise ValueError(
            f"metrics holds {entry!r} of type {type(entry).__name__}; expected a name or a Metric: "
            "wrap a function as Metric(name, reads, function)"
        )
    if entry not in known:
        close = difflib.get_close_matches(entry, known, n=3)
        hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
        raise ValueError(f"unknown metric {entry!r}: {hint}allowed names are {', '.join(known)}")
    return known[entry]


def _shown(metrics: object) -> str:
    return f"the Metric {metrics.name!r}" if isinstance(metrics, Metric) else repr(metrics)


def _described(arguments: tuple[Any, ...]) -> str:
    return ", ".join(
        str(list(argument.shape)) if isinstance(argument, Tensor) else f"a list of {len(argument)} tensors" for argument in arguments
    )
