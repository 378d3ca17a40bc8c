"""A run opened for a service: what it can be asked, and that work in the background can be given up."""

import threading
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from tests.web.recipes import RECIPE, TOLD, copied, recipe
from torch import Tensor

import backstory
from backstory import insight
from backstory.run.embed import Progress
from backstory.web.cancellation import GivenUp, carrying
from backstory.web.checkpoint import Scored
from backstory.web.errors import Refused
from backstory.web.state import Opened, Stopped, size


def test_a_folder_that_is_just_called_run_has_the_name_of_its_parent(opened: Opened, tmp_path: Path) -> None:
    assert Opened(copied(opened.run.path, tmp_path / "mnist" / "run")).name == "mnist"
    assert opened.name == "text"


def test_whether_the_model_s_answers_are_known(opened: Opened) -> None:
    telling = Opened(opened.run.path, TOLD)
    assert opened.own_known()  # there is nothing to know
    assert not telling.own_known()
    for name in telling.sets:
        telling.own(name, 24)
    assert telling.own_known()


def test_query_sets_of_the_recipe_come_first(opened: Opened) -> None:
    assert list(opened.sets) == ["law", "poems"]
    assert (opened.default, opened.can_ask, opened.missing()) == ("law", True, [])
    assert [size(batch) for batch in opened.sets.values()] == [2, 2]


def test_without_a_recipe_it_says_what_is_missing(untrusted: Opened) -> None:
    assert list(untrusted.sets) == ["law"]  # stored in the run
    assert (untrusted.default, untrusted.can_ask) == (None, False)
    assert "--trust-recipe" in untrusted.missing()[0]
    with pytest.raises(Refused, match="without a model") as error:
        untrusted.named(None)
    assert error.value.code == 422
    assert "--trust-recipe" in error.value.hint


def test_without_embeddings_it_says_how_to_get_them(bare_run: Path) -> None:
    bare = Opened(bare_run, RECIPE)
    assert any("backstory embed RUN" in line for line in bare.missing())
    assert not bare.quick(bare.final)
    assert bare.quality()["words"]


def test_unknown_names_and_steps_are_refused(opened: Opened) -> None:
    with pytest.raises(Refused, match="law, poems") as error:
        opened.named("../law")
    assert error.value.code == 404
    with pytest.raises(Refused, match="8, 16, 24") as error:
        opened.step(5)
    assert error.value.code == 422
    assert opened.step(None) == 24


@pytest.mark.parametrize("step", [8, 24])
def test_means_are_those_of_each_set(opened: Opened, step: int) -> None:
    made, run = recipe(), backstory.open(opened.run.path)
    model = run.load_weights(made.model, step)
    for name, batch in made.queries.items():
        expected = run.query(model, made.loss, batch, step).scores.mean(0)
        assert np.allclose(opened.mean(name, step).scores[0], expected.numpy(), rtol=1e-3, atol=1e-6)


def test_one_sweep_answers_for_all_sets(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = Opened(opened.run.path, RECIPE)
    there, asked = fresh.checkpoint(8), list[int]()
    plain = there.scores

    def counted(v: Tensor, progress: Progress | None = None) -> Scored:
        asked.append(len(v))
        return plain(v, progress)

    monkeypatch.setattr(there, "scores", counted)
    for name in ("law", "poems", "law"):
        fresh.mean(name, 8)
    assert asked == [2]


@pytest.mark.parametrize("held", [True, False])
def test_each_query_of_a_set(opened: Opened, bare_run: Path, held: bool) -> None:
    ready = opened if held else Opened(bare_run, RECIPE)
    made, run = recipe(), backstory.open(ready.run.path)
    answer = run.query(run.load_weights(made.model), made.loss, made.queries["law"])
    rows = ready.catalogue.rows(ready.catalogue.number("tags"))
    assert np.allclose(ready.each("law", rows), answer.sum_over(["tags"]).numpy(), rtol=1e-3, atol=1e-6)


def test_checkpoints_in_memory_are_bounded(text_run: Path, tmp_path: Path) -> None:
    path = copied(text_run, tmp_path / "embedded")
    for step in (8, 16):
        backstory.open(path).embed(step)
    final = Opened(path, RECIPE).checkpoint(24).nbytes
    small = Opened(path, RECIPE, room=final + 1)
    assert [small.checkpoint(c).E is None for c in (24, 16, 8)] == [False, True, True]
    roomy = Opened(path, RECIPE, room=3 * final)
    assert [roomy.checkpoint(c).E is None for c in (24, 16, 8)] == [False, False, False]
    assert small.quick(8)  # the last one stays
    assert roomy.quick(8)
    middle = Opened(path, RECIPE, room=final + roomy.checkpoint(16).nbytes)
    assert [middle.checkpoint(c).E is None for c in (8, 16)] == [False, False]
    assert 8 not in middle._checkpoints  # no room for both


def test_the_timeline_is_that_of_insight(opened: Opened) -> None:
    made, run = recipe(), backstory.open(opened.run.path)
    expected = insight.timeline(run, run.load_weights(made.model), made.loss, made.queries["law"])
    assert np.allclose(opened.timeline("law", 24).influence, expected.influence, rtol=1e-4, atol=1e-7)
    assert opened.timeline("law", 24) is opened.timeline("law", 24)


def test_the_spare_model_belongs_to_one_at_a_time(opened: Opened) -> None:
    inside, held = threading.Event(), threading.Event()

    def second() -> None:
        held.set()
        with opened.spare(8):
            inside.set()

    with opened.spare(24) as (model, _):
        thread = threading.Thread(target=second)
        thread.start()
        assert held.wait(20)
        assert not inside.wait(0.05)
        assert model is not opened.gradients(24).model
    thread.join(20)
    assert inside.is_set()


def test_work_ends_with_the_service(bare_run: Path) -> None:
    ending = Opened(bare_run, RECIPE)
    ending.stopping.set()
    with pytest.raises(Stopped):
        ending.warm()


def test_whether_something_is_known_is_said_without_computing_it(
    bare_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = Opened(bare_run, RECIPE)

    def never(*_: object) -> None:
        raise AssertionError("the run was read")

    monkeypatch.setattr(Opened, "run", property(never))
    assert not any(bare.quick(c) for c in bare.checkpoints)
    assert [bare.means_known(None), bare.each_known(None), bare.validity_known()] == [False] * 3
    assert not bare.mean_known("law", 8)
    monkeypatch.undo()
    bare.quality()
    bare.each("law", bare.catalogue.rows(0))
    bare.mean("law", 8)
    monkeypatch.setattr(Opened, "run", property(never))
    assert bare.validity_known()
    assert bare.each_known("law")
    assert not bare.each_known("poems")
    assert bare.mean_known("poems", 8)
    assert not bare.means_known("law")


def test_a_question_that_nobody_waits_for_is_given_up(bare_run: Path) -> None:
    bare, flag = Opened(bare_run, RECIPE), Event()
    v = bare.vectors("law", 24)[:1]

    def job() -> None:
        flag.set()  # its time passes while it runs
        bare.scored("q", v, 24)

    with pytest.raises(GivenUp):
        carrying(flag, job)()
    assert ("one", "q", 24) not in bare._scores
    bare.mean("law", 24)  # what others want goes on


def test_warming_computes_what_pages_need(opened: Opened) -> None:
    fresh = Opened(opened.run.path, RECIPE)
    assert not fresh.timeline_known(None, None)
    assert not fresh.means_known(None)
    fresh.warm()
    assert fresh.timeline_known(None, None)
    assert fresh.timeline_known("law", 24)
    assert not fresh.timeline_known("law", 8)
    assert fresh.means_known("law")
    assert ("timeline", "law", 24) in fresh.results
    assert ("mean", "law", 24) in fresh._scores
    assert ("means", 8) in fresh._scores
