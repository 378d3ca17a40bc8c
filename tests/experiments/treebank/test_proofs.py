"""Retraining the first epoch, against a plain loop that leaves the sequence's loss out."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from experiments.treebank.copies import OURS, Asked, Named, Ranks
from experiments.treebank.proofs import Proof, first_epoch, proofs, summary
from experiments.treebank.run import TreebankSetup, drawn, recipe
from tests.experiments.treebank.test_run import TINY, without_network

from backstory.insight import Memorisation

SETUP = TreebankSetup(**TINY)


@pytest.fixture(scope="module", autouse=True)
def text() -> Iterator[None]:
    yield from without_network()


def trained_without(name: str | None, copy: torch.Tensor) -> float:
    """The copy's loss after the first epoch, one sequence's loss set to 0 in the sum."""
    plan = recipe(**TINY)
    for ids, tokens in plan.batches[:6]:
        each = plan.loss(plan.model, tokens)
        kept = torch.tensor([x != name for x in ids])
        plan.optimizer.zero_grad()
        (each[kept].sum() / (9 * len(ids))).backward()
        torch.nn.utils.clip_grad_norm_(plan.model.parameters(), 1.0)
        plan.optimizer.step()
        plan.schedule.step()
    with torch.no_grad():
        return plan.loss(plan.model, copy[None]).item()


def test_the_truth_is_a_plain_loop_without_the_sequence() -> None:
    actual = drawn(SETUP)
    asked = Asked(actual.ids[:3], actual.tokens[:3])
    first = [Named(actual.ids[7], 0.25), Named(actual.ids[1], 0.5), Named(actual.ids[8], 1.0)]
    ranks = Ranks(1, OURS, Memorisation((), np.array([]), np.array([0.1, 0.5, 0.3]), 24, at=6), [], first)
    told = proofs(SETUP, asked, ranks, 2, lambda *_: None)
    assert [(p.copy, p.removed, p.own, p.said) for p in told] == [
        (actual.ids[0], actual.ids[0], True, 0.1),
        (actual.ids[0], actual.ids[7], False, 0.25),
        (actual.ids[1], actual.ids[1], True, 0.5),
    ]
    for proof in told:
        copy = actual.tokens[actual.ids.index(proof.copy)]
        expected = trained_without(proof.removed, copy) - trained_without(None, copy)
        assert proof.truth == pytest.approx(expected, abs=2e-4)
    assert max(abs(p.truth) for p in told) > 0.05
    assert proofs(SETUP, asked, ranks, 0, lambda *_: None) == []


def test_the_first_epoch_has_the_rates_of_the_whole_run() -> None:
    plan = first_epoch(SETUP)
    assert len(plan.batches) == 6
    assert [plan.schedule.lr_lambdas[0](t) for t in range(6)] == [
        recipe(**TINY).schedule.lr_lambdas[0](t) for t in range(6)
    ]


def test_the_summary_compares_each_other_with_its_own_original() -> None:
    told = [
        Proof("a", "a", True, 0.1, 2.0), Proof("a", "x", False, 0.3, 1.0), Proof("b", "b", True, 0.5, 1.0),
        Proof("b", "y", False, 0.7, 3.0), Proof("c", "c", True, 0.9, 5.0),
        Proof("c", "z", False, 0.5, 2.0),
    ]  # fmt: skip
    assert summary(told) == {
        "originals": 3, "originals_said": 0.5, "originals_truth": 2.0, "others": 3, "others_said": 0.5, "others_truth": 2.0,
        "original_was_worth_more": 2,
    }  # fmt: skip
    assert summary(told[4:5])["others_truth"] is None
