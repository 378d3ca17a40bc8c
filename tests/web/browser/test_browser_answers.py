"""Quality, late samples, unclear sources and errors as somebody meets them in real Chromium."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.web.browsing import FITS, Visitor, served
from tests.web.recipes import RECIPE, recorded

import backstory
from backstory.run.calibrate import read_calibration, write_calibration
from backstory.store import RunStore

Visit = Callable[..., Visitor]
PHONE = {"viewport": {"width": 390, "height": 844}}


@pytest.fixture
def visit(browser: Browser, services: dict[str, str]) -> Iterator[Visit]:
    visitors: list[Visitor] = []

    def begin(**options: Any) -> Visitor:
        visitors.append(Visitor(browser, services["text"], **options))
        return visitors[-1]

    yield begin
    for visitor in visitors:
        visitor.close()


@pytest.mark.parametrize("path", ["/", "/queries/law/0", "/harmful", "/sources?queries=law"])
def test_every_answer_has_its_quality(path: str, visit: Visit) -> None:
    for visitor in (visit(), visit(**PHONE)):
        page, actual = visitor.see(path), visitor.json(path)["quality"]
        badge = page.locator(".quality")
        expect(badge).to_be_visible()
        expect(badge).to_contain_text(actual["sentence"].replace("`", ""))
        assert page.locator(".strip").count() == 0, "nothing was measured"
        assert page.evaluate(FITS)


RANKS = [-0.11, 0.2, 0.61, 0.49, None, 0.8, 0.8, 0.9, 0.95, 1.0]
BOXES = "(all) => all.map((x) => { const r = x.getBoundingClientRect(); return [r.left, r.right, r.top, r.bottom]; })"


@pytest.fixture(scope="module")
def calibrated(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a run whose tenths rank as in `RANKS`."""
    path: Path = recorded(tmp_path_factory.mktemp("calibrated") / "run")
    backstory.open(path).calibrate("law", RECIPE, singles=1, removals=0)
    store = RunStore.open(path)
    made = read_calibration(store, 24)
    assert made is not None
    write_calibration(store, replace(made, measured=[replace(x, whole=0.6, tenths=RANKS) for x in made.measured]))
    with served(path) as address:
        yield address


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(("path", "figure"), [("/queries/poems/0", "by_step"), ("/timeline?queries=poems", "timeline")])
def test_the_strip_stands_between_the_axis_and_its_labels(
    path: str, figure: str, width: int, browser: Browser, calibrated: str
) -> None:
    visitor = Visitor(browser, calibrated, viewport={"width": width, "height": 900})
    page, quality = visitor.see(path), visitor.json(path)["quality"]
    assert [x["rank"] for x in quality["tenths"]] == RANKS
    assert quality["weak"] == [[0, 5], [8, 10]]
    drawn = page.locator(f"[data-figure=figure-{figure}]")
    cells, labels = (
        boxes(page, figure, ".shapelayer .shape-group:has(text) path"),
        boxes(page, figure, ".shapelayer text"),
    )
    ticks, plot = boxes(page, figure, ".xtick text"), boxes(page, figure, ".bglayer .bg, .gridlayer path.ygrid")
    assert len(cells) == len(labels) == 10
    assert [x.replace("−", "-") for x in drawn.locator(".shapelayer text").all_text_contents()][:3] == [
        "-.11",
        ".20",
        ".61",
    ]
    assert max(top for *_, top, _ in ticks) >= min(top for *_, top, _ in ticks) >= max(x[3] for x in cells)
    assert all(x[2] >= max(y[3] for y in plot) - 1 for x in cells), "a cell lies on the plot"
    for (left, right, *_), (first, last, *_) in zip(cells, labels, strict=True):
        assert left <= first
        assert last <= right + 1
    assert drawn.locator(".shapelayer path").count() - len(cells) == len(quality["weak"]), (
        "grey over what is not ranked"
    )
    key = page.locator("figure.plot", has=drawn).locator(".key")
    for words in ("strip: quality, a rank correlation", "outlined, grey above: below 0.50, not reliable"):
        expect(key).to_contain_text(words)
    expect(page.locator(".strip li.weak")).to_have_count(3)
    assert page.evaluate(FITS)
    visitor.close()


def boxes(page: Page, figure: str, what: str) -> list[list[float]]:
    """`[left, right, top, bottom]` of parts of a figure."""
    out: list[list[float]] = page.locator(f"[data-figure=figure-{figure}]").locator(what).evaluate_all(BOXES)
    return out


def test_a_query_says_how_much_of_its_weight_is_ranked(browser: Browser, calibrated: str) -> None:
    visitor = Visitor(browser, calibrated)
    page, actual = visitor.see("/queries/poems/0"), visitor.json("/queries/poems/0")
    expect(page.locator("[data-weight]")).to_have_text(actual["words"])
    expect(page.locator("figcaption").first).to_contain_text("Sizes over time are rescaled to match exact results")
    visitor.close()


def test_the_last_steps_are_left_out_of_harmful_data(visit: Visit) -> None:
    visitor = visit()
    page, whole = visitor.see("/harmful"), visitor.json("/harmful")
    expect(page.locator("[data-late]")).to_contain_text(f"{whole['late']} of these {len(whole['harmful'])} samples")
    page.get_by_label("Without the last steps").fill("8")
    page.get_by_role("button", name="Show").click()
    visitor.drawn()
    actual = visitor.json("/harmful?without_last=8")
    shown = [x.get_attribute("value") for x in page.locator("input[name=id]").all()]
    assert shown == [str(h["sample"]) for h in actual["harmful"]]
    last = [int(x) for x in page.locator("td[data-name='Last used']").all_text_contents()]
    assert last == [h["last"] for h in actual["harmful"]]
    assert all(step < 16 for step in last)


def test_a_source_whose_interval_includes_zero_is_grey_and_not_clear(visit: Visit) -> None:
    visitor = visit()
    path = "/sources?queries=law&queries=poems&queries=code"
    page, actual = visitor.see(path), visitor.json(path)
    rows = page.get_by_role("region", name="Value of each source").locator("tbody tr")
    for row, source in zip(rows.all(), actual["total"], strict=True):
        clear = not source["low"] <= 0 <= source["high"]
        said = row.locator("td[data-name=Value]")
        expect(said).to_contain_text(source["words"])
        assert (source["words"] == "not clear") == (not clear)
        assert said.locator(".helped-ink, .hurt-ink").count() == int(clear)
    cells = page.get_by_role("region", name="Source by query set").locator("td.number").all()
    sure = [x for line in actual["clear"] for x in line]
    assert ["not clear" in cell.inner_text() for cell in cells] == [not x for x in sure]


def test_an_error_keeps_the_form_and_what_was_typed(visit: Visit) -> None:
    visitor = visit()
    page = visitor.see("/query")
    page.get_by_label("Your text").fill("   ")
    page.get_by_role("button", name="Query").click()
    expect(page.locator(".problem")).to_contain_text("has only white space")
    again = page.get_by_role("form", name="What you sent")
    expect(again.get_by_label("Your text")).to_have_value("   ")
    expect(again.get_by_label("Results per side")).to_have_value("10")
    again.get_by_label("Your text").fill("the court held the appeal")
    again.get_by_role("button", name="Send again").click()
    visitor.drawn()
    expect(page.locator("#ranking")).to_be_visible()
    page.goto(f"{visitor.address}/samples?text=court&page=99")
    expect(page.locator(".problem")).to_contain_text("there is no page 99")
    page.get_by_label("The page", exact=True).fill("1")
    page.get_by_role("button", name="Send again").click()
    expect(page.get_by_role("heading", name="Training samples")).to_be_visible()
    assert len(visitor.wrong) == 4  # the two answers of an error, each told by the browser twice
    visitor.wrong.clear()
