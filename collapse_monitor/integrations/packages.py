"""`lightning` and `pytorch_lightning` are two copies of everything: what the callback must be for both."""

from __future__ import annotations

import importlib


def callback_classes() -> tuple[type, ...]:
    """The Callback class of every installed package: an instance of all of them is accepted by each Trainer and each CLI.

    Raises:
        ImportError: neither is installed; the message says what to install.
    """
    found: list[type] = []
    broken: Exception | None = None
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            found.append(importlib.import_module(package).Callback)
        except Exception as error:  # a broken installation of one must not take the other away
            broken = error
    if not found:
        raise ImportError("CollapseCallback needs Lightning: pip install pytorch-lightning (or lightning)") from broken
    return tuple(dict.fromkeys(found))
