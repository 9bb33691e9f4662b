"""A LightningModule whose whole training step is compiled: the same step, uncompiled, to be looked at beside the real one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

_LOGGING = ("log", "log_dict", "print")


def uncompiled_step(pl_module: Any) -> Callable[..., Any] | None:
    """The user's `training_step` behind the one that `torch.compile(module)` made; None where it is not compiled."""
    return getattr(vars(pl_module).get("training_step"), "_torchdynamo_orig_callable", None)


def repeatable(trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> Callable[[], None] | None:
    """A function that runs the uncompiled training step on a copy of the batch, without logging; None where there is nothing to run.

    A step that optimises by hand is never run a second time.
    """
    step = uncompiled_step(pl_module)
    if step is None or not pl_module.automatic_optimization:
        return None

    def run() -> None:
        arguments = (tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch), batch_idx)
        with _unlogged(pl_module), trainer.precision_plugin.train_step_context():
            step(*arguments[: max(1, min(2, len(inspect.signature(step).parameters)))])

    return run


@contextmanager
def _unlogged(pl_module: Any) -> Iterator[None]:
    """What the step logs before its forward is over would count twice."""
    own = {name: vars(pl_module)[name] for name in _LOGGING if name in vars(pl_module)}
    try:
        for name in _LOGGING:
            vars(pl_module)[name] = lambda *args, **kwargs: None
        yield
    finally:
        for name in _LOGGING:
            vars(pl_module).pop(name, None)
        vars(pl_module).update(own)
