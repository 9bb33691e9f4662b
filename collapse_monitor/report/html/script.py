"""The modules of the tab as one script: a page opened from a disk may not load modules from other files."""

from __future__ import annotations

import re
from importlib import resources
from importlib.resources.abc import Traversable

STATIC = resources.files("collapse_monitor") / "tensorboard_plugin" / "static"

_IMPORT = re.compile(r'^import \{([\w,\s]+)\} from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def bundle(entry: str, folder: Traversable = STATIC) -> str:
    """One script that defines each module once, in the order they need each other, and calls `render` of the last.

    Modules import names from each other, `import { a, b } from "./c.js";`, and export functions, classes and constants where
    they define them: that is all the syntax this needs to know.

    Raises:
        ValueError: modules import each other in a circle, or in another way.
    """
    parts: dict[str, str] = {}
    _add(entry, folder, parts, ())
    return '"use strict";\n' + "\n".join(parts.values()) + f"\n_{entry}.render();\n"


def read_static(name: str) -> str:
    """A file of the tab."""
    return (STATIC / name).read_text(encoding="utf-8")


def _add(name: str, folder: Traversable, parts: dict[str, str], within: tuple[str, ...]) -> None:
    if name in within:
        raise ValueError(f"modules import each other in a circle: {' > '.join((*within, name))}")
    if name in parts:
        return
    source = (folder / f"{name}.js").read_text(encoding="utf-8")
    for _, needed in _IMPORT.findall(source):
        _add(needed, folder, parts, (*within, name))
    body = _IMPORT.sub(r"const {\1} = _\2;", source)
    exported = [found[1] for found in _EXPORT.findall(body)]
    body = _EXPORT.sub(r"\1", body)
    if left := re.search(r"^(?:import|export)\b.*", body, re.MULTILINE):
        raise ValueError(f"{name}.js: {left[0]!r} is no import or export that the report can bundle")
    parts[name] = f"const _{name} = (() => {{\n{body}\nreturn {{ {', '.join(exported)} }};\n}})();"
