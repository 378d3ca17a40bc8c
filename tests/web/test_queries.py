"""Results are those of the run's own queries, for stored queries, typed text, images and gradients."""

from typing import Any

import pytest
import torch
from tests.web.recipes import LENGTH, TEXTS, TOLD, assert_same_hits, encoded, recipe

import backstory
from backstory import insight
from backstory.errors import UsageError
from backstory.web import queries as q
from backstory.web import schemas, views
from backstory.web.errors import Refusal
from backstory.web.queries import parse_gradient, parse_image, parse_query, parse_stored, parse_text, show_influence
from backstory.web.requests import QueryBody
from backstory.web.schemas import MOST_PIECES
from backstory.web.state import State


def expected(state: State, batch: torch.Tensor, at: int = 24) -> backstory.Influence:
    made, run = recipe(), backstory.open(state.run.path)
    return run.query(run.load_weights(made.model, at), lambda m, b: made.loss(m, b).sum(), batch, at)


def result(state: State, query: q.Query, at: int | None = None, top: int = 3, replay: bool = False) -> dict[str, Any]:
    data = show_influence(state, query, at, top, replay).data
    schemas.QueryResult.model_validate(data)
    return data


def same(data: dict[str, Any], right: backstory.Influence, top: int) -> None:
    there = right.as_dict(top=top)
    assert_same_hits({k: data[k] for k in ("hits", "harmful")}, {k: there[k] for k in ("hits", "harmful")})
    for key in ("sign", "unit", "quality", "method", "at", "per", "headline"):
        assert data[key] == there[key], key


@pytest.mark.parametrize("at", [None, 8, 16])
def test_a_stored_query(state: State, at: int | None) -> None:
    data = result(state, parse_stored(state, "law", 1), at, 4)
    right = expected(state, recipe().queries["law"][1:2], at or 24)
    same(data, right, 4)
    assert data["caveats"] == list(right.caveats)
    assert (data["input"]["kind"], data["input"]["text"], data["rankings"]) == ("stored", "that judge he", None)
    steps = right.scores[0].reshape(-1, 3).sum(1).tolist()
    assert data["by_step"]["influence"] == pytest.approx(steps, rel=1e-3, abs=1e-6)
    assert set(data["samples"]) == {h["sample"] for side in ("hits", "harmful") for h in data[side]}
    assert data["seconds"] > 0


@pytest.mark.parametrize("text", ["the court", "a long text about roses, courts, judges and violets"])
def test_typed_text(state: State, text: str) -> None:
    encode = recipe().page.text
    assert encode is not None
    data = result(state, parse_text(state, text))
    same(data, expected(state, encode(text)), 3)
    assert any("split into" in line for line in data["caveats"]) == (len(text) > 13)
    assert (data["input"]["kind"], data["input"]["text"]) == ("text", text)


def test_an_image(state: State) -> None:
    data = result(state, parse_image(state, b"bytes", "seven"))
    same(data, expected(state, encoded(b"bytes", "seven")), 3)
    assert (data["input"]["image"], data["input"]["label"]) == ("data:image/png;base64,Ynl0ZXM=", "seven")


def test_a_ready_gradient(state: State) -> None:
    v = torch.randn(136, generator=torch.Generator().manual_seed(0))
    right = backstory.open(state.run.path).query_gradients(v[None])
    same(result(state, parse_gradient(state, v.tolist())), right, 3)


@pytest.mark.parametrize(
    ("gradient", "words"),
    [
        ([0.0], "this run needs 136"),
        ([1e39] * 136, "float32"),
        ([1.0] * 137, "this run needs 136"),
        ([0.0] * 136, "0 everywhere"),
    ],
)
def test_a_gradient_that_does_not_fit(state: State, gradient: list[float], words: str) -> None:
    with pytest.raises(Refusal, match=words) as error:
        parse_gradient(state, gradient)
    assert error.value.code == 422


def test_the_way_to_make_a_gradient_works(state: State) -> None:
    with pytest.raises(Refusal) as error:
        parse_gradient(state, [1.0])
    line = error.value.hint.split("`")[1]
    made, run = recipe(), backstory.open(state.run.path)
    scope: dict[str, Any] = {
        "run": run,
        "model": run.load_weights(made.model),
        "loss": made.loss,
        "batch": made.queries["law"],
    }
    exec(line, scope)
    by_hand = result(state, parse_gradient(state, scope["v"][1].tolist()))
    assert_same_hits(by_hand["hits"], result(state, parse_stored(state, "law", 1))["hits"])


@pytest.mark.parametrize("at", [None, 16])
def test_the_model_s_loss_on_the_query_is_shown(state: State, at: int | None) -> None:
    made, run = recipe(), backstory.open(state.run.path)
    model = run.load_weights(made.model, at or 24).eval()
    shown = result(state, parse_stored(state, "law", 1), at)["input"]
    assert shown["loss"] == pytest.approx(made.loss(model, made.queries["law"])[1].item(), rel=1e-5)
    assert shown["tokens"] == 12
    long = parse_text(state, "the court held that a judge said so")
    whole = made.loss(model, long.batch).sum().item()
    assert result(state, long, at)["input"]["loss"] == pytest.approx(whole, rel=1e-5)
    assert result(state, parse_gradient(state, [1.0] * 136))["input"]["loss"] is None


def test_an_image_is_shown_as_the_model_gets_it_with_its_prediction(state: State) -> None:
    telling = State(state.run.path, TOLD)
    shown = result(telling, parse_image(telling, b"12345", "seven"))["input"]
    assert (shown["prediction"], shown["model_image"]) == ("0", views.data_url(b"\x89PNG small"))
    assert shown["image"] == views.data_url(b"12345")
    plain = result(state, parse_image(state, b"12345", "seven"))["input"]
    assert (plain["prediction"], plain["model_image"]) == (None, None)


def test_white_space_is_no_query(state: State) -> None:
    with pytest.raises(Refusal, match="only white space") as error:
        parse_text(state, " \n\t ")
    assert error.value.code == 422


def test_a_text_fills_only_so_many_contexts(state: State) -> None:
    longest = MOST_PIECES * LENGTH + 1  # each byte but the first has a loss
    assert len(parse_text(state, "a" * longest).batch) == MOST_PIECES
    words = f"fills the model's context {MOST_PIECES + 1} times, and at most {MOST_PIECES} times is allowed"
    with pytest.raises(Refusal, match=words):
        parse_text(state, "a" * (longest + 1))


@pytest.mark.parametrize(
    "body",
    [{}, {"text": "a", "set": "law", "index": 0}, {"set": "law"}, {"index": 0}, {"text": "a", "gradient": [1.0]}],
)
def test_exactly_one_query(state: State, body: dict[str, object]) -> None:
    with pytest.raises(Refusal, match="exactly one"):
        parse_query(state, QueryBody.model_validate(body))


def test_the_replay_is_the_ranking_at_every_checkpoint(state: State) -> None:
    view = show_influence(state, parse_stored(state, "poems", 0), None, 2, True)
    assert [r["at"] for r in view.data["rankings"]] == [8, 16, 24]
    for line in view.data["rankings"]:
        right = expected(state, recipe().queries["poems"][:1], line["at"])
        assert line["hits"] == [h.sample for h in right.top(10) if h.influence > 0]
        assert line["harmful"] == [h.sample for h in right.bottom(10) if h.influence < 0]
    assert {"by_step", "places_hits", "places_harmful"} == set(view.figures)
    with pytest.raises(Refusal, match="cannot be evaluated at other checkpoints"):
        show_influence(state, parse_gradient(state, [1.0] * 136), None, 2, True)


def test_two_results_share_what_is_at_the_same_end(state: State) -> None:
    law, poems = parse_stored(state, "law", 0), parse_stored(state, "poems", 0)
    view = q.show_comparison(state, law, law, None, 3)
    schemas.Comparison.model_validate(view.data)
    assert view.data["both"] == sorted({h["sample"] for end in ("hits", "harmful") for h in view.data["left"][end]})
    other = q.show_comparison(state, law, poems, None, 2).data
    ends = [
        {h["sample"] for h in other["left"][end]} & {h["sample"] for h in other["right"][end]}
        for end in ("hits", "harmful")
    ]
    assert other["both"] == sorted(ends[0] | ends[1])
    assert set(view.figures) == {"compare"}


def test_tokens_are_exact_and_add_up(state: State) -> None:
    hits = [(name, state.catalogue.sample(name)["steps"][k]) for name, k in (("tags", 0), ("law/1/0", 1))]
    data = q.show_tokens(state, parse_stored(state, "law", 0), hits, None).data
    schemas.Tokens.model_validate(data)
    right = insight.tokens(backstory.open(state.run.path), recipe, recipe().queries["law"][:1], hits)
    for shown, told, (name, step) in zip(data["items"], right, hits, strict=True):
        assert (shown["sample"], shown["step"]) == (name, step)
        parts = [p["influence"] for p in shown["tokens"]]
        assert parts == pytest.approx(told.scores[0].tolist(), rel=1e-3, abs=1e-6)
        assert "".join(p["text"] for p in shown["tokens"]) == TEXTS[name][:12]
        assert sum(parts) == pytest.approx(shown["total"], rel=1e-2, abs=1e-4)
        for key in ("headline", "sign", "unit", "caveats", "quality", "at"):
            assert shown[key] == told.as_dict()[key]


def test_pieces_that_do_not_fit_are_refused() -> None:
    influence = insight.TokenInfluence("tags", 0, torch.zeros(1, 3), torch.zeros(1), at=8)
    with pytest.raises(UsageError, match=r"texts must have one text per token \(3\), got 2"):
        q._with_texts((["tags"], None), influence, lambda batch, place: ["a", "b"])


def test_without_a_recipe_only_gradients_can_be_queried(untrusted: State) -> None:
    ready = parse_gradient(untrusted, [1.0] * 136)
    assert result(untrusted, ready)["hits"]
    refused = (
        lambda: parse_text(untrusted, "a text"),
        lambda: parse_image(untrusted, b"", None),
        lambda: parse_stored(untrusted, "law", 0),
        lambda: q.show_tokens(untrusted, ready, [("tags", 0)], None),
    )
    for query in refused:
        with pytest.raises(Refusal) as error:
            query()
        assert error.value.code == 422
        assert "--trust-recipe" in error.value.hint
    data = views.form(untrusted).data
    assert (data["query_sets"], data["can_type"], data["dims"]) == ([], False, 136)


def test_the_same_query_has_one_key_and_another_another(state: State) -> None:
    assert parse_text(state, "one").key == parse_text(state, "one").key != parse_text(state, "two").key
    assert parse_image(state, b"x", "1").key != parse_image(state, b"x", "2").key
    assert parse_gradient(state, [1.0] * 136).key != parse_gradient(state, [2.0] * 136).key
