"""How fast the backward recursion runs: against the machine's best matrix product, and against the paper's pseudocode.

Knows nothing of files: rows are in memory.
"""

from typing import Any

import torch
from torch import Tensor

from ..maths.propagation import Propagator
from ..maths.steps import Coefficients, Step
from .timing import interleave

PLAIN = Coefficients(rate=0.05, l2=0.0, decay=0.0, momentum=0.0, tau=0.0, a=1.0, n=0.0)


def bench_embed(*, p: int = 1024, batch: int = 16, steps: int = 256, repeats: int = 5) -> dict[str, Any]:
    """The default form and the damped one, float32, beside a literal transcription of Algorithm 1 and a square product."""
    g = torch.Generator().manual_seed(0)
    G = torch.randn(batch * steps, p, generator=g) * (0.5 / p**0.5)
    w = torch.full((batch,), 1.0 / batch)
    made = [Step(G[t * batch : (t + 1) * batch], w, PLAIN) for t in range(steps)]
    square = torch.randn(2048, 2048, generator=g)
    times = interleave(
        {
            "product": lambda: square @ square,
            "paper": lambda: literal_algorithm_1(G, batch, PLAIN.rate),
            "ours": lambda: Propagator(p, dtype=torch.float32, gamma="auto").embed(made),
            "damped": lambda: Propagator(p, dtype=torch.float32, gamma=None).embed(made),
        },
        repeats,
    )
    peak = 2 * 2048**3 / times["product"].wall
    rows = batch * steps
    return {
        "p": p,
        "rows_per_step": batch,
        "steps": steps,
        "threads": torch.get_num_threads(),
        "samples_per_s": rows / times["ours"].wall,
        "share_of_peak": 4 * p * p * rows / times["ours"].wall / peak,
        "against_literal": times["paper"].wall / times["ours"].wall,
        "damped_against_literal": times["paper"].wall / times["damped"].wall,
        "damped_share_of_peak": 4 * p * p * rows / times["damped"].wall / peak,
        "peak_gflops": peak / 1e9,
    }


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
