r"""Which later steps and samples overwrote a sample's influence: Theorem 1 of the paper, for every optimizer of `maths.steps`.

    influence = just after its own steps + arrived through momentum − overwritten by later samples − lost to decay

Leaving an occurrence out moves (θ, m) at its own step by (d^θ, d^m). If no later step bent that displacement (no
curvature, no decay), the momentum's buffer would pay out what it holds and nothing else would happen:

    own step t:    d^m = −(1−τ) w J g,           d^θ = η P ((1−τ) a + n) w J g
    later k, free: d^m ← μ d^m,                  d^θ ← d^θ − η a P d^m

In truth step k adds what follows from u' = (J H̃ + λ) d^θ, and the decay −ηλ' d^θ. Let x be the adjoint of `maths.adjoint` after step k, s
its effect of u at step k, and d the *free* displacement before step k. The product of true steps, from the left, and free steps, from
the right, changes by one step at a time, and the changes add up without a remainder:

    ⟨v, d_T⟩ − ⟨v, e⟩ = Σ_k ( Σ_r −⟨s, J V_r⟩ (W V d)_r  −  λ⟨s, d⟩ + ηλ'⟨x_θ, d⟩ ),     W = (I + V γα Vᵀ)⁻¹

A row of curvature belongs to an occurrence, so each occurrence of step k has a term of its own: with h = g it is

    (its own influence on the query) × (W V d)_r / √w,       in the literal form and for SGD  ⟨g_k(z), d⟩ × influence of z at k

which is the paper's Theorem 1: a later sample takes over as much as its gradient overlaps with the displacement. In the implicit
form W shares the overlap out among the rows of the step, and nothing is left over. In a run that keeps curvature by windows the rows of a
step belong to no occurrence: they give what the step takes, and an occurrence's term is that of its own gradient, h = g. The decays (λ and λ') have a term of their own.

One backward sweep, in float64, for one sample and one query (or the mean of a set); the free path takes as many vectors as the
momentum's buffer lasts.

Shapes:  B occurrences and R curvature rows of a step, p projected coordinates; one query, one sample.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Unpack, cast

import numpy as np
import torch
from torch import Tensor, nn

from ..capture.ids import as_text, restore
from ..errors import UsageError
from ..maths.adjoint import Adjoint
from ..maths.steps import (
    Contraction,
    Step,
    clipped_curvature,
    clipped_gradients,
    curvature_rows,
    implicit,
    own_curvature,
)
from ..results import figures
from ..results.result import Result
from ..results.row import Row
from ..results.words import signed
from ..run.embed import ContractionChoice, Progress
from ..run.gradients import LossFn
from ..run.run import Run
from ..run.sweep import Layers, backward, slices
from ..store import RunStore
from .mean import CheckedOptions, Options, find_exact, mean_gradient, sweep_options
from .phases import Curve

STEPS_AT_ONCE = 256  # whose numbers are read together
OWN = (
    "the run keeps curvature by windows of steps: what each step overwrote is that of its window, and the shares of samples are taken "
    "from their gradients in it, so that they need not add up to it"
)
FADED = 1e-20  # share of a buffer below which it pays out nothing more


@dataclass(frozen=True)
class Overwriter(Row):
    """A later sample, and how much influence all its later occurrences overwrote."""

    sample: int | str
    overwritten: float
    step: int  # where it took most
    occurrences: int  # later ones


@dataclass(frozen=True)
class TopStep(Row):
    """A step that overwrote much."""

    step: int
    overwritten: float


@dataclass(frozen=True, repr=False)
class Overwriting(Result):
    """Where the influence of one sample went."""

    sample: int | str
    steps: tuple[int, ...]  # of its own occurrences
    just_after: float  # right after its own steps, on the gradient of the query at `at`
    momentum: float  # what the momentum's buffer added later
    overwritten: float  # by the curvature of later occurrences, all of them
    decay: float  # by weight decay
    influence: float  # what is left at `at`
    overwritten_by: tuple[Overwriter, ...]  # samples, largest first
    by_step: Curve  # (T,) overwritten at each step, decay included; 0 up to its first own step
    exact: float | None = field(default=None, kw_only=True)  # its exact influence, where one is stored
    method: str = field(default="adjoint", kw_only=True)  # of the terms: a reverse sweep
    unit = (
        "units of the query's loss; overwritten is positive where influence was taken away, negative where it was added"
    )
    shown = (
        "sample", "steps", "just_after", "momentum", "overwritten", "decay", "influence", "lost", "unexplained", "overwritten_by",
        "by_step", "top_steps", "exact", "method",
    )  # fmt: skip

    @property
    def headline(self) -> str:
        """The influence right after its own steps, and now."""
        change = f"{self.just_after:+.4g} right after its own steps, {self.influence:+.4g} at step {self.at}"
        return f"What overwrote the influence of sample {self.sample}: {change}"

    @property
    def words(self) -> tuple[str, ...]:
        """How the recording's terms compare with the exact influence, where that is known."""
        if self.exact is None:
            return ()
        return (
            f"Its exact influence is {signed(self.exact)}. The terms are the recording's, and add up to "
            f"{signed(self.influence)}.",
        )

    @property
    def lost(self) -> float:
        """Influence just after its own steps minus what is left: overwritten + decay − momentum."""
        return self.just_after - self.influence

    @property
    def unexplained(self) -> float:
        """What the terms leave over: rounding."""
        return self.lost - (self.overwritten + self.decay - self.momentum)

    def top_steps(self, k: int = 10) -> list[TopStep]:
        """The k steps that overwrote most."""
        order = np.argsort(-self.by_step, kind="stable")[:k]
        return [TopStep(int(t), float(self.by_step[t])) for t in order if self.by_step[t] > 0]

    def table(self) -> dict[str, Any]:
        """One line for each later sample."""
        return Overwriter.table(self.overwritten_by)

    def drawings(self) -> dict[str, figures.Figure]:
        """The samples that overwrote most, and what each step took."""
        samples, values = [str(e.sample) for e in self.overwritten_by], [e.overwritten for e in self.overwritten_by]
        each = figures.overwritten(self.by_step, self.just_after + self.momentum)
        return figures.drawable(overwriters=figures.overwriters(samples, values), by_step=each)


class Moved(NamedTuple):
    """What leaving an occurrence out does to the state at its own step."""

    theta: Tensor  # (p,) d^θ
    momentum: Tensor  # (p,) d^m


class Pay(NamedTuple):
    """How a step pays out the momentum's buffer."""

    keep: float | Tensor  # μ
    pace: float | Tensor  # η a P


class Taken(NamedTuple):
    """What one later step took of the influence."""

    rows: Tensor  # (B,) by the curvature of each occurrence
    whole: float  # by all curvature of the step
    decay: float


def overwriting(
    run: Run,
    model: nn.Module,
    loss: LossFn,
    batch: Any,
    sample: int | str,
    at: int | str = "final",
    *,
    step: int | None = None,
    **options: Unpack[CheckedOptions],
) -> Overwriting:
    """What overwrote the influence of `sample` (all its occurrences, or the one of `step`) on the queries' mean loss.

    The terms are the recording's; the sample's exact influence is beside them where one is stored.
    """
    until = run.step_of(at)
    v, caveats, queries = mean_gradient(run, model, loss, batch, until, unverified=options.get("unverified", False))
    mean = run.is_mean(batch, until, queries)
    result = overwriting_of(
        run, v, sample, until, step=step, mean=mean, caveats=(*caveats, *run.caveats()), **sweep_options(options)
    )
    found = find_exact(run, model, loss, batch, until, cast(Options, options), mean=True)
    if found.result is None:
        told = (*result.caveats, *found.notes)
        return replace(result, caveats=told, remedy=run.remedy(batch, until))
    return replace(result, exact=float(found.result.sum_over([sample], steps=result.steps)[0]))


def overwriting_of(
    run: Run,
    v: Tensor,
    sample: int | str,
    at: int | str = "final",
    *,
    step: int | None = None,
    mean: bool = False,
    per_layer: bool = False,
    contraction: ContractionChoice = "auto",
    caveats: Sequence[str] = (),
    progress: Progress | None = None,
) -> Overwriting:
    """Like `overwriting`, from the gradient (1, p) of a query, or of a `mean` of several, projected to the run's coordinates."""
    store = RunStore.open(run.path)
    until, v = run.step_of(at), v.double()
    judged = run.quality(until, mean=mean, per_layer=per_layer, contraction=contraction, method="adjoint")
    samples, steps = run.occurrences(until)
    (name,), _ = as_text([sample])
    rows = {int(steps[i]): int(i) for i in np.flatnonzero((samples == name) & ((steps == step) | (step is None)))}
    if not rows:
        where = "" if step is None else f" at step {step}"
        raise UsageError(f"sample {sample!r} was not used{where} before step {until}.")
    first = min(rows)
    moves = {t - first: _moved(store, t, row) for t, row in rows.items()}
    path = free_path(moves, _pays(store, first, until))
    terms = np.zeros(len(samples))
    decay, bent, left = np.zeros(until), np.zeros(until), 0.0
    for t, row_start, term, scores in _sweep(store, v, until, first, path, per_layer, run.form(contraction), progress):
        terms[row_start : row_start + len(term.rows)] = term.rows.numpy()
        decay[t], bent[t] = term.decay, term.whole
        left += float(scores[rows[t] - row_start]) if t in rows else 0.0
    direct = functools.reduce(torch.add, [moves[t].theta for t in sorted(moves)])
    return Overwriting(
        sample, tuple(sorted(rows)), at=until, just_after=float(v[0] @ direct), momentum=float(v[0] @ (path[-1] - direct)),
        overwritten=float(bent.sum()), decay=float(decay.sum()), influence=left,
        overwritten_by=_ranked(samples, steps, terms, first, run.config.get("ids", "str")), by_step=decay + bent,
        caveats=(*caveats, *([OWN] if store.has_windows else [])), quality=judged, recording=run.recording_report(until),
    )  # fmt: skip


def _sweep(
    store: RunStore,
    v: Tensor,
    at: int,
    first: int,
    path: Sequence[Tensor],
    per_layer: bool,
    contraction: Contraction,
    progress: Progress | None,
) -> Iterator[tuple[int, int, Taken, Tensor]]:
    """(step, its first row, its terms, its influences (B,)) of the steps from `first` on, last first."""
    where = slices(store, per_layer)
    layers, adjoints = Layers(where), [Adjoint(v[:, w], contraction=contraction) for w in where]
    for chunk in backward(store, at, dtype=torch.float64, down_to=first):
        end = chunk.row_start + sum(len(s.w) for s in chunk.steps)
        for t, whole in reversed(list(enumerate(chunk.steps, chunk.first_step))):
            end -= len(whole.w)
            seen = (whole, own_curvature(whole))
            cuts = zip(*map(layers.cut, seen), strict=True)
            parts = [(a, of, path[t - first][w]) for a, of, w in zip(adjoints, cuts, where, strict=True)]
            terms = [taken(a, step, d, own) for a, (step, own), d in parts]
            scores = torch.stack([a.influence(step)[0] for a, (step, _), _ in parts]).sum(0)
            rows = torch.stack([x.rows for x in terms]).sum(0)
            yield t, end, Taken(rows, sum(x.whole for x in terms), sum(x.decay for x in terms)), scores
        if progress is not None:
            progress(at - chunk.first_step, at - first)


def _moved(store: RunStore, step: int, row: int) -> Moved:
    (chunk,) = backward(store, step + 1, dtype=torch.float64, down_to=step)
    return moved(chunk.steps[0], row - chunk.row_start)


def _pays(store: RunStore, first: int, at: int) -> Iterator[Pay]:
    """μ and η a P of the steps first … at−1: numbers where the parameter groups agree, else vectors."""
    owner = torch.tensor([b["group"] for b in store.config["blocks"]]).repeat_interleave(torch.tensor(store.dims))
    for lo in range(first, at, STEPS_AT_ONCE):
        hi = min(at, lo + STEPS_AT_ONCE)
        groups, P = store.steps(lo, hi).groups, store.diagonal(lo, hi)
        keep, pace = (torch.from_numpy(x) for x in (groups["momentum"], groups["rate"] * groups["a"]))
        for k in range(hi - lo):
            paid = _spread(pace[k], owner)
            yield Pay(_spread(keep[k], owner), paid if P is None else paid * P[k].double())


def _spread(values: Tensor, owner: Tensor) -> float | Tensor:
    return float(values[0]) if bool((values == values[0]).all()) else values[owner]


def _ranked(samples: Any, steps: Any, terms: Curve, first: int, kind: str) -> tuple[Overwriter, ...]:
    """Later samples, largest first; those that took nothing are left out."""
    later = np.flatnonzero((steps > first) & (terms != 0))
    names, inverse, counts = np.unique(samples[later], return_inverse=True, return_counts=True)
    sums = np.bincount(inverse, weights=terms[later], minlength=len(names))
    most = later[np.lexsort((-np.abs(terms[later]), inverse))][np.cumsum(counts) - counts] if len(later) else later
    ids = restore([str(x) for x in names], kind)
    order = np.argsort(-sums, kind="stable")
    return tuple(Overwriter(ids[j], float(sums[j]), int(steps[most[j]]), int(counts[j])) for j in order)


# -- the terms of one step -----------------------------------------------------------------------------------------


def moved(step: Step, row: int) -> Moved:
    """The displacement by occurrence `row` of the step."""
    k = step.coefficients
    pulled = step.w[row] * clipped_gradients(step)[row]  # (p,) w J g
    return Moved(pulled * (k.pace * ((1 - k.tau) * k.a + k.n)), pulled * -(1 - k.tau))


def free_path(moves: Mapping[int, Moved], pays: Iterable[Pay]) -> list[Tensor]:
    """d^θ before each of the steps 0 … n and after the last one, if nothing bent it; `moves`: step -> what is moved there.

    Where the buffer is empty the displacement stays, and so does its tensor: memory grows only while it pays out.
    """
    p = next(iter(moves.values())).theta
    theta, buffer, largest = torch.zeros_like(p), torch.zeros_like(p), 0.0
    path = [theta]
    for k, pay in enumerate(pays):
        buffer = buffer * pay.keep
        if float(buffer.abs().max()) > FADED * largest:
            theta = theta - buffer * pay.pace
        if k in moves:
            theta, buffer = theta + moves[k].theta, buffer + moves[k].momentum
            largest = max(largest, float(buffer.abs().max()))
        path.append(theta)
    return path


def taken(adjoint: Adjoint, step: Step, d: Tensor, own: Step | None = None) -> Taken:
    """The terms of one step for the displacement d (p,) before it; the adjoint is after the step and does not move.

    `own` has the curvature of the step's own samples, where `step` has that of its window.
    """
    k = step.coefficients
    s, x = adjoint.effect(step)[0], adjoint.x_theta[0]  # (p,)
    whole = _bent(step, s, d, adjoint.contraction)
    rows = whole if own is None else _bent(own, s, d, adjoint.contraction)
    decay = float(((x * (k.rate * k.decay) - s * k.l2) * d).sum())
    return Taken(rows.reshape(len(step.w), -1).sum(1), float(whole.sum()), decay)


def _bent(step: Step, s: Tensor, d: Tensor, contraction: Contraction) -> Tensor:
    """−⟨s, J V_r⟩ (W V d)_r of each curvature row, (R,)."""
    overlap = implicit(step, contraction, (curvature_rows(step) @ d)[:, None])  # (R, 1)
    return -(clipped_curvature(step) @ s) * overlap[:, 0]
