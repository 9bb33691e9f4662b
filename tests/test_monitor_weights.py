"""The projections in a run: on which steps they are read, against dense singular values and hand-cut gradients, and why they are not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from collapse_monitor.monitor import Monitor
from collapse_monitor.once import probe
from collapse_monitor.records import Snapshot
from tests.capture.models import loss_of
from tests.capture.projected import WIDTH, Projected, Separate, Stack, Weights, each_projected, heads_of
from tests.watching import strict

pytestmark = pytest.mark.slow

READINGS = ("qk_spectral_norm", "value_condition")
METRICS = (*READINGS, "qk_to_v_weight_gradient", "attention_uniformity")


def observed(monitor: Monitor, model: nn.Module, step: int, call: tuple[tuple[object, ...], dict[str, object]]) -> Snapshot:
    """One observed forward and backward; gradients stay."""
    model.zero_grad()
    with monitor.observe(step):
        loss_of(model(*call[0], **call[1])).backward()
    assert monitor.latest is not None
    return monitor.latest


def dense(weights: Weights) -> tuple[list[float], list[float]]:
    """Largest singular value of W_Q^T W_K over sqrt(head_dim), and the condition number of W_V, head by head."""
    query, key, value = (side.detach().double() for side in weights)
    norms = [float(torch.linalg.matrix_norm(q.T @ k, 2)) / math.sqrt(len(q)) for q, k in zip(query, key, strict=True)]
    return norms, [float(torch.linalg.cond(v)) for v in value]


@each_projected()
def test_readings_are_those_of_dense_matrices(case: Projected) -> None:
    model = case.model()
    snapshot = observed(strict(model, metrics=METRICS), model, 0, case.call(0))
    for index, site in enumerate(snapshot.attention_sites):
        norms, conditions = dense(case.truth(model, site.name))
        np.testing.assert_allclose(snapshot.heads("qk_spectral_norm")[index], norms, rtol=1e-4)
        np.testing.assert_allclose(snapshot.heads("value_condition")[index], conditions, rtol=1e-3)
        if site.layer is not None:
            assert not any(reading in place for place in snapshot.missing for reading in READINGS)


@pytest.mark.slow
@each_projected(composed=False)
def test_gradient_ratio_is_over_the_same_rows(case: Projected) -> None:
    """The gradient of every row that made q over that of every row that made v, each row once."""
    model = case.model()
    snapshot = observed(strict(model, metrics=METRICS), model, 0, case.call(0))
    for index, site in enumerate(snapshot.attention_sites):
        norms = []
        for side in (0, 2):
            elements = case.elements(model, site.name)[side].unique()
            gradients = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in model.parameters()])
            norms.append(float(gradients[elements].double().norm()))
        assert snapshot.heads("qk_to_v_weight_gradient")[index] == pytest.approx([norms[0] / norms[1]], rel=1e-4)


def test_one_sampled_step_in_ten_reads_them_and_the_others_say_so() -> None:
    torch.manual_seed(0)
    model = Stack(Separate)
    monitor = strict(model, every=2, metrics=METRICS)
    read = []
    for step in range(45):
        with monitor.observe(step):
            loss_of(model(torch.randn(2, 5, WIDTH))).backward()
        snapshot = monitor.latest
        assert snapshot is not None
        if snapshot.step == step:
            known = not np.isnan(snapshot.heads("qk_spectral_norm")).any()
            assert known == (not np.isnan(snapshot.heads("value_condition")).any())
            assert not np.isnan(snapshot.heads("qk_to_v_weight_gradient")).any(), "gradients cost little and come on every sampled step"
            for reading in READINGS:
                assert snapshot.missing.get(reading) == (None if known else "weights are not read on this step")
            read += [step] if known else []
    assert read == [0, 20, 40]


def test_probe_reads_them() -> None:
    torch.manual_seed(0)
    model = Stack(Separate)
    snapshot = probe(model, torch.randn(2, 5, WIDTH))
    norms, conditions = dense(model.layers[1].weights())
    np.testing.assert_allclose(snapshot.heads("qk_spectral_norm")[1], norms, rtol=1e-4)
    np.testing.assert_allclose(snapshot.heads("value_condition")[1], conditions, rtol=1e-3)


def test_a_separate_forward_reads_them_too() -> None:
    torch.manual_seed(0)
    model = Stack(Separate)
    snapshot = observed(strict(model, source="probe", metrics=METRICS), model, 0, ((torch.randn(2, 5, WIDTH),), {}))
    np.testing.assert_allclose(snapshot.heads("qk_spectral_norm")[0], dense(model.layers[0].weights())[0], rtol=1e-4)
    assert not np.isnan(snapshot.heads("qk_to_v_weight_gradient")).any()


class Activated(Separate):
    """Only the first of two layers has something between its keys and their projection."""

    count = 0

    def set_up(self) -> None:
        super().set_up()
        Activated.count += 1
        self.active = Activated.count == 1

    def project(self, x: Tensor) -> Weights:
        q, k, v = super().project(x)
        return q, torch.relu(k) if self.active else k, v


def test_a_site_whose_weights_are_not_known_is_named_with_the_reason() -> None:
    Activated.count = 0
    torch.manual_seed(0)
    model = Stack(Activated)
    snapshot = observed(strict(model, metrics=METRICS), model, 0, ((torch.randn(2, 5, WIDTH),), {}))
    assert snapshot.missing["layers.0/qk_spectral_norm"] == "its keys: relu stands between it and a projection"
    assert np.isnan(snapshot.heads("qk_spectral_norm")[0]).all()
    for known in ("layers.1/qk_spectral_norm", "layers.0/value_condition", "layers.0/qk_to_v_weight_gradient"):
        site, _, metric = known.partition("/")
        assert known not in snapshot.missing
        assert not np.isnan(snapshot.heads(metric)[int(site[-1])]).any()


def frozen(model: nn.Module, names: Sequence[str]) -> None:
    for name, parameter in model.named_parameters():
        if any(part in name for part in names):
            parameter.requires_grad_(False)


@pytest.mark.parametrize(("name", "role"), [("q", "queries"), ("v", "values")])
def test_frozen_weights_have_no_ratio(name: str, role: str) -> None:
    torch.manual_seed(0)
    model = Stack(Separate)
    frozen(model, [f"{name}.weight"])
    snapshot = observed(strict(model, metrics=METRICS), model, 0, ((torch.randn(2, 5, WIDTH),), {}))
    assert snapshot.missing["qk_to_v_weight_gradient"] == f"the weights that made its {role} have no gradient"
    assert not np.isnan(snapshot.heads("qk_spectral_norm")).any()


def test_a_scaled_loss_does_not_show_in_the_ratio() -> None:
    ratios = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        model = Stack(Separate)
        monitor = strict(model, metrics=METRICS)
        with monitor.observe(0, loss_scale=scale):
            (scale * loss_of(model(torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))))).backward()
        assert monitor.latest is not None
        ratios.append(monitor.latest.heads("qk_to_v_weight_gradient"))
    np.testing.assert_allclose(ratios[0], ratios[1], rtol=1e-5)


def test_the_ratio_falls_as_the_square_of_what_is_left_between_tokens() -> None:
    """With tokens that differ by epsilon the queries learn epsilon squared as much, the values as much as ever."""
    ratios = []
    for epsilon in (1e-1, 1e-2):
        torch.manual_seed(0)
        model = Stack(Unnormed, depth=1)
        tokens = torch.randn(1, 1, WIDTH) + epsilon * torch.randn(2, 6, WIDTH)
        ratios.append(observed(strict(model, metrics=METRICS), model, 0, ((tokens,), {})).heads("qk_to_v_weight_gradient")[0][0])
    assert math.log10(ratios[0] / ratios[1]) == pytest.approx(2, abs=0.3)


class Unnormed(Separate):
    def project(self, x: Tensor) -> Weights:
        return super().project(x)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads_of(self.q(x)), heads_of(self.k(x)), heads_of(self.v(x))
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
