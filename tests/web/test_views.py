"""Views are the results of the library, with samples, links and figures beside them."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from tests.web.recipes import RECIPE, STEPS, TERMS, TEXTS, TOLD, recipe

import backstory
from backstory import insight
from backstory.web import schemas, views
from backstory.web.errors import Refusal
from backstory.web.requests import SampleFilter
from backstory.web.state import State
from backstory.web.views import View, sample

ROUNDING = TERMS * 2**-24


def samples(state: State, **chosen: Any) -> View:
    return views.samples(state, SampleFilter(**chosen))


def python(state: State) -> tuple[backstory.Run, Any, Any, dict[str, Any]]:
    """`(run, model, loss, query sets)`, without anything of the service."""
    made, run = recipe(), backstory.open(state.run.path)
    return run, run.load_weights(made.model), made.loss, dict(made.queries)


def test_the_overview(state: State) -> None:
    data = views.overview(state).data
    schemas.Overview.model_validate(data)
    assert (data["steps"], data["occurrences"], data["samples"]) == (24, 72, 9)
    assert (data["checkpoints"], data["optimizer"], data["curvature"]) == ([8, 16, 24], "SGD", "empirical/6")
    assert [(s["name"], s["count"]) for s in data["query_sets"]] == [("law", 2), ("poems", 2)]
    assert (data["can_type"], data["can_upload"], data["can_shade"]) == (True, True, True)
    assert len(data["loss"]) == STEPS
    assert all(x > 0 for x in data["loss"])
    assert data["quality"] == backstory.open(state.run.path).quality().as_dict()
    assert data["default_queries"] == "law"
    assert data["created"] is not None


def test_the_overview_without_a_recipe(untrusted: State) -> None:
    view = views.overview(untrusted)
    data = view.data
    schemas.Overview.model_validate(data)
    assert [data[k] for k in ("timeline", "default_queries", "can_type", "can_shade")] == [None, None, False, False]
    assert "--trust-recipe" in data["missing"][0]
    assert not data["quality"]["measured"]
    assert data["recording"]["words"]
    assert set(view.figures) == {"loss"}


def test_the_timeline_and_its_phases(state: State) -> None:
    view = views.timeline(state, "poems", 16)
    assert (view.data["queries"], view.data["at"], len(view.data["per_rate"])) == ("poems", 16, 16)
    assert set(view.figures) == {"timeline", "loss"}


def test_evolution_of_groups_and_of_a_sample(state: State) -> None:
    run, model, loss, sets = python(state)
    for by, ids in (("thirds", None), ("source", None), ("ids", ["tags", "law/1/0"])):
        groups = by if ids is None else {"named": ids}
        expected = insight.evolution(run, model, loss, sets["law"], by=groups).as_dict()
        data = views.evolution(state, None, "thirds" if ids else by, ids).data
        schemas.Evolution.model_validate(data)
        assert (data["queries"], data["by"], data["checkpoints"]) == ("law", by, [8, 16, 24])
        for group, values in expected["mean"].items():
            assert data["mean"][group] == pytest.approx(values, rel=1e-3, abs=1e-6)


def test_sources_where_nobody_names_query_sets_are_for_all_domains(state: State) -> None:
    assert views.sources(state, None, None, None).data == views.sources(state, ["law", "poems"], None, None).data
    assert views.sources(state, None, "label", None).data["by"] == "label"


def test_bars_lead_to_samples(state: State) -> None:
    view = views.sources(state, ["law"], None, None)
    links = view.figures["sources"]["layout"]["meta"]["links"]
    assert links == [view.data["paths"][name] for name in view.data["sources"]]
    assert links[0].startswith("/samples?source=")
    ranked = views.harmful(state, None, 3, None)
    assert ranked.figures["harmful"]["layout"]["meta"]["links"][0] == views.sample_path(
        ranked.data["harmful"][0]["sample"]
    )


def test_sources_as_a_table_hold_no_formula(state: State) -> None:
    data = views.sources(state, ["law", "poems"], None, None).data
    lines = list(csv.reader(io.StringIO(views.sources_csv(data))))
    assert [lines[0][0], *lines[0][-2:]] == ["source", "law", "poems"]
    assert [line[0] for line in lines[1:]] == data["sources"]
    assert [[float(x) for x in line[-2:]] for line in lines[1:]] == data["matrix"]
    for line, total in zip(lines[1:], data["total"], strict=True):
        expected = {key: str(x) for key, x in total.items() if key not in ("source", "domain")}
        assert dict(zip(lines[0][1:-2], line[1:-2], strict=True)) == expected
    assert views._cell("=1+1") == "'=1+1"
    assert views._cell("law") == "law"


def test_a_run_without_sources_says_so(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state.catalogue, "has", {**state.catalogue.has, "source": False})
    assert views.sources(state, None, None, None).data["by"] == "label"
    with pytest.raises(Refusal, match="has no source"):
        views.sources(state, None, "source", None)


def test_harmful_samples_come_with_their_content(state: State) -> None:
    data = views.harmful(state, None, 9, None).data
    schemas.Harmful.model_validate(data)
    assert {str(x["sample"]) for side in ("harmful", "helpful") for x in data[side]} == set(data["samples"])
    assert data["samples"]["tags"]["text"] == "<script>alert"
    assert len(views.harmful(state, None, 1, None).data["harmful"]) == 1
    assert views.harmful(state, None, 9, None, 10).data["harmful"] != data["harmful"]


def test_every_result_has_its_quality_and_what_the_recording_is_like(state: State) -> None:
    shown = (
        views.overview(state), views.harmful(state, None, 3, None), views.sources(state, None, None, 16),
        views.timeline(state, None, 16), views.evolution(state, None, "thirds", None), views.overwriting(state, None, "tags", None),
    )  # fmt: skip
    for view in shown:
        quality, step = view.data["quality"], view.data.get("at", 24)
        assert not quality["measured"]
        assert quality["sentence"].startswith("Quality: not measured.")
        at = "" if step == 24 else f" --at {step}"
        assert quality["command"] == f"backstory calibrate {state.run.path} --queries law{at}"
        assert view.data["recording"] == state.recording(step).as_dict()


# -- samples -----------------------------------------------------------------------------------------------------------


def test_pages_of_samples(state: State) -> None:
    whole = [s["id"] for s in samples(state).data["items"]]
    assert whole == sorted(TEXTS)
    parts = [samples(state, page=n, per=4).data for n in (1, 2, 3)]
    assert [s["id"] for part in parts for s in part["items"]] == whole
    assert [part["total"] for part in parts] == [9] * 3
    for page, per, last in ((4, 4, 3), (10**7, 200, 1)):
        with pytest.raises(Refusal, match=f"there is no page {page}: the 9 matching samples fill {last}") as error:
            samples(state, page=page, per=per)
        assert error.value.code == 404
    assert samples(state, text="nothing like this").data["items"] == []
    assert parts[0]["sources"] == ["law", "odd", "poems"]
    assert parts[0]["items"][0]["value"] is None


def test_steps_the_wrong_way_round_are_refused(state: State) -> None:
    with pytest.raises(
        Refusal, match=r"first_step \(from step\) is 9, which is after last_step \(to step\), 3"
    ) as error:
        samples(state, first_step=9, last_step=3)
    assert error.value.code == 422
    assert samples(state, first_step=3, last_step=3).data["total"] == 3


def test_values_are_influences_on_the_mean_loss(state: State) -> None:
    run, model, loss, sets = python(state)
    ids, scores = run.query(model, loss, sets["poems"]).per_sample()
    expected = dict(zip(map(str, ids), scores.mean(0).tolist(), strict=True))
    data = samples(state, sort="value", queries="poems").data
    schemas.Samples.model_validate(data)
    assert {s["id"]: s["value"] for s in data["items"]} == pytest.approx(expected, rel=1e-3)
    values = [s["value"] for s in data["items"]]
    assert values == sorted(values)


def test_samples_between_two_values(state: State) -> None:
    whole = samples(state, sort="value", queries="poems").data["items"]
    low, high = whole[2]["value"], whole[5]["value"]
    for least, most, expected in ((low, high, whole[2:6]), (low, None, whole[2:]), (None, high, whole[:6])):
        data = samples(state, sort="value", queries="poems", min_value=least, max_value=most).data
        assert [s["id"] for s in data["items"]] == [s["id"] for s in expected]
        assert data["total"] == len(expected)
    assert samples(state, queries="poems", min_value=high, max_value=low).data["items"] == []
    for least, most in ((0.0, None), (None, 0.0)):
        with pytest.raises(Refusal, match="no query set is named") as error:
            samples(state, sort="value", min_value=least, max_value=most)
        assert error.value.code == 422


def test_one_sample_over_training(state: State) -> None:
    run, model, loss, sets = python(state)
    view = sample(state, "law/1/0", "poems", True)
    data = view.data
    schemas.SamplePage.model_validate(data)
    influence = run.query(model, loss, sets["poems"])
    assert data["value"] == pytest.approx(float(influence.sum_over(["law/1/0"]).mean()), rel=1e-3)
    assert data["occurrences"]["steps"] == data["sample"]["steps"]
    assert sum(data["occurrences"]["influence"]) == pytest.approx(data["value"], rel=1e-6)
    each = influence.sum_over(["law/1/0"]).tolist()
    shown = {q["query"]: q["influence"] for side in ("helped", "hurt") for q in data["on_queries"][side]}
    assert shown == pytest.approx(dict(enumerate(each)), rel=1e-3)
    assert {int(q) for q in data["query_labels"]} == set(shown)
    assert data["query_labels"]["0"]["path"] == "/queries/poems/0"
    assert {"evolution", "occurrences"} <= set(view.figures)


def test_what_overwrote_a_sample(state: State) -> None:
    run, model, loss, sets = python(state)
    expected = insight.overwriting(run, model, loss, sets["law"], "tags")
    data = sample(state, "tags", None, True).data
    over = data["overwriting"]
    assert [(e["sample"], e["step"]) for e in over["overwritten_by"]] == [
        (e.sample, e.step) for e in expected.overwritten_by
    ]
    assert over["lost"] == pytest.approx(expected.lost, rel=ROUNDING, abs=ROUNDING * abs(expected.just_after))
    assert {str(e["sample"]) for e in over["overwritten_by"][:20]} <= set(data["samples"])
    assert sample(state, "tags", None, False).data["overwriting"] is None


def test_a_sample_without_a_recipe_has_what_needs_no_model(untrusted: State) -> None:
    data = sample(untrusted, "tags", None, True).data
    schemas.SamplePage.model_validate(data)
    assert [data[k] for k in ("queries", "evolution", "on_queries", "overwriting")] == [None] * 4
    assert len(data["neighbours"]["neighbours"]) == 8
    assert "--trust-recipe" in data["missing"][0]
    with pytest.raises(Refusal, match="without a model"):
        sample(untrusted, "tags", "law", False)


def test_a_sample_without_embeddings(bare_run: Path) -> None:
    data = sample(State(bare_run, RECIPE), "tags", None, False).data
    assert data["neighbours"] is None
    assert data["evolution"]["checkpoints"] == [8, 16, 24]
    assert len(data["on_queries"]["helped"]) + len(data["on_queries"]["hurt"]) == 2


def test_images_are_given_only_where_they_are(state: State) -> None:
    assert views.image(state, "law/1/0") == b"\x89PNG\r\n\x1a\nlaw/1/0"
    with pytest.raises(Refusal, match="no image") as error:
        views.image(state, "tags")
    assert error.value.code == 404
    with pytest.raises(Refusal, match="no sample of this id") as error:
        views.image(state, "../../etc/shadow")
    assert "shadow" not in error.value.message


# -- stored queries ------------------------------------------------------------------------------------------------------


def test_queries_in_a_few_words(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    assert views.label_query(state, "law", 1) == "law 1: that judge he"
    monkeypatch.setattr(views, "present_queries", lambda *_: [{"label": "7"}])
    assert views.label_query(state, "law", 0) == "law 0: label 7"
    monkeypatch.setattr(views, "present_queries", lambda *_: [])
    assert views.label_query(state, "law", 1) == "law 1"


def test_the_form_lists_mistakes_alone(state: State) -> None:
    telling = State(state.run.path, TOLD)
    whole, wrong = views.form(telling).data, views.form(telling, mistakes=True).data
    schemas.QueryForm.model_validate(whole)
    assert [[x["mistake"] for x in s["items"]] for s in whole["query_sets"]] == [[False, False], [True, True]]
    assert [(s["fits"], len(s["items"]), s["count"]) for s in wrong["query_sets"]] == [(0, 0, 2), (2, 2, 2)]
    assert [x["prediction"] for x in wrong["query_sets"][1]["items"]] == ["r", "b"]
    assert whole["can_predict"]
    assert not views.form(state).data["can_predict"]
    with pytest.raises(Refusal, match="does not know the model's mistakes") as error:
        views.form(state, mistakes=True)
    assert "predict=" in error.value.hint


def test_the_form_shows_the_stored_queries(state: State) -> None:
    sets = views.form(state).data["query_sets"]
    assert [(s["name"], s["count"]) for s in sets] == [("law", 2), ("poems", 2)]
    assert [(q["index"], q["text"], q["path"]) for q in sets[0]["items"]] == [
        (0, "this court sa", "/queries/law/0"),
        (1, "that judge he", "/queries/law/1"),
    ]
