"""The diagnosis against known truths: synthetic attention maps, models that collapse by theory, and models that do not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import collapse_monitor as cm
from collapse_monitor.judge import History, Judge, undecided
from collapse_monitor.judge.catalogue import CATALOGUE
from collapse_monitor.judge.diagnosis import ALONE, ORDER, explain
from collapse_monitor.records import Alert, Finding, Severity, Site, Snapshot
from collapse_monitor.testing import PureAttention, tiny_gpt, tiny_vit
from tests.judge.test_role_rules import at, course, maps
from tests.synthetic import make_alert, make_snapshot

N, BATCH, HEADS = 64, 4, 4


def causal(logits: Tensor) -> Tensor:
    return logits.masked_fill(torch.ones(N, N).triu(1).bool(), -math.inf).softmax(-1)


def healthy() -> Tensor:
    return torch.randn(BATCH, HEADS, N, N, generator=torch.Generator().manual_seed(0)) * 2


MAPS: dict[str, Callable[[], Tensor]] = {
    "healthy": lambda: causal(healthy()),
    "uniform": lambda: causal(torch.zeros(BATCH, HEADS, N, N)),
    "one-hot": lambda: causal(healthy() * 50),
    "sink": lambda: causal(healthy() + 12 * torch.eye(N)[0]),
    "identical heads": lambda: causal(healthy()[:, :1].expand(-1, HEADS, -1, -1)),
    "input-independent": lambda: causal(healthy()[:1].expand(BATCH, -1, -1, -1)),
    "diagonal": lambda: causal(60 * torch.eye(N).expand(BATCH, HEADS, -1, -1)),
}


def seen(weights: Tensor) -> Snapshot:
    """A snapshot of one block with these maps, through the metrics themselves."""
    mask = torch.ones(N, N).tril().bool()
    names = ("attention_uniformity", "sink_mass", "dominant_column", "head_similarity")
    readings = {name: getattr(cm.metrics, name)(weights, mask).mean(0).tolist() for name in names}
    readings["input_dependence"] = cm.metrics.input_dependence(weights, mask).tolist()
    sites = (Site("block", "block", 0), Site("block.attention", "attention", 0, HEADS, N, N, True, False))
    return Snapshot(0, sites, {"token_similarity": (0.2,)}, {name: (tuple(values),) for name, values in readings.items()})


@pytest.mark.parametrize(
    ("name", "truth"),
    [
        ("healthy", []),
        ("uniform", ["uniform_attention"]),
        ("one-hot", ["attention_entropy_collapse"]),
        ("sink", ["attention_sink"]),
        ("identical heads", ["head_redundancy"]),
        ("input-independent", ["input_independent_attention"]),
        ("diagonal", ["attention_entropy_collapse"]),
    ],
)
def test_synthetic_maps(name: str, truth: list[str]) -> None:
    assert [finding.phenomenon for finding in cm.diagnose(seen(MAPS[name]()))] == truth


def test_uniform_attention_and_sinks_are_notes() -> None:
    for name in ("uniform", "sink"):
        assert [finding.severity for finding in cm.diagnose(seen(MAPS[name]()))] == [Severity.INFO]


def test_a_sink_names_its_heads() -> None:
    weights = causal(healthy())
    weights[:, 2] = MAPS["sink"]()[:, 2]
    (finding,) = cm.diagnose(seen(weights))
    assert (finding.phenomenon, finding.layers, finding.heads) == ("attention_sink", (0,), (2,))


class PostNorm(nn.Module):
    """Post-norm blocks without training: collapsed at 64 layers, unless the branch is scaled down (Noci et al. 2022)."""

    def __init__(self, depth: int, scale: float = 1.0, dim: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(PostNormBlock(dim, scale) for _ in range(depth))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class PostNormBlock(nn.Module):
    def __init__(self, dim: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))
        for weight in (self.attention.in_proj_weight, self.attention.out_proj.weight, self.mlp[0].weight, self.mlp[2].weight):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        attended, _ = self.attention(hidden, hidden, hidden, need_weights=False)
        hidden = self.norm(hidden + self.scale * attended)
        return self.mlp_norm(hidden + self.scale * self.mlp(hidden))


def tokens(dim: int = 32, n: int = 32) -> Tensor:
    return torch.randn(2, n, dim, generator=torch.Generator().manual_seed(1))


def test_pure_attention_collapses_doubly_exponentially() -> None:
    findings = cm.diagnose(cm.probe(PureAttention(dim=64, depth=4, residual=False), tokens(64, 64)))
    first = findings[0]
    assert (first.phenomenon, first.severity, first.since) == ("rank_collapse", Severity.CRITICAL, None)
    assert first.notes == (
        "the relative residual falls doubly exponentially with depth: its logarithm triples in each layer; "
        "from layer 2 on it is at the floor of rounding",
    )


def test_deep_post_norm_collapses_and_scaled_residuals_do_not() -> None:
    collapsed = cm.diagnose(cm.probe(PostNorm(64), tokens()))
    assert {"rank_collapse"} <= {finding.phenomenon for finding in collapsed if finding.severity is not Severity.INFO}
    scaled = cm.diagnose(cm.probe(PostNorm(64, scale=64**-0.5), tokens()))
    assert [finding for finding in scaled if finding.severity is not Severity.INFO] == []


@pytest.mark.parametrize("model", ["vit", "gpt"])
def test_nothing_alarms_at_initialisation(model: str) -> None:
    generator = torch.Generator().manual_seed(0)
    snapshot = (
        cm.probe(tiny_vit(), torch.randn(4, 1, 8, 8, generator=generator))
        if model == "vit"
        else cm.probe(tiny_gpt(), torch.randint(0, 64, (4, 32), generator=generator))
    )
    assert [finding.phenomenon for finding in cm.diagnose(snapshot) if finding.severity is not Severity.INFO] == []


def test_gradients_tell_rank_collapse_from_vanishing_gradients() -> None:
    gradients = {"gradient_norm": [1e-9, 1e-6, 1e-3, 1.0]}
    vanishing = make_snapshot(blocks={**gradients, "qk_to_v_gradient": 0.3})
    assert [finding.phenomenon for finding in cm.diagnose(vanishing)] == ["vanishing_gradient"]
    collapsed = make_snapshot(
        similarity=[0.3, 0.99999, 1.0, 1.0],
        contraction=[0.9, 0.01, 0.3, 0.3],
        rank=[30, 1, 1, 1],
        blocks={**gradients, "qk_to_v_gradient": [0.3, 1e-6, 1e-8, 1e-8]},
    )
    findings = cm.diagnose(collapsed)
    assert findings[0].phenomenon == "rank_collapse"
    assert {"vanishing_gradient"} & {finding.phenomenon for finding in findings if 1 in finding.layers} == set()


def test_a_finding_says_what_was_not_read() -> None:
    collapsed = make_snapshot(similarity=[0.3, 0.99999, 1.0, 1.0], contraction=[0.9, 0.01, 0.3, 0.3], rank=[30, 1, 1, 1])
    (finding,) = cm.diagnose(collapsed)
    assert "not read: branch_ratio, qk_to_v_gradient" in finding.against


def test_what_cannot_be_looked_for_is_listed() -> None:
    snapshot = cm.probe(tiny_vit(), torch.zeros(2, 1, 8, 8))
    assert undecided(snapshot)["vanishing_gradient"] == "gradient_norm was not read: probe runs no backward"
    assert "rank_collapse" not in undecided(snapshot)
    assert {"vanishing_gradient", "bypassed_attention"} <= set(undecided(make_snapshot()))


@pytest.mark.parametrize(
    ("name", "changed", "blocks"),
    [
        ("uniform_attention", {"attention_uniformity": at(2, 0.999, 0.7), "input_dependence": at(2, 0.001, 0.25)}, {}),
        ("bypassed_attention", {}, {"branch_ratio": at(2, 1e-4, 0.4)}),
        ("dead_tokens", {}, {"dead_tokens": at(2, 0.5, 0)}),
        ("dimensional_collapse", {}, {"pooled_rank": at(2, 1.2, 20)}),
    ],
)
def test_a_past_turns_a_note_into_a_warning(name: str, changed: dict[str, list[float]], blocks: dict[str, list[float]]) -> None:
    readings = course() + course(changed, blocks, checks=4)
    snapshots = [make_snapshot(25 * check, **reading) for check, reading in enumerate(readings)]
    (alone,) = cm.diagnose(snapshots[-1])
    assert (alone.phenomenon, alone.severity, alone.since) == (name, Severity.INFO, None)
    assert alone.against[0] == ALONE
    (finding,) = cm.diagnose(snapshots)
    assert (finding.phenomenon, finding.severity, finding.layers, finding.since) == (name, Severity.WARNING, (2,), 500)
    assert ALONE not in finding.against
    assert any(evidence.baseline is not None for evidence in finding.evidence)


def test_a_history_is_judged_by_its_baselines() -> None:
    judge = Judge(["bypassed_attention"])
    for check, reading in enumerate(course() + course(blocks={"branch_ratio": at(1, 5e-3, 0.4)}, checks=4)):
        judge.check(make_snapshot(25 * check, **reading))
    (finding,) = cm.diagnose(judge.history)
    assert (finding.phenomenon, finding.layers, finding.severity) == ("bypassed_attention", (1,), Severity.WARNING)
    assert cm.diagnose(History()) == []


def test_massive_activations_are_information() -> None:
    (finding,) = cm.diagnose(make_snapshot(blocks={"massive_activation": [3, 4000, 4000, 5]}))
    assert (finding.phenomenon, finding.severity, finding.layers) == ("massive_activation", Severity.INFO, (1, 2))


def test_collapse_in_width_is_noted_where_it_is_no_rank_collapse() -> None:
    erased = make_snapshot(
        similarity=[0.3, 0.93, 0.93, 0.93], contraction=[0.9, 0.3, 1, 1], uniformity=0.97, blocks={"stable_rank": [6, 1.05, 1.05, 1.05]}
    )
    (finding,) = cm.diagnose(erased)
    assert (finding.phenomenon, finding.severity, finding.layers) == ("width_collapse", Severity.INFO, (1,))


def test_the_order_covers_the_catalogue() -> None:
    assert sorted(ORDER) == sorted(CATALOGUE)


def test_findings_are_in_order_and_explained() -> None:
    both = make_snapshot(
        max_logit=[5, 2e4, 5, 5],
        logit_std=[1, 40, 1, 1],
        attention=maps(head_similarity=at(3, 1.0, 0.4)),
        blocks={"branch_ratio": at(0, 0, 0.4)},
    )
    findings = cm.diagnose(both)
    assert [finding.phenomenon for finding in findings] == ["logit_explosion", "head_redundancy", "bypassed_attention"]
    text = explain(findings)
    assert text.startswith("logit_explosion (critical) in layers 1: Attention logits have grown out of the range")
    assert "  Evidence: max_logit 2e+04 (bound 1000)" in text
    assert "See phenomena.md#bypassed_attention" in text
    assert explain([]) == "Nothing remarkable."


def test_notes_survive_json() -> None:
    alert = make_alert()
    assert alert.finding is not None
    noted = Alert.from_dict(json.loads(json.dumps({**alert.to_dict(), "finding": {**alert.finding.to_dict(), "notes": ["a note"]}})))
    assert isinstance(noted.finding, Finding)
    assert noted.finding.notes == ("a note",)
