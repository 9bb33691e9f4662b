"""Hosts that wrap, rebuild, offload or transform the model while it is watched."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

import collapse_monitor as cm
from tests.capture.models import loss_of
from tests.watching import GPT, Surroundings, gpt, strict, warnings_in

transformers = pytest.importorskip("transformers")

LAYERS = ["model.layers.0", "model.layers.1", "model.layers.2"]
IDS = torch.arange(24).reshape(2, 12) * 7 % 96 + 1


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=97
    )
    return transformers.LlamaForCausalLM(config)


def blocks(snapshot: cm.Snapshot) -> list[str]:
    return [site.name for site in snapshot.block_sites]


def watched(monitor: cm.Monitor, model: Any, step: int) -> cm.Snapshot:
    with monitor.observe(step):
        model(input_ids=IDS, use_cache=False)
    assert monitor.latest is not None
    return monitor.latest


def ensemble(model: nn.Module, ids: Tensor) -> Tensor:
    states = stack_module_state([model, copy.deepcopy(model)])
    return torch.vmap(lambda state: functional_call(model, state, (ids,)), randomness="different")(states)


def gradients(model: nn.Module, ids: Tensor) -> Tensor:
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = torch.func.grad(lambda p: loss_of(functional_call(model, p, (ids,))))(parameters)
    return torch.cat([gradient.flatten() for gradient in found.values()])


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
@pytest.mark.parametrize("transformed", [ensemble, gradients], ids=["vmap", "grad"])
def test_inside_a_function_transform_every_layer_is_named_and_nothing_changes(
    transformed: Callable[[nn.Module, Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = gpt().eval(), GPT.call(0)[0][0]
    expected, before = transformed(model, ids), Surroundings.of(model)
    monitor = strict(model)
    for step in range(2):
        with monitor.observe(step):
            result = transformed(model, ids)
        assert torch.equal(result, expected)
        assert monitor.latest is not None
        assert monitor.latest.sites
        for site in monitor.latest.sites:
            assert "torch.vmap or torch.func" in monitor.latest.missing[site.name]
    assert Surroundings.of(model) == before
    assert [text.startswith("no layer could be read, first ") for text in warnings_in(caplog)] == [True]


def test_a_model_without_values_is_said_to_have_none(caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        model = llama()
    monitor = strict(model)
    with monitor.observe(0):
        model(input_ids=IDS.to("meta"))
    assert monitor.latest is not None
    assert blocks(monitor.latest) == LAYERS[:2]
    assert all(monitor.latest.missing[name] == "a tensor on the meta device, without values" for name in LAYERS[:2])
    assert len(warnings_in(caplog)) == 1


def test_layers_put_on_and_taken_off_are_counted_anew() -> None:
    model = llama()
    monitor = strict(model)
    assert blocks(watched(monitor, model, 0)) == LAYERS[:2]
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.config.num_hidden_layers = 3
    grown = watched(monitor, model, 1)
    assert blocks(grown) == LAYERS
    assert grown.series("effective_rank") == pytest.approx(watched(strict(model), model, 0).series("effective_rank"), rel=1e-6)
    del model.model.layers[2]
    model.config.num_hidden_layers = 2
    assert blocks(watched(monitor, model, 2)) == LAYERS[:2]


def test_a_layer_that_was_replaced_is_read_and_not_the_old_one() -> None:
    model = llama()
    monitor = strict(model)
    before = watched(monitor, model, 0).series("residual_norm")
    layer = copy.deepcopy(model.model.layers[1])
    with torch.no_grad():
        layer.mlp.down_proj.weight.mul_(1000)
    model.model.layers[1] = layer
    after = watched(monitor, model, 1).series("residual_norm")
    assert after[0] == pytest.approx(before[0], rel=1e-6)
    assert after[1] > 10 * before[1]


def test_a_model_that_goes_on_changing_is_learnt_a_few_times_only() -> None:
    model = llama()
    monitor = strict(model)
    plans = set()
    for step in range(12):
        model.add_module(f"extra_{step}", nn.Identity())
        watched(monitor, model, step)
        plans.add(id(monitor._learning.plan))
    assert len(plans) <= 6


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_put_in_and_merged_keep_the_names_of_the_layers() -> None:
    peft = pytest.importorskip("peft")
    model = llama()
    monitor = strict(model)
    plain = watched(monitor, model, 0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    wrapped = watched(monitor, adapted, 1)
    merged_model = adapted.merge_and_unload()
    merged = watched(monitor, merged_model, 2)
    assert plain.sites == wrapped.sites == merged.sites
    assert merged.series("effective_rank") == pytest.approx(wrapped.series("effective_rank"), rel=1e-4)
    assert merged.series("effective_rank") != pytest.approx(plain.series("effective_rank"), rel=1e-4)
    idle = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    assert norms(idle) == pytest.approx(norms(llama()), rel=1e-4)  # an adapter starts as nothing
    assert norms(merged_model) != pytest.approx(norms(llama()), rel=1e-4)


def norms(model: Any) -> list[float]:
    """`qk_spectral_norm` of every head of every layer."""
    return [value for site in watched(strict(model), model, 0).heads("qk_spectral_norm") for value in site]


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_an_offloaded_model_is_read_and_its_weights_are_not_guessed() -> None:
    from accelerate import cpu_offload

    plain, model = llama(), llama()
    cpu_offload(model, execution_device=torch.device("cpu"))
    readings = []
    for each in (plain, model):
        monitor = strict(each)
        with torch.no_grad(), monitor.observe(0):
            each(input_ids=IDS)
        readings.append(monitor.latest)
    one, other = readings
    assert one is not None
    assert other is not None
    assert other.series("effective_rank") == pytest.approx(one.series("effective_rank"), rel=1e-6)
    assert "no parameter of the model" in other.missing["value_condition"]


def test_generation_inside_a_window_reads_the_prompt_and_writes_the_same() -> None:
    model = llama().eval()

    def generated() -> Tensor:
        return model.generate(IDS, max_new_tokens=4, do_sample=False, pad_token_id=0)

    expected = generated()
    monitor = strict(model)
    with monitor.observe(0):
        assert torch.equal(generated(), expected)
    assert monitor.latest is not None
    assert monitor.latest.tokens == (12.0, 12.0)


def test_one_token_at_first_is_undefined_and_later_calls_are_read() -> None:
    model = llama()
    monitor = strict(model)
    with monitor.observe(0):
        model(input_ids=IDS[:, :1])
    assert monitor.latest is not None
    assert monitor.latest.missing["effective_rank"] == "fewer than two tokens"
    assert watched(monitor, model, 1).series("effective_rank") == pytest.approx(
        watched(strict(model), model, 0).series("effective_rank"), rel=1e-6
    )
