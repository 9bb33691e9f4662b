"""The pictures of the tab and of the report in docs/images, from a real training with a planted fault.

    python -m docs.generate_screenshots [FOLDER OF THE RUNS, KEPT]

A Vision Transformer of twelve blocks learns scikit-learn's digits. In one run the residual path of the blocks behind the fourth fades from
step 160 on. Needs the extras `demo` and `dev`, and Chromium with its driver.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

from collapse_monitor.demo import digits
from collapse_monitor.monitor import Monitor
from collapse_monitor.report import TensorBoardSink
from collapse_monitor.report.html import write_report
from collapse_monitor.testing import PreNormBlock, tiny_vit
from tests.tensorboard_plugin.browsers import open_browser, open_tab, wait
from tests.tensorboard_plugin.servers import index_of, serve

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
STEPS, EVERY, FADES_AT, FADES_FOR, FIRST_FADING = 320, 2, 160, 80, 4


class FadingBlock(PreNormBlock):
    """A pre-norm block whose residual path can be turned down."""

    keep = 1.0

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.keep * hidden + self.attention(self.attention_norm(hidden))
        return self.keep * hidden + self.mlp(self.mlp_norm(hidden))


def train(folder: Path, *, fades: bool) -> None:
    """One run into one folder."""
    model = tiny_vit(patch=2, dim=64, depth=12)
    for block in model.blocks:
        block.__class__ = FadingBlock
    torch.manual_seed(0)
    loader = digits()[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    writer = SummaryWriter(folder)
    with Monitor(model, every=EVERY, budget=None, sinks=[TensorBoardSink(writer, heads_every=4)]) as monitor:
        step = 0
        while step < STEPS:
            for images, labels in loader:
                if fades and step >= FADES_AT:
                    for block in list(model.blocks)[FIRST_FADING:]:
                        block.keep = max(0.0, 1 - (step - FADES_AT) / FADES_FOR)
                with monitor.observe(step):
                    loss = F.cross_entropy(model(images), labels)
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step == STEPS:
                    break
    writer.close()


def package(folder: Path) -> Path:
    """The wheel of this checkout, unpacked."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(folder / "package")
    return folder / "package"


def link(**state: Any) -> str:
    return "&".join(("collapse_monitor", *(f"p.collapse_monitor.{name}={value}" for name, value in state.items())))


def save(browser: Any, name: str) -> None:
    """In 256 colours: a third of the bytes, and nobody sees it."""
    picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    picture.quantize(256, dither=Image.Dither.NONE).save(IMAGES / f"{name}.png", optimize=True)


def shoot(logs: Path, folder: Path) -> None:
    with serve(logs, package(folder), folder / "tensorboard.log") as address, open_browser(folder / "profile", 1340, 1010) as browser:
        index_of(address, {"healthy", "fading"})

        def take(name: str, query: str = "", width: int = 1340, height: int = 1010, **state: Any) -> None:
            browser.switch_to.default_content()
            browser.set_window_size(width, height)
            open_tab(browser, address, link(**state), query)
            wait(browser, "const t = document.querySelector('.curve h3'); return t && t.textContent")
            browser.switch_to.default_content()
            save(browser, name)

        shown = {"run": "fading", "layer": 9, "step": 226}
        take("tab", metric="token_similarity", **shown)
        take("tab-heads-dark", "?darkMode=true", height=1200, metric="attention_uniformity", **shown)
        take("tab-difference", metric="relative_residual", compare="healthy", mode="difference", **shown)
        take("tab-narrow", width=520, height=1000, metric="effective_rank", **shown)
        browser.set_window_size(1100, 1150)
        write_report([logs], folder / "report.html")
        browser.get((folder / "report.html").as_uri())
        wait(browser, "return document.querySelector('.collapse[data-painted]') !== null")
        save(browser, "report")


def main() -> None:
    torch.set_num_threads(1)
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "logs"  # a folder given is used again
        if not logs.exists():
            train(logs / "healthy", fades=False)
            train(logs / "fading", fades=True)
        shoot(logs, Path(folder))


if __name__ == "__main__":
    main()
