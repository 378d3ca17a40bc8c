"""Every page and every interaction in real Chromium, on real recorded runs, with nobody else to ask."""

import csv
import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, Route, expect
from tests.web.browsing import FITS, ROOT, Visitor, missing, served, until

from backstory.results.sign import HELPED, HURT

Visit = Callable[..., Visitor]
RUNS = ("digits", "text")
PHONE = {"viewport": {"width": 390, "height": 844}}


@pytest.fixture
def visit(browser: Browser, services: dict[str, str]) -> Iterator[Visit]:
    visitors: list[Visitor] = []

    def begin(run: str, **options: Any) -> Visitor:
        visitors.append(Visitor(browser, services[run], **options))
        return visitors[-1]

    yield begin
    for visitor in visitors:
        visitor.close()


def paths(visitor: Visitor) -> list[str]:
    """One address of each page."""
    name = visitor.json("/")["default_queries"]
    answer = visitor.json(f"/queries/{name}/0")
    sample = answer["samples"][str(answer["hits"][0]["sample"])]["path"]
    other = f"set={name}&index=0&set2={name}&index2=1"
    fixed = ["/", "/timeline", "/query", "/samples", "/sources", "/harmful", "/health", "/evolution"]
    over = f"/overwriting?sample={quote(str(answer['hits'][0]['sample']), safe='')}"
    return [*fixed, over, f"{sample}?overwriting=true", f"/queries/{name}/0?replay=true", f"/compare?{other}"]


def shown(page: Page, side: str) -> list[str | None]:
    """Ids of the hits of one side, as the page shows them."""
    return [hit.get_attribute("data-id") for hit in page.locator(f"[data-side={side}] li.hit").all()]


def ids(hits: list[dict[str, Any]]) -> list[str]:
    return [str(h["sample"]) for h in hits]


@pytest.mark.parametrize("run", RUNS)
def test_every_page_fits_a_phone(run: str, visit: Visit) -> None:
    visitor = visit(run, **PHONE)
    for path in paths(visitor):
        fits(visitor.see(path), path)


def fits(page: Page, path: str) -> None:
    assert page.evaluate(FITS), f"{path} is wider than the window"
    expect(page.locator("h1")).to_be_visible()


@pytest.mark.parametrize("run", RUNS)
def test_the_overview_says_what_was_trained_and_how_far_to_trust_it(run: str, visit: Visit) -> None:
    visitor = visit(run)
    page, actual = visitor.see("/"), visitor.json("/")
    expect(page.locator("dl.facts")).to_contain_text(f"{actual['occurrences']:,}")
    expect(page.locator("main")).to_contain_text(actual["timeline"]["phases"]["words"])
    for words in (actual["quality"]["sentence"], *actual["recording"]["words"]):
        expect(page.locator("main")).to_contain_text(words.replace("`", ""))
    assert page.locator(".canvas .main-svg").count() >= 2  # timeline and loss
    expect(page.locator("[data-figure=figure-loss] .scatterlayer path.js-line").first).to_be_visible()


def test_the_timeline_of_another_query_set_is_chosen(visit: Visit) -> None:
    visitor = visit("text")
    page = visitor.see("/")
    page.get_by_label("Query set", exact=True).select_option("poems")
    page.get_by_role("button", name="Show").click()
    expect(page).to_have_url(re.compile(r"/timeline\?queries=poems"))
    expect(visitor.drawn().locator(".lead")).to_contain_text("poems")


@pytest.mark.parametrize("run", RUNS)
def test_phases_are_shaded_where_they_were_found_and_nowhere_else(run: str, visit: Visit) -> None:
    visitor = visit(run)
    page, actual = visitor.see("/timeline"), visitor.json("/timeline")["phases"]
    bands = page.locator("[data-figure=figure-timeline] .shapelayer path")
    expect(bands).to_have_count(3 if actual["present"] else 0)
    expect(page.locator("main")).to_contain_text(actual["words"])


def test_a_stored_query_is_chosen_and_answered_with_images(visit: Visit) -> None:
    visitor = visit("digits")
    page = visitor.see("/query")
    page.locator("summary", has_text="demo").click()
    page.locator("a[href='/queries/demo/0']").click()
    visitor.drawn()
    actual = visitor.json("/queries/demo/0")
    assert (shown(page, "hits"), shown(page, "harmful")) == (ids(actual["hits"]), ids(actual["harmful"]))
    hit = page.locator("[data-side=hits] li.hit").first
    best = actual["hits"][0]
    for words in (HELPED, f"step {best['step']}", f"label {actual['samples'][str(best['sample'])]['label']}"):
        expect(hit).to_contain_text(words)
    expect(page.locator("[data-side=harmful] li.hit").first).to_contain_text(HURT)
    image = hit.locator("img")
    assert image.evaluate("(x) => x.decode().then(() => x.naturalWidth)") == 8
    assert "labelled" in (image.get_attribute("alt") or "")
    expect(page.locator("[data-figure=figure-by_step] .bars .point").first).to_be_visible()


def test_sides_stand_beside_each_other_and_below_on_a_phone(visit: Visit) -> None:
    def boxes(visitor: Visitor) -> list[Any]:
        page = visitor.see("/queries/demo/0")
        return [page.locator(f"[data-side={side}]").bounding_box() for side in ("hits", "harmful")]

    left, right = boxes(visit("digits"))
    assert left["x"] + left["width"] <= right["x"]
    upper, lower = boxes(visit("digits", **PHONE))
    assert upper["y"] + upper["height"] <= lower["y"]


def test_a_typed_text_is_answered_and_common_words_are_marked(visit: Visit) -> None:
    visitor = visit("text")
    page = visitor.see("/query")
    page.get_by_label("Your text").fill("The court denied the appeal.\nA witness held the contract. <b>x</b>")
    page.locator("form", has=page.get_by_label("Your text")).get_by_label("Results per side").fill("20")
    page.get_by_role("button", name="Query", exact=True).click()
    visitor.drawn()
    expect(page.locator("section.card .text")).to_have_text(
        "The court denied the appeal.\nA witness held the contract. <b>x</b>"
    )
    assert "\n" in page.locator("section.card .text").inner_text()
    marks = {m.casefold() for m in page.locator(".hit mark").all_inner_texts()}
    assert marks
    assert marks <= {"court", "denied", "appeal", "witness", "held", "contract"}
    assert len(shown(page, "hits")) == 20
    assert page.title() != "taken"
    assert page.locator("main script:not([type])").count() == 0


def test_an_image_is_uploaded_and_asked_at_an_earlier_checkpoint(visit: Visit, tmp_path: Path) -> None:
    file = drawn_digit(tmp_path / "digit.png", 0)
    visitor = visit("digits")
    page = visitor.see("/query")
    page.get_by_label("Your image").set_input_files(file)
    page.get_by_label("Its label").fill("3")
    page.locator("form", has=page.get_by_label("Your image")).get_by_role("button", name="Query").click()
    visitor.drawn()
    before = shown(page, "hits")
    assert len(before) == 10
    assert page.locator("img[data-input]").evaluate("(x) => x.decode().then(() => x.naturalWidth)") > 0
    move(page, "ArrowLeft")
    assert shown(page, "hits") != before


def move(page: Page, key: str) -> None:
    """Move the checkpoint slider by a key, and wait for the answer."""
    old = page.locator("#ranking").element_handle()
    page.get_by_label("At checkpoint").press(key)
    until(page, "(old) => !old.isConnected && !document.querySelector('[aria-busy=true]')", old)


@pytest.mark.parametrize("run", RUNS)
def test_the_slider_replays_the_ranking(run: str, visit: Visit) -> None:
    visitor = visit(run)
    path = f"/queries/{visitor.json('/')['default_queries']}/0"
    page, steps = visitor.see(path), visitor.json(path)["checkpoints"]
    slider = page.get_by_label("At checkpoint")
    expect(slider).to_have_attribute("aria-valuetext", f"step {steps[-1]} (final)")
    for step in (steps[-2], steps[-3]):
        move(page, "ArrowLeft")
        actual = visitor.json(f"{path}?at={step}")
        assert (shown(page, "hits"), shown(page, "harmful")) == (ids(actual["hits"]), ids(actual["harmful"]))
        expect(page.locator("#ranking")).to_contain_text(f"On the model at step {step}")
        expect(slider).to_have_attribute("aria-valuetext", f"step {step}")
    visitor.drawn()


def test_replay_plays_all_checkpoints_to_the_end(visit: Visit) -> None:
    visitor = visit("text")
    page, steps = visitor.see("/queries/law/0"), visitor.json("/queries/law/0")["checkpoints"]
    asked: list[str] = []
    page.on("request", lambda r: asked.extend(re.findall(r"at=(\d+)", r.url)))
    button = page.get_by_role("button", name="Replay")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(button).to_have_attribute("aria-pressed", "false")
    assert asked == [str(s) for s in steps]
    expect(page.locator("#ranking")).to_contain_text(f"step {steps[-1]} (final)")
    visitor.drawn()


def test_the_places_at_every_checkpoint_are_drawn_on_demand(visit: Visit) -> None:
    visitor = visit("text")
    page = visitor.see("/queries/law/0")
    page.get_by_role("button", name="Show the ranking at every checkpoint").click()
    page.wait_for_selector("[data-figure=figure-places_hits]")
    visitor.drawn()
    rankings = visitor.json("/queries/law/0?replay=true")["rankings"]
    lines = page.evaluate("document.querySelector('[data-figure=figure-places_hits]').data.map((t) => [t.name, t.y])")
    assert len(lines) >= 6
    for name, places in lines:
        known = [r["hits"].index(name) + 1 if name in r["hits"] else None for r in rankings]
        assert places == known


@pytest.mark.parametrize("typed", [False, True])
def test_tokens_are_shaded_on_demand(typed: bool, visit: Visit) -> None:
    visitor = visit("text")
    if typed:
        page = visitor.see("/query")
        page.get_by_label("Your text").fill("The moon sang to the river.")
        page.get_by_role("button", name="Query", exact=True).click()
        visitor.drawn()
    else:
        page = visitor.see("/queries/poems/0?top=3")
    before = page.locator("[data-side=hits] .text").first.inner_text()
    page.get_by_role("button", name="Shade the tokens").click()
    page.wait_for_selector(".hit .tokens span.helped")
    expect(page.locator("#status")).to_contain_text("Tokens are shaded")
    after = page.locator("[data-side=hits] .tokens").first
    assert before.startswith(after.inner_text().rstrip("\n")[:20])
    assert page.locator(".hit .tokens span.hurt").count() > 0
    title = after.locator("span.helped").first.get_attribute("title") or ""
    assert re.fullmatch(r"\+[\d.]+( × 10⁻?[⁰¹²³⁴-⁹]+)? helped", title), title


def test_two_queries_are_compared(visit: Visit) -> None:
    visitor = visit("text")
    page = visitor.see("/query")
    page.get_by_label("First set").select_option("law")
    page.get_by_label("Second set").select_option("poems")
    page.get_by_role("button", name="Compare").click()
    visitor.drawn()
    actual = visitor.json("/compare?set=law&index=0&set2=poems&index2=0")
    hits = [h.get_attribute("data-id") for h in page.locator("section.side").first.locator(".hit").all()]
    assert hits == ids(actual["left"]["hits"]) + ids(actual["left"]["harmful"])
    assert page.locator(".hit.both").count() == 2 * len(actual["both"])
    assert page.evaluate("document.querySelector('[data-figure=figure-compare]').data.length") == 2


def test_an_answer_leads_to_a_comparison(visit: Visit) -> None:
    visitor = visit("digits")
    page = visitor.see("/queries/demo/1")
    page.get_by_label("Query index").fill("2")
    page.get_by_role("button", name="Compare").click()
    expect(page).to_have_url(re.compile(r"/compare\?set=demo&index=1&.*set2=demo&index2=2"))
    visitor.drawn()


def sides(page: Page) -> list[list[str | None]]:
    """Ids of the hits of both answers of a comparison."""
    return [[h.get_attribute("data-id") for h in x.locator(".hit").all()] for x in page.locator("section.side").all()]


def compared(actual: dict[str, Any]) -> list[list[str]]:
    return [ids(actual[x]["hits"]) + ids(actual[x]["harmful"]) for x in ("left", "right")]


def test_two_texts_are_compared_and_one_with_a_stored_query(visit: Visit) -> None:
    visitor, texts = visit("text"), {"text": "the court denied the appeal", "text2": "the moon sang"}
    page = visitor.see("/query")
    page.get_by_label("First text").fill(texts["text"])
    page.get_by_label("Second text").fill(texts["text2"])
    page.get_by_role("button", name="Both texts side by side").click()
    visitor.drawn()
    assert sides(page) == compared(visitor.context.request.post(f"{visitor.address}/compare", data=texts).json())
    assert page.evaluate("document.querySelector('[data-figure=figure-compare]').data.length") == 2
    page = visitor.see("/query")
    page.get_by_label("Your text").fill(texts["text"])
    page.get_by_role("button", name="Query", exact=True).click()
    visitor.drawn()
    page.get_by_label("Its set").select_option("poems")
    page.get_by_role("button", name="Compare", exact=True).click()
    visitor.drawn()
    asked = {"text": texts["text"], "set2": "poems", "index2": 0}
    assert sides(page) == compared(visitor.context.request.post(f"{visitor.address}/compare", data=asked).json())


def test_two_images_are_compared_and_one_with_a_stored_query(visit: Visit, tmp_path: Path) -> None:
    files = [drawn_digit(tmp_path / f"{seed}.png", seed) for seed in (0, 1)]
    visitor = visit("digits")
    page = visitor.see("/query")
    for place, file in zip(("First", "Second"), files, strict=True):
        page.get_by_label(f"{place} image").set_input_files(file)
        page.get_by_label(f"{place} label").fill("3")
    page.get_by_role("button", name="Both images side by side").click()
    visitor.drawn()
    both = sides(page)
    assert [len(x) for x in both] == [20, 20]
    assert both[0] != both[1]
    page = visitor.see("/query")
    page.get_by_label("Your image").set_input_files(files[0])
    page.get_by_label("Its label").fill("3")
    page.locator("form", has=page.get_by_label("Your image")).get_by_role("button", name="Query").click()
    visitor.drawn()
    page.get_by_label("Query index").fill("1")
    page.get_by_role("button", name="Compare", exact=True).click()
    visitor.drawn()
    stored = visitor.json(f"/queries/{visitor.json('/')['default_queries']}/1")
    assert sides(page) == [both[0], ids(stored["hits"]) + ids(stored["harmful"])]


def drawn_digit(file: Path, seed: int) -> Path:
    import torch

    from backstory.demo.digits import png

    file.write_bytes(png(torch.rand(8, 8, generator=torch.Generator().manual_seed(seed))))
    return file


def test_samples_are_searched_filtered_sorted_and_opened(visit: Visit) -> None:
    visitor = visit("text")
    page = visitor.see("/samples")
    page.get_by_label("Text contains").fill("moon")
    page.get_by_label("Source").select_option("poems")
    page.get_by_label("Sort by").select_option("value")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("p[role=status]").first).to_contain_text("sample")
    actual = visitor.json("/samples?text=moon&source=poems&sort=value")
    assert actual["total"] > 1
    rows = page.locator("main tbody tr")
    assert rows.count() == len(actual["items"])
    assert all("moon" in text.casefold() for text in rows.locator(".text").all_inner_texts())
    expect(page.get_by_label("Text contains")).to_have_value("moon")
    values = [x["value"] for x in actual["items"]]
    assert values == sorted(values)
    rows.first.locator("a").first.click()
    visitor.drawn()
    expect(page.locator("h1")).to_contain_text(actual["items"][0]["id"])


def test_samples_are_filtered_by_value(visit: Visit) -> None:
    visitor = visit("text")
    page = visitor.see("/samples")
    page.get_by_label("Value for").select_option("law")
    page.get_by_label("Value to").fill("0")
    page.get_by_role("button", name="Search").click()
    expect(page).to_have_url(re.compile("max_value=0"))
    actual, whole = (visitor.json(f"/samples?queries=law{more}&per=200") for more in ("&max_value=0", ""))
    assert [x["id"] for x in actual["items"]] == [x["id"] for x in whole["items"] if x["value"] <= 0]
    assert 0 < actual["total"] < whole["total"] <= 200
    assert page.locator("main tbody tr").count() == min(50, actual["total"])
    expect(page.get_by_label("Value to")).to_have_value("0")


def test_pages_of_samples_follow_each_other(visit: Visit) -> None:
    visitor = visit("digits")
    page = visitor.see("/samples?per=20&sort=step&label=3")
    page.get_by_role("link", name="Later").click()
    expect(page).to_have_url(re.compile("per=20.*page=2"))
    expect(page.locator("p[role=status]").first).to_contain_text("page 2 of")
    assert page.locator("main tbody tr").count() == 20
    page.get_by_role("link", name="Earlier").click()
    expect(page).to_have_url(re.compile("page=1"))


@pytest.mark.parametrize("run", RUNS)
def test_a_sample_shows_its_life_and_what_overwrote_it(run: str, visit: Visit) -> None:
    visitor = visit(run)
    path = visitor.json("/samples?sort=step&per=1")["items"][0]["path"]
    page, actual = visitor.see(path), visitor.json(path)
    expect(page.locator("[data-figure=figure-evolution] .main-svg").first).to_be_visible()
    expect(page.locator("[data-figure=figure-occurrences] .bars .point").first).to_be_visible()
    assert (
        page.locator("section[aria-labelledby=neighbours] .hit").count() == len(actual["neighbours"]["neighbours"]) > 0
    )
    page.get_by_role("link", name="Compute").click()
    page.wait_for_selector("#overwriting table")
    visitor.drawn()
    left = visitor.json(f"{path}?overwriting=true")["overwriting"]["influence"]
    expect(page.locator("#overwriting tbody tr").last).to_contain_text(f"{abs(left):.3g}"[:6])
    expect(page).to_have_url(visitor.address + path)


def test_sources_have_a_matrix_a_table_and_lead_to_samples(visit: Visit) -> None:
    visitor = visit("text")
    page = visitor.see("/sources")
    for name in ("code", "law", "poems"):  # the domains; passages holds the first of each
        expect(page.get_by_label(name, exact=True)).to_be_checked()
    page.get_by_label("code", exact=True).uncheck()
    page.get_by_label("passages", exact=True).check()
    page.get_by_role("button", name="Show").click()
    page.wait_for_selector("[data-figure=figure-matrix]")
    visitor.drawn()
    actual = visitor.json("/sources?queries=passages&queries=law&queries=poems")
    drawn = page.evaluate("document.querySelector('[data-figure=figure-matrix]').data[0].z")
    np.testing.assert_allclose(drawn, actual["matrix"])
    expect(page.locator("[data-figure=figure-sources] .errorbar").first).to_be_attached()
    page.locator("[data-figure=figure-sources] .bars .point path").first.click(force=True)
    expect(page).to_have_url(re.compile(r"/samples\?source="))
    visitor.drawn()


def test_sources_are_downloaded_as_csv(visit: Visit) -> None:
    visitor = visit("text")
    page = visitor.see("/sources?queries=law&queries=poems")
    with page.expect_download() as waiting:
        page.get_by_role("link", name="Download as CSV").click()
    rows = list(csv.reader(io.StringIO(Path(waiting.value.path()).read_text())))
    actual = visitor.json("/sources?queries=law&queries=poems")
    assert rows[0][0] == "source"
    assert [row[0] for row in rows[1:]] == actual["sources"]


def test_harmful_samples_are_selected_and_their_ids_exported(visit: Visit) -> None:
    visitor = visit("text", permissions=["clipboard-read", "clipboard-write"])
    page, actual = visitor.see("/harmful?top=6"), visitor.json("/harmful?top=6")["harmful"]
    button = page.get_by_role("button", name="Export ids as CSV")
    expect(button).to_be_disabled()
    for hit in (actual[0], actual[2]):
        page.get_by_label(f"Select sample {hit['sample']}", exact=True).check()
    expect(page.locator("[data-count]")).to_have_text(f"2 of {len(actual)} selected")
    with page.expect_download() as waiting:
        button.click()
    rows = list(csv.reader(io.StringIO(Path(waiting.value.path()).read_text())))
    assert [r[0] for r in rows] == ["id", *ids([actual[0], actual[2]])]
    assert [float(r[1]) for r in rows[1:]] == [actual[0]["influence"], actual[2]["influence"]]
    page.get_by_label("All", exact=True).check()
    expect(page.locator("[data-count]")).to_have_text(f"{len(actual)} of {len(actual)} selected")
    page.get_by_role("button", name="Copy ids").click()
    expect(page.locator("#status")).to_have_text(f"{len(actual)} ids copied")
    assert page.evaluate("navigator.clipboard.readText()").split() == ids(actual)


def colours(page: Page) -> tuple[str, str]:
    """Of the page, and of the words in its first figure."""
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return paper, page.evaluate("document.querySelector('[data-figure]').layout.font.color")


def test_the_theme_follows_the_system_until_somebody_chooses(visit: Visit) -> None:
    visitor = visit("digits", color_scheme="light")
    page = visitor.see("/")
    light = colours(page)
    page.emulate_media(color_scheme="dark")
    until(page, "(old) => document.querySelector('[data-figure]').layout.font.color !== old", light[1])
    dark = colours(page)
    assert dark[0] != light[0]
    button = page.get_by_role("button", name=re.compile("^Theme"))
    expect(button).to_have_text("Theme: system")
    button.click()
    expect(button).to_have_text("Theme: light")
    until(page, "(old) => document.querySelector('[data-figure]').layout.font.color === old", light[1])
    assert colours(page) == light
    visitor.see("/")  # it is remembered, though the system is dark
    expect(button).to_have_text("Theme: light")
    assert colours(page) == light
    button.click()
    expect(button).to_have_text("Theme: dark")
    until(page, "(old) => document.querySelector('[data-figure]').layout.font.color === old", dark[1])


def test_keys_lead_to_pages_but_not_while_somebody_types(visit: Visit) -> None:
    visitor = visit("text")
    page = visitor.see("/")
    for key, path in (("q", "/query"), ("s", "/samples"), ("r", "/sources"), ("h", "/harmful"), ("o", "/")):
        page.keyboard.press(key)
        expect(page).to_have_url(visitor.address + path)
        visitor.drawn()
    page.keyboard.press("s")
    expect(page).to_have_url(f"{visitor.address}/samples")
    visitor.drawn()
    page.keyboard.press("/")
    expect(page.get_by_label("Text contains")).to_be_focused()
    page.keyboard.type("hoa?/t")
    expect(page.get_by_label("Text contains")).to_have_value("hoa?/t")
    expect(page).to_have_url(f"{visitor.address}/samples")
    expect(page.locator("dialog")).to_be_hidden()


def test_keys_are_explained_and_can_be_switched_off(visit: Visit) -> None:
    visitor = visit("text")
    page = visitor.see("/harmful")
    page.keyboard.press("?")
    expect(page.locator("dialog")).to_be_visible()
    expect(page.locator("dialog")).to_contain_text("Keys do nothing while you type")
    page.get_by_label("Keys are on").uncheck()
    page.get_by_role("button", name="Close").click()
    page.keyboard.press("q")
    page.keyboard.press("?")
    expect(page.locator("dialog")).to_be_hidden()
    expect(page).to_have_url(f"{visitor.address}/harmful")
    page.get_by_role("button", name="Keys", exact=True).click()
    expect(page.get_by_label("Keys are on")).not_to_be_checked()


def test_brackets_move_the_checkpoint(visit: Visit) -> None:
    visitor = visit("text")
    page, steps = visitor.see("/queries/law/0"), visitor.json("/queries/law/0")["checkpoints"]
    page.keyboard.press("[")
    expect(page.locator("#ranking")).to_contain_text(f"On the model at step {steps[-2]}")
    page.keyboard.press("]")
    expect(page.locator("#ranking")).to_contain_text(f"On the model at step {steps[-1]} (final)")
    visitor.drawn()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "the first one late"])
def test_of_two_quick_moves_the_last_one_stays(order: tuple[int, int], visit: Visit) -> None:
    visitor = visit("text")
    held: list[Route] = []
    # before the page is opened: one that is there already may ask past a route that is only just set
    visitor.page.route("**/queries/law/0?*at=*", lambda route: held.append(route))
    page, steps = visitor.see("/queries/law/0"), visitor.json("/queries/law/0")["checkpoints"]
    for count in (1, 2):
        page.keyboard.press("[")
        for _ in range(600):  # until the question is held
            if len(held) < count:
                page.wait_for_timeout(50)
    assert [f"at={step}" in route.request.url for step, route in zip(steps[-2:-4:-1], held, strict=True)] == [True] * 2
    for n in order:
        with page.expect_response(held[n].request.url) as answer:
            held[n].continue_()
        answer.value.finished()
        page.wait_for_timeout(200)  # for the page to do with it what it will
    expect(page.locator("#ranking")).to_contain_text(f"On the model at step {steps[-3]}")
    expect(page.locator("#ranking")).not_to_have_attribute("aria-busy", "true")
    visitor.drawn()


def test_a_service_that_does_not_answer_is_said(visit: Visit) -> None:
    visitor = visit("text")
    # before the page is opened: one that is there already may ask past a route that is only just set
    visitor.page.route("**/queries/law/0?*", lambda route: route.abort())
    page = visitor.see("/queries/law/0")
    page.keyboard.press("[")
    expect(page.locator("#ranking > .problem")).to_have_text("The service does not respond.")
    expect(page.locator("#status")).to_have_text("The service does not respond.")
    expect(page.locator("#ranking")).not_to_have_attribute("aria-busy", "true")
    assert [w for w in visitor.wrong if "ERR_FAILED" not in w] == []
    visitor.wrong.clear()


def test_ids_are_copied_only_where_the_browser_can(visit: Visit) -> None:
    visitor = visit("text")
    visitor.page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page = visitor.see("/harmful?top=6")
    expect(page.get_by_role("button", name="Export ids as CSV")).to_be_visible()
    expect(page.locator("[data-copy]")).to_be_hidden()


def test_the_first_key_of_tab_leads_past_the_head(visit: Visit) -> None:
    visitor = visit("digits")
    page = visitor.see("/")
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    expect(page.get_by_text("Skip to the content")).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    focused = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert focused == "solid"


def test_everything_but_figures_works_without_a_script(visit: Visit) -> None:
    visitor = visit("text", java_script_enabled=False)
    page = visitor.page
    page.goto(f"{visitor.address}/query")
    page.get_by_label("Your text").fill("The court held.")
    page.get_by_role("button", name="Query", exact=True).click()
    assert len(shown(page, "hits")) == 10
    step = visitor.json("/")["checkpoints"][0]
    page.get_by_label("Model at step").select_option(str(step))
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.locator("#ranking")).to_contain_text(f"On the model at step {step}")
    page.goto(f"{visitor.address}/samples")
    page.get_by_label("Text contains").fill("court")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("main tbody tr").first).to_contain_text("court")
    page.locator("main tbody a").first.click()
    page.get_by_role("link", name="Compute").click()
    expect(page.locator("#overwriting table")).to_be_visible()


def test_text_of_samples_is_never_run(visit: Visit) -> None:
    visitor = visit("text")
    page = visitor.see("/samples?text=script")
    expect(page.locator("main tbody tr .text").first).to_contain_text("<script>")
    assert "Samples" in page.title()
    page.locator("main tbody a").first.click()
    visitor.drawn()
    assert page.title().startswith("Sample ")


def test_an_error_in_a_part_is_said_in_its_place_and_can_be_tried_again(visit: Visit) -> None:
    visitor = visit("text")
    page = visitor.see("/queries/law/0")
    words = '<div class="banner problem">Too many questions at once. Try again.</div>'
    page.route("**/queries/law/0?*replay=true*", lambda r: r.fulfill(status=503, content_type="text/html", body=words))
    button = page.get_by_role("button", name="Show the ranking at every checkpoint")
    for _ in range(2):
        with (
            page.expect_console_message(lambda said: "503" in said.text),
            page.expect_response(re.compile("replay=true")),
        ):
            button.click()
        expect(page.locator("#replay .problem")).to_have_count(1)
        expect(page.locator("#replay .problem")).to_contain_text("Try again")
    page.unroute("**/queries/law/0?*replay=true*")
    assert [w for w in visitor.wrong if "503" not in w] == []
    visitor.wrong.clear()
    button.click()
    page.wait_for_selector("[data-figure=figure-places_hits]")
    visitor.drawn()


def test_an_error_is_said_in_the_words_of_the_service(visit: Visit) -> None:
    visitor = visit("digits")
    page = visitor.see("/queries/nothing/0")
    actual = visitor.json("/queries/nothing/0")["error"]
    expect(page.locator(".problem")).to_contain_text(actual["message"])
    expect(page.locator(".problem")).to_contain_text(actual["hint"])
    assert page.evaluate(FITS)
    assert [w for w in visitor.wrong if "404" not in w] == []
    visitor.wrong.clear()


def in_scheme(page: Page, scheme: str) -> bool:
    return bool(page.evaluate(f"matchMedia('(prefers-color-scheme: {scheme})').matches"))


@pytest.fixture(scope="module")
def axe() -> str:
    file = Path(os.environ.get("AXE_CORE", ROOT / ".venv" / "axe" / "package" / "axe.min.js"))
    if not file.exists():
        missing(f"axe-core is not at {file.name}: make .venv/axe, or name it with AXE_CORE")
    return file.read_text(encoding="utf-8")


@pytest.mark.parametrize(("scheme", "window"), [("light", {}), ("dark", PHONE)], ids=["light", "dark, on a phone"])
@pytest.mark.parametrize("run", RUNS)
def test_axe_finds_nothing_serious_and_pages_fit(
    run: str, scheme: str, window: dict[str, Any], visit: Visit, axe: str
) -> None:
    visitor = visit(run, color_scheme=scheme, **window)
    for path in paths(visitor):
        page = visitor.see(path)
        assert in_scheme(page, scheme)
        fits(page, path)
        page.evaluate(axe)
        actual = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        assert len(actual["passes"]) > 20, "axe has looked at nothing"
        bad = [
            (v["id"], v["impact"], [n["html"][:200] + n["failureSummary"] for n in v["nodes"][:3]])
            for v in actual["violations"]
            if v["impact"] in ("serious", "critical")
        ]
        assert not bad, f"{path}: {bad}"


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_screens_are_kept(scheme: str, width: int, browser: Browser, screened: dict[str, str]) -> None:
    folder = ROOT / "build" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    for run, address in screened.items():
        visitor = Visitor(browser, address, color_scheme=scheme, viewport={"width": width, "height": 900})
        for path in paths(visitor):
            page = visitor.see(path)
            assert in_scheme(page, scheme)
            page.evaluate("document.querySelectorAll('img').forEach((x) => { x.loading = 'eager'; })")
            page.wait_for_load_state("networkidle")
            name = "sample" if path.startswith("/samples/") else path.split("?")[0].split("/")[1] or "overview"
            page.screenshot(path=folder / f"{run}-{name}-{scheme}-{width}.png", full_page=True)
            assert page.evaluate(FITS), f"{path} is wider than the window"
        visitor.close()


@pytest.fixture(scope="module")
def screened(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """The runs of the fixtures, or those in the folders that SCREENSHOT_RUNS names, such as demo:demo-text."""
    named = [Path(x) for x in os.environ.get("SCREENSHOT_RUNS", "").split(":") if x]
    with ExitStack() as stack:
        actual = {x.name: stack.enter_context(served(x / "run")) for x in named}
        yield actual or request.getfixturevalue("services")
