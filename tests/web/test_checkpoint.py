"""Answers from memory are those of the run, at every checkpoint; neighbours are cosines."""

import numpy as np
import pytest
import torch
from tests.web.recipes import RECIPE, recipe

import backstory
from backstory.web.state import Opened


@pytest.mark.parametrize("step", [8, 16, 24])
def test_scores_are_those_of_the_run(opened: Opened, step: int) -> None:
    made = recipe()
    run = backstory.open(opened.run.path)
    expected = run.query(run.load_weights(made.model, step), made.loss, made.queries["law"], step)
    found = opened.checkpoint(step).scores(opened.gradients(step).of(made.queries["law"]))
    assert np.allclose(found.scores, expected.scores.numpy(), rtol=1e-4, atol=1e-6)
    assert (found.at, found.method) == (step, expected.method)
    assert set(expected.caveats) == set(found.notes)
    assert expected.quality is not None
    assert found.quality == expected.quality.as_dict()


def test_the_final_embeddings_are_held_and_others_are_not_there(opened: Opened) -> None:
    assert opened.checkpoint(24).E is not None
    assert opened.checkpoint(24).ready
    assert opened.checkpoint(8).E is None
    assert not opened.checkpoint(8).ready
    assert opened.checkpoint(24).nbytes > opened.checkpoint(8).nbytes > 0


def test_without_room_the_run_is_read(opened: Opened) -> None:
    small = Opened(opened.run.path, RECIPE, room=1000)
    assert small.checkpoint(24).E is None
    v = torch.randn(2, small.run.store.width, generator=torch.Generator().manual_seed(0))
    there, here = small.checkpoint(24).scores(v), opened.checkpoint(24).scores(v)
    assert np.allclose(there.scores, here.scores, rtol=1e-4, atol=1e-6)
    assert any("do not fit" in line for line in small.missing())


def test_the_mean_takes_one_backward_pass(opened: Opened) -> None:
    batch = recipe().queries["poems"]
    model = opened.gradients(24)
    assert torch.allclose(model.of_mean(batch)[0], model.of(batch).mean(0), rtol=1e-4, atol=1e-6)


def test_the_sum_takes_one_pass_for_some_queries_at_a_time(opened: Opened) -> None:
    model, batch = opened.gradients(24), torch.cat([recipe().queries["poems"]] * 10)
    told = list[tuple[int, int]]()
    found = model.of_sum(batch, lambda done, total: told.append((done, total)))
    assert torch.allclose(found[0], model.of(batch).sum(0), rtol=1e-4, atol=1e-5)
    assert told == [(0, 20), (8, 20), (16, 20)]


def test_the_model_s_own_losses_are_those_of_the_recipe(opened: Opened) -> None:
    made, run = recipe(), backstory.open(opened.run.path)
    model, batch = run.load_weights(made.model).eval(), made.queries["poems"]
    found = opened.gradients(24).own(batch)
    assert found.losses == pytest.approx(made.loss(model, batch).tolist(), rel=1e-5)
    assert found.says == []


def test_neighbours_are_cosines_of_summed_embeddings(opened: Opened) -> None:
    E, catalogue = opened.run.embeddings().double().numpy(), opened.catalogue
    sums = np.stack([E[[i for i, k in enumerate(catalogue.inverse) if k == j]].sum(0) for j in range(len(catalogue))])
    for j in (0, 4):
        expected = sums @ sums[j] / np.linalg.norm(sums, axis=1) / np.linalg.norm(sums[j])
        found = opened.checkpoint(24).similar(catalogue.rows(j), catalogue.inverse, len(catalogue))
        assert found is not None
        assert np.allclose(found, expected, atol=1e-5)


def test_norms_do_not_depend_on_how_many_are_summed_at_once(opened: Opened) -> None:
    catalogue, fresh = opened.catalogue, Opened(opened.run.path, RECIPE)
    expected = opened.checkpoint(24)._sizes(catalogue.inverse, len(catalogue))
    assert np.allclose(fresh.checkpoint(24)._sizes(catalogue.inverse, len(catalogue), at_once=2), expected)
