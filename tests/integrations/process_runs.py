"""What two processes do in `test_processes.py`: `python process_runs.py FOLDER CASE ...` leaves `CASE.RANK.json` there.

One interpreter runs many cases, forking two processes for each: loading Lightning takes longer than all of them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pytorch_lightning import Callback
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.strategies import DDPStrategy

sys.path.insert(0, str(Path(__file__).parents[2]))

from collapse_monitor import JSONLSink
from collapse_monitor.capture.discovery.watch import Discovery
from collapse_monitor.capture.listen import Listening
from collapse_monitor.integrations.lightning import CollapseCallback
from collapse_monitor.monitor import Monitor
from collapse_monitor.records import Alert, Condition, Snapshot
from collapse_monitor.schedule import Schedule
from tests.integrations.lit import by_hand, changed, loader, loss_of, module, network, trainer

FOLDER = Path(os.environ.get("SPAWNED_INTO") or sys.argv[1])
CASE = "spawned"


class Witness(Callback):
    """Leaves what a process knows at the end: its own snapshots, its losses and parameters, and how many collectives Python started."""

    def __init__(self, watched: CollapseCallback | None) -> None:
        self.watched, self.collectives, self.seen = watched, 0, []  # type: ignore[var-annotated]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for name in ("all_reduce", "broadcast", "all_gather", "barrier"):
            original = getattr(dist, name)

            def counted(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
                self.collectives += 1
                return _original(*args, **kwargs)

            setattr(dist, name, counted)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        monitor = self.watched.monitor if self.watched is not None else None
        latest = monitor.latest if monitor is not None else None
        if latest is not None and (not self.seen or self.seen[-1]["step"] != latest.step):
            self.seen.append(
                {"step": latest.step, "rank": latest.series("effective_rank"), "notes": latest.notes, "context": dict(latest.context)}
            )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.watched is not None:
            self.on_train_batch_end(trainer)
        monitor = self.watched.monitor if self.watched is not None else None
        note = {
            "global_step": trainer.global_step,
            "losses": pl_module.losses,
            "parameters": [float(p.detach().double().sum()) for p in pl_module.parameters()],
            "collectives": self.collectives,
            "snapshots": self.seen,
            "alerts": [alert.step for alert in monitor.alerts] if monitor is not None else [],
            "every": monitor.every if monitor is not None else None,
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "sites": [site.name for site in monitor.latest.block_sites] if monitor is not None and monitor.latest is not None else [],
        }
        (FOLDER / f"{CASE}.{trainer.global_rank}.json").write_text(json.dumps(note))


class Marks:
    """A sink that says which process has written which steps."""

    def write(self, snapshot: Snapshot, alerts: Sequence[Alert]) -> None:
        with (FOLDER / f"{CASE}.writers").open("a") as file:
            file.write(f"{dist.get_rank()} {snapshot.step}\n")

    def close(self) -> None: ...


def alarmed(step: int, rank: int | None = None) -> Callable[..., list[Condition]]:
    """A rule that fires from `step` on, in one process only if `rank` says so."""

    def alarm(snapshot: Snapshot, history: Any) -> list[Condition]:
        here = rank is None or dist.get_rank() == rank
        return [Condition(0, "effective_rank", 1.0, 2.0)] if here and snapshot.step >= step else []

    alarm.for_checks = 1  # type: ignore[attr-defined]
    return alarm


def watch(**options: Any) -> CollapseCallback:
    return CollapseCallback(**{"every": 2, "budget": None, "sinks": [Marks(), JSONLSink(FOLDER / f"{CASE}.jsonl")], **options})


def run(callback: CollapseCallback | None, lit: Any = None, callbacks: Sequence[Any] = (), **options: Any) -> None:
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo", timeout=timedelta(seconds=60))
    found = [callback] if callback is not None else []
    made = trainer(
        [*found, *callbacks, Witness(callback)],
        **{"strategy": strategy, "devices": 2, "max_epochs": 2, "default_root_dir": FOLDER, **options},
    )
    made.fit(lit if lit is not None else module(), loader(8), loader(2))


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Something of ours behaves otherwise, in the processes that are forked inside."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def fails_on_rank_one(original: Any) -> Any:
    def sometimes(self: Any, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("only here")
        return original(self, *args, **kwargs)

    return sometimes


def early(metric: str = "collapse/min_rank") -> Any:
    return EarlyStopping(metric, mode="max", patience=99, check_finite=False)


def unused() -> DDPStrategy:
    """For modules that leave parameters out."""
    return DDPStrategy(start_method="fork", process_group_backend="gloo", find_unused_parameters=True, timeout=timedelta(seconds=60))


def unwatched() -> None:
    run(None)


def local() -> None:
    run(watch(), logger=[TensorBoardLogger(FOLDER / "local", "tb"), CSVLogger(FOLDER / "local", "csv")])


def together() -> None:
    run(watch(ranks="all"))


def stop_everywhere() -> None:
    run(watch(rules=[alarmed(4)], stop_on="warning"), max_epochs=5)


def stop_from_rank_one() -> None:
    run(watch(rules=[alarmed(4, rank=1)], stop_on="warning", checkpoint_on="warning"), max_epochs=5)


def stop_together() -> None:
    run(watch(ranks="all", rules=[alarmed(4)], stop_on="warning"), max_epochs=5)


def fault_local() -> None:
    with replaced(Listening, "finish", fails_on_rank_one):
        run(watch(stop_on="critical"), callbacks=[early()])


def fault_together() -> None:
    with replaced(Listening, "finish", fails_on_rank_one):
        run(watch(ranks="all", stop_on="critical"))


def fault_at_once() -> None:
    """The second process never finds anything to watch."""
    best = ModelCheckpoint(FOLDER / "fault_at_once", monitor="collapse/min_rank")
    with replaced(Discovery, "finish", fails_on_rank_one):
        run(watch(ranks="all"), callbacks=[early(), best], enable_checkpointing=True)


def fault_at_once_local() -> None:
    best = ModelCheckpoint(FOLDER / "fault_at_once_local", monitor="collapse/min_rank")
    with replaced(Discovery, "finish", fails_on_rank_one):
        run(watch(), callbacks=[early(), best], enable_checkpointing=True)


def other_sites() -> None:
    """The processes do not hear the same: the second one skips a block."""

    def logits(self: Any, ids: torch.Tensor) -> torch.Tensor:
        net = self.net
        hidden = net.embed(ids) + net.position.weight[: ids.shape[1]]
        for block in net.blocks if dist.get_rank() == 0 else net.blocks[:1]:
            hidden = block(hidden)
        return net.head(net.norm(hidden))

    run(watch(ranks="all"), changed("pytorch_lightning", logits=logits), strategy=unused())


def budgets() -> None:
    """The second process finds its readings dearer: by itself it would sample other steps."""

    def slower(original: Any) -> Any:
        def charge(self: Any, seconds: float, once: bool = False) -> str | None:
            return original(self, seconds + 0.02 * dist.get_rank(), once)

        return charge

    with replaced(Schedule, "charge", slower), replaced(Schedule, "_binds", lambda _: True):
        run(watch(ranks="all", budget=0.9, every=1), max_epochs=4)


def monitored() -> None:
    run(
        watch(),
        callbacks=[early(), ModelCheckpoint(FOLDER / "monitored", monitor="collapse/min_rank")],
        enable_checkpointing=True,
    )


def hand_made() -> None:
    run(watch(), by_hand(), strategy=unused())


def parts() -> None:
    """`self.net(x)` twice in a training step: the wrapper's own call of the module is no forward."""

    def logits(self: Any, ids: torch.Tensor) -> torch.Tensor:
        return self.net(ids) + self.net(ids.flip(1))

    run(watch(), changed("pytorch_lightning", logits=logits))


def probed() -> None:
    run(watch(source="probe"))


def spawned() -> None:
    """Two new interpreters that are handed the pickled Trainer."""
    strategy = DDPStrategy(start_method="spawn", process_group_backend="gloo", timeout=timedelta(seconds=60))
    os.environ["SPAWNED_INTO"] = str(FOLDER)
    found = CollapseCallback(every=2, budget=None, sinks=[JSONLSink(FOLDER / "spawned.jsonl")], ranks="all", stop_on="critical")
    run(found, SpawnedModule(), strategy=strategy)


def launched() -> None:
    """Lightning starts this script a second time."""
    run(watch(), strategy=DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60)))


class SpawnedModule(type(module())):  # type: ignore[misc]
    """Importable, as a process that starts from nothing needs it."""


# -- without Lightning


def processes(body: Callable[[int], Any], case: str) -> None:
    """Two forked processes in one group; what `body` returns is left like that of the others."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE="2")
    torch.multiprocessing.start_processes(_joined, args=(body, case), nprocs=2, start_method="fork")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _joined(rank: int, body: Callable[[int], Any], case: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    note = body(rank)
    (FOLDER / f"{case}.{rank}.json").write_text(json.dumps(note))


def plain_loop() -> None:
    """A loop of the user's own, in which the first process looks at the monitor whenever it likes."""

    def body(rank: int) -> Any:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        model = network()
        monitor = Monitor(model, every=2, budget=None, ranks="all", sinks=[Marks()])
        looked = []
        for step, (ids,) in enumerate(loader(8, seed=rank)):
            with monitor.observe(step):
                loss_of(model(ids[:, :-1]), ids).backward()
            monitor.log(step, train_loss=float(rank))
            if rank == 0:
                monitor.state_dict(), monitor.alerts, monitor.findings
                looked.append(monitor.latest.step if monitor.latest is not None else None)
        monitor.settle()
        latest = monitor.latest
        monitor.close()
        dist.destroy_process_group()
        assert latest is not None
        return {"looked": looked, "rank": latest.series("effective_rank"), "loss": latest.context["train_loss"], "step": latest.step}

    processes(body, "plain_loop")


def closed_alone() -> None:
    """One process leaves its loop early: nobody waits for it in `close`."""

    def body(rank: int) -> Any:
        dist.init_process_group("gloo", timeout=timedelta(seconds=20))
        model = network()
        with Monitor(model, every=1, budget=None, ranks="all", sinks=[Marks()]) as monitor:
            for step, (ids,) in enumerate(loader(3, seed=rank)):
                with monitor.observe(step):
                    loss_of(model(ids[:, :-1]), ids).backward()
                if step == 2 and rank == 1:
                    break
        latest = monitor.latest
        dist.destroy_process_group()
        return {"step": latest.step, "notes": latest.notes} if latest is not None else {}

    processes(body, "closed_alone")


def hugging_face() -> None:
    """`transformers.Trainer` in two processes; the second one alone has an alert."""

    def body(rank: int) -> Any:
        from collapse_monitor.integrations.huggingface import CollapseCallback as Watch
        from tests.integrations.test_huggingface import trainer as hugging_trainer

        callback = Watch(every=2, budget=None, sinks=[Marks()], logging_dir=None, rules=[alarmed(4, rank=1)], stop_on="warning")
        made = hugging_trainer([callback], FOLDER / "hugging_face", size=40, ddp_backend="gloo", per_device_train_batch_size=2)
        made.train()
        assert callback.monitor is not None
        alerts = [alert.step for alert in callback.monitor.alerts]
        dist.destroy_process_group()
        return {"global_step": made.state.global_step, "alerts": alerts, "world": made.args.world_size}

    processes(body, "hugging_face")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for CASE in sys.argv[2:]:
        try:
            globals()[CASE]()
        except BaseException:
            (FOLDER / f"{CASE}.error").write_text(traceback.format_exc())
