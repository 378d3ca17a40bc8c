r"""Reconstruct a run that was never recorded from its saved checkpoints and the order of its data.

As if there had been one update between two checkpoints (the paper, Appendix "practical considerations"), the gradient of
a sample is taken at the checkpoint that follows its step:

    g_t(z) ≈ ∇ℓ(θ_c, z),      c = the first checkpoint ≥ t + 1 ("after", the paper's), or the last ≤ t ("before")

With a checkpoint before every step, "before" is the recording itself.

The ordinary recorder watches the recipe take every step again, so that weights, rates, clipping and all checks are those
of any recording. But each step starts from its checkpoint, and a hook that runs after the update, and before the recorder
looks at the optimizer, puts the weights back and shows it the optimizer's state of that checkpoint, for the reader of its type
(`capture.optimizers`) to read its second moment. Without stored states its own goes on from batch to batch: an average over
the batches seen so far. The run says what was assumed.
"""

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from inspect import unwrap
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..capture import OptimizerReader, fingerprint
from ..capture.optimizers import checked_rule, rule_of
from ..errors import MismatchError, UsageError, check_one_of
from ..replay.recipe import Recipe, take_step
from ..run.embed import Progress
from ..run.run import Run
from ..store.bases import save_scales
from ..store.files import read_tensors
from .adam import Adaptive
from .recorder import Recorder, record

OURS = ("resume", "start", "steps", "checkpoints", "scaler", "loss_reduction")  # arguments of record, decided here
State = Mapping[str, Any]
States = dict[Tensor, dict[str, Any]]  # of an optimizer, by parameter
Weights = State | str | Path | Callable[[], State]
Given = tuple[int, Weights, State | Callable[[], State] | None]


class Checkpoint(NamedTuple):
    """The model before update `step`; weights and optimizer state are read when they are needed."""

    step: int
    weights: Weights
    state: State | Callable[[], State] | None


def record_checkpoints(
    recipe: Recipe,
    checkpoints: Sequence[Given],
    path: str | Path,
    /,
    *,
    nearest: str = "after",
    outputs: str | None = None,
    progress: Progress | None = None,
    **arguments: Any,
) -> Run:
    """Write a run from checkpoints `(step, model state dict, optimizer state dict or None)`, sorted by step.

    A state dict can also be a function that returns it, or, for the model, a path to a safetensors file. `recipe` provides
    the model, the loss, the batches in order, and a new optimizer and schedule. The run ends at the last checkpoint, and the
    recipe's model is left with its weights. `outputs` is the kind of the model's outputs, if the curvature needs them
    (`s.outputs`). All other arguments are those of `record`.
    """
    if taken := [name for name in OURS if name in arguments]:
        raise UsageError(f"{taken[0]}= comes from the recipe or the checkpoints. Leave it out.")
    given = _checked(recipe, checkpoints, nearest)
    still = _Standstill(recipe, given, nearest)
    still.load(0)
    known = {"loss_reduction": recipe.loss_reduction, "steps": given[-1].step, "clip_norm": recipe.clip_norm}
    with still.attached(), record(recipe.model, recipe.optimizer, path, **{**known, **arguments}) as rec:
        about = {"nearest": nearest, "steps": [c.step for c in given], "assumed": _assumed(recipe, given, nearest)}
        rec.store.update_config(from_checkpoints=about)
        rec.watcher.weights.following = False
        rec.watcher.adaptive.every_step = True
        for t in range(given[-1].step):
            _step(recipe, rec, still, t, outputs)
            if progress is not None:
                progress(t + 1, given[-1].step)
        still.load(len(given) - 1)
        rec.know_weights()
    return Run(path)


def _step(recipe: Recipe, rec: Recorder, still: "_Standstill", t: int, outputs: str | None) -> None:
    ids, batch = recipe.batches[t]
    still.place(t)
    tokens = None if recipe.tokens is None else recipe.tokens(batch)
    groups = None if recipe.groups is None else recipe.groups(batch)
    with (
        rec.step(ids, tokens=tokens, groups=groups) as s,
        nullcontext() if outputs is None else s.outputs_of(recipe.model, outputs),
    ):
        take_step(recipe, t)
    still.know(rec, t + 1)


def _checked(recipe: Recipe, given: Sequence[Given], nearest: str) -> list[Checkpoint]:
    """The checkpoints, with the recipe's own start as the first where none is given."""
    check_one_of("nearest", nearest, ("after", "before"))
    points = [Checkpoint(*x) for x in given]
    steps = [c.step for c in points]
    if not points or steps != sorted(set(steps)) or steps[0] < 0 or not 0 < steps[-1] <= len(recipe.batches):
        raise UsageError(
            f"checkpoints must be at distinct steps in increasing order, the last between 1 and {len(recipe.batches)} "
            f"(the recipe's number of batches), got {steps}."
        )
    states = {c.state is not None for c in points if c.step}
    if len(states) > 1:
        raise UsageError("only some checkpoints have an optimizer state. Pass one for every checkpoint, or for none.")
    if steps[0] > 0:
        points.insert(0, Checkpoint(0, copy.deepcopy(recipe.model.state_dict()), None))
    if states == {True} and points[0].state is None:
        points[0] = points[0]._replace(state=copy.deepcopy(recipe.optimizer.state_dict()))
    return points


def _assumed(recipe: Recipe, points: Sequence[Checkpoint], nearest: str) -> list[str]:
    end, steps = points[-1].step, {c.step for c in points}
    head = f"the run was reconstructed from {len(steps - {0})} checkpoints for {end} steps, not recorded"
    side = "follows it" if nearest == "after" else "comes before it"
    exact = nearest == "before" and steps.issuperset(range(end))
    notes = [
        f"{head}; there is one before every step, so gradients are those of the training run"
        if exact
        else f"{head}; gradients of a step are taken at the checkpoint that {side}"
    ]
    if _adaptive(recipe.optimizer):
        moment = f"{type(recipe.optimizer).__name__}'s second moment"
        notes.append(
            f"{moment} is taken from the same checkpoint"
            if points[-1].state is not None
            else f"{moment} was not given; it is estimated from the batches' gradients at their checkpoints"
        )
    notes.append("learning rates are those of the recipe's optimizer and schedule")
    if recipe.clip_norm is not None:
        notes.append("clipping was recomputed from each batch's gradient at its checkpoint")
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.training and m.p > 0 for m in recipe.model.modules()):
        notes.append("dropout masks were drawn again")
    return notes


def _adaptive(optimizer: Optimizer) -> bool:
    """Whether it divides by a second moment."""
    rule = rule_of(optimizer)
    return rule is not None and rule.second_moment is not None


class _Standstill:
    """Lets the recipe take its steps without moving: each begins and ends at its checkpoint."""

    def __init__(self, recipe: Recipe, points: Sequence[Checkpoint], nearest: str) -> None:
        self._recipe, self._checkpoints, self._after = recipe, points, nearest == "after"
        self._steps = [c.step for c in points]
        self._given = _adaptive(recipe.optimizer) and points[-1].state is not None
        self._running: States = dict(recipe.optimizer.state)  # of the optimizer itself, which takes every step
        self._saved: States = {}  # of the checkpoint, where it is given
        self._now = -1  # the checkpoint that the model has
        self._weights: State = {}

    def attached(self) -> RemovableHandle:
        """Its hook, until the end of a `with`; it must come before the recorder's, which then sees what it left."""
        return self._recipe.optimizer.register_step_post_hook(self._put_back)

    def load(self, index: int) -> None:
        """The model at one of the checkpoints."""
        if index == self._now:
            return
        chosen = self._checkpoints[index]
        self._weights, self._now = _read(chosen.weights), index
        _load(self._recipe.model, self._weights, chosen.step)
        if self._given:
            self._saved = _saved(self._recipe.optimizer, _read(chosen.state or {}), chosen.step)

    def place(self, t: int) -> None:
        """Before step t: the model, and the optimizer as it is after t steps."""
        self.load(bisect_left(self._steps, t + 1) if self._after else bisect_right(self._steps, t) - 1)
        if self._given:
            _swap(self._recipe.optimizer, self._running)

    def know(self, rec: Recorder, step: int) -> None:
        """After update step − 1: if there is a checkpoint, the run can be queried at that step."""
        if step not in self._steps or step == self._steps[-1]:
            return
        self.load(self._steps.index(step))
        if self._given:
            _swap(self._recipe.optimizer, self._saved)
        known = rec.store.config.get("fingerprints", {})
        reader = OptimizerReader(self._recipe.model, self._recipe.optimizer, model_as=rec.settings.optimizer_model)
        scales = Adaptive(reader, rec.blocks, rec.settings.projection).told()
        if scales is not None:
            save_scales(rec.store, step, [b.name for b in rec.blocks], scales)
        rec.store.update_config(fingerprints={**known, str(step): fingerprint(self._recipe.model)})

    def _put_back(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _load(self._recipe.model, self._weights, self._steps[self._now])
        if not self._given:
            return
        self._running = _swap(optimizer, {p: copy.deepcopy(state) for p, state in self._saved.items()})
        if not self._after:  # the recorder reads what this step makes of the checkpoint's state
            with torch.no_grad():
                unwrap(type(optimizer).step)(optimizer)  # without hooks
            _load(self._recipe.model, self._weights, self._steps[self._now])


def _swap(optimizer: Optimizer, states: States) -> States:
    """Give the optimizer these states; those that it had."""
    before = dict(optimizer.state)
    optimizer.state.clear()
    optimizer.state.update(states)
    return before


def _read(source: Any) -> State:
    """A state dict, from where it is."""
    if isinstance(source, str | Path):
        return read_tensors(Path(source))
    state = source() if callable(source) else source
    if not isinstance(state, Mapping):
        raise UsageError(f"a state dict must be a mapping from names to tensors, got {type(state).__name__}.")
    return state


def _load(model: nn.Module, weights: State, step: int) -> None:
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise MismatchError(
            f"the checkpoint of step {step} does not fit the recipe's model. Build the model that was trained. {error}"
        ) from error


def _saved(optimizer: Optimizer, state: State, step: int) -> States:
    """Each parameter's own part of an optimizer's state dict; there may be none before the first step."""
    groups = [g["params"] for g in optimizer.param_groups]
    numbers = [g["params"] for g in state.get("param_groups", optimizer.state_dict()["param_groups"])]
    if [len(g) for g in groups] != [len(g) for g in numbers]:
        raise MismatchError(
            f"the optimizer state of step {step} has parameter groups of {[len(g) for g in numbers]} parameters, but "
            f"the recipe's optimizer has {[len(g) for g in groups]}. Build the optimizer as in training."
        )
    parts, pairs = state.get("state", {}), zip(chain(*groups), chain(*numbers), strict=True)
    saved = {  # as torch loads it: numbers for each entry have the type and device of the parameter, counts stay
        p: {name: x.to(p) if isinstance(x, Tensor) and x.dim() else x for name, x in parts[n].items()}
        for p, n in pairs
        if n in parts
    }
    if step:
        _check_moments(optimizer, saved, step)
    return saved


def _check_moments(optimizer: Optimizer, saved: States, step: int) -> None:
    """Raise where the reader of the optimizer's second moment does not find it."""
    rule, running = checked_rule(optimizer), _swap(optimizer, saved)
    try:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.requires_grad and rule.second_moment is not None:
                    rule.second_moment(optimizer, group, p)
    except KeyError as error:
        raise MismatchError(
            f"the optimizer state of step {step} lacks {type(optimizer).__name__}'s second moment for some parameters. "
            "Save the full optimizer.state_dict()."
        ) from error
    finally:
        _swap(optimizer, running)
