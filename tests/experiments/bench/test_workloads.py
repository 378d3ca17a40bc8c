"""The workloads are what the docstring says, and the same at every call."""

import pytest
import torch
import torch.nn.functional as F
from experiments.bench.workloads import FULL, TINY, Workload, sample_losses, train_step


def test_sizes_are_those_of_the_table() -> None:
    A, B, C, D, E = FULL.values()
    assert (A.samples, A.batch, A.n_queries, A.epoch) == (6000, 64, 100, 94)
    assert (B.samples, B.batch, B.n_queries, B.steps, B.terms) == (1024, 16, 32, 320, 128)
    assert (C.layers, C.width, C.batch, C.vocabulary) == (2, 768, 8, 2048)
    assert (D.layers, D.width, D.heads, D.batch) == (5, 384, 6, 8)
    assert (E.layers, E.width, E.length, E.vocabulary, E.steps) == (2, 48, 48, 256, 100)
    assert sum(p.numel() for p in D.start()[0].parameters()) == pytest.approx(10e6, rel=0.1)
    assert sum(p.numel() for p in E.start()[0].parameters()) == pytest.approx(80e3, rel=0.1)
    assert [w.loss_reduction for w in FULL.values()] == ["mean", *["token-mean"] * 4]
    assert [w.name for w in FULL.values()] == list(FULL) == list(TINY)


@pytest.mark.parametrize("work", TINY.values(), ids=TINY)
def test_every_start_is_the_same_and_leaves_the_global_generator_alone(work: Workload) -> None:
    before = torch.random.get_rng_state()
    first, second = work.start()[0].state_dict(), work.start()[0].state_dict()
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert torch.equal(before, torch.random.get_rng_state())


def test_visits_cover_every_sample_once_in_an_epoch() -> None:
    work = TINY["A"]
    seen = [i for cut in work.visits() for i in range(cut.start, cut.stop)]
    assert seen == list(range(work.samples))
    assert len(list(work.visits(5))) == 5


def test_a_sequence_loss_is_the_sum_over_its_positions() -> None:
    logits, targets = (
        torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)),
        torch.tensor([[0, 1, 2], [3, 2, 1]]),
    )
    by_hand = torch.stack(
        [sum((F.cross_entropy(logits[b, s], targets[b, s]) for s in range(3)), torch.zeros(())) for b in range(2)]
    )
    torch.testing.assert_close(sample_losses(logits, targets), by_hand)


def test_a_step_differentiates_the_mean_over_all_tokens() -> None:
    work = TINY["B"]
    model, _ = work.start()
    twin, _ = work.start()
    for p in [*model.parameters(), *twin.parameters()]:
        p.data.mul_(5)  # gradients long enough to be clipped
    x, y = (part[:4] for part in work.data())
    rate = 0.5
    train_step(work, model, torch.optim.SGD(model.parameters(), lr=rate), x, y)
    F.cross_entropy(twin(x).flatten(0, 1), y.flatten()).backward()
    assert torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0) > 1.5
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert q.grad is not None
        torch.testing.assert_close(p, q - rate * q.grad)
