"""A service on a free loopback port, and a browser that can reach nothing else."""

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect, sync_playwright

from backstory.run.run import Run
from backstory.web.app import make_app
from backstory.web.state import State

ROOT = Path(__file__).parents[2]
SECONDS = 60  # for anything that a test waits for
QUIET = [  # one process more or less, and nothing that looks for a network or a graphics card
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]
FREE = WeakKeyDictionary[
    Browser, dict[str, list[Page]]
]()  # windows to use again: a new one reads Plotly's script anew, for 2 s
FITS = "document.scrollingElement.scrollWidth <= innerWidth"


def missing(what: str) -> None:
    """Skip where something is not installed, but not where everything must be."""
    if os.environ.get("CI"):
        pytest.fail(f"{what}; in CI this must be there")
    pytest.skip(what)


@contextmanager
def served(path: Path) -> Iterator[str]:
    """The address of a service for a run, for as long as the block lasts."""
    state = State(path, Run(path).config["recipe"])
    settings = uvicorn.Config(make_app(state, timeout=300), host="127.0.0.1", port=0, log_level="warning", ws="none")
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    until = time.monotonic() + SECONDS
    while not server.started and thread.is_alive() and time.monotonic() < until:
        time.sleep(0.05)
    assert server.started, "the service did not start"
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive(), "the service did not end"


@contextmanager
def chromium() -> Iterator[Browser]:
    """Debian's Chromium, or whichever is on the path."""
    actual = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if actual is None:
        missing("no Chromium on the path: install the package `chromium`")
    expect.set_options(timeout=1000 * SECONDS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=actual, args=QUIET, timeout=1000 * SECONDS)
        yield browser
        browser.close()


def until(page: Page, expression: str, arg: Any = None) -> None:
    """Wait until an expression is true; the page's own policy forbids the browser to look by itself."""
    end = time.monotonic() + SECONDS
    while not page.evaluate(expression, arg):
        assert time.monotonic() < end, f"never true: {expression}"
        page.wait_for_timeout(50)


def _window(browser: Browser, options: dict[str, Any]) -> Page:
    context = browser.new_context(**options)
    context.set_default_timeout(1000 * SECONDS)
    return context.new_page()


class Visitor:
    """A window of the browser on one service; keeps what went wrong, and who else was asked for."""

    def __init__(self, browser: Browser, address: str, **options: Any) -> None:
        self.address, self.wrong, self.elsewhere = address, list[str](), list[str]()
        options = {"viewport": {"width": 1280, "height": 900}, **options}
        self._free = FREE.setdefault(browser, {}).setdefault(repr(sorted(options.items())), [])
        self.page: Page = self._free.pop() if self._free else _window(browser, options)
        self.context = self.page.context
        # whoever had the window before may have changed its colours
        self.page.emulate_media(color_scheme=options.get("color_scheme", "light"))
        self._heard: dict[Any, Callable[[Any], None]] = {
            "request": lambda request: self._asked(request.url),
            "pageerror": lambda error: self.wrong.append(str(error)),
            "console": lambda said: self._noted(said.type == "error", said.text),
            "response": lambda got: self._noted(got.status >= 400, f"{got.status} {got.url}"),
        }
        for event, hear in self._heard.items():
            self.page.on(event, hear)

    def _noted(self, bad: bool, words: str) -> None:
        self.wrong.extend([words] if bad else [])

    def _asked(self, url: str) -> None:
        asked, own = urlsplit(url), urlsplit(self.address)
        if asked.scheme != "data" and (asked.scheme, asked.netloc) != (own.scheme, own.netloc):
            self.elsewhere.append(url)

    def see(self, path: str) -> Page:
        """Open a page and wait until its figures are drawn."""
        self.page.goto(self.address + path)
        return self.drawn()

    def drawn(self) -> Page:
        """The page once its script is there and its figures are drawn."""
        self.page.wait_for_load_state()
        expect(self.page.locator("[data-figure]:not([data-drawn])")).to_have_count(0, timeout=1000 * SECONDS)
        return self.page

    def json(self, path: str) -> Any:
        """The twin of a page."""
        joined = f"{path}{'&' if '?' in path else '?'}format=json"
        return self.context.request.get(self.address + joined).json()

    def close(self) -> None:
        """End, and say what went wrong."""
        for event, hear in self._heard.items():
            self.page.remove_listener(event, hear)
        if self.page.url.startswith("http"):
            self.page.unroute_all()
            self.page.evaluate("localStorage.clear()")
            self._free.append(self.page)
        else:
            self.page.context.close()
        assert self.elsewhere == [], f"the page asked others: {self.elsewhere}"
        assert self.wrong == [], f"errors on the page: {self.wrong}"
