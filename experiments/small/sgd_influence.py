r"""The SGD-influence of Hara, Nitanda and Maehara (2019) in its Hessian-vector form.

For plain SGD, θ_{t+1} = θ_t − η_t (∇L_t + λ θ_t), carry u = ∇ℓ(θ_T, q) backward:

    influence of z at t = w_z η_t ⟨∇ℓ(θ_t, z), u⟩
    u ← u − η_t (H_t u + λ u)

It is the paper's unrolled expression read from the left, and equals exact unrolling where there is no momentum, no preconditioner
and no clipping; elsewhere it is refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backstory.errors import UnsupportedError
from backstory.exact.cache import ProgressFile
from backstory.exact.losses import QueryLoss, step_gradient
from backstory.exact.reverse import Moment, as_influence, boundaries, start, sweep
from backstory.replay.tape import Progress, RecipeSource, Tape, own_randomness
from backstory.replay.update import Slots
from backstory.results.influence import Influence


def sgd_influence(
    recipe: RecipeSource,
    query_loss: QueryLoss,
    *,
    args: Mapping[str, Any] | None = None,
    at: int | None = None,
    dtype: torch.dtype | None = torch.float64,
    checkpoints: int | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Influence:
    """The influence of every occurrence on the queries; arguments as of `reverse`."""
    with own_randomness():
        tape = Tape(recipe, args=args, dtype=dtype, length=at)
        tape.need_modelled("the SGD-influence")
        bounds = boundaries(tape.length, checkpoints)
        tape.record(bounds)
        _need_plain(tape)
        x, base = start(tape, query_loss)
        file = ProgressFile(cache, "sgd", (tape.start, tape.end), base, bounds)
        scores = sweep(tape, x, bounds, file, _back, progress)
    return as_influence(tape, scores, "SGD-influence", ())


def _back(tape: Tape, moment: Moment, u: Slots) -> tuple[Tensor, Slots]:
    t = moment.step
    tape.load(moment.before.theta)
    w, steps = tape.weights(t), tape.coefficients[t]
    found = step_gradient(lambda: tape.losses(t), w, tape.parameters)
    stepped = [c.rate * x for x, c in zip(u.theta, steps, strict=True)]  # η u
    dots, turned = found.pull(stepped)
    before = (x - h - c.l2 * s for x, h, s, c in zip(u.theta, turned, stepped, steps, strict=True))
    return w.to(dots) * dots, u._replace(theta=tuple(before))


def _need_plain(tape: Tape) -> None:
    plain = all(not c.momentum and c.beta2 is None for step in tape.coefficients for c in step)
    if not plain or tape.recipe.clip_norm is not None:
        raise UnsupportedError(
            "the SGD-influence is for plain SGD, without momentum, Adam or clipping; use backstory.exact.reverse, which "
            "follows them."
        )
