"""Debian's Chromium, driven through chromedriver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = "no browser: install chromium and chromium-driver (`make browser`) to run these"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-dev-shm-usage", "--window-size=1280,900",
)  # fmt: skip
CELLS = """
const box = document.querySelectorAll("#runs .tokens")[arguments[0]];
return JSON.stringify([...box.querySelectorAll(".token")].map((cell) => ({
  look: [...cell.classList], text: cell.textContent,
  chunk: Number(cell.dataset.chunk), forward: Number(cell.dataset.forward),
})));
"""
PATIENCE = 60.0
"""Seconds to wait for what must come; the machine may be busy."""


def dumped(page: Path, profile: Path, *flags: str) -> str:
    """A page's elements after its scripts have run; without a browser the test is skipped."""
    if CHROMIUM is None:
        pytest.skip(MISSING)
    command = [str(CHROMIUM), *FLAGS, "--dump-dom", *flags, f"--user-data-dir={profile}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr[-2000:]
    return done.stdout


@contextmanager
def chromium(profile: Path) -> Iterator[Any]:
    """A browser with a fresh profile; where there is none, the test is skipped."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip(MISSING)
    pytest.importorskip("selenium")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """The playground in a browser, as a person sees it."""

    def __init__(self, driver: Any, artefacts: Path) -> None:
        self.driver, self.artefacts = driver, artefacts

    def open(
        self, address: str, width: int = 1280, height: int = 900, dark: bool = False, still: bool = False,
        **settings: Any,
    ) -> Page:  # fmt: skip
        """A fresh page. `settings` are its fragment's, with `a_commit` for a.commit."""
        media = {"prefers-color-scheme": "dark" if dark else "light",
                 "prefers-reduced-motion": "reduce" if still else "no-preference"}  # fmt: skip
        self.cdp("Emulation.setEmulatedMedia", features=[{"name": n, "value": v} for n, v in media.items()])
        self.size(width, height)
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        fragment = urlencode({name.replace("_", "."): value for name, value in settings.items()})
        self.driver.get(f"{address}/#{fragment}")
        self.until("document.querySelectorAll('.decoder').length === 2", "the page to know its model")
        return self

    def size(self, width: int, height: int) -> None:
        self.cdp(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def cdp(self, command: str, **arguments: Any) -> None:
        self.driver.execute_cdp_cmd(command, arguments)

    def offline(self, yes: bool) -> None:
        """Take the network away, or give it back."""
        rate = 0 if yes else -1
        self.cdp("Network.enable")
        limits = {"latency": 0, "downloadThroughput": rate, "uploadThroughput": rate}
        self.cdp("Network.emulateNetworkConditions", offline=yes, **limits)

    def js(self, expression: str, *arguments: Any) -> Any:
        return self.driver.execute_script(f"return {expression}", *arguments)

    def until(self, expression: str, what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.js(expression):
            assert time.monotonic() < deadline, f"waited {PATIENCE:g} s for {what}"
            time.sleep(0.02)

    def text(self, name: str) -> str:
        return self.js("document.getElementById(arguments[0]).textContent", name)

    def click(self, selector: str) -> None:
        self.driver.execute_script(
            "document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", selector
        )
        self.driver.find_element("css selector", selector).click()

    def keys(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def chord(self, held: str, key: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).key_down(held).send_keys(key).key_up(held).perform()

    def fill(self, name: str, value: str) -> None:
        """Put a value into a control, as if it had been typed."""
        self.driver.execute_script(
            "const c = document.getElementById(arguments[0]); c.value = arguments[1];"
            "for (const kind of ['input', 'change']) c.dispatchEvent(new Event(kind, {bubbles: true}))",
            name, value,
        )  # fmt: skip

    def generate(self) -> None:
        """Press the button and wait until everything has come."""
        self.click("#generate")
        self.finished()

    def finished(self) -> None:
        self.until("document.getElementById('runs').ariaBusy !== 'true'", "the run to end")

    def scrub(self, step: int) -> None:
        self.driver.execute_script(
            "const s = document.querySelector('#player input'); s.value = arguments[0];"
            "s.dispatchEvent(new Event('input', {bubbles: true}))",
            step,
        )

    def cells(self, run: int = 0) -> list[dict[str, Any]]:
        """Every position as it is shown: its classes, its chunk and forward where it is filled."""
        return json.loads(self.driver.execute_script(CELLS, run))

    def masked(self, run: int = 0) -> int:
        return self.js(
            "document.querySelectorAll('#runs .tokens')[arguments[0]].querySelectorAll('.masked').length", run
        )

    def overflow(self) -> int:
        """By how many pixels the page is wider than its screen."""
        return self.js("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def complaints(self) -> list[str]:
        """What the console holds, but for answers that the page has shown."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["source"] != "network"]

    def shot(self, name: str) -> None:
        """A picture of the whole page, for people to look at."""
        width, height = self.js("[innerWidth, innerHeight]")
        self.size(width, max(height, self.js("document.documentElement.scrollHeight")))
        self.driver.save_screenshot(str(self.artefacts / f"{name}.png"))
        self.size(width, height)


def artefacts(fallback: Path) -> Path:
    """Where pictures go: the folder named by DCDM_ARTEFACTS, else `fallback`."""
    folder = Path(os.environ.get("DCDM_ARTEFACTS") or fallback)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
