"""A run opened for a service: what can be queried, what is in memory, and that work in the background can be cancelled."""

import threading
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from tests.web.recipes import RECIPE, TOLD, copied, recipe

import backstory
from backstory import insight
from backstory.replay.queries import size
from backstory.run.run import Run
from backstory.web.app import make_app
from backstory.web.errors import Refusal
from backstory.web.jobs import Cancelled, Stopping, cancel_on
from backstory.web.state import State


def test_a_folder_that_is_just_called_run_has_the_name_of_its_parent(state: State, tmp_path: Path) -> None:
    assert State(copied(state.run.path, tmp_path / "mnist" / "run")).name == "mnist"
    assert state.name == "text"


def test_each_thread_has_the_run_open_for_itself(state: State) -> None:
    runs, errors = list[Run](), list[BaseException]()
    expected = state.run._store.read(0, 72).rows
    assert expected is not None

    def read() -> None:
        try:
            runs.append(state.run)
            for _ in range(20):
                rows = state.run._store.read(0, 72).rows
                assert rows is not None
                assert torch.equal(rows, expected)
                assert len(state.run.content(["law/1/0", "tags"])) == 2
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert state.run is state.run
    assert len({id(x) for x in [*runs, state.run]}) == 9


def test_whether_the_model_s_predictions_are_known(state: State) -> None:
    telling = State(state.run.path, TOLD)
    assert state.evaluations_known()  # there is nothing to know
    assert not telling.evaluations_known()
    for name in telling.sets:
        telling.evaluation(name, 24)
    assert telling.evaluations_known()


def test_the_model_s_own_losses_are_those_of_the_recipe(state: State) -> None:
    made, run = recipe(), backstory.open(state.run.path)
    model, batch = run.load_weights(made.model).eval(), made.queries["poems"]
    evaluation = state.evaluation("poems", 24)
    assert evaluation.losses == pytest.approx(made.loss(model, batch).tolist(), rel=1e-5)
    assert evaluation.predictions == []


def test_query_sets_of_the_recipe_come_first(state: State) -> None:
    assert list(state.sets) == ["law", "poems"]
    assert (state.default, state.has_model, state.missing()) == ("law", True, [])
    assert [size(batch) for batch in state.sets.values()] == [2, 2]


def test_without_a_recipe_it_says_what_is_missing(untrusted: State) -> None:
    assert list(untrusted.sets) == ["law"]  # stored in the run
    assert (untrusted.default, untrusted.has_model, untrusted.queryable) == (None, False, [])
    assert "--trust-recipe" in untrusted.missing()[0]
    with pytest.raises(Refusal, match="without a model") as error:
        untrusted.named(None)
    assert error.value.code == 422
    assert "--trust-recipe" in error.value.hint


@pytest.mark.parametrize("kind", ["text", "image"])
def test_what_cannot_be_typed_or_uploaded_is_told_only_where_samples_are_such(
    kind: str, state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert state.recipe is not None
    monkeypatch.setattr(state, "recipe", replace(state.recipe, page=backstory.Presentation()))
    for has in ({"text": False, "image": False}, {"text": kind == "text", "image": kind == "image"}):
        monkeypatch.setattr(state.catalogue, "has", has)
        named = [line.split(":")[0] for line in state.missing()]
        assert named == ([{"text": "Typed text", "image": "Uploaded images"}[kind]] if has[kind] else [])


def test_without_embeddings_it_says_how_to_get_them(bare_run: Path) -> None:
    bare = State(bare_run, RECIPE)
    assert any(f"backstory embed {bare_run}`" in line for line in bare.missing())
    assert bare.embedded == []
    assert bare.recording(24).words


def test_unknown_names_and_steps_are_refused(state: State) -> None:
    with pytest.raises(Refusal, match="law, poems") as error:
        state.named("../law")
    assert error.value.code == 404
    with pytest.raises(Refusal, match="8, 16, 24") as error:
        state.step(5)
    assert error.value.code == 422
    assert state.step(None) == 24
    with pytest.raises(Refusal, match="no sample of this id") as error:
        state.sample_id("../../etc/shadow")
    assert error.value.code == 404
    assert "shadow" not in error.value.message


@pytest.mark.parametrize("step", [8, 24])
def test_means_are_those_of_each_set(state: State, step: int) -> None:
    made, run = recipe(), backstory.open(state.run.path)
    model = run.load_weights(made.model, step)
    for name, batch in made.queries.items():
        expected = insight.mean.mean_influence(run, model, made.loss, batch, step)
        mean = state.mean(name, step)
        assert np.allclose(mean.scores, expected.scores, rtol=1e-3, atol=1e-6)
        assert (mean.caveats, mean.method, mean.at) == (expected.caveats, expected.method, step)
        assert mean.quality == expected.quality is not None
        assert mean.recording == expected.recording is not None


def test_one_sweep_serves_all_sets(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, queries, query = State(state.run.path, RECIPE), list[int](), Run.query_gradients

    def counted(self: Run, v: Any, *args: Any, **options: Any) -> backstory.Influence:
        queries.append(len(v))
        return query(self, v, *args, **options)

    monkeypatch.setattr(Run, "query_gradients", counted)
    for name in ("law", "poems", "law"):
        fresh.mean(name, 8)
    assert queries == [2]


@pytest.mark.parametrize("embedded", [True, False])
def test_each_query_of_a_set(state: State, bare_run: Path, embedded: bool) -> None:
    ready = state if embedded else State(bare_run, RECIPE)
    made, run = recipe(), backstory.open(ready.run.path)
    expected = run.query(run.load_weights(made.model), made.loss, made.queries["law"]).sum_over(["tags"])
    result = ready.on_queries("law", "tags", 10)
    values = {x.query: x.influence for x in (*result.helped, *result.hurt)}
    assert values == pytest.approx(dict(enumerate(expected.tolist())), rel=1e-3)


def test_memory_is_bounded(text_run: Path, tmp_path: Path) -> None:
    path = copied(text_run, tmp_path / "embedded")
    for step in (8, 16):
        backstory.open(path).embed(step)
    whole = State(path, RECIPE)
    assert whole.in_memory == [24, 16, 8]
    model, final = whole.checkpoint(24).nbytes, whole.run.embeddings(24).nbytes
    assert State(path, RECIPE, room=model + final).in_memory == [24]
    assert State(path, RECIPE, room=model + final - 1).in_memory == [16]  # the final ones do not fit
    small = State(path, RECIPE, room=0)
    assert (small.in_memory, small.embedded) == ([], [8, 16, 24])
    assert any("do not fit" in line for line in small.missing())
    assert np.allclose(small.mean("law", 24).scores, whole.mean("law", 24).scores, rtol=1e-4, atol=1e-6)
    small.checkpoint(8)
    small.checkpoint(16)
    assert 8 not in small._models  # no room for both; the last one stays
    assert 16 in small._models


def test_the_timeline_is_that_of_insight(state: State) -> None:
    made, run = recipe(), backstory.open(state.run.path)
    expected = insight.timeline(run, run.load_weights(made.model), made.loss, made.queries["law"])
    assert np.allclose(state.timeline("law", 24).influence, expected.influence, rtol=1e-4, atol=1e-7)
    assert state.timeline("law", 24) is state.timeline("law", 24)


def test_the_spare_model_belongs_to_one_at_a_time(state: State) -> None:
    inside, waiting = threading.Event(), threading.Event()

    def second() -> None:
        waiting.set()
        with state.spare(8):
            inside.set()

    with state.spare(24) as (model, _):
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(20)
        assert not inside.wait(0.05)
        assert model is not state.checkpoint(24).model
    thread.join(20)
    assert inside.is_set()


def test_the_sum_takes_one_pass_for_some_pieces_at_a_time(state: State) -> None:
    model, batch = state.checkpoint(24), torch.cat([recipe().queries["poems"]] * 10)
    progress = list[tuple[int, int]]()
    v, caveats = model.total_gradient(batch, lambda done, total: progress.append((done, total)))
    assert torch.allclose(v[0], model.gradients(batch)[0].sum(0), rtol=1e-4, atol=1e-5)
    assert progress == [(0, 20), (8, 20), (16, 20)]
    assert "split into 20 pieces" in caveats[-1]


def test_work_ends_with_the_service(bare_run: Path) -> None:
    ending = State(bare_run, RECIPE)
    ending.stopping.set()
    with pytest.raises(Stopping):
        ending.warm()


def test_whether_something_is_known_is_told_without_computing_it(
    bare_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = State(bare_run, RECIPE)

    def never(*_: object) -> None:
        raise AssertionError("the run was read")

    monkeypatch.setattr(State, "run", property(never))
    assert [bare.means_known(None), bare.each_known(None), bare.recording_known()] == [False] * 3
    assert not bare.mean_known("law", 8)
    monkeypatch.undo()
    bare.recording(24)
    bare.on_queries("law", "tags", 3)
    bare.mean("law", 8)
    monkeypatch.setattr(State, "run", property(never))
    assert bare.recording_known()
    assert bare.each_known("law")
    assert not bare.each_known("poems")
    assert bare.mean_known("poems", 8)
    assert not bare.means_known("law")


def test_a_query_that_nobody_waits_for_is_cancelled(bare_run: Path) -> None:
    bare, flag = State(bare_run, RECIPE), Event()
    v, caveats = bare.gradients("law", 24)

    def job() -> None:
        flag.set()  # its time passes while it runs
        bare.influence("q", v[:1], caveats, 24)

    with pytest.raises(Cancelled):
        cancel_on(flag, job)()
    assert ("one", "q", 24) not in bare._influences
    bare.mean("law", 24)  # what others want goes on


def test_warming_computes_what_pages_need(state: State) -> None:
    fresh = State(state.run.path, RECIPE)
    assert not fresh.timeline_known(None, None)
    assert not fresh.means_known(None)
    fresh.warm()
    assert fresh.timeline_known(None, None)
    assert fresh.timeline_known("law", 24)
    assert not fresh.timeline_known("law", 8)
    assert fresh.means_known("law")


@pytest.mark.parametrize("kind", ["text_run", "bare_run"])
def test_a_calibration_that_is_made_meanwhile_is_in_every_result(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path = copied(request.getfixturevalue(kind), tmp_path / "run")
    state = State(path, RECIPE)
    with TestClient(make_app(state, warm=False), base_url="http://127.0.0.1") as client:

        def measured() -> list[bool]:
            paths = (
                "/",
                "/timeline?queries=law",
                "/harmful?queries=poems",
                "/queries/poems/0",
                "/sources?queries=poems",
            )
            answers = [client.get(path).json() for path in paths]
            return [x["quality"]["measured"] for x in (*answers, answers[0]["timeline"])]

        assert measured() == [False] * 6
        made = backstory.open(path).calibrate("law", RECIPE, singles=1, removals=0)
        assert measured() == [True, False, True, True, True, False]  # those of `law` are exact now, and not retrained
        assert client.get("/timeline?queries=law").json()["quality"]["exact"]
        assert client.get("/harmful?queries=poems").json()["quality"] == made.as_dict()
        kept = state.timeline("poems", 24)
        assert client.get("/timeline?queries=poems").status_code == 200
        assert state.timeline("poems", 24) is kept, "what was not calibrated since is computed once"
