"""What is known of the model: the plan that a first window made, made anew where the model has changed since."""

from __future__ import annotations

from typing import Literal

from torch import nn

from collapse_monitor.capture.plan import Plan
from collapse_monitor.capture.probe import Probed
from collapse_monitor.capture.window import Observed

_MOST_RELEARNT = 5
"""How often a model whose parts run by chance, or come and go, is watched anew."""


class Learning:
    """Keeps the plan, and decides when a window has to watch the model as if it were new.

    That is the case after a block ran that did not in the forward the plan was made from, and when modules have come, gone or been
    renamed: layers stacked while training goes on, adapters put in or merged. A forward learns once; five times more at most.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self._why: Literal["", "outgrown", "rebuilt"] = ""
        self._times = 0
        self._modules: frozenset[str] = frozenset()

    def plan_for(self, model: nn.Module) -> Plan | None:
        """The plan of the next window; None: it has to find one."""
        modules = frozenset(name for name, _ in model.named_modules())
        if self.plan is not None and modules != self._modules and self._times < _MOST_RELEARNT:
            self._why, self._times = "rebuilt", self._times + 1
        self._modules = modules
        return None if self._why else self.plan

    def learn(self, observed: Observed | Probed) -> str | None:
        """Keep what a window has found; a sentence when there is nothing to watch."""
        if not observed.heard_forward:
            return (
                "the model was not called inside the observed window: put its forward into `with monitor.observe(step):` "
                "(a training step that is compiled as a whole hides it: compile the model instead)"
            )
        found = observed.plan
        if self._why and self.plan is not None and found is not None:
            better = self._why == "rebuilt" or found.tells_more(self.plan)
            if better and found.problem() is None:
                self.plan = found
            self._why = ""
        elif observed.outgrown and self._times < _MOST_RELEARNT:
            self._why, self._times = "outgrown", self._times + 1
        if self.plan is None and found is not None:
            problem = found.problem()
            if problem is not None:
                return problem
            self.plan = found
        return None
