"""What the methods of the fidelity study share: the run they are asked about, their scores, a row of the table."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments.data.images import OPTIMIZERS, Batch, Setup, last_epoch
from experiments.fidelity.full import Replay


@dataclass(frozen=True)
class Problem:
    """One seed's run and the samples that are removed."""

    setup: Setup
    seed: int
    replay: Replay
    samples: list[int]
    folder: Path  # for recorded runs
    memo: dict[str, Any] = field(default_factory=dict, repr=False)  # what two rows share

    @property
    def queries(self) -> Batch:
        """The images whose mean loss is asked about."""
        found: Batch = self.replay.recipe.queries["test"]
        return found

    @property
    def last(self) -> tuple[int, ...]:
        """Steps of the last epoch."""
        return last_epoch(self.setup)

    def once(self, name: str, make: Callable[[], Any]) -> tuple[Any, float]:
        """`(what `make` gave when it was first asked for, seconds that this call saved)`."""
        if name in self.memo:
            value, seconds = self.memo[name]
            return value, seconds
        began = time.perf_counter()
        value = make()
        self.memo[name] = value, time.perf_counter() - began
        return value, 0.0


@dataclass(frozen=True)
class Scores:
    """Predicted changes, (removals,) each; a swept method has one pair for each setting, to be chosen from."""

    single: Tensor
    all: Tensor
    store_bytes: int = 0
    settings: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    earlier: float = 0.0  # seconds that another row spent on what both need


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    name: str
    projection: str
    curvature: str
    optimizer_model: str
    run: Callable[[Problem], Scores]
    extra: str | None = None  # the package that it needs
    default: bool = True  # False: only where it is named, for it takes minutes
    optimizers: tuple[str, ...] = OPTIMIZERS  # the runs that it is for
