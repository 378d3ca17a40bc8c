"""The bench compares like with like: the transcription and ours give the same embeddings."""

import torch
from experiments.bench.embedding import PLAIN, bench_in_memory, literal_algorithm_1, product_peak

from backstory.maths.blocked import Propagator
from backstory.maths.steps import Step


def test_the_rival_computes_the_same_embeddings() -> None:
    batch, steps, p = 4, 30, 16
    G = torch.randn(batch * steps, p, generator=torch.Generator().manual_seed(0))
    w = torch.full((batch,), 1 / batch)
    made = [Step(G[t * batch : (t + 1) * batch], w, PLAIN) for t in range(steps)]
    ours = torch.cat(Propagator(p, dtype=torch.float32, contraction="never").embed(made))
    theirs = torch.cat(literal_algorithm_1(G, batch, PLAIN.rate)[::-1])
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


def test_one_line_for_each_batch_size() -> None:
    actual = bench_in_memory(p=16, batches=(4, 1), rows=16, repeats=1)
    assert [(x["rows_per_step"], x["steps"]) for x in actual] == [(4, 4), (1, 16)]
    assert all(x["samples_per_s"] > 0 and x["share_of_peak"] > 0 and x["against_literal"] > 0 for x in actual)


def test_the_peak_is_operations_a_second() -> None:
    assert product_peak(1, side=64) > 1e6
