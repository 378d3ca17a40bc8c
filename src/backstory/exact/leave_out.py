r"""Trajectory-specific leave-one-out: retrain without chosen occurrences, all else equal, and subtract.

    TSLOO = ℓ(θ_T without, q) − ℓ(θ_T with, q)           positive: the removed sample helped

The weights of the other samples stay what they were; order, initialisation, schedule and random draws too. A replay
starts from the nearest kept state before the first removed occurrence.

Many replays run stacked where the model allows (`Replicas`): the parameters of R replicas stacked, the batches shared, the weights their
own. One forward pass under `torch.func.vmap`; the sum of all replicas' losses has the stacked gradients as its gradient, since
no replica depends on another. Random draws (dropout) are those of the run. The numbers are those of the plain loop, up to rounding.

Shapes:  R replicas, B samples, Q queries.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import UnsupportedError, UsageError
from ..replay import update
from ..replay.tape import (
    Places,
    Progress,
    RecipeSource,
    Removal,
    Tape,
    index,
    own_randomness,
    places,
    seed,
    tell,
    thin_out,
)
from ..replay.update import Slots, distance
from ..store import RunStore
from ..workers import spread
from .cache import Rows
from .losses import QueryLoss, QuerySet, losses

WORTH_STACKING = 4  # replicas
STACK_BYTES = 4 << 20  # parameters of a stack: about what a processor's cache holds, and measured best
SAVED_BYTES = 512 << 20  # what the backward pass of a stack may keep
MOST = 256
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-2}  # of the first steps' displacement
Cut = tuple[Places, float]  # where a removal bites, and its share
Theta = tuple[Tensor, ...]


def leave_out(
    recipe: RecipeSource,
    removals: Sequence[Removal],
    query_loss: QueryLoss,
    progress: Progress | None = None,
    *,
    args: Mapping[str, Any] | None = None,
    cache: Path | None = None,
    workers: int = 1,
    vectorised: bool | None = None,
    dtype: torch.dtype | None = None,
    run: RunStore | None = None,
) -> Tensor:
    """Retrain without each removal: differences of the query losses (removals, Q), float64.

    `recipe` is a function that returns a new recipe. `query_loss(model)` returns a scalar or (Q,) losses of the trained model;
    a string names one of the recipe's query sets. With `cache`, each result is stored in that folder as soon as it is known
    and reused by the next call. `workers` > 1 needs `recipe` as "package.module:function" (and `args`) and a query that can
    be imported by name. `vectorised=None` runs several replays at once (torch.func) if that works; True requires it. `dtype`
    replays in that precision, batches included. With `run`, the replay follows its recording, up to the first removed step.
    """
    if workers > 1 and len(removals) > 1:
        options = {"args": args, "cache": cache, "vectorised": vectorised, "dtype": dtype, "run": run and run.path}
        return _in_processes(recipe, removals, query_loss, progress, workers, options)
    with own_randomness():
        tape = Tape(recipe, args=args, dtype=dtype, run=run)
        occurrences = index(tape.ids)
        cuts = [(places(removal, occurrences), removal.share) for removal in removals]
        tape.let_go(min((min(gone) for gone, _ in cuts), default=tape.length))
        tape.record(thin_out([min(gone) for gone, _ in cuts], tape.affordable()))
        base = losses(tape.recipe, query_loss)
        rows = Rows(cache, (tape.start, tape.end), base)
        return _all(tape, cuts, query_loss, rows, vectorised, progress)


def _all(
    tape: Tape, cuts: Sequence[Cut], query: QueryLoss, rows: Rows, vectorised: bool | None, progress: Progress | None
) -> Tensor:
    known = {i: row for i, cut in enumerate(cuts) if (row := rows.get(*cut)) is not None}
    todo = sorted((i for i in range(len(cuts)) if i not in known), key=lambda i: min(cuts[i][0]))
    size = _stack_size(tape, [cuts[i] for i in todo], vectorised)
    for done in range(len(known)):
        tell(progress, done + 1, len(cuts))
    for k in range(0, len(todo), size):
        part = todo[k : k + size]
        for i, after in zip(part, _replayed(tape, [cuts[i] for i in part], query), strict=True):
            known[i] = after - rows.base
            rows.put(*cuts[i], known[i])
            tell(progress, len(known), len(cuts))
    out = [known[i] for i in range(len(cuts))]
    return torch.stack(out) if out else torch.zeros(0, len(rows.base), dtype=torch.float64)


def _stack_size(tape: Tape, cuts: Sequence[Cut], vectorised: bool | None) -> int:
    """How many replays to stack; 1 for the plain loop."""
    if vectorised is False or not cuts or (vectorised is None and len(cuts) < WORTH_STACKING):
        return 1
    tape.rewind(0 if 0 in tape.states else min(tape.states))
    size = min(at_once(tape), len(cuts))
    if vectorised is None and size < WORTH_STACKING:
        return 1
    reason = obstacle(tape, cuts[0], min(cuts[0][0]))
    if vectorised and reason is not None:
        raise UnsupportedError(f"the replays cannot be vectorised: {reason}. Pass vectorised=False, or workers=.")
    return max(size, 2) if reason is None else 1


def _replayed(tape: Tape, cuts: Sequence[Cut], query: QueryLoss) -> Iterator[Tensor]:
    """Query losses (Q,) after each removal, one by one or stacked."""
    start = tape.rewind(min(min(gone) for gone, _ in cuts))
    if len(cuts) == 1:
        gone, share = cuts[0]
        for t in range(start, tape.length):
            tape.step(t, tape.without(t, gone, share))
        yield losses(tape.recipe, query)
        return
    stack = Replicas(tape, cuts)
    for t in range(start, tape.length):
        stack.step(t)
    for r in range(len(cuts)):
        tape.load(stack.theta(r))
        yield losses(tape.recipe, query)


def _in_processes(
    recipe: RecipeSource,
    removals: Sequence[Removal],
    query: QueryLoss,
    progress: Progress | None,
    workers: int,
    options: Mapping[str, Any],
) -> Tensor:
    _check_importable(recipe, query)
    count = min(len(removals), 2 * workers)
    pieces = [list(range(k, len(removals), count)) for k in range(count)]
    jobs = [(recipe, [removals[i] for i in piece], query, options) for piece in pieces]
    rows: dict[int, Tensor] = {}
    for k, piece_rows in spread(_piece, jobs, workers):
        rows.update(zip(pieces[k], torch.tensor(piece_rows, dtype=torch.float64), strict=True))
        tell(progress, len(rows), len(removals))
    return torch.stack([rows[i] for i in range(len(removals))])


def _piece(recipe: str, removals: Sequence[Removal], query: QueryLoss, options: Mapping[str, Any]) -> list[list[float]]:
    """What one worker does."""
    run = None if options["run"] is None else RunStore.open(options["run"])
    return [[float(x) for x in row] for row in leave_out(recipe, removals, query, **{**options, "run": run})]


def _check_importable(recipe: RecipeSource, query: QueryLoss) -> None:
    if not isinstance(recipe, str):
        raise UsageError("workers > 1 imports the recipe in each process. Pass it as 'package.module:function'.")
    if not isinstance(query, str | QuerySet) and "<" in getattr(query, "__qualname__", "<"):
        raise UsageError(
            "workers > 1 needs a query that other processes can import. Pass the name of one of the recipe's query "
            "sets, a backstory.exact.QuerySet, or a module-level function."
        )


class Replicas:
    """R copies of the tape's model, at the state where the tape stands."""

    def __init__(self, tape: Tape, cuts: Sequence[Cut]) -> None:
        self.tape, self.cuts = tape, cuts
        self._loss = _Losses(tape)
        names = {id(p): name for name, p in self._loss.named_parameters()}
        self._names = [names[id(p)] for p in tape.parameters]
        now = update.slots(tape.optimizer)
        self.slots = Slots(*(tuple(x.expand(len(cuts), *x.shape).clone() for x in part) for part in now))

    def step(self, t: int) -> None:
        """Step t of all replicas."""
        tape = self.tape
        W = torch.stack([tape.without(t, gone, share) for gone, share in self.cuts])  # (R, B)
        theta = [x.detach().requires_grad_() for x in self.slots.theta]  # the same memory
        seed(tape.generators[t])
        batch = tape.recipe.batches[t][1]

        def losses(parameters: dict[str, Tensor]) -> Any:
            return functional_call(self._loss, parameters, (batch,))

        with sdpa_kernel(SDPBackend.MATH):  # the fused attentions cannot be stacked
            stacked = vmap(losses, randomness="same")(dict(zip(self._names, theta, strict=True)))  # (R, B)
            grads = torch.autograd.grad((stacked * W.to(stacked)).sum(), theta, allow_unused=True)
        with torch.no_grad():
            known = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, theta, strict=True)]
            self.slots = update.update(self.slots, known, tape.coefficients[t], tape.recipe.clip_norm, lead=1)

    def theta(self, r: int) -> Theta:
        """The parameters of replica r."""
        return tuple(x[r].detach() for x in self.slots.theta)


def at_once(tape: Tape) -> int:
    """How many replicas fit the bounds of memory; 1 means that stacking is not worth it."""
    size = sum(p.numel() * p.element_size() for p in tape.parameters)
    return max(1, min(MOST, STACK_BYTES // max(1, size), SAVED_BYTES // max(1, _saved_bytes(tape))))


def obstacle(tape: Tape, cut: Cut, first: int) -> str | None:
    """Why replays cannot be stacked, or None: tried on the first steps of one removal, beside the plain replay."""
    if tape.obstacle is not None:
        return tape.obstacle
    if len({id(p) for p in tape.parameters}) < sum(p.requires_grad for p in tape.recipe.model.parameters()):
        return "some trainable parameters are not in the optimizer"
    end = min(first + 3, tape.length)
    before, plain = _displaced(tape, cut, first, end)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="There is a performance drop")  # torch would loop inside
            start = tape.rewind(first)
            stack = Replicas(tape, [({}, 1.0), cut])
            for t in range(start, end):
                stack.step(t)
    except Exception as error:  # whatever torch.func cannot do; the plain replay gives the same numbers
        return (
            f"torch.func cannot vectorise this model ({type(error).__name__}: {str(error).partition(chr(10))[0][:120]})"
        )
    wrong = max(distance(stack.theta(r), plain[r]) for r in (0, 1))
    size = distance(plain[0], before)
    if wrong <= TOLERANCE.get(tape.parameters[0].dtype, 1e-1) * size:
        return None
    return f"vectorised and plain replays differ by {wrong / max(size, 1e-300):.1e} of the weight change over the first steps"


class _Losses(nn.Module):
    """The recipe's loss as a module, so that `functional_call` can replace the model's parameters."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.model, self._of = tape.recipe.model, tape.recipe.loss

    def forward(self, batch: Any) -> Tensor:
        """(B,)."""
        return self._of(self.model, batch)


def _displaced(tape: Tape, cut: Cut, first: int, end: int) -> tuple[Theta, list[Theta]]:
    """Parameters at the state that replays start from, and before step `end`, without and with the removal, by plain replays."""
    out = []
    for gone, share in (({}, 1.0), cut):
        start = tape.rewind(first)
        before = update.slots(tape.optimizer).theta
        for t in range(start, end):
            tape.step(t, tape.without(t, gone, share))
        out.append(update.slots(tape.optimizer).theta)
    return before, out


def _saved_bytes(tape: Tape) -> int:
    """What one replica's backward pass keeps of one step."""
    sizes: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in tape.parameters}

    def note(x: Tensor) -> Tensor:
        where = x.untyped_storage().data_ptr()
        if where not in parameters:
            sizes[where] = x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        losses = tape.losses(0)  # alive until the count is done, so that no address is used twice
    del losses
    return sum(sizes.values())
