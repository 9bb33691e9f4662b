"""The budget of a real run: steps of 30 ms, sampled ever more rarely until the monitor takes the share it may."""

from __future__ import annotations

import logging
import re
import time
from statistics import median

import pytest

from collapse_monitor.monitor import Monitor
from tests.capture.models import loss_of
from tests.watching import GPT, gpt

STEP_SECONDS = 0.03


@pytest.mark.slow
def test_the_interval_is_stretched_until_the_share_is_right(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="collapse_monitor")
    model = gpt()
    monitor = Monitor(model, every=1, budget=0.02)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    sampled_before = -1
    for step in range(400):
        began = time.perf_counter()
        with monitor.observe(step):
            time.sleep(STEP_SECONDS)
            loss_of(model(*GPT.call(step)[0])).backward()
        model.zero_grad()
        sampled = monitor.schedule._last != sampled_before
        sampled_before = monitor.schedule._last
        if step > 60:
            seconds[sampled].append(time.perf_counter() - began)
    sentences = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert re.search(
        r"sampling every \d+ steps instead of 1: a sampled step costs .* ms more, .* the budget is 2.0% of training", sentences[0]
    )
    assert monitor.every is not None
    assert monitor.every > 5
    plain, watched = median(seconds[False]), median(seconds[True])
    # what a sample really costs, by the test's own clock, over the time between two samples
    assert (watched - plain) / (monitor.every * plain) < 0.03


@pytest.mark.slow
def test_without_a_budget_every_step_is_sampled() -> None:
    model = gpt()
    monitor = Monitor(model, every=1, budget=None)
    for step in range(60):
        with monitor.observe(step):
            loss_of(model(*GPT.call(step)[0])).backward()
        assert monitor.latest is not None
        assert monitor.latest.step == step
    assert monitor.every == 1
