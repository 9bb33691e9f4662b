"""What a user installs: the wheel is complete, typed, importable, and asks for no particular torch."""

from __future__ import annotations

import email
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import collapse_monitor

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)], check=True, capture_output=True
    )
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_every_module_the_type_marker_and_the_license(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "collapse_monitor").rglob("*.py")}
    assert sources | {"collapse_monitor/py.typed"} <= names
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "examples/", "benchmarks/"))]


def test_the_metadata_says_what_is_needed(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    metadata = email.message_from_bytes(archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))))
    required = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    assert sorted(line.partition(">=")[0] for line in required) == [
        "einops",
        "jaxtyping",
        "numpy",
        "pytorch-lightning",
        "rich",
        "tensorboard",
        "torch",
    ]
    assert set(metadata.get_all("Provides-Extra") or []) == {"hf", "demo", "dev", "zoo", "benchmark", "docs"}
    assert metadata["Version"] == collapse_monitor.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"


def test_the_wheel_imports_on_its_own(wheel: Path, tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(wheel)!r}); import collapse_monitor as cm; cm.Snapshot; print(cm.__file__, cm.__version__)"
    said = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert said.split() == [f"{wheel}/collapse_monitor/__init__.py", collapse_monitor.__version__]


def test_the_command_exists() -> None:
    said = subprocess.run([sys.executable, "-m", "collapse_monitor.cli", "--help"], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "demo" in said.stdout


def test_the_changelog_and_the_test_torch_are_in_step() -> None:
    assert (
        "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
        or f"## [{collapse_monitor.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    )
    pins = dict(line.split("==") for line in (ROOT / "requirements-dev.txt").read_text().splitlines() if "==" in line)
    assert set(pins) == {"torch", "torchvision"}
    assert tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 6)
