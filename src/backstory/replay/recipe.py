"""A recipe rebuilds a training run (model, loss, data and their order), so that it can be queried and replayed.

Recipes are code. They are named in a run's config as `package.module:function`, and imported only when the user
passes the name, or confirms the one that is stored. Where Python looks for them is up to the caller.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UsageError, check_one_of
from ..maths.steps import loss_divisor

WRITTEN = "backstory.integrations.written:recipe"  # reads what a trainer's callback wrote into the run


@dataclass(frozen=True, kw_only=True)
class Presentation:
    """How the page shows samples and queries, and reads new queries; each function is optional."""

    # what a person types -> a batch; the losses of its rows add up to one query
    text: Callable[[str], Any] | None = None
    # PNG bytes, label (None: the model's prediction) -> a batch of one
    image: Callable[[bytes, str | None], Any] | None = None
    # queries -> text, image (PNG bytes) and label of each
    show: Callable[[Any], Sequence[Mapping[str, Any]]] | None = None
    # (model, queries) -> the model's prediction for each, as text like its label
    predict: Callable[[nn.Module, Any], Sequence[str]] | None = None
    # (training batch, place in it) -> the text of each position
    pieces: Callable[[Any, int], Sequence[str]] | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that defines a training run. A recipe function returns a new one at each call."""

    model: nn.Module  # at its initial weights
    optimizer: Optimizer
    loss: Callable[[nn.Module, Any], Tensor]  # (model, batch) -> one loss per sample (B,)
    batches: Sequence[tuple[Sequence[int | str], Any]]  # step t -> (ids, batch)
    loss_reduction: str = (
        "mean"  # or "sum"; "token-mean": `loss` is the sum over a sample's tokens; "weights": as `weights` says
    )
    tokens: Callable[[Any], Tensor] | None = None  # batch -> how many tokens of each sample have a loss (B,)
    groups: Callable[[Any], Sequence[int]] | None = (
        None  # batch -> which of the ids each row belongs to, where samples have several
    )
    weights: Callable[[int], Tensor] | None = None  # step -> the weight of each sample in the step's loss (B,)
    clip_norm: float | None = None
    schedule: Any = None  # a torch learning-rate scheduler, stepped after each update
    queries: Mapping[str, Any] = field(default_factory=dict)  # name -> batch
    page: Presentation = Presentation()


def load_recipe(name: str, args: Mapping[str, Any] | None = None) -> Recipe:
    """Import `package.module:function` and call it."""
    module, _, function = name.partition(":")
    if not module or module.startswith(".") or not function:
        raise UsageError(f"a recipe must be given as package.module:function, got {name!r}.")
    try:
        build = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        missed = error.name if isinstance(error, ImportError) and error.name else module
        remedy = hidden(missed) or "Run from a place where its package can be imported."
        raise UsageError(f"could not import the recipe {name!r} ({error}). {remedy}") from error
    made = build(**(args or {}))
    if not isinstance(made, Recipe):
        raise UsageError(f"the recipe {name!r} must return a backstory.Recipe, got {type(made).__name__}.")
    return made


class StoresRecipe(Protocol):
    """A run in a folder, and its config."""

    @property
    def path(self) -> Path:
        """Its folder."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Its `config.json`."""


def stored_args(run: StoresRecipe, recipe: object) -> Mapping[str, Any] | None:
    """The arguments that a run stores for its recipe; None for any other recipe.

    A recipe that a trainer's callback wrote (WRITTEN) reads the run itself, wherever it lies now.
    """
    if not isinstance(recipe, str):
        return None
    if recipe == WRITTEN:
        return {"run": str(run.path)}
    return run.config.get("recipe_args") if recipe == run.config.get("recipe") else None


def place(module: str) -> str | None:
    """The file or folder of a module's package, where Python would import it from now; nothing is run."""
    spec = _spec(module)
    return None if spec is None else _place(spec)


def hidden(module: str) -> str:
    """What to do where the package that Python finds has the name of another one further down its path; else nothing."""
    spec, package = _spec(module), module.partition(".")[0]
    if spec is None or spec.origin is None:  # not found; or a package without a file, which may lie in several places
        return ""
    first = _place(spec)
    others = [_place(x) for folder in sys.path if (x := PathFinder.find_spec(package, [folder])) is not None]
    rest = [other for other in others if os.path.realpath(other) != os.path.realpath(first)]
    if not rest:
        return ""
    return f"Python imports {package!r} from {first}, which shadows {rest[0]}. Rename yours."


def _spec(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module.partition(".")[0])
    except ValueError:  # a module that was put together by hand has no spec
        return None


def _place(spec: ModuleSpec) -> str:
    if spec.submodule_search_locations:
        return str(next(iter(spec.submodule_search_locations)))
    origin = spec.origin if spec.has_location else getattr(spec.loader_state, "filename", None)
    return origin or "Python itself"


def weights(recipe: Recipe, step: int) -> Tensor:
    """w_z of the samples of one step, (B,) float64."""
    ids, batch = recipe.batches[step]
    check_one_of("loss_reduction of a recipe", recipe.loss_reduction, ("mean", "sum", "token-mean", "weights"))
    if recipe.loss_reduction == "weights":
        return _given_weights(recipe, step, len(ids))
    if recipe.loss_reduction == "token-mean" and recipe.tokens is None:
        raise UsageError(
            "a recipe with loss_reduction='token-mean' needs tokens=, a function that counts each sample's tokens."
        )
    divisor = loss_divisor(recipe.loss_reduction, len(ids), None if recipe.tokens is None else recipe.tokens(batch))
    return torch.full((len(ids),), 1.0 / divisor, dtype=torch.float64)


def _given_weights(recipe: Recipe, step: int, n: int) -> Tensor:
    if recipe.weights is None:
        raise UsageError("a recipe with loss_reduction='weights' needs weights=, a function of the step.")
    w = torch.as_tensor(recipe.weights(step), dtype=torch.float64).reshape(-1).clone()
    if len(w) != n:
        raise UsageError(f"the recipe's weights of step {step} must be one per sample, got {len(w)} for {n} samples.")
    return w


def take_step(recipe: Recipe, step: int, w: Tensor | None = None) -> Tensor:
    """One update of `recipe.model`, as the run took it; `w` replaces the weights. Returns the losses (B,)."""
    batch = recipe.batches[step][1]
    losses = recipe.loss(recipe.model, batch)
    w = weights(recipe, step) if w is None else w
    recipe.optimizer.zero_grad()
    (losses * w.to(losses)).sum().backward()
    if recipe.clip_norm is not None:
        nn.utils.clip_grad_norm_(recipe.model.parameters(), recipe.clip_norm)
    recipe.optimizer.step()
    if recipe.schedule is not None:
        recipe.schedule.step()
    return losses.detach()
