"""What the user chose for a recording: checked once, frozen, and kept in the run's config.json.

Knows nothing of hooks or tables.
"""

import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .._version import __version__
from ..errors import UsageError
from ..maths.encoding import check as check_encoding
from ..maths.subspace import KINDS

LOSS_REDUCTIONS = ("mean", "sum", "token-mean", "weights")


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """The arguments of `record` that decide what the numbers of a run mean."""

    loss_reduction: str
    subspace: str = "learned"
    rank: int | tuple[int, int] | Mapping[str, int | tuple[int, int]] = 16
    curvature: str = "empirical"  # or "sampled", "sampled:K", "exact:N"
    encoding: str = "float16"
    seed: int = 0
    optimizer_model: str = "auto"
    uncovered: str = "error"
    warmup_steps: int = 20
    warmup_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        _one_of("loss_reduction", self.loss_reduction, LOSS_REDUCTIONS)
        _one_of("subspace", self.subspace, KINDS)
        check_encoding(self.encoding)
        self.curvature_form()
        if self.warmup_steps < 1 or self.warmup_bytes < 1:
            raise UsageError("warmup_steps and warmup_bytes must be at least 1.")

    def curvature_form(self) -> tuple[str, int]:
        """`(kind, rows to an occurrence)`: empirical has none of its own."""
        kind, _, number = self.curvature.partition(":")
        fits = (kind == "empirical" and not number) or (kind == "sampled" and (not number or number.isdigit()))
        if not fits and not (kind == "exact" and number.isdigit()):
            raise UsageError(
                f"found curvature={self.curvature!r}; expected 'empirical', 'sampled', 'sampled:K' with K draws, or "
                "'exact:N' with N output entries for each sample (the number of classes)."
            )
        rows = 0 if kind == "empirical" else int(number or 1)
        if kind != "empirical" and rows < 1:
            raise UsageError(f"found curvature={self.curvature!r}; expected at least 1 row.")
        return kind, rows

    def as_config(self) -> dict[str, Any]:
        """Plain values for config.json."""
        plain = asdict(self)
        rank = self.rank
        plain["rank"] = {k: _plain(r) for k, r in rank.items()} if isinstance(rank, Mapping) else _plain(rank)
        return plain


def provenance(device: str) -> dict[str, Any]:
    """Where and with what a run was made."""
    return {
        "backstory": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": device,
        "torch_initial_seed": torch.initial_seed(),
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _plain(rank: int | tuple[int, int]) -> int | list[int]:
    return rank if isinstance(rank, int) else list(rank)  # as JSON gives it back: a resumed run compares


def _one_of(name: str, found: str, allowed: tuple[str, ...]) -> None:
    if found not in allowed:
        raise UsageError(f"found {name}={found!r}; expected one of {', '.join(map(repr, allowed))}.")
