"""Trust, late samples, unclear sources and errors as somebody meets them in real Chromium."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from tests.web.browsing import FITS, Visitor

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
def test_every_answer_has_its_verdict_and_reason(path: str, visit: Visit) -> None:
    for visitor in (visit(), visit(**PHONE)):
        page, actual = visitor.see(path), visitor.json(path)["quality"]
        badge = page.locator(".quality")
        expect(badge).to_be_visible()
        for words in (f"Recording quality: {actual['verdict']}", actual["reason"], "Early steps are understated"):
            expect(badge).to_contain_text(words)
        assert page.evaluate(FITS)


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
