"""The rules that run by default, and how a list of rules, names and import paths becomes a list of rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module

from collapse_monitor.judge.attention_rules import attention_entropy_collapse, logit_explosion
from collapse_monitor.judge.flow_rules import bypassed_attention, exploding_gradient, vanishing_gradient
from collapse_monitor.judge.map_rules import (
    attention_stagnation,
    head_redundancy,
    input_independent_attention,
    single_column_attention,
    uniform_attention,
)
from collapse_monitor.judge.rule import Rule, checks_of, name_of
from collapse_monitor.judge.sample_rules import dead_tokens, dimensional_collapse, overfitting
from collapse_monitor.judge.token_rules import non_finite, oversmoothing, rank_collapse

DEFAULT_RULES: tuple[Rule, ...] = (
    non_finite,
    rank_collapse,
    oversmoothing,
    logit_explosion,
    attention_entropy_collapse,
    uniform_attention,
    single_column_attention,
    head_redundancy,
    attention_stagnation,
    input_independent_attention,
    bypassed_attention,
    vanishing_gradient,
    exploding_gradient,
    dimensional_collapse,
    dead_tokens,
    overfitting,
)
"""The built-in rules. Their names are the phenomena they name."""

_ALIKE = ("head_redundancy", "attention_stagnation", "input_independent_attention")
_OF_TOKENS = ("oversmoothing", "width_collapse", "dead_tokens", "dimensional_collapse", "vanishing_gradient", "exploding_gradient")
_OF_MAPS = ("uniform_attention", "single_column_attention", *_ALIKE)

SILENCES: Mapping[str, tuple[str, ...]] = {
    "non_finite": tuple(name_of(rule) for rule in DEFAULT_RULES[1:]),
    "rank_collapse": _OF_TOKENS,
    "logit_explosion": _OF_MAPS,
    "attention_entropy_collapse": _OF_MAPS,
    "single_column_attention": _ALIKE,
    "uniform_attention": ("head_redundancy", "attention_stagnation"),
    "input_independent_attention": ("uniform_attention",),
    "head_redundancy": ("attention_stagnation",),
    "dead_tokens": ("dimensional_collapse",),
}
"""Echoes: while the rule on the left fires on a layer, those on the right say nothing about that layer."""

SILENCES_DOWNSTREAM: Mapping[str, tuple[str, ...]] = {
    "non_finite": tuple(name_of(rule) for rule in DEFAULT_RULES[1:]),
    "rank_collapse": (*_OF_TOKENS, *_OF_MAPS, "attention_entropy_collapse", "bypassed_attention"),
    "oversmoothing": _OF_MAPS,
    "dead_tokens": ("oversmoothing", *_OF_MAPS),
}
"""Echoes further down: nothing is said about layers behind the origin either, since what they read is already spoilt."""


def resolve_rules(rules: Sequence[Rule | str]) -> tuple[Rule, ...]:
    """Rules from callables, names of built-in rules, and import paths such as `my_package.rules.my_rule`.

    Raises:
        ValueError: an unknown name, a path that does not lead to a callable, or two rules of one name; the message says what is allowed.

    >>> [name_of(rule) for rule in resolve_rules(["oversmoothing"])]
    ['oversmoothing']
    """
    if isinstance(rules, str):
        raise ValueError(f"rules={rules!r}: give a list, as in rules=[{rules!r}]")
    if not isinstance(rules, Iterable):
        raise ValueError(f"rules={rules!r}: give a list of rules and names, as in rules=[*DEFAULT_RULES, my_rule]; [] for none")
    resolved = tuple(rule if callable(rule) else _named(rule) for rule in rules)
    names = [name_of(rule) for rule in resolved]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"Two rules are named {', '.join(map(repr, repeated))}: give one of them a `name` attribute of its own")
    for rule, name in zip(resolved, names, strict=True):
        if checks_of(rule) < 1:
            raise ValueError(f"Rule {name!r}: for_checks is {checks_of(rule)}, it must be at least 1")
    return resolved


def _named(rule: object) -> Rule:
    built_in = {name_of(known): known for known in DEFAULT_RULES}
    if isinstance(rule, str) and rule in built_in:
        return built_in[rule]
    if isinstance(rule, str) and "." in rule:
        module, _, name = rule.rpartition(".")
        try:
            found = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"Rule {rule!r} cannot be imported ({error}): give the path of a function, as in my_package.rules.my_rule"
            ) from error
        if callable(found):
            return found
        raise ValueError(f"Rule {rule!r} is a {type(found).__name__}: a rule is a callable rule(snapshot, history) -> list[Condition]")
    raise ValueError(
        f"Unknown rule {rule!r}: allowed are {', '.join(built_in)}, the import path of a function, or a callable rule(snapshot, history)"
    )
