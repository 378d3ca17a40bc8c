"""What was overwritten, over recorded runs: terms add up, agree with the run's own answers, and come in order."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.insight.runs import RUNS, STEPS, Small, loss, small
from tests.maths.examples import RULES, P, queries, random_steps, recorded
from tests.support.loops import ids_of
from tests.support.oracles import Recorded, assert_same, unrolled
from torch import Tensor

from backstory.errors import UsageError
from backstory.insight.overwriting import Overwriting, Pay, Taken, free_path, moved, overwriting, taken
from backstory.maths.adjoint import Adjoint
from backstory.maths.steps import Contraction, Step, expands
from backstory.run.embed import ContractionChoice


def check(actual: Overwriting, answer: float, *, windows: bool = False) -> None:
    """Curvature of a window belongs to no sample: there the samples' own terms need not add up to what its steps took."""
    size = abs(actual.just_after) + abs(actual.momentum) + float(np.abs(actual.by_step).sum())
    assert abs(actual.unexplained) < 1e-10 * size, f"the terms leave {actual.unexplained:.2e} of {size:.2e}"
    assert abs(actual.influence - answer) < 1e-10 * size
    shares = sum(e.overwritten for e in actual.overwritten_by)
    assert (shares == pytest.approx(actual.overwritten, rel=1e-10, abs=1e-12 * size)) != windows
    assert any("keeps curvature by windows" in note for note in actual.caveats) == windows
    assert float(actual.by_step.sum()) == pytest.approx(actual.overwritten + actual.decay, rel=1e-10, abs=1e-12 * size)
    assert actual.lost == actual.just_after - actual.influence


@pytest.mark.parametrize("contraction", ["never", "always", "auto"])
@pytest.mark.parametrize("name", RUNS)
def test_terms_add_up_in_every_run(name: str, contraction: ContractionChoice, tmp_path: Path) -> None:
    made = small(name, tmp_path / "run")
    answer = made.run.query(made.model, loss, made.queries, contraction=contraction, method="adjoint")
    sample = ids_of(1)[0]
    for step in (None, 1):
        actual = overwriting(made.run, made.model, loss, made.queries, sample, contraction=contraction, step=step)
        expected = answer.sum_over([sample], steps=None if step is None else [step]).mean()
        check(actual, float(expected), windows="windows" in name)
        assert actual.quality == made.run.quality(mean=True, contraction=contraction)
        assert actual.steps == tuple(t for t in range(STEPS) if sample in ids_of(t) and step in (None, t))
    assert (actual.momentum != 0) == (name not in ("sgd", "sgd, exact curvature"))
    assert (actual.decay != 0) == (
        name
        in (
            "momentum, decay, clipped",
            "groups",
            "adamw, diagonal",
            "adamw, preconditioned, clipped",
            "adamw, windows, clipped",
        )
    )


@pytest.mark.parametrize("name", ["sgd", "adamw, preconditioned, clipped", "adamw, windows, clipped"])
def test_terms_add_up_with_independent_parameters_and_at_a_checkpoint(name: str, tmp_path: Path) -> None:
    made = small(name, tmp_path / "run")
    made.run.load_weights(made.model, 8)
    answer = made.run.query(made.model, loss, made.queries, 8, per_layer=True, method="adjoint")
    actual = overwriting(made.run, made.model, loss, made.queries, 4, 8, per_layer=True)
    check(actual, float(answer.sum_over([4]).mean()), windows="windows" in name)
    together = overwriting(made.run, made.model, loss, made.queries, 4, 8)
    assert abs(together.overwritten - actual.overwritten) > 1e-6 * abs(actual.overwritten), "layers were taken together"
    assert len(actual.by_step) == 8


def test_just_after_is_the_step_itself(plain: Small) -> None:
    """SGD: η w ⟨∇ℓ of the query, g⟩, from a backward pass of its own."""
    run, model = plain.run, plain.model
    sample = ids_of(3)[1]
    actual = overwriting(run, model, loss, plain.queries, sample, step=3)
    block = run._store.read(9, 12, dtype=torch.float64)
    assert block.rows is not None
    grads = torch.autograd.grad(loss(model, plain.queries).mean(), list(model.parameters()))
    v = torch.cat([g.flatten() for g in grads])
    rate = float(run.steps().groups["rate"][3, 0])
    assert actual.just_after == pytest.approx(rate / 3 * float(v @ block.rows[1]), rel=1e-9)


def test_terms_are_overlap_times_influence(plain: Small) -> None:
    """Theorem 1 from the stored rows and the run's own answer: SGD, literal form."""
    run, sample = plain.run, ids_of(0)[2]
    actual = overwriting(run, plain.model, loss, plain.queries, sample, step=0, contraction="never")
    answer = run.query(plain.model, loss, plain.queries, contraction="never", method="adjoint")
    rows = run._store.read(0, run.n_occurrences, dtype=torch.float64).rows
    assert rows is not None
    moved = 0.3 / 3 * rows[2]  # η w g
    terms = (answer.scores.mean(0) * (rows @ moved)).tolist()
    places = [(t, i) for t in range(STEPS) for i in ids_of(t)]
    assert len(actual.overwritten_by) == 9
    for e in actual.overwritten_by:
        mine = {t: x for (t, i), x in zip(places, terms, strict=True) if i == e.sample and t > 0}
        assert e.overwritten == pytest.approx(sum(mine.values()), rel=1e-8)
        assert e.step == max(mine, key=lambda t: abs(mine[t]))
    for t in range(1, STEPS):
        assert actual.by_step[t] == pytest.approx(sum(terms[3 * t : 3 * t + 3]), rel=1e-8)


def test_overwriters_are_ranked_and_named(plain: Small) -> None:
    actual = overwriting(plain.run, plain.model, loss, plain.queries, ids_of(0)[0], step=0)
    taken = [e.overwritten for e in actual.overwritten_by]
    assert taken == sorted(taken, reverse=True)
    assert actual.by_step[0] == 0
    for e in actual.overwritten_by:
        assert isinstance(e.sample, int)
        assert e.sample in ids_of(e.step)
        assert e.occurrences == sum(e.sample in ids_of(t) for t in range(1, STEPS))
    ranked = [x.overwritten for x in actual.top_steps(3)]
    assert ranked == sorted(ranked, reverse=True)
    assert ranked[0] == actual.by_step.max()


def test_an_answer_in_plain_values(plain: Small) -> None:
    actual = overwriting(plain.run, plain.model, loss, plain.queries, 4)
    told = actual.as_dict()
    assert told["sign"].startswith("positive: the sample helped")
    assert told["lost"] == actual.lost
    assert len(told["by_step"]) == STEPS
    assert len(actual.to_pandas()) == len(actual.overwritten_by)
    assert "influence overwritten" in actual.figure().to_json()


def test_a_sample_that_was_not_there_is_refused(plain: Small) -> None:
    with pytest.raises(UsageError, match="was not used before"):
        overwriting(plain.run, plain.model, loss, plain.queries, 77)
    absent = next(t for t in range(STEPS) if 4 not in ids_of(t))
    with pytest.raises(UsageError, match=f"at step {absent}"):
        overwriting(plain.run, plain.model, loss, plain.queries, 4, step=absent)


ZERO = torch.zeros(P, dtype=torch.float64)
FORMS: list[Contraction] = ["never", 1.0, "always", "when_expanding"]
UNIT = torch.finfo(torch.float64).eps / 2
OWN = 2  # the step of the sample that is followed


def per_sample(step: Step, per: int) -> Step:
    """The same step with `per` curvature rows of its own for each sample."""
    g = torch.Generator().manual_seed(len(step.w))
    V = 0.5 * torch.randn(len(step.w) * per, P, generator=g, dtype=torch.float64)
    return step._replace(V=V, dot_v=V @ (step.w @ step.G))


def made(rule: str, clipped: bool, per: int) -> list[Step]:
    return [per_sample(s, per) if per else s for s in random_steps(rule, clipped=clipped)]


def oracle(step: Step, contraction: Contraction) -> Recorded:
    return recorded(step, ("always" if expands(step) else "never") if contraction == "when_expanding" else contraction)


def free(step: Recorded) -> Recorded:
    """The step without anything that bends a displacement; what it pays out of the momentum stays."""
    return step._replace(H=torch.zeros(P, P, dtype=torch.float64), l2=ZERO, decay=ZERO)


def end_of(steps: Sequence[Recorded], t: int, row: int) -> Tensor:
    """Where occurrence `row` of step t has moved θ at the end."""
    return unrolled(steps)[0][t][row]


def followed(
    steps: Sequence[Step], contraction: Contraction, where: dict[int, int], v: Tensor
) -> tuple[list[Tensor], list[Taken], float]:
    """Free path, terms of each step, and the influence that is left, as `saturation` puts them together."""
    pays = [Pay(s.coefficients.momentum, s.coefficients.pace * s.coefficients.a) for s in steps]
    path = free_path({t: moved(steps[t], row) for t, row in where.items()}, pays)
    terms: list[Taken] = []
    adjoint, left = Adjoint(v, contraction=contraction), 0.0
    for t in reversed(range(len(steps))):
        terms.insert(0, taken(adjoint, steps[t], path[t]))
        scores = adjoint.influence(steps[t])
        left += float(scores[0, where[t]]) if t in where else 0.0
    return path, terms, left


@pytest.mark.parametrize("contraction", FORMS)
@pytest.mark.parametrize("per", [0, 2])
@pytest.mark.parametrize("clipped", [False, True], ids=["whole", "clipped"])
@pytest.mark.parametrize("rule", RULES)
def test_terms_add_up_to_what_was_lost(rule: str, clipped: bool, per: int, contraction: Contraction) -> None:
    steps, v = made(rule, clipped, per), queries(1)
    _, terms, left = followed(steps, contraction, {OWN: 3}, v)
    true = [oracle(s, contraction) for s in steps]
    loose = [*true[: OWN + 1], *(free(s) for s in true[OWN + 1 :])]
    whole, rest = (float(v[0] @ end_of(x, OWN, 3)) for x in (loose, true))
    lost = sum(float(x.rows.sum()) + x.decay for x in terms)
    size = max(abs(whole), abs(rest), sum(float(x.rows.abs().sum()) for x in terms))
    assert abs(left - rest) < 1e-10 * size
    assert abs((whole - rest) - lost) < 1e-10 * size, (
        f"terms {lost:.6g}, lost {whole - rest:.6g}. The free path and the terms must see the same momentum and clipping."
    )


@pytest.mark.parametrize("contraction", FORMS)
@pytest.mark.parametrize("rule", ["plain", "momentum", "nesterov", "groups", "adam, own diagonal"])
def test_the_term_of_a_step_and_of_a_row_is_what_bending_it_changes(rule: str, contraction: Contraction) -> None:
    """Steps before k free, steps after k true: step k free, with its decays alone, or with one row's curvature alone."""
    steps, v = made(rule, True, 0), queries(1)
    _, terms, _ = followed(steps, contraction, {OWN: 1}, v)
    true = [oracle(s, contraction) for s in steps]
    for k in range(OWN + 1, len(steps)):

        def end(bent: Recorded, k: int = k) -> float:
            mixed = [*true[: OWN + 1], *(free(s) for s in true[OWN + 1 : k]), bent, *true[k + 1 :]]
            return float(v[0] @ end_of(mixed, OWN, 1))

        none = end(free(true[k]))
        size = abs(none) + float(terms[k].rows.abs().sum())
        assert abs(none - end(true[k]) - float(terms[k].rows.sum()) - terms[k].decay) < 1e-10 * size
        assert (
            abs(none - end(free(true[k])._replace(l2=true[k].l2, decay=true[k].decay)) - terms[k].decay) < 1e-10 * size
        )
        kept = [r for r in range(len(steps[k].w)) if steps[k].w[r] > 0]
        V = (steps[k].w.sqrt()[:, None] * steps[k].G)[kept]
        W = torch.linalg.pinv(V.T) @ true[k].H  # H = Vᵀ W
        for r, v_row, w_row in zip(kept, V, W, strict=True):
            alone = end(free(true[k])._replace(H=torch.outer(v_row, w_row)))
            assert abs(none - alone - float(terms[k].rows[r])) < 1e-9 * size


@pytest.mark.parametrize("rule", ["plain", "momentum", "adam"])
def test_several_occurrences_are_the_sum_of_each(rule: str) -> None:
    steps, v = made(rule, False, 0), queries(1)
    together = followed(steps, "always", {0: 1, 3: 0}, v)
    first, second = followed(steps, "always", {0: 1}, v), followed(steps, "always", {3: 0}, v)
    terms, size = len(steps) * 2 * (P + 4), sum(abs(x[2]) for x in (first, second))  # queries there, 4 rows back
    assert abs(together[2] - first[2] - second[2]) <= terms * UNIT * max(size, 1.0)
    for t in range(len(steps)):
        torch.testing.assert_close(together[1][t].rows, first[1][t].rows + second[1][t].rows)
        torch.testing.assert_close(together[0][t], first[0][t] + second[0][t])


def test_the_papers_theorem_1() -> None:
    """SGD, literal: the term of a later sample is its gradient's overlap with the displacement times its own influence."""
    steps, v = made("plain", False, 0), queries(1)
    path, terms, _ = followed(steps, 0.0, {OWN: 0}, v)
    g = steps[OWN].G[0] * steps[OWN].w[0] * float(steps[OWN].coefficients.rate)
    torch.testing.assert_close(path[-1], g)
    embeddings, _ = unrolled([recorded(s, 0.0) for s in steps])
    for k in range(OWN + 1, len(steps)):
        expected = torch.stack([(z @ g) * (v[0] @ e) for z, e in zip(steps[k].G, embeddings[k], strict=True)])
        torch.testing.assert_close(terms[k].rows, expected, rtol=1e-10, atol=1e-12)
    assert all(float(x.rows.abs().sum()) == 0 for x in terms[: OWN + 1])


def test_an_empty_buffer_takes_no_memory_and_a_full_one_pays_out_whole() -> None:
    own = moved(made("momentum", False, 0)[0], 0)
    path = free_path({0: own}, [Pay(0.1, 0.5)] * 200)
    assert len({id(x) for x in path}) < 40
    assert len(path) == 201
    slow = free_path({0: own}, [Pay(0.95, 0.5)] * 2000)
    assert_same(slow[-1], own.theta - 0.5 * 0.95 / 0.05 * own.momentum, 2000)  # as many payments
