"""`lightning` and `pytorch_lightning`, one of them or both, from Python and from LightningCLI."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from collapse_monitor import JSONLSink
from collapse_monitor.integrations.lightning import CollapseCallback
from tests.integrations.lit import PACKAGES, package

pytestmark = pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")  # of Lightning's own use of it

ROOT = Path(__file__).parents[2]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=170, check=False)


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""

TRAINED = """
import json, torch
from collapse_monitor import CollapseCallback
from collapse_monitor.testing import MemorySink
from tests.integrations.lit import loader, module, trainer
sink = MemorySink()
made = trainer([CollapseCallback(every=2, budget=None, sinks=[sink])], {name!r})
made.fit(module({name!r}), loader(4))
print(json.dumps([sink.steps, sorted({{loaded.partition(".")[0] for loaded in sys.modules}} & {{"lightning", "pytorch_lightning"}})]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "absent"), [("pytorch_lightning", {"lightning"}), ("lightning.pytorch", {"pytorch_lightning", "lightning_fabric"})]
)
def test_one_package_is_enough(name: str, absent: set[str]) -> None:
    package(name)
    ended = python(BLOCKED.format(absent=absent) + TRAINED.format(name=name))
    assert ended.returncode == 0, ended.stderr
    steps, loaded = json.loads(ended.stdout.splitlines()[-1])
    assert steps == [0, 2]
    assert loaded == [name.partition(".")[0]]


@pytest.mark.slow
def test_without_lightning_the_error_says_what_to_install() -> None:
    absent = {"lightning", "pytorch_lightning", "lightning_fabric"}
    ended = python(BLOCKED.format(absent=absent) + "import collapse_monitor\ncollapse_monitor.CollapseCallback")
    assert "ImportError: CollapseCallback needs Lightning: pip install pytorch-lightning (or lightning)" in ended.stderr


def test_the_class_is_a_callback_of_every_installed_package() -> None:
    assert all(issubclass(CollapseCallback, package(name).Callback) for name in PACKAGES)


# -- LightningCLI


@pytest.fixture(autouse=True)
def _no_arguments_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns when it is given arguments in a program that has some."""
    monkeypatch.setattr(sys, "argv", ["train.py"])


def configured(pl: str, folder: Path, init_args: dict[str, Any], **trainer: Any) -> Any:
    """The Trainer that LightningCLI makes of a YAML file."""
    module = importlib.import_module(f"{pl}.demos.boring_classes")
    path = folder / "config.yaml"
    callback = {"class_path": "collapse_monitor.integrations.lightning.CollapseCallback", "init_args": init_args}
    quiet = {
        "logger": False,
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    path.write_text(yaml.safe_dump({"seed_everything": 1, "trainer": {"callbacks": [callback], **quiet, **trainer}}))
    cli = importlib.import_module(f"{pl}.cli").LightningCLI
    return cli(module.BoringModel, run=False, args=["--config", str(path)], save_config_callback=None).trainer


def made_from(pl: str, folder: Path, init_args: dict[str, Any]) -> CollapseCallback:
    (callback,) = (found for found in configured(pl, folder, init_args).callbacks if isinstance(found, CollapseCallback))
    return callback


@pytest.mark.parametrize("pl", PACKAGES)
def test_every_argument_can_be_written_in_yaml(pl: str, tmp_path: Path) -> None:
    package(pl)
    pytest.importorskip("jsonargparse")
    callback = made_from(
        pl,
        tmp_path,
        {
            "every": 7,
            "budget": None,
            "source": "probe",
            "sites": ["layer"],
            "metrics": ["effective_rank", "token_similarity"],
            "rules": ["rank_collapse", "oversmoothing", "tests.integrations.cli_callbacks.never"],
            "sinks": [
                "collapse_monitor.ConsoleSink",
                {"class_path": "collapse_monitor.JSONLSink", "init_args": {"path": str(tmp_path / "log.jsonl")}},
            ],
            "mute": ["oversmoothing:0,3-5", "rank_collapse"],
            "token_mask": "attention_mask",
            "max_sequences": 2,
            "max_tokens": None,
            "max_queries": 8,
            "ranks": "all",
            "on_error": "raise",
            "stop_on": "critical",
            "checkpoint_on": "warning",
            "preflight": True,
        },
    )
    options = callback._options
    assert (options["every"], options["budget"], options["source"], options["ranks"]) == (7, None, "probe", "all")
    assert options["metrics"] == ["effective_rank", "token_similarity"]
    assert [type(sink).__name__ for sink in callback._own_sinks] == ["ConsoleSink", "JSONLSink"]
    assert isinstance(callback._own_sinks[1], JSONLSink)
    assert callback._own_sinks[1].path == tmp_path / "log.jsonl"


@pytest.mark.parametrize("pl", PACKAGES)
def test_a_function_is_found_by_its_path(pl: str, tmp_path: Path) -> None:
    package(pl)
    from tests.integrations.cli_callbacks import sampled

    assert made_from(pl, tmp_path, {"every": "tests.integrations.cli_callbacks.sampled"})._options["every"] is sampled


@pytest.mark.parametrize("pl", PACKAGES)
def test_without_arguments_the_defaults_hold(pl: str, tmp_path: Path) -> None:
    package(pl)
    assert made_from(pl, tmp_path, {})._options == CollapseCallback()._options


@pytest.mark.parametrize("pl", PACKAGES)
@pytest.mark.parametrize(
    ("init_args", "message"),
    [({"evry": 7}, "evry"), ({"stop_on": "fatal"}, "fatal"), ({"metrics": ["rank_of_effect"]}, "rank_of_effect")],
)
def test_a_mistake_in_yaml_is_named(
    pl: str, init_args: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package(pl)
    with pytest.raises((SystemExit, ValueError)) as caught:
        made_from(pl, tmp_path, init_args)
    assert message in capsys.readouterr().err + str(caught.value)


@pytest.mark.parametrize("pl", PACKAGES)
def test_a_run_from_yaml_is_watched(pl: str, tmp_path: Path) -> None:
    from tests.integrations.lit import loader, module

    log = tmp_path / "log.jsonl"
    sinks = [{"class_path": "collapse_monitor.JSONLSink", "init_args": {"path": str(log)}}]
    run = configured(pl, tmp_path, {"every": 2, "budget": None, "on_error": "raise", "sinks": sinks}, max_epochs=1, num_sanity_val_steps=0)
    run.fit(module(pl), loader(4), loader(1))
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [0, 2]
