"""Hooks go when their context ends; a copy or a file made meanwhile holds none that does anything, and needs no package to load."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from collapse_monitor.capture.hooks import GradientHooks, module_hooks, noted_calls


def count(model: nn.Module) -> int:
    """How many hooks of any kind are on the model and its parts."""
    kinds = (
        "_forward_pre_hooks",
        "_forward_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_state_dict_hooks",
        "_load_state_dict_pre_hooks",
    )
    flags = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in (*kinds, *flags))


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


def listening(model: nn.Module, heard: list[str]) -> Any:
    return module_hooks(model.modules(), lambda *_: heard.append("enter"), lambda *_: heard.append("leave"))


def test_every_call_is_heard_and_nothing_is_left() -> None:
    model, heard = two_layers(), list[str]()
    with listening(model, heard):
        model(torch.ones(1, 3))
    assert heard == ["enter", "enter", "leave", "enter", "leave", "leave"]
    assert count(model) == 0
    model(torch.ones(1, 3))
    assert len(heard) == 6


def test_a_listener_cannot_change_the_result() -> None:
    model = two_layers()
    expected = model(torch.ones(1, 3))
    with module_hooks(model.modules(), lambda *_: (torch.zeros(1, 3),), lambda *_: torch.zeros(1, 2)):
        assert torch.equal(model(torch.ones(1, 3)), expected)


def test_hooks_of_others_stay() -> None:
    model = two_layers()
    model[0].register_forward_hook(lambda *_: None)
    before = count(model)
    with listening(model, []):
        model[1].register_forward_pre_hook(lambda *_: None)
    assert count(model) == before + 1


def test_a_forward_that_raises_is_left_and_nothing_stays() -> None:
    model, left = two_layers(), list[Any]()
    with pytest.raises(RuntimeError), module_hooks(model.modules(), lambda *_: None, lambda *call: left.append(call[-1])):
        model(torch.ones(1, 5))
    assert left == [None, None]
    assert count(model) == 0


def test_the_calls_of_other_threads_are_not_heard() -> None:
    model, heard = two_layers(), list[str]()
    with listening(model, heard):
        thread = threading.Thread(target=model, args=(torch.ones(1, 3),))
        thread.start()
        thread.join()
    assert not heard


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: _saved_and_loaded(model),
}


def _saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("way", list(COPIES))
def test_copies_made_meanwhile_are_inert(way: str) -> None:
    model, heard = two_layers(), list[str]()
    with listening(model, heard):
        twin = COPIES[way](model)
        assert torch.equal(twin(torch.ones(1, 3)), model(torch.ones(1, 3)))
        assert heard.count("enter") == (3 if way != "copy" else 5), "a shallow copy shares its parts with the model, which are heard"
    heard.clear()
    twin(torch.ones(1, 3))
    assert not heard


def test_a_file_saved_meanwhile_needs_no_package_to_load(tmp_path: Path) -> None:
    model = two_layers()
    with listening(model, []):
        torch.save(model, tmp_path / "model.pt")
    code = f"""
import sys, torch
model = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
print(*model(torch.ones(1, 3)).flatten().tolist())
assert not any(name.startswith("collapse_monitor") for name in sys.modules)
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert [float(number) for number in printed.split()] == model(torch.ones(1, 3)).flatten().tolist()


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_exported_meanwhile_knows_nothing_of_it(strict: bool) -> None:
    if strict and torch.__version__.startswith("2.6."):
        pytest.skip("strict export of torch 2.6 cannot trace past any hook")
    model, heard = two_layers().eval(), list[str]()
    with listening(model, heard):
        exported = torch.export.export(model, (torch.ones(1, 3),), strict=strict)
    assert not heard
    assert torch.equal(exported.module()(torch.ones(1, 3)), model(torch.ones(1, 3)))


def test_calls_of_a_model_compiled_in_place_are_noted_outside_the_graph() -> None:
    torch._dynamo.reset()
    model, noted = two_layers(), list[Any]()
    model.compile(backend="eager", fullgraph=True)
    compiled = model._compiled_call_impl
    for _ in range(2):
        with noted_calls(model, lambda module, args, kwargs: noted.append((module, args, kwargs))):
            model(torch.ones(1, 3))
        assert model._compiled_call_impl is compiled
    assert [call[0] for call in noted] == [model, model]
    assert all(torch.equal(call[1][0], torch.ones(1, 3)) for call in noted)


def test_gradient_hooks_are_called_once_and_go() -> None:
    hooks, heard = GradientHooks(), list[float]()
    leaf = torch.ones(2, requires_grad=True)
    middle = leaf * 3
    assert hooks.watch(middle, lambda gradient: heard.append(float(gradient.sum())))
    assert not hooks.watch(torch.ones(2), lambda gradient: None)
    middle.square().sum().backward(retain_graph=True)
    assert heard == [12.0]
    assert hooks.heard
    hooks.remove()
    middle.square().sum().backward()
    assert heard == [12.0]
