"""What was erased, over recorded runs: terms add up, agree with the run's own answers, and come in order."""

from pathlib import Path

import numpy as np
import pytest
import torch
from backstory.insight.saturation import Saturation, saturation
from tests.insight.runs import RUNS, STEPS, Small, loss, small
from tests.support.loops import ids_of

from backstory.errors import UsageError
from backstory.run.embed import ContractionChoice


def check(found: Saturation, answer: float) -> None:
    size = abs(found.just_after) + abs(found.momentum) + float(np.abs(found.by_step).sum())
    assert abs(found.unexplained) < 1e-10 * size, f"the terms leave {found.unexplained:.2e} of {size:.2e}"
    assert abs(found.influence - answer) < 1e-10 * size
    assert sum(e.erased for e in found.erasers) == pytest.approx(found.erased, rel=1e-10, abs=1e-12 * size)
    assert float(found.by_step.sum()) == pytest.approx(found.erased + found.decay, rel=1e-10, abs=1e-12 * size)
    assert found.lost == found.just_after - found.influence


@pytest.mark.parametrize("contraction", ["never", "always", "auto"])
@pytest.mark.parametrize("name", RUNS)
def test_terms_add_up_in_every_run(name: str, contraction: ContractionChoice, tmp_path: Path) -> None:
    made = small(name, tmp_path / "run")
    answer = made.run.query(made.model, loss, made.queries, contraction=contraction, method="adjoint")
    sample = ids_of(1)[0]
    for step in (None, 1):
        found = saturation(made.run, made.model, loss, made.queries, sample, contraction=contraction, step=step)
        expected = answer.sum_over([sample], steps=None if step is None else [step]).mean()
        check(found, float(expected))
        assert found.steps == tuple(t for t in range(STEPS) if sample in ids_of(t) and step in (None, t))
    assert (found.momentum != 0) == (name not in ("sgd", "sgd, exact curvature"))
    assert (found.decay != 0) == (
        name in ("momentum, decay, clipped", "groups", "adamw, diagonal", "adamw, preconditioned, clipped")
    )


@pytest.mark.parametrize("name", ["sgd", "adamw, preconditioned, clipped"])
def test_terms_add_up_with_independent_parameters_and_at_a_checkpoint(name: str, tmp_path: Path) -> None:
    made = small(name, tmp_path / "run")
    made.run.load_weights(made.model, 8)
    answer = made.run.query(made.model, loss, made.queries, 8, per_layer=True, method="adjoint")
    found = saturation(made.run, made.model, loss, made.queries, 4, 8, per_layer=True)
    check(found, float(answer.sum_over([4]).mean()))
    together = saturation(made.run, made.model, loss, made.queries, 4, 8)
    assert abs(together.erased - found.erased) > 1e-6 * abs(found.erased), "layers were taken together"
    assert len(found.by_step) == 8


def test_just_after_is_the_step_itself(plain: Small) -> None:
    """SGD: η w ⟨∇ℓ of the query, g⟩, from a backward pass of its own."""
    run, model = plain.run, plain.model
    sample = ids_of(3)[1]
    found = saturation(run, model, loss, plain.queries, sample, step=3)
    block = run.store.read(9, 12, dtype=torch.float64)
    assert block.rows is not None
    grads = torch.autograd.grad(loss(model, plain.queries).mean(), list(model.parameters()))
    v = torch.cat([g.flatten() for g in grads])
    rate = float(run.store.steps().groups["rate"][3, 0])
    assert found.just_after == pytest.approx(rate / 3 * float(v @ block.rows[1]), rel=1e-9)


def test_terms_are_overlap_times_influence(plain: Small) -> None:
    """Theorem 1 from the stored rows and the run's own answer: SGD, literal form."""
    run, sample = plain.run, ids_of(0)[2]
    found = saturation(run, plain.model, loss, plain.queries, sample, step=0, contraction="never")
    answer = run.query(plain.model, loss, plain.queries, contraction="never", method="adjoint")
    rows = run.store.read(0, run.store.n_rows(), dtype=torch.float64).rows
    assert rows is not None
    moved = 0.3 / 3 * rows[2]  # η w g
    terms = (answer.scores.mean(0) * (rows @ moved)).tolist()
    places = [(t, i) for t in range(STEPS) for i in ids_of(t)]
    assert len(found.erasers) == 9
    for e in found.erasers:
        mine = {t: x for (t, i), x in zip(places, terms, strict=True) if i == e.sample and t > 0}
        assert e.erased == pytest.approx(sum(mine.values()), rel=1e-8)
        assert e.step == max(mine, key=lambda t: abs(mine[t]))
    for t in range(1, STEPS):
        assert found.by_step[t] == pytest.approx(sum(terms[3 * t : 3 * t + 3]), rel=1e-8)


def test_erasers_are_ranked_and_named(plain: Small) -> None:
    found = saturation(plain.run, plain.model, loss, plain.queries, ids_of(0)[0], step=0)
    erased = [e.erased for e in found.erasers]
    assert erased == sorted(erased, reverse=True)
    assert found.by_step[0] == 0
    for e in found.erasers:
        assert isinstance(e.sample, int)
        assert e.sample in ids_of(e.step)
        assert e.occurrences == sum(e.sample in ids_of(t) for t in range(1, STEPS))
    ranked = found.steps_ranked(3)
    assert [x for _, x in ranked] == sorted((x for _, x in ranked), reverse=True)
    assert ranked[0][1] == found.by_step.max()


def test_an_answer_in_plain_values(plain: Small) -> None:
    found = saturation(plain.run, plain.model, loss, plain.queries, 4)
    told = found.as_dict()
    assert told["sign"].startswith("positive: the sample helped")
    assert told["lost"] == found.lost
    assert len(told["by_step"]) == STEPS
    assert len(found.to_pandas()) == len(found.erasers)
    assert "erased by the sample" in found.figure().to_json()


def test_a_sample_that_was_not_there_is_refused(plain: Small) -> None:
    with pytest.raises(UsageError, match="did not occur before"):
        saturation(plain.run, plain.model, loss, plain.queries, 77)
    absent = next(t for t in range(STEPS) if 4 not in ids_of(t))
    with pytest.raises(UsageError, match=f"at step {absent}"):
        saturation(plain.run, plain.model, loss, plain.queries, 4, step=absent)


def test_every_answer_says_how_far_to_trust_it(plain: Small) -> None:
    found = saturation(plain.run, plain.model, loss, plain.queries, 4)
    assert any("modelled exactly" in note for note in found.caveats)
    assert any("eval mode" in note for note in found.caveats)
