"""Which Python, which TensorBoard, and whether the tab is installed where TensorBoard looks for it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import collapse_monitor
from collapse_monitor.commands.doctor.findings import Found, note, ok, wrong

OLDEST_TENSORBOARD = (2, 21)
"""Older ones need `pkg_resources`, which new versions of setuptools no longer have."""

# Runs in the Python of the `tensorboard` command, which may be old and may lack everything: plain Python 3.
_ASK = """
import importlib.metadata as metadata, json, sys
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
def binary():
    try:
        import tensorboard_data_server
        return tensorboard_data_server.server_binary()
    except Exception:
        return None
found = metadata.entry_points()
plugins = list(found.select(group="tensorboard_plugins")) if hasattr(found, "select") else list(found.get("tensorboard_plugins", ()))
broken = {}
for plugin in plugins:
    try:
        plugin.load()
    except BaseException as error:
        broken[plugin.name] = "{}: {}".format(type(error).__name__, error)
names = ["tensorboard", "tensorboard-data-server", "collapse-monitor"]
print(json.dumps({"python": sys.version.split()[0], "prefix": sys.prefix, "plugins": [plugin.name for plugin in plugins], "broken": broken,
                  "server": binary(), **{name: version(name) for name in names}}))
"""


def examine_environment(path: str | None = None) -> tuple[list[Found], bool]:
    """What is found, and whether TensorBoard reads with its fast loader. `path`: where to look for commands, if not on the PATH."""
    here = f"Python {sys.version.split()[0]} ({sys.executable}), collapse_monitor {collapse_monitor.__version__}"
    found = [ok(f"{here} from {Path(collapse_monitor.__file__).parent}")]
    script = shutil.which("tensorboard", path=path)
    python = Path(sys.executable) if script is None else interpreter_of(Path(script))
    if python is None:
        found.append(note(f"{script} does not say which Python it belongs to", f"{sys.executable} -m tensorboard.main --logdir LOGDIR"))
        return found, False
    about = _ask(python)
    if about is None:
        problem = f"{script} belongs to {python}, which does not run" if script else f"{python} could not be asked what is installed"
        return [*found, wrong(problem, "python -m pip install --force-reinstall tensorboard")], False
    if script is None:
        found += _without_command(about, python)
    elif about["tensorboard"] is None:
        found.append(wrong(f"{script} is there, but {python} has no tensorboard", f"{python} -m pip install tensorboard"))
    else:
        found.append(ok(f"tensorboard {about['tensorboard']} on the PATH: {script} (Python {about['python']}, {python})"))
    if about["tensorboard"] is not None:
        found += [*_age(about, python), *_tab(about, python), *_broken(about, python), _loader(about)]
    return found, bool(about["server"])


def interpreter_of(script: Path) -> Path | None:
    """The Python that an installed command runs with, from its first lines; None where they do not say."""
    with script.open("rb") as file:
        head = file.read(4096).decode("utf-8", "replace")
    if not head.startswith("#!"):
        # Windows: a small program beside or below the Python.
        known = (script.parent / "python.exe", script.parent.parent / "python.exe")
        return next((path for path in known if path.exists()), None)
    first, _, rest = head[2:].partition("\n")
    if first.strip().endswith("/sh"):
        # How pip writes paths that are too long or contain spaces.
        quoted = re.match(r"""'''exec'\s+(?:"([^"]+)"|(\S+))""", rest)
        return Path(quoted[1] or quoted[2]) if quoted else None
    words = first.split()
    if Path(words[0]).name == "env":
        names = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        resolved = shutil.which(names[0]) if names else None
        return Path(resolved) if resolved else None
    return Path(words[0])


def _ask(python: Path) -> dict[str, Any] | None:
    try:
        # From a folder without packages, as `-c` would find those of the one it runs in.
        said = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=120, check=True, cwd=Path(python).parent).stdout
        return dict(json.loads(said.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _without_command(about: dict[str, Any], python: Path) -> list[Found]:
    if about["tensorboard"] is None:
        return [wrong("there is no tensorboard, neither as a command nor for this Python", f"{python} -m pip install tensorboard")]
    said = f"tensorboard {about['tensorboard']} is installed for this Python, but there is no such command on the PATH"
    return [note(said, f"{python} -m tensorboard.main --logdir LOGDIR")]


def _age(about: dict[str, Any], python: Path) -> list[Found]:
    numbers = tuple(int(part) for part in re.findall(r"\d+", about["tensorboard"])[:2])
    if numbers >= OLDEST_TENSORBOARD:
        return []
    said = f"tensorboard {about['tensorboard']} does not start beside setuptools 82 or newer"
    return [note(said, f"{python} -m pip install --upgrade tensorboard")]


def _tab(about: dict[str, Any], python: Path) -> list[Found]:
    if "collapse_monitor" in about["plugins"]:
        return [ok(f"the tab Collapse is installed there (collapse-monitor {about['collapse-monitor']})")]
    if about["collapse-monitor"]:
        said = f"collapse-monitor {about['collapse-monitor']} is installed there, without the tab"
        return [wrong(said, f"{python} -m pip install --upgrade --force-reinstall --no-deps collapse-monitor")]
    return [
        wrong(
            f"the tab Collapse is missing: collapse-monitor is not installed for {python}, which TensorBoard runs with",
            f"{python} -m pip install collapse-monitor",
            "or, without the tab: collapse-monitor report LOGDIR -o report.html",
        )
    ]


def _broken(about: dict[str, Any], python: Path) -> list[Found]:
    """TensorBoard does not start if one plugin cannot be imported."""
    return [
        wrong(
            f"TensorBoard does not start: its plugin {name} cannot be imported ({error})",
            f"{python} -m pip install --upgrade {name.replace('_', '-')}",
        )
        for name, error in about["broken"].items()
    ]


def _loader(about: dict[str, Any]) -> Found:
    if about["server"]:
        return ok(f"TensorBoard reads with its fast loader (tensorboard-data-server {about['tensorboard-data-server']})")
    return note(
        "TensorBoard reads with its slow loader: there is no tensorboard-data-server for this platform or it is not installed. The tab "
        "works with both; long logs take several times as long to load",
        "give every run a folder of its own, and wait for long logs",
    )
