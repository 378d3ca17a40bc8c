"""What the user chose for a recording: checked once, frozen, and kept in the run's config.json."""

import platform
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from .._version import __version__
from ..capture.modules import Rank
from ..errors import UsageError
from ..maths.curvature import CURVATURE
from ..maths.encoding import check as check_encoding
from ..maths.projection import KINDS

AUTO_RANK = re.compile(r"auto:(?P<share>0?\.\d+)(/(?P<most>\d+))?")
MOST_AUTO = 32  # the ceiling of "auto:S": no more coordinates in all than this rank would keep
SEQUENCE_CURVATURE = "empirical/6"  # the default where a sample's loss is a sum over tokens
LOSS_REDUCTIONS = ("mean", "sum", "token-mean", "weights")


class CurvatureForm(NamedTuple):
    """Which curvature rows an occurrence has."""

    kind: str  # "empirical", "sampled" or "exact"
    passes: int  # extra backward passes
    groups: int  # groups of positions, 1: rows are not taken apart

    @property
    def rows(self) -> int:
        """Curvature rows of their own: none where the gradient row is the curvature row."""
        return self.groups * max(1, self.passes) if self.passes or self.groups > 1 else 0

    @property
    def split(self) -> bool:
        """Whether the gradient is the sum of the curvature rows."""
        return self.rows > 0 and not self.passes


class AutoRank(NamedTuple):
    """A rank that the energy of the warm-up chooses."""

    share: float  # of the rows' energy that is to be kept, between 0 and 1
    most: int  # the rank that bounds it


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """The arguments of `record` that decide what the numbers of a run mean."""

    loss_reduction: str
    projection: str = "learned"
    rank: int | tuple[int, int] | Mapping[str, int | tuple[int, int]] | str = 16  # text: "auto:S" or "auto:S/R"
    curvature: str = "empirical"  # or "empirical/K", "sampled:D", "sampled:D/K", "exact:N"
    encoding: str = "float16"
    factored: bool = False
    seed: int = 0
    optimizer_model: str = "auto"
    uncovered: str = "error"
    warmup_steps: int = 20
    warmup_bytes: int = 2 << 30

    def __post_init__(self) -> None:
        _one_of("loss_reduction", self.loss_reduction, LOSS_REDUCTIONS)
        _one_of("projection", self.projection, KINDS)
        check_encoding(self.encoding)
        self.curvature_form()
        if auto_rank(self.rank) is not None and self.projection != "learned":
            raise UsageError(
                f"found rank={self.rank!r} with projection={self.projection!r}; expected projection='learned', the only one that knows "
                "the energy of the gradients. Leave projection= out, or give rank= as a number."
            )
        if self.factored and self.projection == "learned":
            raise UsageError(
                "found factored=True with projection='learned'; expected 'full', 'random' or 'mask': in learned coordinates a row is no "
                "outer product."
            )
        if self.warmup_steps < 1 or self.warmup_bytes < 1:
            raise UsageError("warmup_steps and warmup_bytes must be at least 1.")

    def widths(self) -> Rank | None:
        """The ranks that shapes begin with: None where everything is kept, the ceiling where the warm-up chooses."""
        if self.projection == "full":
            return None
        if isinstance(self.rank, str):
            return _auto(self.rank).most
        return dict(self.rank) if isinstance(self.rank, Mapping) else self.rank

    def curvature_form(self) -> "CurvatureForm":
        """The curvature rows of an occurrence."""
        fits = CURVATURE.fullmatch(self.curvature)
        if not fits:
            raise UsageError(
                f"found curvature={self.curvature!r}; expected 'empirical', 'sampled', 'sampled:D' with D draws, 'exact:N' "
                "with N output entries for each sample (the number of classes), each with '/K' behind it where rows are "
                "to be taken apart by K groups of positions ('empirical/6'); or 'auto'."
            )
        kind, groups = fits[1].partition(":")[0], int(fits["groups"] or 1)
        passes = 0 if kind == "empirical" else int(fits["draws"] or fits["classes"] or 1)
        if groups < 1 or (kind != "empirical" and passes < 1):
            raise UsageError(f"found curvature={self.curvature!r}; expected at least 1 row.")
        return CurvatureForm(kind, passes, groups)

    def as_config(self) -> dict[str, Any]:
        """Plain values for config.json."""
        plain = asdict(self)
        rank = self.rank
        if not self.factored:
            del plain["factored"]  # a run of before it was there is the same
        plain["rank"] = {k: _plain(r) for k, r in rank.items()} if isinstance(rank, Mapping) else _plain(rank)
        return plain


def auto_rank(rank: Any) -> AutoRank | None:
    """What "auto:S" and "auto:S/R" stand for; None where `rank` is no text."""
    return _auto(rank) if isinstance(rank, str) else None


def _auto(rank: str) -> AutoRank:
    fits = AUTO_RANK.fullmatch(rank)
    share, most = (float(fits["share"]), int(fits["most"] or MOST_AUTO)) if fits else (0.0, 0)
    if not share or not most:
        raise UsageError(
            f"found rank={rank!r}; expected a whole number, a pair (out, in), a dict from name patterns to either, or "
            "'auto:S' with the share S of the gradients' energy that is to be kept, between 0 and 1, such as 'auto:0.95'; "
            f"'auto:S/R' keeps at most as much as rank R would ({MOST_AUTO} unless given)."
        )
    return AutoRank(share, most)


def curvature_of(asked: str, loss_reduction: str) -> str:
    """What "auto" stands for."""
    if asked != "auto":
        return asked
    return SEQUENCE_CURVATURE if loss_reduction == "token-mean" else "empirical"


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


def _plain(rank: int | str | tuple[int, int]) -> int | str | list[int]:
    return rank if isinstance(rank, int | str) else list(rank)  # as JSON gives it back: a resumed run compares


def _one_of(name: str, found: str, allowed: tuple[str, ...]) -> None:
    if found not in allowed:
        raise UsageError(f"found {name}={found!r}; expected one of {', '.join(map(repr, allowed))}.")
