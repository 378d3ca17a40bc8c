"""Three pages of the built site in real Chromium: nothing is loaded from another host, and equations are drawn."""

import functools
import http.server
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from playwright.sync_api import Browser
from tests.web.browsing import FITS, ROOT, Visitor

from backstory.cli.app import app

LEFT_OUT = "extensions,results/*,reference/api/*"  # most of the work, and not looked at here
PHONE = {"viewport": {"width": 390, "height": 844}}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the site, built without the pages of the API and the measured tables."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-D", f"exclude_patterns={LEFT_OUT}", "-d", str(folder / "trees")]
    built = subprocess.run(
        [*command, str(ROOT / "docs"), str(folder / "html")], capture_output=True, text=True, timeout=300
    )
    assert built.returncode == 0, built.stderr
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder / "html")))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(params=[{}, PHONE], ids=["desktop", "phone"])
def visitor(request: pytest.FixtureRequest, browser: Browser, site: str) -> Iterator[Visitor]:
    """A window that fails, when it is closed, if a page asked another host for anything."""
    window = Visitor(browser, site, **request.param)
    yield window
    window.close()


def test_the_first_page_leads_to_the_four_parts(visitor: Visitor) -> None:
    page = visitor.see("/index.html")
    assert page.evaluate(FITS)
    parts = page.locator("article td:first-child a").all_text_contents()
    assert parts == ["Start here", "How-to guides", "Reference", "Explanation"]
    assert page.locator("article img").evaluate("image => image.naturalWidth > 0")


def test_equations_are_drawn_without_a_script(visitor: Visitor) -> None:
    page = visitor.see("/explanation/method.html")
    assert page.evaluate(FITS)
    shapes = page.evaluate("[...document.querySelectorAll('math')].map(m => m.getBoundingClientRect().width)")
    assert len(shapes) > 30
    assert min(shapes) > 0
    assert page.locator("math .merror, .math.notranslate").count() == 0
    assert page.evaluate("[...document.scripts].every(s => !/mathjax|katex/i.test(s.src))")


def test_every_command_is_on_the_page_of_the_command_line(visitor: Visitor) -> None:
    page = visitor.see("/reference/cli.html")
    assert page.evaluate(FITS)
    shown = [re.sub("[#¶\ue157]", "", text).strip() for text in page.locator("article h2").all_text_contents()]
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert shown[0] == "backstory"
    assert {f"backstory {name}" for name in commands} <= set(shown)
    assert all("Usage: backstory" in block for block in page.locator("article pre").all_text_contents())
