"""The command line as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from collapse_monitor.cli import main

MODELS = """
import torch
from collapse_monitor.testing import PureAttention, tiny_vit

def healthy():
    return tiny_vit(), torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))

def by_keyword():
    return tiny_vit(), {"images": torch.zeros(2, 1, 8, 8)}

def collapsed():
    return PureAttention(residual=False), torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(0))

def alone():
    return tiny_vit()

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models_to_probe.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("factory", ["healthy", "by_keyword"])
def test_probe_of_a_healthy_model(factory: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", f"models_to_probe:{factory}"]) == 0
    said = capsys.readouterr().out
    assert "blocks.3" in said
    assert "- No layer starts out collapsed." in said
    assert "Nothing is wrong with it." in said
    assert "Not looked for: " in said
    assert "gradient_norm was not read: probe runs no backward" in said


def test_probe_of_a_collapsed_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "models_to_probe:collapsed"]) == 1
    said = capsys.readouterr().out
    assert "- Collapsed from the start: layers 1, 2, 3." in said
    assert "falls doubly exponentially with depth" in said
    assert "rank_collapse (critical) in layers 1, 2, 3: All tokens of a sequence" in said


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("models_to_probe", "is not of the form MODULE:FACTORY"),
        ("models_to_probe:number", "models_to_probe has no function 'number'"),
        ("models_to_probe:alone", "returned a TinyViT: return (model, inputs)"),
        ("no_such_module_anywhere:f", "No module named 'no_such_module_anywhere'"),
    ],
)
def test_a_wrong_path_says_what_is_expected(path: str, problem: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", path]) == 2
    assert problem in capsys.readouterr().err
