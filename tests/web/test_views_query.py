"""Answers are those of the run's own queries, for stored queries, typed text, images and gradients."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.web.recipes import LENGTH, TEXTS, TOLD, assert_same_hits, encoded, recipe

import backstory
from backstory import exact
from backstory.errors import UsageError
from backstory.web import schemas as shapes
from backstory.web import views_form
from backstory.web import views_query as views_ask
from backstory.web.errors import Refused
from backstory.web.schemas_run import MOST_PIECES
from backstory.web.state import Opened
from backstory.web.views_query import answer, asked, compare, ready, stored, typed, uploaded


def expected(opened: Opened, batch: torch.Tensor, at: int = 24) -> backstory.Influence:
    made, run = recipe(), backstory.open(opened.run.path)
    return run.query(run.load_weights(made.model, at), lambda m, b: made.loss(m, b).sum(), batch, at)


def same(found: shapes.Answer, right: backstory.Influence, k: int) -> None:
    for hits, told in ((found.helpful, right.top(k)), (found.harmful, right.bottom(k))):
        assert [h.influence for h in hits] == pytest.approx([h.influence for h in told], rel=1e-3)
        assert [h.sample.id for h in hits] == [h.sample for h in told]
        assert [(h.step, h.occurrences, h.words) for h in hits] == [(h.step, h.occurrences, h.words) for h in told]


@pytest.mark.parametrize("at", [None, 8, 16])
def test_a_stored_query(opened: Opened, at: int | None) -> None:
    found = answer(opened, stored(opened, "law", 1), at, 4, False)
    same(found, expected(opened, recipe().queries["law"][1:2], at or 24), 4)
    assert (found.query.kind, found.query.text, found.replay) == ("stored", "that judge he", None)
    assert found.timeline.influence == pytest.approx(
        expected(opened, recipe().queries["law"][1:2], at or 24).scores[0].reshape(-1, 3).sum(1).tolist(),
        rel=1e-3,
        abs=1e-6,
    )
    assert found.quality.words
    assert found.seconds > 0


@pytest.mark.parametrize("text", ["the court", "a long text about roses, courts, judges and violets"])
def test_typed_text(opened: Opened, text: str) -> None:
    made = recipe()
    assert made.page.text is not None
    found = answer(opened, typed(opened, text), None, 3, False)
    same(found, expected(opened, made.page.text(text)), 3)
    assert any("cut into" in note for note in found.notes) == (len(text) > 13)
    assert (found.query.kind, found.query.text) == ("text", text)


def test_common_words_are_those_of_the_query(opened: Opened) -> None:
    found = answer(opened, typed(opened, "The Court of judges"), None, 9, False)
    marked = {h.sample.id: h.common for h in found.helpful}
    assert marked["law/1/0"] == ["court"]
    assert marked["poems/2/0"] == []


def test_an_image(opened: Opened) -> None:
    found = answer(opened, uploaded(opened, b"bytes", "seven"), None, 3, False)
    same(found, expected(opened, encoded(b"bytes", "seven")), 3)
    assert (found.query.image, found.query.label) == ("data:image/png;base64,Ynl0ZXM=", "seven")


def test_a_ready_gradient(opened: Opened) -> None:
    v = torch.randn(136, generator=torch.Generator().manual_seed(0))
    right = backstory.open(opened.run.path).query_gradients(v[None])
    same(answer(opened, ready(opened, v.tolist()), None, 3, False), right, 3)


@pytest.mark.parametrize(
    ("gradient", "words"),
    [([0.0], "expected 136"), ([1e39] * 136, "float32"), ([1.0] * 137, "expected 136"), ([0.0] * 136, "0 everywhere")],
)
def test_a_gradient_that_does_not_fit(opened: Opened, gradient: list[float], words: str) -> None:
    with pytest.raises(Refused, match=words) as error:
        ready(opened, gradient)
    assert error.value.code == 422


def test_the_way_to_make_a_gradient_works(opened: Opened) -> None:
    with pytest.raises(Refused) as error:
        ready(opened, [1.0])
    line = error.value.hint.split("`")[1]
    made, run = recipe(), backstory.open(opened.run.path)
    scope = {"run": run, "model": run.load_weights(made.model), "loss": made.loss, "batch": made.queries["law"]}
    exec(line, scope)
    v = cast("Any", scope["v"])
    found = answer(opened, ready(opened, v[1].tolist()), None, 3, False)
    by_name = answer(opened, stored(opened, "law", 1), None, 3, False)
    assert_same_hits(*([h.model_dump() for h in x.helpful] for x in (found, by_name)))


@pytest.mark.parametrize("at", [None, 16])
def test_the_query_s_own_loss_is_said(opened: Opened, at: int | None) -> None:
    made, run = recipe(), backstory.open(opened.run.path)
    model = run.load_weights(made.model, at or 24).eval()
    found = answer(opened, stored(opened, "law", 1), at, 3, False).query
    loss = made.loss(model, made.queries["law"])[1].item()
    assert found.loss is not None
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.loss_words is not None
    assert found.loss_words.startswith(f"the sum over 12 tokens, {found.loss / 12:.3g} each")
    long = typed(opened, "the court held that a judge said so")
    assert answer(opened, long, at, 3, False).query.loss == pytest.approx(
        made.loss(model, long.batch).sum().item(), rel=1e-5
    )
    assert answer(opened, ready(opened, [1.0] * 136), None, 3, False).query.loss is None


def test_an_image_is_shown_as_the_model_sees_it_with_its_answer(opened: Opened) -> None:
    telling = Opened(opened.run.path, TOLD)
    found = answer(telling, uploaded(telling, b"12345", "seven"), None, 3, False).query
    assert (found.says, found.seen) == ("0", views_ask.data_url(b"\x89PNG small"))
    assert found.image == views_ask.data_url(b"12345")
    plain = answer(opened, uploaded(opened, b"12345", "seven"), None, 3, False).query
    assert (plain.says, plain.seen) == (None, None)


def test_white_space_is_no_question(opened: Opened) -> None:
    with pytest.raises(Refused, match="only white space") as error:
        typed(opened, " \n\t ")
    assert error.value.code == 422


def test_a_text_fills_only_so_many_contexts(opened: Opened) -> None:
    longest = MOST_PIECES * LENGTH + 1  # each byte but the first has a loss
    assert len(typed(opened, "a" * longest).batch) == MOST_PIECES
    with pytest.raises(
        Refused, match=f"fills the model's context {MOST_PIECES + 1} times; expected at most {MOST_PIECES}"
    ):
        typed(opened, "a" * (longest + 1))


@pytest.mark.parametrize(
    "q", [{}, {"text": "a", "set": "law", "index": 0}, {"set": "law"}, {"index": 0}, {"text": "a", "gradient": [1.0]}]
)
def test_exactly_one_question(opened: Opened, q: dict[str, object]) -> None:
    with pytest.raises(Refused, match="exactly one"):
        asked(opened, shapes.Question.model_validate(q))


def test_the_replay_is_the_ranking_at_every_checkpoint(opened: Opened) -> None:
    found = answer(opened, stored(opened, "poems", 0), None, 2, True)
    assert found.replay is not None
    assert [r.at for r in found.replay] == [8, 16, 24]
    for line in found.replay:
        right = expected(opened, recipe().queries["poems"][:1], line.at)
        assert line.helpful == [h.sample for h in right.top(10)]
        assert line.harmful == [h.sample for h in right.bottom(10)]
    with pytest.raises(Refused, match="cannot be replayed"):
        answer(opened, ready(opened, [1.0] * 136), None, 2, True)


def test_two_answers_share_what_is_at_the_same_end(opened: Opened) -> None:
    found = compare(opened, stored(opened, "law", 0), stored(opened, "law", 0), None, 3)
    assert found.both == sorted({h.sample.id for h in (*found.left.helpful, *found.left.harmful)})
    other = compare(opened, stored(opened, "law", 0), stored(opened, "poems", 0), None, 2)
    ends = [
        {h.sample.id for h in getattr(other.left, end)} & {h.sample.id for h in getattr(other.right, end)}
        for end in ("helpful", "harmful")
    ]
    assert other.both == sorted(ends[0] | ends[1])


def test_tokens_are_those_of_the_truth_and_add_up(opened: Opened) -> None:
    steps = opened.catalogue.sample(opened.catalogue.number("tags")).steps
    hits = [("tags", steps[0]), ("law/1/0", opened.catalogue.sample(opened.catalogue.number("law/1/0")).steps[1])]
    found = views_ask.tokens(opened, stored(opened, "law", 0), hits, None)
    run = backstory.open(opened.run.path)
    right = exact.tokens(run, recipe, recipe().queries["law"][:1], hits)
    for shown, told, (name, step) in zip(found.items, right, hits, strict=True):
        assert (shown.sample, shown.step) == (name, step)
        assert [p.influence for p in shown.tokens] == pytest.approx(told.scores[0].tolist(), rel=1e-3, abs=1e-6)
        assert "".join(p.text for p in shown.tokens) == TEXTS[name][:12]
        assert sum(p.influence for p in shown.tokens) == pytest.approx(shown.total, rel=1e-2, abs=1e-4)


def test_pieces_that_do_not_fit_are_refused(opened: Opened) -> None:
    found = exact.TokenInfluence("tags", 0, torch.zeros(1, 3), torch.zeros(1))
    with pytest.raises(UsageError, match="gives 2 texts; expected 3"):
        views_ask._tokens((["tags"], None), found, lambda batch, place: ["a", "b"])


def test_without_a_recipe_only_gradients_can_be_asked(untrusted: Opened) -> None:
    assert answer(untrusted, ready(untrusted, [1.0] * 136), None, 2, False).helpful
    refused = (
        lambda: typed(untrusted, "a text"),
        lambda: uploaded(untrusted, b"", None),
        lambda: stored(untrusted, "law", 0),
        lambda: views_ask.tokens(untrusted, ready(untrusted, [1.0] * 136), [("tags", 0)], None),
    )
    for ask in refused:
        with pytest.raises(Refused) as error:
            ask()
        assert error.value.code == 422
        assert "--trust-recipe" in error.value.hint
    found = views_form.form(untrusted)
    assert (found.query_sets, found.can_type, found.dims) == ([], False, 136)


def test_the_same_question_has_one_key_and_another_another(opened: Opened) -> None:
    assert typed(opened, "one").key == typed(opened, "one").key != typed(opened, "two").key
    assert uploaded(opened, b"x", "1").key != uploaded(opened, b"x", "2").key
    v = np.ones(136)
    assert ready(opened, v.tolist()).key != ready(opened, (2 * v).tolist()).key
