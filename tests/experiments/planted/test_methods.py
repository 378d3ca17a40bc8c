"""Every suspicion is what its name says, sample by sample; on small digits and made-up text."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from experiments.planted.methods import Found, all_scores, by_recording, influence_functions
from experiments.planted.setups import Planted, planted
from experiments.recorded import recorded
from tests.demo.test_texts import without_network
from tests.experiments.data.test_texts import TINY
from tests.experiments.planted.test_setups import DIGITS
from torch import Tensor

from backstory.baselines.influence import influence_function
from backstory.exact.leave_out import leave_out
from backstory.exact.losses import QuerySet
from backstory.insight import harmful
from backstory.replay.recipe import Recipe, take_step
from backstory.replay.tape import Removal


@pytest.fixture(scope="module", autouse=True)
def text() -> Iterator[None]:
    yield from without_network()


@pytest.fixture(scope="module")
def problem() -> Planted:
    return planted(DIGITS, "labels", 0, 0.1)


@pytest.fixture(scope="module")
def said(problem: Planted) -> tuple[list[str], Found]:
    told: list[tuple[int, int]] = []
    found = all_scores(problem, lambda *x: told.append(x))
    assert told == [(1, 3), (2, 3), (3, 3)]
    return found


@pytest.fixture(scope="module")
def end(problem: Planted) -> Recipe:
    plan = problem.make()
    for t in range(len(plan.batches)):
        take_step(plan, t)
    return plan


def of_samples(plan: Recipe) -> dict[str, tuple[Tensor, Tensor]]:
    """Loss and gradient of each sample on the trained model, one backward pass each."""
    out = {}
    for ids, (x, y) in plan.batches:
        for i, image, label in zip(ids, x, y, strict=True):
            loss = plan.loss(plan.model, (image[None], label[None]))[0]
            grads = torch.autograd.grad(loss, list(plan.model.parameters()))
            out[str(i)] = loss.detach().double(), torch.cat([g.flatten() for g in grads]).double()
    return out


def test_loss_and_gradient_norm_are_those_of_the_trained_model(
    said: tuple[list[str], Found], end: Recipe, problem: Planted
) -> None:
    (ids, found), expected = said, of_samples(end)
    assert sorted(expected) == ids
    losses, norms = torch.stack([expected[i][0] for i in ids]), torch.stack([expected[i][1].norm() for i in ids])
    torch.testing.assert_close(found["loss"][""].scores, losses, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["gradient-norm"][""].scores, norms, rtol=1e-4, atol=1e-6)


def test_influence_functions_are_the_explicit_inverse(
    said: tuple[list[str], Found], end: Recipe, problem: Planted
) -> None:
    (ids, found), of = said, of_samples(end)
    G = torch.stack([of[i][1] for i in ids])
    asked = torch.autograd.grad(problem.asked(end.model, problem.queries), list(end.model.parameters()))
    v = torch.cat([g.flatten() for g in asked]).double()
    inverse = torch.linalg.inv(G.T @ G / len(G) + 0.1 * torch.eye(G.shape[1], dtype=torch.float64)) / len(G)
    towards, itself = (found[n]["damping 0.1"] for n in ("influence-function", "influence-function-self"))
    torch.testing.assert_close(towards.influences, v @ inverse @ G.T, rtol=1e-3, atol=1e-8)
    assert towards.influences is not None
    assert torch.equal(towards.scores, -towards.influences)
    torch.testing.assert_close(itself.scores, ((G @ inverse) * G).sum(1), rtol=1e-3, atol=1e-8)
    assert itself.influences is None


def test_the_influence_function_is_that_of_the_methods(
    said: tuple[list[str], Found], end: Recipe, problem: Planted
) -> None:
    answer = influence_function(end, problem.queries, loss=problem.asked, damping=1e-3)
    names, scores = answer.per_sample()
    found = said[1]["influence-function-0.001"][""].influences
    assert [str(x) for x in names] == said[0]
    torch.testing.assert_close(found, scores[0], rtol=1e-2, atol=1e-3 * float(scores.abs().max()))


def test_exact_is_the_effect_of_a_little_less_of_each_sample(said: tuple[list[str], Found], problem: Planted) -> None:
    small, some = 1e-3, [0, 17, 60]
    groups = [Removal((int(said[0][k]),), share=small) for k in some]
    effect = leave_out(problem.make, groups, QuerySet("test", mean=True), dtype=torch.float64)
    found = said[1]["exact"][""].influences
    assert found is not None
    torch.testing.assert_close(found[some], effect[:, 0] / small, rtol=0.03, atol=1e-7)


def test_the_most_suspect_are_the_most_harmful_of_insight(problem: Planted, tmp_path: Path) -> None:
    plan = problem.make()
    run = recorded(plan, tmp_path / "run")
    told = harmful(run, plan.model, problem.asked, problem.queries, top=10)
    ids = sorted({str(i) for names, _ in plan.batches for i in names})
    scores = by_recording(problem)["default"][""].scores
    found = [float(scores[ids.index(str(shown.sample))]) for shown in told.harmful]
    assert found == pytest.approx(
        scores.topk(10).values.tolist(), rel=1e-3
    )  # rows in float16: nearly equal ones may swap


def test_text_has_a_compressed_run_too_and_images_have_none(said: tuple[list[str], Found]) -> None:
    assert "default-compressed" not in said[1]
    assert not torch.equal(said[1]["curvature-sampled:4"][""].scores, said[1]["default"][""].scores)
    found = by_recording(planted(TINY, "uniform", 0, 0.1))
    assert set(found) == {"default", "default-compressed"}
    assert len(found["default-compressed"][""].scores) == 48


def test_small_damping_makes_every_sample_explain_itself() -> None:
    G = torch.randn(6, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = influence_functions(G[:1], G)
    torch.testing.assert_close(
        found["influence-function-self"]["damping 0.001"].scores, torch.ones(6).double(), rtol=0, atol=0.01
    )
