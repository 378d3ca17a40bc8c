"""How the weights of a run would differ without groups of samples, at every checkpoint: stored in the run, for any later query.

A group's change is one file of the run, named by a hash of what decides it: the run, the group's occurrences, the choices, the
precision and whether the replay had to agree with the run. Its tensors are `<step>/<name of a weight>`, as differences from the run's weights before that step. By training again they
are the differences themselves, and a query is evaluated with and without them; tangents are θ̇, and the effect on a query is ⟨∇ℓ(θ_t, q), θ̇_t⟩.

Shapes:  G groups, C checkpoints, Q queries, K twins.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..capture.fingerprint import canonical, weights
from ..capture.ids import as_text
from ..capture.model_state import load_weights, restored_weights
from ..errors import MismatchError, UsageError
from ..exact.cache import digest
from ..exact.tangent import Group
from ..replay.recipe import Recipe
from ..replay.tape import RecipeSource, convert
from ..results.effects import MOVED, RETRAINED, GroupEffects, MoveEffects
from ..store import RunStore
from ..store.files import write_tensors
from .gradients import LossFn, check_model, evaluate_loss, in_query_mode
from .groups import OTHERS, Groups, Texts, places_of
from .pieces import work_folder

PREFIX = "change-"
TWIN = "twin"
ADD_UP = (
    "effects of groups do not add up, since training without one changes what the others do: for totals use tangents"
)
AT_ONCE = 16  # gradients of queries in memory
FIRST = "first order: the derivative as the group's weights are lowered; effects of groups add up"


Change = Callable[[], dict[str, Tensor]]  # reads it


class Part(NamedTuple):
    """One group: what it is called, and which occurrences it has."""

    name: str
    key: tuple[str, ...]
    group: Group
    samples: int

    @property
    def first(self) -> int:
        """The first step that differs without it."""
        return min((*self.group.out, *self.group.into))

    @property
    def occurrences(self) -> int:
        """How many occurrences it has."""
        return sum(map(len, self.group.out.values()))


@dataclass(frozen=True)
class About:
    """What a run says of one of its changes of weights."""

    group: str
    kind: str  # "leave_out", "tangent", "move", or "twin"
    samples: int
    occurrences: int
    first: int
    precision: str  # "" for that of the recipe
    replay: str  # how well the recipe reproduced the run
    caveats: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Spec:
    """What decides changes beside their groups."""

    kind: str
    steps: tuple[int, ...]  # the checkpoints after the start, and the end
    dtype: torch.dtype | None
    choices: tuple[str, ...] = ()
    check: bool = True  # whether the replay must agree with the run

    @property
    def precision(self) -> str:
        """The precision by name; "" for that of the recipe."""
        return "" if self.dtype is None else str(self.dtype).removeprefix("torch.")


class Job(NamedTuple):
    """One change that is to be computed: the name of its file, what is known of it, and what it takes."""

    name: str
    about: About
    what: Any  # a `Variant` or a `Group`


def steps_of(store: RunStore) -> tuple[int, ...]:
    """Steps at which changes are kept: the stored checkpoints after the start, and the end."""
    return tuple(sorted({*(c for c in store.checkpoints() if c > 0), store.n_steps()}))


def parts_of(groups: Groups, samples: Texts, steps: Any) -> list[Part]:
    """The groups with their occurrences; samples that are in none of the named ones are no group."""
    out = []
    for k, name in enumerate(groups.names):
        chosen = groups.of == k
        if chosen.any() and name != OTHERS:
            count = len(np.unique(samples[chosen]))
            out.append(Part(name, groups.keys[k], Group(places_of(steps, chosen)), count))
    return out


def file_name(store: RunStore, spec: Spec, what: Any) -> str:
    """The name of a change's file: a hash of what decides it."""
    marks = store.config.get("fingerprints", {})
    return f"{PREFIX}{digest([marks, spec.kind, spec.steps, spec.precision, spec.choices, spec.check, what])}"


def group_key(group: Group) -> list[Any]:
    """A group's occurrences, in short."""
    out = hashlib.sha256(json.dumps(sorted(group.out.items())).encode()).hexdigest()
    return [out, sorted((t, list(map(list, pairs))) for t, pairs in group.into.items())]


def check_order(store: RunStore, recipe: Recipe, until: int) -> None:
    """The recipe's batches must have the samples of the run's steps before `until` in their order, in which scores are labelled."""
    ids, steps = store.occurrences(store.n_rows())
    if len(recipe.batches) < until:
        raise MismatchError(
            f"the recipe has {len(recipe.batches)} steps, but the run has {until}. Pass the run's own recipe."
        )
    for t in range(until):
        lo, hi = np.searchsorted(steps, (t, t + 1))
        if list(as_text(recipe.batches[t][0])[0]) != ids[lo:hi].tolist():
            raise MismatchError(
                f"the samples of step {t} in the recipe are not those that the run recorded. Pass the run's own recipe."
            )


def write_change(store: RunStore, job: Job, changes: Mapping[int, Mapping[str, Tensor]], seconds: float) -> None:
    """A finished change as a file, for the run to take in."""
    tensors = {f"{step}/{name}": x for step, each in changes.items() for name, x in each.items()}
    about = replace(job.about, seconds=round(seconds, 3))
    file = work_folder(store.path) / f"{job.name}.safetensors"
    write_tensors(file, tensors, {"about": json.dumps(asdict(about))}, checked=True)


def read_about(store: RunStore, name: str) -> About:
    """What is known of a stored change."""
    about = json.loads(store.tensor_metadata(name)["about"])
    return About(**{**about, "caveats": tuple(about["caveats"])})


def stored_changes(store: RunStore) -> list[About]:
    """The changes that a run has, of groups and of twins."""
    return [read_about(store, name) for name in store.tensor_names() if name.startswith(PREFIX)]


def missing_recipe(names: Sequence[str], recipe: RecipeSource | None) -> RecipeSource:
    """The recipe, which must be there where something is to be computed."""
    if recipe is None:
        raise UsageError(
            f"{len(names)} of these groups, such as {names[0]!r}, are not stored in the run yet. Pass the recipe to compute them."
        )
    return recipe


# -- what they do to queries ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightChanges:
    """Stored changes of the weights, one for each group: `effects` gives what they do to any query."""

    store: RunStore = field(repr=False)
    spec: Spec = field(repr=False)
    by: tuple[str, ...]
    parts: tuple[Part, ...] = field(repr=False)
    files: tuple[str, ...] = field(repr=False)  # of the groups
    twins: tuple[str, ...] = field(default=(), repr=False)  # files of the twins

    @property
    def groups(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(part.name for part in self.parts)

    @cached_property
    def caveats(self) -> tuple[str, ...]:
        """What holds for every effect of these changes."""
        every = [read_about(self.store, name) for name in self.files]
        notes = [*dict.fromkeys(x for about in every for x in (about.replay, *about.caveats))]
        notes.append(ADD_UP if self.spec.kind == RETRAINED else FIRST)
        if self.twins:
            many = "a training" if len(self.twins) == 1 else f"any of {len(self.twins)} trainings"
            notes.append(f"noise floor: the largest change of {many} that started one rounding unit away")
        return (*notes, *([f"computed in {self.spec.precision}"] if self.spec.precision else []))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        rows = [
            {"group": p.name, "samples": p.samples, "occurrences": p.occurrences, "first_step": p.first}
            for p in self.parts
        ]
        return {"kind": self.spec.kind, "by": self.by, "groups": rows, "checkpoints": self.spec.steps,
                "twins": len(self.twins), "caveats": self.caveats}  # fmt: skip

    def change(self, group: str, at: int | str = "final") -> dict[str, Tensor]:
        """The change of each weight at a checkpoint without a group; none where it had not been used before."""
        if group not in self.groups:
            raise UsageError(f"there is no group {group!r}. There are: {', '.join(self.groups)}.")
        return self._read(self.files[self.groups.index(group)], self._steps(at)[0])

    def effects(
        self,
        model: nn.Module,
        loss: LossFn,
        batch: Any = None,
        at: int | str = "final",
        *,
        queries: Sequence[str] | None = None,
        mode: str = "eval",
        unverified: bool = False,
    ) -> GroupEffects:
        """What each group does to the queries: `loss(model)` or `loss(model, batch)`, a scalar or (Q,), at a checkpoint or at "all" of them.

        `model` gets the weights of each checkpoint in turn, and its own again at the end. `queries` names the Q queries.
        """
        steps, given = self._steps(at), weights(model)
        losses, values, twins, notes = [], [], [], [*self.caveats]
        with _in_precision(model, self.spec.dtype) as (own, cast), restored_weights(own):
            query = Evaluation(own, loss, batch if cast is None else convert(batch, cast), mode)
            for step in steps:
                load_weights(model, given)
                base, unchecked = self._base(model, step, unverified)
                notes += unchecked
                load_weights(own, base)
                losses.append(_losses(query))
                changes, others = (
                    [partial(self._read, name, step) for name in names] for names in (self.files, self.twins)
                )
                measure = _differences if self.spec.kind == RETRAINED else _derivatives
                values.append(measure(query, base, changes, losses[-1]))
                twins.append(_differences(query, base, others, losses[-1]))
        names = tuple(queries) if queries is not None else tuple(map(str, range(len(losses[0]))))
        if len(names) != len(losses[0]):
            raise UsageError(f"the loss gives {len(losses[0])} queries, but {len(names)} names were passed.")
        kind = MoveEffects if self.spec.kind == MOVED else GroupEffects
        return kind(
            kind=self.spec.kind, by=self.by, groups=self.groups, keys=tuple(p.key for p in self.parts),
            samples=tuple(p.samples for p in self.parts), occurrences=tuple(p.occurrences for p in self.parts),
            first_steps=tuple(p.first for p in self.parts), checkpoints=steps, queries=names, losses=torch.stack(losses),
            values=torch.stack(values, 1), twins=torch.stack(twins, 1), at=steps[-1],
            caveats=(*dict.fromkeys(notes), f"evaluated in {mode} mode"),
        )  # fmt: skip

    def _steps(self, at: int | str) -> tuple[int, ...]:
        if at == "all":
            return self.spec.steps
        step = self.store.step_of(at)
        if step not in self.spec.steps:
            raise UsageError(
                f"changes are stored at the run's checkpoints, steps {', '.join(map(str, self.spec.steps))}, not at {step}."
            )
        return (step,)

    def _read(self, name: str, step: int) -> dict[str, Tensor]:
        tensors = self.store.load_tensors(name, f"{step}/")
        return {key.partition("/")[2]: x for key, x in tensors.items()}

    def _base(self, model: nn.Module, step: int, unverified: bool) -> tuple[dict[str, Tensor], list[str]]:
        """`(the run's weights at a step, caveats)`; where it has not stored them, those of the model, which must be that step's."""
        if step in self.store.checkpoints():
            return self.store.load_checkpoint(step), []
        return weights(model), check_model(self.store, model, step, unverified)


class Evaluation(NamedTuple):
    """What is evaluated."""

    model: nn.Module
    loss: LossFn
    batch: Any
    mode: str


@contextmanager
def _in_precision(model: nn.Module, dtype: torch.dtype | None) -> Iterator[tuple[nn.Module, torch.dtype | None]]:
    """`(the model, None)`, or a copy of it in another precision with that."""
    if dtype is None or all(p.dtype == dtype for p in model.parameters()):
        yield model, None
    else:
        yield copy.deepcopy(model).to(dtype), dtype


def _losses(query: Evaluation) -> Tensor:
    """(Q,) float64."""
    with in_query_mode(query.model, query.mode, ()), torch.random.fork_rng(devices=[]), torch.no_grad():
        return _vector(query).double().cpu().clone()


def _vector(query: Evaluation) -> Tensor:
    values = evaluate_loss(query.loss, query.model, query.batch)
    if not isinstance(values, Tensor) or values.dim() > 1 or not values.numel():
        raise UsageError("the loss must return a scalar or one loss per query (Q,).")
    return values.reshape(-1)


def _differences(query: Evaluation, base: Mapping[str, Tensor], changes: Sequence[Change], before: Tensor) -> Tensor:
    """ℓ(θ_t + change) − ℓ(θ_t) of each change, (G, Q): two forward passes, of which one is shared by all."""
    out = before.new_zeros(len(changes), len(before))
    for row, read in zip(out, changes, strict=True):
        if change := read():
            load_weights(query.model, {name: x + change[name] if name in change else x for name, x in base.items()})
            row += _losses(query) - before
    return out


def _derivatives(query: Evaluation, base: Mapping[str, Tensor], changes: Sequence[Change], before: Tensor) -> Tensor:
    """⟨∇ℓ(θ_t, q), θ̇_t⟩ of each change, (G, Q); the gradients of some queries at a time."""
    names = [name for name, _ in query.model.named_parameters()]
    parameters = [p for _, p in query.model.named_parameters()]
    out = before.new_zeros(len(changes), len(before))
    with in_query_mode(query.model, query.mode, parameters), torch.random.fork_rng(devices=[]), torch.enable_grad():
        losses = _vector(query)
        for lo in range(0, len(losses), AT_ONCE):
            rows = [
                torch.autograd.grad(x, parameters, retain_graph=True, allow_unused=True)
                for x in losses[lo : lo + AT_ONCE]
            ]
            v = [{canonical(k): g for k, g in zip(names, row, strict=True) if g is not None} for row in rows]
            for g, read in enumerate(changes):
                change = read()
                out[g, lo : lo + len(v)] = torch.tensor([_dot(one, change) for one in v], dtype=torch.float64)
    return out


def _dot(gradient: Mapping[str, Tensor], change: Mapping[str, Tensor]) -> float:
    return sum(
        float(gradient[k].double().cpu().flatten() @ x.double().flatten()) for k, x in change.items() if k in gradient
    )
