"""Every suspicion is what its name says, sample by sample; on small digits and made-up text."""

from collections.abc import Iterator

import pytest
import torch
from experiments.harness import Scores
from experiments.planted.methods import INFLUENCE, SUSPICION, influence_functions, methods
from experiments.planted.setups import PlantedProblem, problem_of
from tests.experiments.data.test_passages import without_network
from tests.experiments.data.test_texts import TINY
from tests.experiments.planted.test_setups import DIGITS
from torch import Tensor

from backstory.baselines.influence import influence_function
from backstory.exact.leave_out import leave_out
from backstory.exact.losses import QuerySet
from backstory.insight import harmful
from backstory.replay.recipe import Recipe
from backstory.replay.tape import Removal


@pytest.fixture(scope="module", autouse=True)
def text() -> Iterator[None]:
    yield from without_network()


@pytest.fixture(scope="module")
def problem() -> Iterator[PlantedProblem]:
    with problem_of(DIGITS, "labels", 0, 0.1) as made:
        yield made


@pytest.fixture(scope="module")
def actual(problem: PlantedProblem) -> dict[str, Scores]:
    return {method.name: method.scores(problem) for method in methods(labels=True)}


@pytest.fixture(scope="module")
def end(problem: PlantedProblem) -> Recipe:
    return problem.trained


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
    actual: dict[str, Scores], end: Recipe, problem: PlantedProblem
) -> None:
    ids, expected = problem.ids, of_samples(end)
    assert sorted(expected) == ids
    losses, norms = torch.stack([expected[i][0] for i in ids]), torch.stack([expected[i][1].norm() for i in ids])
    torch.testing.assert_close(actual["loss"].values[SUSPICION], losses, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(actual["gradient-norm"].values[SUSPICION], norms, rtol=1e-4, atol=1e-6)


def test_influence_functions_are_the_explicit_inverse(
    actual: dict[str, Scores], end: Recipe, problem: PlantedProblem
) -> None:
    ids, of = problem.ids, of_samples(end)
    G = torch.stack([of[i][1] for i in ids])
    asked = torch.autograd.grad(problem.loss(end.model, problem.queries), list(end.model.parameters()))
    v = torch.cat([g.flatten() for g in asked]).double()
    inverse = torch.linalg.inv(G.T @ G / len(G) + 0.1 * torch.eye(G.shape[1], dtype=torch.float64)) / len(G)
    towards, itself = (actual[n].settings["damping 0.1"] for n in ("influence-function", "influence-function-self"))
    torch.testing.assert_close(towards[INFLUENCE], v @ inverse @ G.T, rtol=1e-3, atol=1e-8)
    assert torch.equal(towards[SUSPICION], -towards[INFLUENCE])
    torch.testing.assert_close(itself[SUSPICION], ((G @ inverse) * G).sum(1), rtol=1e-3, atol=1e-8)
    assert INFLUENCE not in itself


def test_the_influence_function_is_that_of_the_methods(
    actual: dict[str, Scores], end: Recipe, problem: PlantedProblem
) -> None:
    answer = influence_function(end, problem.queries, loss=problem.loss, damping=1e-3)
    names, scores = answer.per_sample()
    assert [str(x) for x in names] == problem.ids
    torch.testing.assert_close(
        actual["influence-function-0.001"].values[INFLUENCE],
        scores[0],
        rtol=1e-2,
        atol=1e-3 * float(scores.abs().max()),
    )


def test_exact_is_the_effect_of_a_little_less_of_each_sample(
    actual: dict[str, Scores], problem: PlantedProblem
) -> None:
    small, some = 1e-3, [0, 17, 60]
    groups = [Removal((int(problem.ids[k]),), share=small) for k in some]
    effect = leave_out(problem.make, groups, QuerySet("test", mean=True), dtype=torch.float64)
    torch.testing.assert_close(actual["exact"].values[INFLUENCE][some], effect[:, 0] / small, rtol=0.03, atol=1e-7)


def test_the_most_suspect_are_the_most_harmful_of_insight(actual: dict[str, Scores], problem: PlantedProblem) -> None:
    made = problem.recording(clip_norm=None)
    worst = harmful(made.run, made.model, problem.loss, problem.queries, top=10).harmful
    scores = actual["default"].values[SUSPICION]
    suspects = [float(scores[problem.ids.index(str(hit.sample))]) for hit in worst]
    assert suspects == pytest.approx(scores.topk(10).values.tolist(), rel=1e-3)  # float16: nearly equal ones may swap


def test_text_has_a_compressed_run_and_images_a_finer_curvature(actual: dict[str, Scores]) -> None:
    assert not torch.equal(actual["curvature-sampled:4"].values[SUSPICION], actual["default"].values[SUSPICION])
    rows = {m.name: m for m in methods(labels=False)}
    assert "curvature-sampled:4" not in rows
    with problem_of(TINY, "uniform", 0, 0.1) as problem:
        assert len(rows["steps-compressed"].scores(problem).values[SUSPICION]) == 48


def test_small_damping_makes_every_sample_explain_itself() -> None:
    G = torch.randn(6, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, itself = influence_functions(G[:1], G)
    values = itself.settings["damping 0.001"][SUSPICION]
    torch.testing.assert_close(values, torch.ones(6).double(), rtol=0, atol=0.01)
