"""A real browser without a window, and what the tests ask of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
ABSENT = CHROMIUM is None or DRIVER is None
REASON = (
    "NO BROWSER: chromium and chromedriver are not installed, so nothing of the tab was looked at (Debian: apt-get install chromium-driver)"
)
PATIENCE = 60

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--no-proxy-server",
    "--force-color-profile=srgb",
)


@contextmanager
def open_browser(profile: Path, width: int = 1500, height: int = 1100) -> Iterator[Any]:
    """A Chromium with a profile of its own, which keeps what the pages log."""
    options = Options()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = Service(DRIVER, log_output=os.devnull)
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(PATIENCE)
    try:
        yield driver
    finally:
        driver.quit()


def wait(driver: Any, script: str, *arguments: Any, why: str = "") -> Any:
    """Until a script returns something true; what it returned."""
    return WebDriverWait(driver, PATIENCE, poll_frequency=0.05).until(lambda d: d.execute_script(script, *arguments), why or script)


def enter_tab(driver: Any) -> None:
    """Into the frame of the tab, when its first picture is drawn."""
    driver.switch_to.default_content()
    found = "return document.querySelector('iframe[src*=collapse_monitor]')"
    driver.switch_to.frame(wait(driver, found, why="the tab's frame"))
    wait(driver, "return document.querySelector('.collapse[data-painted]') !== null", why="the first picture")


def open_tab(driver: Any, url: str, fragment: str = "collapse_monitor", query: str = "") -> None:
    driver.switch_to.default_content()
    driver.get("about:blank")
    driver.get(f"{url}{query}#{fragment}")
    enter_tab(driver)


def complaints(driver: Any) -> list[str]:
    """What the pages logged as errors since the last time, refused content included."""
    found = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    # A browser asks any page for an icon, and TensorBoard looks for its own font in the wrong place where it has a --path_prefix.
    return [message for message in found if "/favicon.ico" not in message and "/font-roboto/" not in message]
