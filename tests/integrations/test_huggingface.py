"""A real `transformers.Trainer` with the callback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from collapse_monitor.records import Severity
from collapse_monitor.testing import MemorySink
from tests.integrations.lit import fires_at, hooks_on, modes

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from collapse_monitor.integrations.huggingface import CollapseCallback  # noqa: E402

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BLOCKS = ["model.layers.0", "model.layers.1"]
WORDS, TOKENS = 40, 8


class Data(torch.utils.data.Dataset):
    def __init__(self, size: int) -> None:
        self.ids = torch.randint(0, WORDS, (size, TOKENS), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index], "attention_mask": torch.ones(TOKENS, dtype=torch.long)}


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, attention_dropout=0.1, **sizes))


class Losses(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.seen.append((state.global_step, logs["loss"]))


def watch(every: Any = 1, **options: Any) -> tuple[Any, MemorySink]:
    sink = MemorySink()
    return CollapseCallback(every=every, sinks=[sink], **{"budget": None, "on_error": "raise", "logging_dir": None, **options}), sink


def trainer(callbacks: list[Any], folder: Path, model: nn.Module | None = None, size: int = 12, **options: Any) -> Any:
    quiet = {
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "seed": 3,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
    }
    arguments = transformers.TrainingArguments(str(folder), **{**quiet, **options})
    model = model if model is not None else llama()
    return transformers.Trainer(model, arguments, train_dataset=Data(size), eval_dataset=Data(4), callbacks=callbacks)


@pytest.mark.parametrize(
    ("options", "expected"), [({}, [1, 2, 3, 4, 5, 6]), ({"gradient_accumulation_steps": 3}, [1, 2])], ids=["plain", "accumulated"]
)
def test_readings_lie_on_the_x_axis_of_the_loss(options: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = Losses()
    callback, sink = watch(logging_dir="auto")
    trainer([callback, losses], tmp_path, **options).train()
    assert sink.steps == [step for step, _ in losses.seen] == expected
    assert [site.name for site in sink.snapshots[0].block_sites] == BLOCKS
    events = EventAccumulator(str(tmp_path / "runs" / "collapse_monitor"))
    events.Reload()
    assert [event.step for event in events.Scalars("collapse_summary/effective_rank_min")] == expected


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"gradient_accumulation_steps": 2, "bf16": True}, marks=pytest.mark.slow)], ids=["plain", "bf16"]
)
def test_training_is_bitwise_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    def run(callbacks: list[Any]) -> tuple[Any, ...]:
        losses = Losses()
        made = trainer([*callbacks, losses], tmp_path, **options)
        made.train()
        return losses.seen, {n: t.clone() for n, t in made.model.state_dict().items()}, torch.get_rng_state()

    callback, sink = watch(every=2)
    plain, watched = run([]), run([callback])
    assert plain[0] == watched[0]
    assert all(torch.equal(plain[1][name], watched[1][name]) for name in plain[1])
    assert torch.equal(plain[2], watched[2])
    assert len(sink.steps) >= 2


def test_gradients_are_those_of_the_loss(tmp_path: Path) -> None:
    readings = []
    for options in ({}, {"gradient_accumulation_steps": 2}):
        callback, sink = watch()
        trainer([callback], tmp_path, max_grad_norm=0.0, **options).train()
        readings.append({m: sink.snapshots[0].series(m) for m in ("gradient_norm", "parameter_gradient_norm")})
    for metric, values in readings[0].items():
        assert min(values) > 0
        assert readings[1][metric] == pytest.approx(values, rel=1e-4)


def test_evaluation_is_not_observed_and_gets_the_headlines(tmp_path: Path) -> None:
    callback, sink = watch(on_error="warn")
    made = trainer([callback], tmp_path, eval_strategy="steps", eval_steps=2)
    made.train()
    assert sink.steps == [1, 2, 3, 4, 5, 6]
    assert [snapshot.step for snapshot in sink.snapshots if "val_loss" in snapshot.context] == [2, 4, 6]
    assert sink.snapshots[-1].context["train_loss"] > 0
    metrics: dict[str, Any] = {}
    callback.on_evaluate(made.args, made.state, made.control, metrics=metrics)
    assert metrics["eval_collapse/min_rank"] == pytest.approx(min(sink.snapshots[-1].series("effective_rank")))


def test_the_best_model_can_be_chosen_by_a_headline(tmp_path: Path) -> None:
    callback, _ = watch()
    options = {"metric_for_best_model": "collapse/min_rank", "greater_is_better": True, "load_best_model_at_end": True}
    made = trainer([callback], tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, **options)
    made.train()
    assert made.state.best_metric is not None
    assert made.state.best_metric > 1


@pytest.mark.parametrize("severity", ["warning", "critical"])
def test_an_alert_stops_after_a_checkpoint(severity: str, tmp_path: Path) -> None:
    callback, sink = watch(rules=[fires_at(3, Severity(severity))], stop_on="critical", checkpoint_on="warning")
    made = trainer([callback], tmp_path)
    made.train()
    assert [alert.step for alert in sink.alerts] == [3]
    assert made.state.global_step == (3 if severity == "critical" else 6)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]


def test_a_resumed_run_neither_warms_up_nor_fires_again(tmp_path: Path) -> None:
    first, _ = watch(rules=[fires_at(2)])
    trainer([first], tmp_path, max_steps=3, save_strategy="steps", save_steps=3).train()
    state = json.loads((tmp_path / "checkpoint-3" / "collapse_monitor.json").read_text())
    second, sink = watch(rules=[fires_at(2)])
    trainer([second], tmp_path, max_steps=6).train(resume_from_checkpoint=True)
    assert sink.steps == [4, 5, 6]
    assert sink.alerts == []
    assert second.monitor is not None
    assert second.monitor.state_dict()["judge"]["history"] != state["judge"]["history"]
    assert [alert.step for alert in second.monitor.alerts] == [2]


def test_a_checkpoint_that_knows_nothing_of_the_callback_is_resumed(tmp_path: Path) -> None:
    trainer([], tmp_path, max_steps=3, save_strategy="steps", save_steps=3).train()
    callback, sink = watch()
    trainer([callback], tmp_path, max_steps=6).train(resume_from_checkpoint=True)
    assert sink.steps == [4, 5, 6]


class Boom(Exception):
    """The user's own."""


def test_a_forward_that_raises_leaves_nothing_and_the_next_training_works(tmp_path: Path) -> None:
    callback, sink = watch()
    model = llama()
    calls = []

    def explode(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Boom

    made = trainer([callback], tmp_path, model)
    handle = model.model.layers[1].register_forward_hook(explode)
    with pytest.raises(Boom):
        made.train()
    handle.remove()
    assert hooks_on(model) == 0
    assert modes() == []
    made.train()
    assert sink.steps[:2] == [1, 2]
    assert sink.steps[-6:] == [1, 2, 3, 4, 5, 6]
    callback.close()
    assert sink.closed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_a_compiled_model_is_probed(tmp_path: Path) -> None:
    torch._dynamo.reset()
    callback, sink = watch(every=3)
    trainer([callback], tmp_path, torch_compile=True, torch_compile_backend="eager").train()
    assert sink.steps == [1, 3, 6]
    assert {snapshot.source for snapshot in sink.snapshots} == {"probe"}
    assert [site.name for site in sink.snapshots[0].block_sites] == BLOCKS


def test_mistakes_show_when_the_callback_is_made() -> None:
    with pytest.raises(ValueError, match="every=0"):
        CollapseCallback(every=0)
    with pytest.raises(ValueError, match="stop_on='fatal'"):
        CollapseCallback(stop_on="fatal")
    with pytest.raises(TypeError, match="evry"):
        CollapseCallback(evry=3)


@pytest.mark.slow
def test_without_transformers_the_error_names_the_extra() -> None:
    code = "import sys; sys.modules['transformers'] = None; import collapse_monitor.integrations.huggingface"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=170, check=False)
    assert "ImportError: CollapseCallback for Hugging Face needs transformers: pip install 'collapse-monitor[hf]'" in ended.stderr
