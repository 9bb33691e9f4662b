"""Models of transformers under the adapters of peft."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.zoo.registry import Shelf, Truth, ids, named
from tests.zoo.transformers_models import GPT, GROUPED

SHELF = Shelf("peft")
tokens = named(input_ids=ids())


def adapted(base: str, options: dict[str, Any], kind: str, **about: Any) -> nn.Module:
    import peft
    import transformers

    config = getattr(transformers, f"{base}Config")(**options)
    return peft.get_peft_model(getattr(transformers, f"{base}Model")(config), getattr(peft, kind)(**about))


@SHELF.model(Truth(3, 3, causal=True), tokens, note="low-rank updates of the fused projection")
def gpt2_lora() -> nn.Module:
    return adapted("GPT2", GPT, "LoraConfig", r=4, target_modules=["c_attn"], fan_in_fan_out=True)


@SHELF.model(Truth(3, 3, causal=True), tokens, note="low-rank updates of q and v")
def llama_lora() -> nn.Module:
    return adapted("Llama", GROUPED, "LoraConfig", r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)


@SHELF.model(Truth(3, 3, causal=True), tokens, note="learned factors on keys, values and MLP")
def llama_ia3() -> nn.Module:
    return adapted("Llama", GROUPED, "IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
