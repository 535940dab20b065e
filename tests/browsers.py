"""A browser of the system without a window, driven by Playwright, for the tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from realparts import require

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PHONE, DESKTOP = {"width": 375, "height": 700}, {"width": 1280, "height": 900}


@contextmanager
def running_browser() -> Iterator[Any]:
    """The browser for the length of a block. Skips the test without one."""
    programs = [path for name in BROWSERS if (path := shutil.which(name))]
    require(bool(programs), "no Chromium: install chromium-headless-shell or chromium (scripts/test-tools.sh does)")
    require(find_spec("playwright") is not None, "no Playwright: pip install 'clusterkit[dev]'")
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 (may be missing)

    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=programs[0])
        yield running
        running.close()


class Screen:
    """One page of the browser; what its console said, what it threw and what it asked the network for is kept."""

    def __init__(self, browser: Any, address: str, viewport: dict[str, int], scheme: str = "light") -> None:
        self.page = browser.new_page(viewport=viewport, color_scheme=scheme, has_touch=viewport is PHONE)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"thrown: {error}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)

    def tip(self) -> str:
        """What is told of the place that is pointed at."""
        return str(self.page.locator(".tip").inner_text())
