"""One training, one built package and one TensorBoard for all tests of the tab."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tensorboard_plugin import trainings
from tests.tensorboard_plugin.servers import index_of, serve, until

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked: with only what it ships, and with its entry points."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "package")
    return folder / "package"


@pytest.fixture(scope="session")
def logdir(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The trainings; of several processes that test, one trains and the others wait."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "trainings"
    try:
        folder.mkdir()
    except FileExistsError:
        until((folder.parent / "trained").exists, "another process has trained")
        return folder
    trainings.train(folder / "healthy")
    trainings.train(folder / "collapsing", breaks_at=trainings.BREAKS_AT)
    trainings.train(folder / trainings.HOSTILE_RUN, steps=8, model=trainings.Named())
    (folder.parent / "trained").touch()
    return folder


@pytest.fixture(scope="session")
def address(logdir: Path, package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A TensorBoard over the trainings, with its fast loader where there is one."""
    with serve(logdir, package, tmp_path_factory.mktemp("server") / "log") as url:
        index_of(url, {"healthy", "collapsing", trainings.HOSTILE_RUN})
        yield url
