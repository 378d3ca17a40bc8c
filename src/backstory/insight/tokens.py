r"""The influence of each token of a training sequence on a query.

In every layer the gradient of a sequence is a sum over its positions, g = Σ_j g_j with g_j the sum of δ_j a_jᵀ over the
layers. With the adjoint s at the step in which the sequence was used (`maths.adjoint`),

    influence of position j = −w ⟨J g_j, s⟩,        Σ_j of it = −w ⟨J g, s⟩, the influence of the occurrence

g_j is not stored: the run's recipe is replayed, and at the requested steps its backward pass goes through the
recording hooks with each position kept apart, in the run's own coordinates. A position's part is that of the layers'
computations *at* that position, with the whole sequence as it was: it is not the effect of deleting the token.

Shapes:  Q queries, S positions, n occurrences of one step, p kept coordinates.
"""

import copy
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import OptimizerReader, Tap
from ..capture.hooks import by_position
from ..capture.ids import as_text
from ..capture.modules import Blocks
from ..capture.updates import sign_of
from ..errors import MismatchError, UsageError
from ..maths.adam import Scale
from ..maths.adjoint import Adjoint
from ..maths.encoding import looseness
from ..maths.layers import Contribution, written_out
from ..maths.steps import Contraction, Step, clipped_curvature
from ..recording.adam import Adaptive
from ..recording.contributions import Gathered
from ..recording.projecting import basis_like
from ..recording.step import safe_inverse
from ..replay.recipe import stored_args
from ..replay.reproduction import reproduction
from ..replay.tape import Progress, RecipeSource, Tape, own_randomness
from ..results import figures
from ..results.influence import Hit
from ..results.result import Result
from ..results.row import Row
from ..results.words import describe_signs
from ..run.embed import ContractionChoice
from ..run.gradients import LossFn, bases_of, blocks_of, query_rows
from ..run.run import Run
from ..run.sweep import backward
from ..store import RunStore
from ..store.bases import load_scales

Where = tuple[int, int]  # step, place in its batch

CAVEAT = (
    "a token's influence comes from the layers' computations at its position, with the sequence unchanged; it is not "
    "the effect of deleting the token"
)


@dataclass(frozen=True)
class Token(Row):
    """A token of a training sequence, and its part of the influence; positive: it helped."""

    text: str | None  # None where it is not known
    influence: float


@dataclass(frozen=True, repr=False)
class TokenInfluence(Result):
    """One occurrence of a sequence, position by position; positive: that token helped."""

    sample: int | str
    step: int
    scores: Tensor  # (Q, S) float64
    total: Tensor  # (Q,) float64, the influence of the occurrence as the run's rows have it
    texts: tuple[str, ...] = ()  # (S) of its tokens, where they are known
    caveats: tuple[str, ...] = field(default=(CAVEAT,), kw_only=True)
    unit = "a token's part of the influence of one occurrence, in units of the query's loss"
    shown = ("sample", "step", "tokens", "total")

    @property
    def headline(self) -> str:
        """Which occurrence it is."""
        return (
            f"Influence of each token of sample {self.sample}, used at step {self.step}, on the model at step {self.at}"
        )

    @property
    def words(self) -> tuple[str, ...]:
        """How many tokens helped and hurt."""
        return (describe_signs([token.influence for token in self.tokens]),)

    @property
    def tokens(self) -> tuple[Token, ...]:
        """Each token's part: of one query, or of the mean of several."""
        values = self.scores.mean(0).tolist()
        return tuple(Token(*x) for x in zip(self.texts or [None] * len(values), values, strict=True))

    def with_texts(self, texts: Sequence[str]) -> "TokenInfluence":
        """The same with the text of each position."""
        if len(texts) != self.scores.shape[1]:
            raise UsageError(f"texts must have one text per token ({self.scores.shape[1]}), got {len(texts)}.")
        return replace(self, texts=tuple(texts))

    def numbers(self) -> dict[str, Any]:
        """The tokens, and the influence that their parts add up to."""
        return {**super().numbers(), "total": float(self.total.mean())}

    def table(self) -> Mapping[str, Any]:
        """One line for each token."""
        return {"position": range(len(self.tokens)), **Token.table(self.tokens)}

    def drawings(self) -> dict[str, figures.Figure]:
        """One bar for each token."""
        names = [f"{k}: {token.text}" if token.text else str(k) for k, token in enumerate(self.tokens)]
        return {"tokens": figures.across(names, [token.influence for token in self.tokens], "part of the influence")}


def tokens(
    run: Run,
    recipe: RecipeSource,
    batch: Any,
    hits: Sequence[Hit | tuple[int | str, int]],
    at: int | str = "final",
    *,
    loss_fn: LossFn | None = None,
    vectors: Tensor | None = None,
    args: Mapping[str, Any] | None = None,
    positions: int | None = None,
    contraction: ContractionChoice = "auto",
    mode: str = "eval",
    check: bool = True,
    progress: Progress | None = None,
) -> list[TokenInfluence]:
    """The influence of each position of these occurrences on the queries, in the order of `hits`.

    The queries are `loss_fn(model, batch)` (default: the recipe's loss), or projected gradients `vectors` (Q, dims) with
    `batch=None`. A hit comes from `influence.top`, or is a pair (sample, step). `positions` is the sequence length S, if the
    model's layers differ in it. The replay must reproduce the run's stored weights, bit for bit or up to rounding
    (`replay.reproduction`); `check=False` compares only the gradients of these occurrences, with a loose tolerance.
    """
    step = run.step_of(at)
    if (batch is None) == (vectors is None):
        raise UsageError("pass either a query batch, or batch=None and vectors=.")
    pairs = _pairs(hits, step)
    args = stored_args(run, recipe) if args is None else args
    with own_randomness():
        length = step if vectors is None else max(t for _, t in pairs) + 1
        tape = Tape(recipe, args=args, length=length, run=RunStore.open(run.path))
        tape.let_go(0)  # what a step left is read after it
        watcher = _Positions(run, tape, _places(tape, pairs), positions)
        if check and not (result := reproduction(run, recipe, args=args, until=length)):
            raise MismatchError(f"{result}. To check only the gradients of these occurrences, pass check=False.")
        tape.record((), progress, watcher.watch)
        v = vectors
        if v is None:
            model, loss = tape.recipe.model, loss_fn or tape.recipe.loss
            scales = load_scales(RunStore.open(run.path), step)
            v = query_rows(model, loss, batch, watcher.blocks, watcher.bases, scales, mode=mode)
    if v.dim() != 2 or v.shape[1] != run.width or not bool(v.isfinite().all()):
        raise UsageError(f"vectors must be finite and of shape (Q, {run.width}), got {tuple(v.shape)}.")
    v = v if v.dtype == torch.float64 else v.float()
    answers = _contract(run, v, step, watcher.rows, watcher.dots, run.form(contraction))
    about: dict[str, Any] = {
        "quality": run.quality(step, contraction=contraction, method="adjoint"),
        "recording": run.recording_report(step),
    }
    caveats = (CAVEAT, *run.caveats())
    return [
        TokenInfluence(name, t, *answers[place], at=step, caveats=caveats, **about)
        for (name, t), place in zip(pairs, watcher.order, strict=True)
    ]


def _pairs(hits: Sequence[Hit | tuple[int | str, int]], at: int) -> list[tuple[int | str, int]]:
    """(sample, step) of each, the steps checked."""
    pairs = [(hit.sample, hit.step) if isinstance(hit, Hit) else (hit[0], int(hit[1])) for hit in hits]
    if not pairs:
        raise UsageError("hits must not be empty. Pass for example influence.top(3, query=0).")
    for name, t in pairs:
        if not 0 <= t < at:
            raise UsageError(f"the step of a hit must be between 0 and {at - 1}, got step {t} for sample {name!r}.")
    return pairs


def _places(tape: Tape, pairs: Sequence[tuple[int | str, int]]) -> list[Where]:
    out = []
    for name, t in pairs:
        ids = as_text(tape.ids[t])[0]
        if str(name) not in ids:
            raise UsageError(
                f"sample {name!r} is not used in step {t} of the recipe. Pass a step from the query's results."
            )
        out.append((t, ids.index(str(name))))
    return out


class _Positions:
    """Watches a replay: the gradient of chosen occurrences, position by position, in the run's coordinates."""

    def __init__(self, run: Run, tape: Tape, order: Sequence[Where], positions: int | None) -> None:
        self.order = order
        self.rows: dict[Where, Tensor] = {}  # (S, p)
        self.dots: dict[Where, Tensor] = {}  # (S,) c ⟨g_j, ∇L⟩ in full coordinates, where rows are in Adam's
        store = RunStore.open(run.path)
        self.blocks, self.bases = blocks_of(store, tape.recipe.model), bases_of(store)
        self._tape, self._positions = tape, positions
        self._settings = run.config["settings"]
        self._wanted: dict[int, list[int]] = defaultdict(list)
        for t, place in dict.fromkeys(order):
            self._wanted[t].append(place)
        self._tap: Tap | None = None
        self._gathered: Gathered | None = None
        self._warmup = int(store.tensor_metadata("basis").get("warmup", "0"))
        self._adaptive: Adaptive | None = None  # follows the second moment as the recording did
        self._known: list[Scale] | None = None  # P^½ that was known before the step under way

    def watch(self, t: int) -> None:
        """Before step t: what step t − 1 left is read, and the hooks are put in place for step t."""
        scales = self._follow(t)
        if self._tap is not None:
            self._tap.detach()
            self._take(t - 1, scales)
            self._tap = None
        if t in self._wanted:
            self._listen(t)

    def _follow(self, t: int) -> list[Scale] | None:
        """P^½ of the rows of step t − 1; where Adam's second moment is no part of them, None."""
        if self._adaptive is None:
            recipe = self._tape.recipe
            reader = OptimizerReader(recipe.model, recipe.optimizer, model_as=self._settings["optimizer_model"])
            self._adaptive = Adaptive(reader, self.blocks.blocks, self._settings["projection"])
            self._adaptive.told()
            self._known = self._adaptive.known() if t >= self._warmup else None
        if t == 0 or not self._adaptive.preconditioned:
            return None
        scales = self._adaptive.after(self._known, () if self._gathered is None else self._gathered.looked_up())
        self._known = self._adaptive.known() if t >= self._warmup else None
        return scales

    def _listen(self, t: int) -> None:
        model, chosen = self._tape.recipe.model, torch.tensor(self._wanted[t])
        S = self._positions or _count(self._tape, t, self.blocks)
        gathered = self._gathered = Gathered(self.blocks.blocks, None, S)

        def sink(slot: int, block: int, part: Contribution, group: int | None) -> None:
            apart = written_out(part)
            gathered.add(slot, block, type(apart)(*(x[chosen.to(x.device)] for x in apart)), group)

        self._tap = Tap(model, self.blocks, sink, groups=S)
        self._tap.attach()
        self._tap.batch(len(self._tape.ids[t]))

    def _take(self, t: int, scales: list[Scale] | None) -> None:
        """After step t: the optimizer's second moment is known, and its gradients are still there."""
        gathered, places, n = self._gathered, self._wanted[t], len(self._wanted[t])
        assert gathered is not None
        assert self._adaptive is not None
        blocks, sign = self.blocks.blocks, sign_of(self._tape.recipe.optimizer)
        inverse = safe_inverse(self._tape.weights(t)[places])  # the gradients that came carry the samples' weights
        if scales is not None:
            dots = gathered.dots([b.parameter.grad for b in blocks], [n]) * inverse[:, None]  # (n, S) c ⟨g_j, ∇L⟩
            self.dots |= {(t, place): x for place, x in zip(places, dots, strict=True)}
        bases = list(map(basis_like, self.bases, (b.parameter for b in blocks)))
        sides = [x._replace(core=None) for x in bases] if scales is None else self._adaptive.sides(bases, scales)
        gathered.settle(bases, sides)
        self._gathered = None
        rows = gathered.rows([n]).double() * (sign * inverse)[:, None, None]  # (n, S, p)
        self.rows |= {(t, place): x for place, x in zip(places, rows, strict=True)}


def _count(tape: Tape, t: int, blocks: Blocks) -> int:
    """How many positions most recorded layers have, seen in a forward pass of a copy."""
    model = tape.recipe.model
    names = {name for name, module in model.named_modules() if module in blocks.owners}
    twin, lengths = copy.deepcopy(model), Counter[int]()

    def see(module: nn.Module, args: Any, out: Any) -> None:
        if isinstance(out, Tensor) and out.dim() > 2:
            lengths[by_position(module, out).shape[1]] += 1

    for name, module in twin.named_modules():
        if name in names:
            module.register_forward_hook(see)
    with own_randomness(), torch.no_grad():
        tape.recipe.loss(twin, tape.recipe.batches[t][1])
    if not lengths:
        raise UsageError(
            "no recorded layer has positions: their outputs have shape (batch, features). Query the whole sample instead."
        )
    return max(lengths, key=lambda n: (lengths[n], n))


def _contract(
    run: Run, v: Tensor, at: int, rows: Mapping[Where, Tensor], dots: Mapping[Where, Tensor], contraction: Contraction
) -> dict[Where, tuple[Tensor, Tensor]]:
    """`(scores (Q, S), total (Q,))` of each occurrence: the queries are carried back to its step."""
    out: dict[Where, tuple[Tensor, Tensor]] = {}
    wanted, adjoint = {t for t, _ in rows}, Adjoint(v, contraction=contraction)
    for chunk in backward(RunStore.open(run.path), at, dtype=v.dtype):
        for t in range(chunk.first_step + len(chunk.steps) - 1, chunk.first_step - 1, -1):
            step = chunk.steps[t - chunk.first_step]
            s = adjoint.effect(step).double() if t in wanted else None
            whole = adjoint.influence(step).double()
            for place in [x for x in rows if x[0] == t]:
                assert s is not None
                _check_row(run, step, place, rows[place])
                apart = _clipped(step, place[1], rows[place], dots.get(place))  # (S, p)
                out[place] = -float(step.w[place[1]]) * (s @ apart.T), whole[:, place[1]]
        if chunk.first_step <= min(wanted):
            break
    return out


def _clipped(step: Step, position: int, rows: Tensor, dots: Tensor | None) -> Tensor:
    """Rows J g_j of one occurrence, in float64; `dots` are shifted so that they add up to the ⟨g, ∇L⟩ that was recorded."""
    if step.clip >= 1:
        return rows
    wide = step._replace(
        G=step.G.double(), w=step.w.double(), dot_g=None if step.dot_g is None else step.dot_g.double()
    )
    full = rows @ (wide.w @ wide.G) if dots is None else dots / step.clip
    if dots is not None and wide.dot_g is not None:
        active = (rows != 0).any(1).double()
        full = full + (wide.dot_g[position] - full.sum()) * active / active.sum().clamp_min(1)
    return clipped_curvature(wide._replace(V=rows, dot_v=full))


def _check_row(run: Run, step: Step, place: Where, rows: Tensor) -> None:
    """The replayed gradient must be the stored one, up to the store's rounding."""
    stored, replayed = step.G[place[1]].double(), rows.sum(0)
    loose = looseness(run.config["settings"]["encoding"])
    if float((stored - replayed).norm()) > loose * float(stored.norm()):
        raise MismatchError(
            f"the gradient at position {place[1]} of step {place[0]} differs from the recorded one by "
            f"{float((stored - replayed).norm() / stored.norm()):.1e} of its length. Pass the recipe that the run was recorded with."
        )
