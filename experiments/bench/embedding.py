"""How fast the backward recursion runs in memory: against the machine's best matrix product and the paper's pseudocode.

A row takes 4 p² operations; `share_of_peak` is that over the speed of a square float32 product in the same turns.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backstory.maths.blocked import Propagator
from backstory.maths.steps import Coefficients, Step
from experiments.bench.timing import interleave

PLAIN = Coefficients(rate=0.05, l2=0.0, decay=0.0, momentum=0.0, tau=0.0, a=1.0, n=0.0)
SQUARE = 2048  # side of the product that gives the peak


def in_memory(p: int, batch: int, steps: int, repeats: int) -> dict[str, Any]:
    """The default form and the damped one, float32, beside a literal transcription of Algorithm 1 and a square product."""
    g = torch.Generator().manual_seed(0)
    G = torch.randn(batch * steps, p, generator=g) * (0.5 / p**0.5)
    w = torch.full((batch,), 1.0 / batch)
    made = [Step(G[t * batch : (t + 1) * batch], w, PLAIN) for t in range(steps)]
    square = torch.randn(SQUARE, SQUARE, generator=g)
    times = interleave(
        {
            "product": lambda: square @ square,
            "paper": lambda: literal_algorithm_1(G, batch, PLAIN.rate),
            "ours": lambda: Propagator(p, dtype=torch.float32, contraction="when_expanding").embed(made),
            "damped": lambda: Propagator(p, dtype=torch.float32, contraction="always").embed(made),
        },
        repeats,
    )
    peak, rows, ours = 2 * SQUARE**3 / times["product"].wall, batch * steps, times["ours"]
    return {
        "p": p,
        "rows_per_step": batch,
        "steps": steps,
        "samples_per_s": rows / ours.wall,
        "seconds": ours.wall,
        "cpu_s": ours.cpu,
        "share_of_peak": 4 * p * p * rows / ours.wall / peak,
        "against_literal": times["paper"].wall / ours.wall,
        "damped_against_literal": times["paper"].wall / times["damped"].wall,
        "damped_share_of_peak": 4 * p * p * rows / times["damped"].wall / peak,
        "peak_gflops": peak / 1e9,
    }


def bench_in_memory(
    *, p: int = 1024, batches: Sequence[int] = (16, 4, 1), rows: int = 4096, repeats: int = 5
) -> list[dict[str, Any]]:
    """One line for each number of rows in a step; fewer steps where a step holds few rows."""
    return [in_memory(p, batch, max(2, min(rows // batch, 512)), repeats) for batch in batches]


def product_peak(repeats: int = 5, side: int = SQUARE) -> float:
    """The speed of a square float32 product, in operations a second."""
    square = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    return 2 * side**3 / interleave({"product": lambda: square @ square}, repeats)["product"].wall


def literal_algorithm_1(G: Tensor, batch: int, rate: float | Tensor) -> list[Tensor]:
    """The paper's pseudocode, line by line, for a mean loss: emb = η/B (g − M g); M ← M + Σ emb gᵀ."""
    M = torch.zeros(G.shape[1], G.shape[1])
    out = []
    for lo in range(len(G) - batch, -1, -batch):
        g = G[lo : lo + batch]
        emb = (rate / batch) * (g - g @ M.T)
        M = M + emb.T @ g
        out.append(emb)
    return out
