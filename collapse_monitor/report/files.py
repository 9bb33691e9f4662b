"""Files below a folder, as TensorBoard finds them: links to folders are followed."""

from __future__ import annotations

import os
from fnmatch import fnmatch
from pathlib import Path


def find_files(folder: Path, pattern: str = "*") -> list[Path]:
    """Files whose name fits, sorted.

    Each folder once, under its own name rather than that of a link. Links to what is gone are left out.
    """
    found: list[Path] = []
    seen: set[str] = set()
    waiting = [str(folder)]
    while waiting:
        start, *waiting = waiting
        for parent, folders, names in os.walk(start):
            real = os.path.realpath(parent)
            if real in seen:
                folders.clear()
                continue
            seen.add(real)
            waiting += sorted(path for name in folders if os.path.islink(path := os.path.join(parent, name)))
            found += [file for name in names if fnmatch(name, pattern) and (file := Path(parent, name)).is_file()]
    return sorted(found)
