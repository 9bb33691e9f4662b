"""What logs and reports take: bytes and milliseconds per step, seconds to read back, size of a report.

    python benchmarks/log_and_report.py [--layers 48] [--heads 16] [--steps 1500]

Made-up readings of 12 metrics (values that change by noise, which compresses worst), through the sink that a training uses. Times are CPU
seconds of one thread on this machine; bytes are exact.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from collapse_monitor.records import Site, Snapshot
from collapse_monitor.report import TensorBoardSink, read
from collapse_monitor.report.html import write_report

BLOCK = ("effective_rank", "token_similarity", "relative_residual", "massive_activation", "contraction", "block_influence", "branch_ratio")
ATTENTION = ("attention_uniformity", "max_logit", "logit_std", "sink_mass", "head_similarity")


def snapshot(step: int, sites: tuple[Site, ...], layers: int, heads: int, random: np.random.Generator) -> Snapshot:
    """Noise around a level."""
    blocks = {name: tuple(map(float, random.normal(1, 0.1, layers))) for name in BLOCK}
    attention = {name: tuple(tuple(map(float, row)) for row in random.normal(0.5, 0.05, (layers, heads))) for name in ATTENTION}
    return Snapshot(step, sites, blocks, attention)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    layers, heads = options.layers, options.heads
    sites = tuple(
        site
        for layer in range(layers)
        for site in (Site(f"blocks.{layer}", "block", layer), Site(f"blocks.{layer}.attention", "attention", layer, heads, 64, 64))
    )
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for run in ("a", "b"):
            writer = SummaryWriter(Path(folder) / run, max_queue=options.steps)
            sink = TensorBoardSink(writer)
            took = []
            for step in range(options.steps):
                now = snapshot(step, sites, layers, heads, random)
                started = time.thread_time()
                sink.write(now, [])
                took.append(time.thread_time() - started)
            sink.close()
            writer.close()
        size = sum(file.stat().st_size for file in (Path(folder) / "a").iterdir())
        per_step = f"{size / options.steps:.0f} bytes and {np.median(took) * 1000:.2f} ms per step"
        print(f"log: {per_step} ({layers} layers, {len(now.metrics)} metrics, heads now and then)")
        started = time.process_time()
        read(Path(folder) / "a")
        print(f"read back: {time.process_time() - started:.2f} s for {size / 1e6:.1f} MB, {options.steps} steps")
        started = time.process_time()
        write_report([folder], Path(folder) / "report.html")
        report = (Path(folder) / "report.html").stat().st_size
        print(f"report of 2 runs: {report / 1e6:.2f} MB in {time.process_time() - started:.2f} s")


if __name__ == "__main__":
    main()
