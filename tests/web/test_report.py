"""The report: one file that needs nothing else, says what it contains, and can be printed."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.web import recorded
from tests.web.browsing import FITS, Visitor, chromium, missing
from tests.web.test_pages import Reader, read

from backstory.errors import StoreError, UnsupportedError
from backstory.studies import digits, texts
from backstory.web import report as made
from backstory.web.opened import Opened
from backstory.web.pages import static


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Opened]]:
    folder = tmp_path_factory.mktemp("runs")
    for _ in recorded.without_network():
        text, numbers = recorded.text_run(folder / "text"), recorded.digits_run(folder / "digits")
        yield {"text": Opened(text, texts.RECIPE), "digits": Opened(numbers, digits.RECIPE)}


@pytest.fixture(scope="module")
def pages(runs: dict[str, Opened], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    out = {}
    for name, opened in runs.items():
        out[name] = folder / f"{name}.html"
        out[name].write_text(made.report(made.gathered(opened)), encoding="utf-8")
    return out


def plain(file: Path) -> Reader:
    """What stands in the page beside style and scripts."""
    text = file.read_text(encoding="utf-8")
    for _, body in static().values():
        assert body.decode() in text
        text = text.replace(body.decode(), "")
    return read(text)


@pytest.mark.parametrize("name", ["text", "digits"])
def test_nothing_leads_outside(name: str, pages: dict[str, Path]) -> None:
    found = plain(pages[name])
    links = [a[k] for _, a in found.elements for k in ("href", "src", "action") if a.get(k)]
    assert all(link is not None and link.startswith(("#", "data:image/png;base64,")) for link in links), links
    assert any(a.get("http-equiv") == "Content-Security-Policy" for a in found.all("meta"))


@pytest.mark.parametrize("name", ["text", "digits"])
def test_it_says_what_it_contains_and_how_far_to_trust_it(
    name: str, pages: dict[str, Path], runs: dict[str, Opened]
) -> None:
    text = " ".join(plain(pages[name]).text.split())
    found = made.gathered(runs[name])
    assert "This report contains training data." in text
    assert "The run was made on" in text
    assert "positive: the sample helped" in text
    assert all(" ".join(words.split()) in text for words in found.overview.validity.words)
    assert found.timeline.phases.words in text
    for hit in (found.helpful[0], found.harmful[0], found.answer.helpful[0], found.answer.harmful[0]):
        assert f"sample {hit.sample.id}" in text


def test_all_figures_are_in_it(pages: dict[str, Path]) -> None:
    ids = [a["data-figure"] for _, a in plain(pages["text"]).elements if "data-figure" in a]
    assert ids == [f"figure-{name}" for name in ("timeline", "loss", "sources", "matrix", "pace")]


def test_hostile_text_is_only_text(pages: dict[str, Path]) -> None:
    raw = pages["text"].read_text(encoding="utf-8")
    assert "<script>document.title" not in raw


def test_pictures_are_in_the_file(pages: dict[str, Path]) -> None:
    found = [a["src"] for a in plain(pages["digits"]).all("img")]
    assert len(found) > 12
    assert all(src is not None and src.startswith("data:image/png;base64,") for src in found)


def test_the_query_set_can_be_chosen(runs: dict[str, Opened]) -> None:
    found = made.gathered(runs["text"], "poems")
    assert (found.timeline.queries, found.answer.query.set) == ("poems", "poems")
    assert found.helpful[0].influence > 0 > found.harmful[0].influence
    assert found.sources is not None
    assert set(found.sources.domains) == {"passages", "code", "law", "poems"}


@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_draws_it_and_asks_nobody(width: int, pages: dict[str, Path]) -> None:
    with chromium() as browser:
        for file in pages.values():
            visitor = Visitor(browser, file.parent.as_uri(), viewport={"width": width, "height": 900})
            page = visitor.see(f"/{file.name}")
            assert page.evaluate(FITS)
            assert page.locator(".canvas .main-svg").count() >= 3
            page.keyboard.press("h")  # keys lead nowhere in a file
            assert page.url == file.as_uri()
            visitor.close()


def test_it_is_printed_where_chromium_is(pages: dict[str, Path], tmp_path: Path) -> None:
    if not any(map(shutil.which, made.BROWSERS)):
        missing("no Chromium on the path: install the package `chromium`")
    made.pdf(pages["digits"], tmp_path / "report.pdf")
    data = (tmp_path / "report.pdf").read_bytes()
    assert data.startswith(b"%PDF-")
    assert len(re.findall(rb"/Type\s*/Page\b", data)) >= 3


def test_without_chromium_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(made, "BROWSERS", ("no-such-browser",))
    with pytest.raises(UnsupportedError, match="Install Chromium or Chrome, or open the report"):
        made.pdf(tmp_path / "page.html", tmp_path / "page.pdf")


def test_a_browser_that_writes_nothing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(made, "BROWSERS", ("true",))
    (tmp_path / "page.pdf").write_text("an old one")
    with pytest.raises(StoreError, match="wrote no PDF"):
        made.pdf(tmp_path / "page.html", tmp_path / "page.pdf")
