"""One browser and one service of each small run for all files of this folder."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser
from tests.web import recorded
from tests.web.browsing import chromium, served


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as actual:
        yield actual


@pytest.fixture(scope="package")
def services(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The addresses of two runs, one of images and one of text."""
    folder = tmp_path_factory.mktemp("runs")
    for _ in recorded.without_network():
        text, digits = recorded.text_run(folder / "text"), recorded.digits_run(folder / "digits")
        with served(digits) as one, served(text) as two:
            yield {"digits": one, "text": two}
