"""The structure of the package, read from its source: what may import what, where hooks and host copies live, how files read."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "collapse_monitor"
FILES = sorted(PACKAGE.rglob("*.py"))

# A part may import parts of a lower layer and itself; parts of one layer do not know each other.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"records", "metrics"}),
    frozenset({"observation"}),
    frozenset({"capture", "measure", "judge", "remedies"}),
    frozenset({"report", "schedule", "arguments"}),
    frozenset({"ledger"}),
    frozenset({"monitor", "once"}),
    frozenset({"integrations", "testing", "tensorboard_plugin"}),
    frozenset({"demo"}),
    frozenset({"commands"}),
    frozenset({"cli"}),
)
# A record shows itself as a table, a table is made of records: one part in several files.
SAME_PART = {"tables": "records", "terminal": "records", "sparklines": "records"}

HOST_COPIES = {"item", "cpu", "tolist", "numpy"}
WORD_OF_NO_MEANING = re.compile(r"(Manager|Handler|Utils?|Base|Helpers?)\b")


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _part(module: str) -> str:
    """`collapse_monitor.capture.hooks` -> `capture`; the package itself -> ``."""
    names = module.split(".")
    return SAME_PART.get(names[1], names[1]) if len(names) > 1 else ""


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every module that the file imports, anywhere in it, as absolute names."""
    package = _module(path) if path.name == "__init__.py" else _module(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
            # `from collapse_monitor import metrics` imports a part, `from collapse_monitor.metrics import X` names of one.
            yield from ((node.lineno, f"{origin}.{alias.name}" if origin == "collapse_monitor" else origin) for alias in node.names)


def _calls(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.lineno, node.func.attr


def _uses(path: Path, package: str) -> bool:
    return any(name.partition(".")[0] == package for _, name in _imports(path))


def test_every_part_has_a_layer() -> None:
    parts = {_part(_module(path)) for path in FILES} - {""}
    assert parts <= frozenset().union(*LAYERS), "a new part of the package needs a place in LAYERS"


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_a_part_imports_lower_layers_only(path: Path) -> None:
    height = {part: i for i, layer in enumerate(LAYERS) for part in layer}
    own = _part(_module(path))
    if not own:
        return  # the front door names everything, lazily
    wrong = [
        f"{_name(path)}:{line} imports {module}"
        for line, module in _imports(path)
        if module.partition(".")[0] == "collapse_monitor" and (part := _part(module)) != own and not height.get(part, -1) < height[own]
    ]
    assert not wrong, "\n".join(wrong)


def test_hooks_are_registered_in_one_file() -> None:
    wrong = [
        f"{_name(path)}:{line} calls {name}"
        for path in FILES
        if path != PACKAGE / "capture" / "hooks.py"
        for line, name in _calls(path)
        if name.startswith("register_") and "hook" in name
    ]
    assert not wrong, "\n".join(wrong)


def test_tensors_reach_the_host_in_measure_only() -> None:
    wrong = [
        f"{_name(path)}:{line} calls .{name}()"
        for path in FILES
        if PACKAGE / "measure" not in path.parents and _uses(path, "torch")
        for line, name in _calls(path)
        if name in HOST_COPIES
    ]
    assert not wrong, "\n".join(wrong)


def test_records_and_judge_know_no_torch() -> None:
    wrong = [_name(path) for path in FILES if _part(_module(path)) in {"records", "judge"} and _uses(path, "torch")]
    assert not wrong


def _loaded(statement: str) -> set[str]:
    """Top-level packages in `sys.modules` after the statement, in a fresh interpreter."""
    code = f"import sys\n{statement}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert _loaded("import collapse_monitor").isdisjoint(
        {"torch", "numpy", "lightning", "pytorch_lightning", "tensorboard", "transformers"}
    )


def test_judging_loads_no_torch() -> None:
    assert "torch" not in _loaded("from collapse_monitor import DEFAULT_RULES, Snapshot; import collapse_monitor.tables")


def test_the_monitor_loads_no_framework() -> None:
    used = "Monitor, probe, metrics, TensorBoardSink, JSONLSink, ConsoleSink, read, testing"
    assert _loaded(f"from collapse_monitor import {used}").isdisjoint({"lightning", "pytorch_lightning", "tensorboard", "transformers"})


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_a_file_has_one_reason_to_change(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 350, "split the file: it probably has more than one reason to change"


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_names_mean_something(path: Path) -> None:
    names = [path.stem.title(), *(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))]
    assert not [name for name in names if WORD_OF_NO_MEANING.search(name)]


def test_product_code_leaves_the_global_generators_alone() -> None:
    """Only the seeded test models touch torch's generator, inside a fork that restores it."""
    seeding = {"manual_seed", "manual_seed_all", "set_rng_state", "seed_everything"}
    wrong = [
        f"{_name(path)}:{line}" for path in FILES if path.stem not in {"testing", "demo"} for line, name in _calls(path) if name in seeding
    ]
    assert not [place for place in wrong if not place.startswith("collapse_monitor/capture/probe.py")], "\n".join(wrong)


def test_nothing_speaks_of_the_machine_it_was_written_on() -> None:
    path_of_a_machine = re.compile(r"(?<![\w.:/-])/(?:home|mnt|root|srv|Users|w[o]rk|workspace)/")
    texts = [
        path
        for folder in ("collapse_monitor", "tests", "examples", "benchmarks", "docs", ".ci", ".")
        for path in ((ROOT / folder).glob("*") if folder == "." else (ROOT / folder).rglob("*"))
        if path.suffix in {".py", ".md", ".toml", ".txt", ".yml", ""} and path.is_file()
    ]
    assert len(texts) > len(FILES)
    assert not [_name(path) for path in texts if path_of_a_machine.search(path.read_text())]
