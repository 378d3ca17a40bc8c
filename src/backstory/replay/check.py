"""Whether a recipe will do for exact results, told by its first steps in about a minute: one line for each thing that it needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..capture import fingerprint
from ..capture.fingerprint import batch_fingerprint
from ..capture.model_state import in_mode
from ..capture.randomness import generators, own_randomness, seed
from ..errors import BackstoryError
from ..results.row import Row
from ..store.run_store import HasPath, store_of
from . import update
from .queries import part
from .recipe import Recipe, take_step, weights
from .reproduction import reproduction
from .tape import RecipeSource, build_recipe

STEPS = 4  # that are tried
QUERIES = 8  # of each set that are tried
SAME = 1e3  # units of the last place: two passes of the same steps in one process


@dataclass(frozen=True)
class Line(Row):
    """One thing that a recipe needs."""

    name: str
    passed: bool
    detail: str = ""  # what was found; where it failed, with what to do

    def __str__(self) -> str:
        return f"{'passed' if self.passed else 'FAILED'}  {self.name}{f': {self.detail}' if self.detail else ''}"


@dataclass(frozen=True)
class RecipeCheck(Row):
    """What was tried of a recipe."""

    lines: tuple[Line, ...]

    @property
    def passed(self) -> bool:
        """Whether everything is as it must be."""
        return all(line.passed for line in self.lines)

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))


class _Failed(Exception):
    """A check did not pass; what was found, and what to do."""


def check_recipe(
    recipe: RecipeSource, *, args: Mapping[str, Any] | None = None, run: HasPath | None = None, steps: int = STEPS
) -> RecipeCheck:
    """Try the first steps of a recipe: whether it can be replayed, differentiated and queried; with `run`, whether it is that run's."""
    with own_randomness():
        return RecipeCheck(tuple(_Tried(recipe, args, run, steps).lines()))


class _Tried:
    """A recipe, and the checks in order; the first one that everything depends on ends them."""

    def __init__(self, recipe: RecipeSource, args: Mapping[str, Any] | None, run: HasPath | None, steps: int) -> None:
        self._source, self._args, self._run, self._steps = recipe, args, run, steps

    def lines(self) -> list[Line]:
        """Of all checks that could be made."""
        needed: list[tuple[str, Callable[[], str]]] = [
            ("it returns a Recipe", self._builds),
            ("two builds start from the same weights", self._starts),
            ("batches are the same when fetched twice", self._batches),
            ("one finite loss per sample", self._loss),
        ]
        others: list[tuple[str, Callable[[], str]]] = [
            ("every trained parameter gets a gradient", self._gradients),
            ("the first steps repeat themselves", self._repeats),
            ("the optimizer can be differentiated", self._optimizer),
            ("second derivatives are finite", self._curvature),
            ("query sets have finite losses", self._queries),
        ]
        if self._run is not None:
            others.append(("the first steps are those of the run", self._compared))
        out: list[Line] = []
        for name, check in needed:
            out.append(_line(name, check))
            if not out[-1].passed:
                return out
        return out + [_line(name, check) for name, check in others]

    def _fresh(self) -> Recipe:
        """As replays build it."""
        torch.manual_seed(0)
        made = build_recipe(self._source, self._args)
        if not isinstance(made, Recipe):
            raise _Failed(f"it returns a {type(made).__name__}. Return a backstory.Recipe")
        return made

    def _builds(self) -> str:
        made = self._fresh()
        self._steps = min(self._steps, len(made.batches))
        if not self._steps:
            raise _Failed("it has no batches. Give `batches` one (ids, batch) for each step of training")
        return f"{len(made.batches):,} steps, {sum(p.numel() for p in made.model.parameters()):,} parameters"

    def _starts(self) -> str:
        if fingerprint(self._fresh().model) != fingerprint(self._fresh().model):
            raise _Failed(
                "they differ. Seed torch's generator inside the function, or load the initial weights from a file"
            )
        return ""

    def _batches(self) -> str:
        one, two = self._fresh(), self._fresh()
        state = generators()
        for t in (*range(self._steps), len(one.batches) - 1):
            marks = []
            for made in (one, one, two):
                seed(state)
                marks.append(batch_fingerprint(made.batches[t]))
            if len(set(marks)) > 1:
                raise _Failed(
                    f"the batch of step {t} differs. Fix the order, and draw augmentations from the global generators of "
                    "torch, Python or NumPy only"
                )
        return ""

    def _loss(self) -> str:
        made = self._fresh()
        for t in range(self._steps):
            ids, batch = made.batches[t]
            losses = made.loss(made.model, batch)
            _check_losses(losses, len(ids), f"step {t}")
            weights(made, t)
        return ""

    def _gradients(self) -> str:
        made = self._fresh()
        names = {id(p): name for name, p in made.model.named_parameters()}
        seen: set[int] = set()
        for t in range(self._steps):
            take_step(made, t)
            parameters = update.trained_parameters(made.optimizer)
            seen |= {id(p) for p in parameters if p.grad is not None}
        idle = [names.get(id(p), "?") for p in parameters if id(p) not in seen]
        if idle:
            raise _Failed(
                f"{', '.join(idle[:3])} got none in {self._steps} steps. Freeze them with requires_grad_(False), or leave "
                "them out of the optimizer"
            )
        return ""

    def _repeats(self) -> str:
        passes, state = [], generators()
        for _ in range(2):
            seed(state)
            made = self._fresh()
            passes.append([take_step(made, t).double() for t in range(self._steps)])
        unit = max(torch.finfo(p.dtype).eps for p in made.model.parameters())
        for t, (a, b) in enumerate(zip(*passes, strict=True)):
            if float((a - b).abs().max()) > SAME * unit * max(1e-30, float(b.abs().max())):
                raise _Failed(
                    f"two passes have other losses at step {t}. Draw random numbers from the global generators of torch, "
                    "Python or NumPy only, and keep no state between calls of `loss`"
                )
        return f"{self._steps} steps"

    def _optimizer(self) -> str:
        optimizer = self._fresh().optimizer
        if (obstacle := update.obstacle(optimizer)) is not None:
            raise _Failed(f"{obstacle}. Leaving data out (`leave_out`) works with any optimizer")
        return type(optimizer).__name__

    def _curvature(self) -> str:
        made = self._fresh()
        parameters = update.trained_parameters(made.optimizer)
        with sdpa_kernel(SDPBackend.MATH):  # as exact results do: the fused attentions have no second derivative
            loss = made.loss(made.model, made.batches[0][1]).sum()
            grads = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
            linear = [g for g in grads if g is not None and g.requires_grad]
            total = sum((g.square().sum() for g in linear), torch.zeros(()))
            rows = torch.autograd.grad(total, parameters, allow_unused=True) if linear else ()
        if not all(bool(x.isfinite().all()) for x in (*grads, *rows) if x is not None):
            raise _Failed("some are NaN or Inf. Look for square roots, norms or logarithms at 0 in model and loss")
        return ""

    def _queries(self) -> str:
        made = self._fresh()
        with in_mode(made.model), torch.no_grad():
            for name, batch in made.queries.items():
                few = part(batch, 0, QUERIES)
                losses = made.loss(made.model, few)
                _check_losses(losses, None, f"query set {name!r}")
        return ", ".join(made.queries) or "it has none; queries can be stored in the run"

    def _compared(self) -> str:
        assert self._run is not None
        store, steps = store_of(self._run), len(self._fresh().batches)
        if steps != (there := store.n_steps()):
            raise _Failed(
                f"the recipe has {steps} steps, but the run has {there}. Pass the run's own recipe and arguments"
            )
        result = reproduction(store, self._source, args=self._args, until=min(self._steps, there))
        if not result:
            raise _Failed(str(result))
        return str(result)


def _check_losses(losses: Any, count: int | None, where: str) -> None:
    if not isinstance(losses, Tensor) or losses.dim() != 1 or (count is not None and len(losses) != count):
        found = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        wanted = "(Q,)" if count is None else f"({count},)"
        raise _Failed(f"{where} has losses of shape {found}, expected {wanted}. Use reduction='none' in `loss`")
    if not bool(losses.isfinite().all()):
        raise _Failed(f"{where} has a loss that is NaN or Inf. Check its data")


def _line(name: str, check: Callable[[], str]) -> Line:
    try:
        return Line(name, True, check())
    except (_Failed, BackstoryError) as error:
        return Line(name, False, str(error))
    except Exception as error:  # whatever the user's own code raises
        return Line(name, False, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
