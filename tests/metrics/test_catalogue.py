"""The catalogue: complete, consistent with the documentation, and strict about what users put in."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor

import collapse_monitor.metrics as package
from collapse_monitor.metrics import DEFAULT_METRICS, Metric, Reads, select, validate

NAMES = [metric.name for metric in DEFAULT_METRICS]
ROOT = Path(__file__).parents[2]


def test_every_metric_is_an_attribute_of_the_package_under_its_own_name() -> None:
    for metric in DEFAULT_METRICS:
        assert getattr(package, metric.name) is metric.compute
        assert metric.compute.__name__ == metric.name


def test_every_function_with_a_result_per_sequence_is_in_the_catalogue() -> None:
    public = {name for name in package.__all__ if name.islower()} - {"select", "validate", "find_outliers"}
    assert public == set(NAMES)


def test_every_way_to_read_is_used() -> None:
    assert {metric.reads for metric in DEFAULT_METRICS} == set(get_args(Reads))


@pytest.mark.parametrize("metric", DEFAULT_METRICS, ids=lambda metric: metric.name)
def test_every_metric_says_what_it_is(metric: Metric) -> None:
    assert metric.range[0] < metric.range[1]
    assert metric.reference or metric.name in ("nonfinite", "dead_tokens", "value_condition")  # these need no paper
    text = metric.compute.__doc__ or ""
    for pattern in ("Range ", "[Cc]ost", "Source: ", r"nan|[Uu]ndefined\s+cases", "Raises:", ">>> "):
        assert re.search(pattern, text), f"{metric.name} does not say: {pattern}"
    validate(metric)


def test_the_page_has_one_heading_per_metric_in_the_same_order() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert re.findall(r"^### `?(\w+)`?$", page, flags=re.MULTILINE) == NAMES


@pytest.mark.parametrize("metric", DEFAULT_METRICS, ids=lambda metric: metric.name)
def test_each_section_of_the_page_is_complete(metric: Metric) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = re.split(r"^##+ ", page.split(f"### {metric.name}\n")[1], flags=re.MULTILINE)[0]
    for part in ("Range", "Collapse", "Reads wrong when", "Cost", "Source"):
        assert f"**{part}**" in section, f"docs/metrics.md: {metric.name} has no {part}"


def test_layers_below_are_not_reached_upwards() -> None:
    allowed = ("collapse_monitor.metrics",)
    for path in (ROOT / "collapse_monitor" / "metrics").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("collapse_monitor"):
                assert (node.module or "").startswith(allowed), f"{path.name} imports {node.module}"


# --- select


def custom(reads: Reads = "hidden", compute: object = None, name: str = "mine") -> Metric:
    return Metric(name, reads, compute or (lambda hidden, mask: hidden.sum((-2, -1))))


def test_select_takes_names_and_records_in_their_order() -> None:
    mine = custom()
    assert select(["max_logit", mine, DEFAULT_METRICS[0]]) == (DEFAULT_METRICS[NAMES.index("max_logit")], mine, DEFAULT_METRICS[0])
    assert select(DEFAULT_METRICS) == DEFAULT_METRICS
    assert select([]) == ()


def test_select_names_what_is_close_and_what_is_allowed() -> None:
    with pytest.raises(
        ValueError, match=r"unknown metric 'token_similarty': did you mean 'token_similarity'.*allowed names are "
    ) as caught:
        select(["effective_rank", "token_similarty"])
    assert all(name in str(caught.value) for name in NAMES)
    with pytest.raises(ValueError, match=r"unknown metric 'xyzzy': allowed names are effective_rank, "):
        select(["xyzzy"])


def test_select_refuses_duplicates() -> None:
    for twice in (["max_logit", "max_logit"], [DEFAULT_METRICS[0], "effective_rank"], [custom(name="dobrushin"), "dobrushin"]):
        with pytest.raises(ValueError, match=r"metric '\w+' is listed twice; .* drop or rename one"):
            select(twice)


def test_select_refuses_what_is_no_metric() -> None:
    with pytest.raises(
        ValueError, match=r"of type function; expected a name or a Metric: wrap a function as Metric\(name, reads, function\)"
    ):
        select([lambda hidden, mask: hidden])
    with pytest.raises(ValueError, match=r"metrics is 'max_logit'; expected a list of names and Metric records, for example"):
        select("max_logit")
    with pytest.raises(ValueError, match=r"metrics is the Metric 'max_logit'; expected a list"):
        select(DEFAULT_METRICS[NAMES.index("max_logit")])
    with pytest.raises(ValueError, match=r"metrics is 3; expected a list"):
        select(3)


# --- validate


@pytest.mark.parametrize(
    ("reads", "compute", "message"),
    [
        (
            "hidden",
            lambda hidden, mask: hidden.sum(),
            r"returned a tensor of shape \[\] for .*; expected a tensor of shape \[2\]: one value per sequence",
        ),
        (
            "hidden",
            lambda hidden, mask: hidden.sum(-1),
            r"returned a tensor of shape \[2, 5\] for \[2, 5, 7\], \[2, 5\]; expected a tensor of shape \[2\]",
        ),
        ("hidden", lambda hidden, mask: 1.0, r"returned a float for .*; expected a tensor of shape \[2\]"),
        ("transition", lambda before, after, mask: None, r"returned a NoneType"),
        ("branch", lambda branch, stream: branch / stream, r"expected a tensor of shape \[\]: one value, reduce over all axes"),
        (
            "attention",
            lambda weights, mask: weights.amax(-1),
            r"shape \[2, 3, 5\] .*; expected a tensor of shape \[2, 3\]: one value per sequence and head",
        ),
        (
            "attention_batch",
            lambda weights, mask: weights.mean((2, 3)),
            r"shape \[2, 3\] .*; expected a tensor of shape \[3\]: one value per head",
        ),
        ("parameter_gradients", lambda gradients: gradients[0], r"for a list of 2 tensors; expected a tensor of shape \[\]"),
        ("qk_weights", lambda query, key: query.sum(), r"expected a tensor of shape \[3\]: one value per head"),
    ],
)
def test_validate_refuses_the_wrong_shape(reads: Reads, compute: object, message: str) -> None:
    with pytest.raises(ValueError, match=rf"Metric 'mine' reads '{reads}' and .*{message}"):
        validate(custom(reads, compute))


def test_validate_refuses_what_cannot_be_called_with_what_it_reads() -> None:
    message = r"Metric 'mine': compute cannot be called with what 'hidden' gives, \[2, 5, 7\], \[2, 5\]: too many positional arguments"
    with pytest.raises(ValueError, match=message):
        validate(custom("hidden", lambda hidden: hidden.sum((-2, -1))))


def test_validate_leaves_faults_inside_the_metric_to_the_run() -> None:
    def broken(hidden: Tensor, mask: Tensor) -> Tensor:
        raise RuntimeError("needs at least 512 tokens")

    validate(custom("hidden", broken))


def test_validate_accepts_a_good_metric_and_touches_no_generator() -> None:
    seen = []

    def noisy(hidden: Tensor, mask: Tensor) -> Tensor:
        seen.append(hidden)
        return hidden.sum((-2, -1)) + torch.rand(2)

    state = torch.get_rng_state()
    validate(custom("hidden", noisy))
    validate(custom("hidden", noisy))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(seen[0], seen[1])
    validate(custom("hidden", torch.ops.aten.sum.dim_IntList))  # an operator without a Python signature raises inside: not judged


def test_metric_refuses_bad_records() -> None:
    with pytest.raises(ValueError, match=r"Metric 'x' reads 'tokens'; allowed: hidden, transition, "):
        Metric("x", "tokens", torch.sum)
    with pytest.raises(ValueError, match=r"Metric name 'Bad name': use a lower-case identifier"):
        Metric("Bad name", "hidden", torch.sum)
    with pytest.raises(ValueError, match=r"compute must be a function of tensors, got int"):
        Metric("x", "hidden", 3)
