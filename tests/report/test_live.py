"""The live view as somebody at a terminal sees it: alone, and with the progress bars of others."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from collapse_monitor import LiveSink
from collapse_monitor.report.above import redirect_logs
from collapse_monitor.report.live import plain_lines, worst_layers
from tests.integrations.lit import PACKAGES
from tests.screen import ROOT, seen
from tests.synthetic import make_alert, make_snapshot

pytestmark = pytest.mark.slow

TRAINING = """
import logging, warnings
warnings.simplefilter("ignore")
import pytorch_lightning as pl
from pytorch_lightning.callbacks import RichProgressBar, TQDMProgressBar
import collapse_monitor as cm
from tests.integrations.lit import fires_at, loader, module

class Talk(pl.Callback):
    def on_train_batch_end(self, trainer, lit, *_):
        if trainer.global_step == 3:
            lit.print("said by the program")

watch = cm.CollapseCallback(every=1, budget=None, on_error="raise", sinks=[cm.LiveSink(per_second=2)], rules=[fires_at(5)])
trainer = pl.Trainer(max_epochs=3, callbacks=[watch, Talk(), BAR], logger=False, enable_checkpointing=False, enable_model_summary=False,
                     accelerator="cpu", log_every_n_steps=1)
trainer.fit(module(), loader(8), loader(2))
print("after")
"""

LOOP = """
from tests.synthetic import make_alert, make_snapshot
import collapse_monitor as cm

sink = cm.LiveSink()
for step in range(5):
    alerts = [make_alert(step=step)] if step == 3 else []
    sink.write(make_snapshot(step, layers=40, similarity=[0.01 * (7 * layer % 40) for layer in range(40)]), alerts)
    print("said at", step)
END
"""


def count(lines: list[str], word: str) -> int:
    return sum(word in line for line in lines)


@pytest.mark.parametrize(
    ("bar", "bars"),
    [
        ("RichProgressBar()", 1),
        ("TQDMProgressBar()", 1),
        pytest.param("TQDMProgressBar(leave=True)", 3, marks=pytest.mark.slow),
        pytest.param("TQDMProgressBar(refresh_rate=0)", 0, marks=pytest.mark.slow),
    ],
)
def test_it_shares_the_terminal_with_lightning(bar: str, bars: int) -> None:
    lines, _ = seen(TRAINING.replace("BAR", bar))
    # The bar, the log and what the program prints are whole, and one frame is left: the last.
    assert count(lines, "8/8") == bars
    assert "said by the program" in lines
    assert count(lines, "step 5: fault (critical) in layer 0 ('net.blocks.0'), since step 5: effective_rank of layer 0 is 1 of 8") == 1
    assert "`Trainer.fit` stopped: `max_epochs=3` reached." in lines
    assert [line for line in lines if line.startswith("step 2")] == [line for line in lines if line.startswith("step 23, train_loss ")]
    assert count(lines, "similarity") == 1
    assert count(lines, "0 net.blocks.0 ") == count(lines, "1 net.blocks.1 ") == 1
    assert count(lines, "CRITICAL fault (critical) in layer 0") == 1
    assert lines[-1] == "after"


AGAIN = """
import warnings
warnings.simplefilter("ignore")
import rich
from rich.progress import track
import PACKAGE as pl
from PACKAGE.callbacks import RichProgressBar, TQDMProgressBar
import collapse_monitor as cm
from tests.integrations.lit import loader, module

class Boom(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            raise RuntimeError("boom")

watch, bar = cm.CollapseCallback(every=1, budget=None, on_error="raise", sinks=["collapse_monitor.LiveSink"]), BAR
options = dict(max_epochs=1, logger=False, enable_checkpointing=False, enable_model_summary=False, accelerator="cpu", log_every_n_steps=1)
trainer, lit = pl.Trainer(callbacks=[watch, bar], **options), module(pl)
trainer.fit(lit, loader(8), loader(2))
trainer.validate(lit, loader(2), verbose=False)
list(track(range(3), "mine"))
try:
    pl.Trainer(callbacks=[watch, bar, Boom()], **options).fit(module(pl), loader(8), loader(2))
except RuntimeError:
    assert rich.get_console()._live_stack == []
"""


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("bar", ["RichProgressBar()", "TQDMProgressBar()"])
def test_it_can_be_used_again_and_gives_the_terminal_back(bar: str, package: str) -> None:
    lines, _ = seen(AGAIN.replace("PACKAGE", package).replace("BAR", bar))
    assert [line.split(",")[0] for line in lines if line.startswith("step ")] == ["step 7", "step 2"]
    assert count(lines, "similarity") == 2
    assert count(lines, "Validation") == 1
    assert count(lines, "mine ━━━") == 1
    assert count(lines, "100% 0:00:00") == 1


def test_the_thread_of_a_progress_bar_leaves_no_frame_behind() -> None:
    """Bars that are redrawn by a thread, as fast as it can, while frames, log lines and the last frame are written."""
    lines, _ = seen("""
import logging, sys
from rich.progress import Progress
import collapse_monitor as cm
from tests.synthetic import make_snapshot
sys.setswitchinterval(1e-5)
for run in range(30):
    with Progress(refresh_per_second=300) as progress:
        task, sink = progress.add_task("bar", total=5), cm.LiveSink()
        for step in range(5):
            sink.write(make_snapshot(step), [])
            progress.advance(task)
            logging.getLogger("somebody").warning("logged")
        sink.close()
""")
    assert count(lines, "step ") == count(lines, "step 4") == count(lines, "similarity") == 30
    assert count(lines, "logged") == 150
    assert count(lines, "bar ━━━") == 30


def test_alone_what_the_program_prints_stands_above() -> None:
    lines, text = seen(LOOP.replace("END", "sink.close(); print('after')"), columns=70, lines=30)
    assert lines[:5] == [f"said at {step}" for step in range(5)]
    assert lines[5] == "step 4"
    assert lines[-1] == "after"
    # Of 40 layers those that are named and the most alike; of the metrics those that fit; the alert in one line.
    rows = [line.split()[0] for line in lines if "blocks." in line and "CRITICAL" not in line]
    assert {"1", "2"} < set(rows)
    assert len(rows) == 16
    assert "the worst 16 of 40 layers" in lines
    assert count(lines, "rank") == 1
    assert count(lines, "max_logit") == count(lines, "no room for ") == 1
    assert lines[-2].startswith("CRITICAL tokens are alike")
    assert max(map(len, lines)) <= 70
    # At once, at the alert and at the end: five snapshots within one second are no five frames.
    assert [f"\x1b[1mstep {step}\x1b" in text for step in range(5)] == [True, False, False, True, True]
    assert "\x1b[1;31m" in text


def test_a_program_that_ends_without_closing_it_has_its_cursor_back() -> None:
    _, text = seen(LOOP.replace("END", ""))
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_bars_that_come_and_go() -> None:
    code = LOOP.replace("in range(5):", "in tqdm(range(5)):").replace('print("said at", step)', 'tqdm.write(f"said at {step}")')
    lines, _ = seen("from tqdm import tqdm" + code.replace("END", "sink.write(make_snapshot(9), []); sink.close(); print('after')"))
    assert count(lines, "5/5") == 1
    assert count(lines, "similarity") == 1
    assert count(lines, "step 9") == 1
    assert lines[-1] == "after"


def test_where_nobody_looks_alerts_are_five_plain_lines_at_most() -> None:
    code = LOOP.replace("[make_alert(step=step)]", "9 * [make_alert(step=step)]").replace("END", "sink.close()")
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    lines = said.stdout.splitlines()
    assert lines[:3] == ["said at 0", "said at 1", "said at 2"]
    assert lines[3:8] == [
        "collapse_monitor, step 3: 9 alerts",
        *["  CRITICAL tokens are alike"] * 3,
        "  and 6 more",
    ]
    assert lines[8:] == ["said at 3", "said at 4"]
    assert said.stderr == ""


def test_few_alerts_are_told_whole() -> None:
    alerts = [make_alert(message=name) for name in "abcd"]
    assert plain_lines(make_snapshot(7), alerts) == ["collapse_monitor, step 7: 4 alerts", *(f"  CRITICAL {name}" for name in "abcd")]
    assert len(plain_lines(make_snapshot(7), [*alerts, alerts[0]])) == 5


def test_layers_that_alerts_name_come_before_those_that_are_alike() -> None:
    snapshot = make_snapshot(layers=5, similarity=[0.1, 0.2, 0.3, 0.9, 0.8])
    assert worst_layers(snapshot, [make_alert()], 3) == [1, 2, 3]
    assert worst_layers(snapshot, [], 2) == [3, 4]


def test_log_handlers_have_their_stream_back() -> None:
    logger = logging.getLogger("tests.somebody")
    handler = logging.StreamHandler(sys.__stderr__)
    logger.addHandler(handler)
    last = logging.lastResort
    lines: list[str] = []
    back = redirect_logs(lines.append)
    try:
        logger.warning("one\ntwo")
        logging.getLogger("tests.nobody").propagate = False
        logging.getLogger("tests.nobody").warning("three")
    finally:
        back()
        logger.removeHandler(handler)
    assert lines == ["one", "two", "three"]
    assert handler.stream is sys.__stderr__
    assert logging.lastResort is last


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="layers=0, expected a whole number from 1 on"):
        LiveSink(0)
    with pytest.raises(ValueError, match="per_second=3, expected more than 0 and at most 2"):
        LiveSink(per_second=3)
