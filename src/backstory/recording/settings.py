"""The settings of a recording in one frozen object: defaults, checks, and the JSON in the run's config.

    Settings(projection="random", rank=8, curvature="sampled:4/6")

A curvature and a rank that the gradients choose have a short form as text, which is also what the config holds:

    "empirical/6"       Empirical(position_groups=6)             "auto:0.95"      AutoRank(share=0.95)
    "sampled:4/6"       Sampled(draws=4, position_groups=6)      "auto:0.95/16"   AutoRank(share=0.95, most=16)
    "exact:10"          Exact(outputs=10)
    "ggn:1"             GaussNewton(passes=1)
"""

import math
import platform
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, ClassVar

import torch

from .._version import __version__
from ..capture.modules import UNCOVERED, Rank, Selection
from ..errors import UsageError, check_one_of
from ..maths.curvature import CURVATURE
from ..maths.encoding import check as check_encoding
from ..maths.projection import KINDS
from ..maths.windows import Grid

AUTO_RANK = re.compile(r"auto:(?P<share>0?\.\d+)(/(?P<most>\d+))?")
MOST_AUTO = 32  # the ceiling of "auto:S": no more coordinates in all than this rank would keep
CURVATURE_OF = ("auto", "windows", "steps")
REST_RANK = 64  # directions of a window that are kept where each occurrence keeps its own curvature
SEEN = 4  # there one in so many steps is seen, at most
LOSS_REDUCTIONS = ("mean", "sum", "token-mean", "weights")


@dataclass(frozen=True, kw_only=True)
class Curvature:
    """The curvature samples per occurrence: create an `Empirical`, `Sampled` or `Exact`, or `parse` a short form."""

    position_groups: int = 1  # groups that a sequence's positions are taken apart into; 1: they are not
    kind: ClassVar[str]

    def __post_init__(self) -> None:
        if self.position_groups < 1 or (self.kind != "empirical" and self.passes < 1):
            raise UsageError(
                f"curvature needs at least 1 draw or output entry and 1 position group, got {str(self)!r}."
            )

    @staticmethod
    def parse(text: str) -> "Curvature":
        """What a short form such as "sampled:4/6" stands for."""
        fits = CURVATURE.fullmatch(text)
        if not fits:
            raise UsageError(
                "curvature must be 'auto', 'ggn', 'ggn:K' with K passes in some steps, 'empirical', 'sampled', 'sampled:D' with D draws, or 'exact:N' with N "
                f"output entries per sample (the number of classes), got {text!r}. Append '/K' to split each "
                "sequence into K position groups ('empirical/6')."
            )
        groups = int(fits["groups"] or 1)
        if fits["passes"] is not None and groups == 1:
            return GaussNewton(seeds=int(fits["passes"]))
        if fits["passes"] is not None:
            raise UsageError(
                f"curvature={text!r}: the Gauss-Newton matrix by windows takes no position groups. Use 'ggn:K'."
            )
        if fits["classes"] is not None:
            return Exact(outputs=int(fits["classes"]), position_groups=groups)
        if fits[1].startswith("sampled"):
            return Sampled(draws=int(fits["draws"] or 1), position_groups=groups)
        return Empirical(position_groups=groups)

    def __str__(self) -> str:
        """The short form."""
        passes = f":{self.passes}" if self.kind != "empirical" else ""
        return f"{self.kind}{passes}" + (f"/{self.position_groups}" if self.position_groups != 1 else "")

    @property
    def passes(self) -> int:
        """Extra backward passes of a step."""
        return 0

    @property
    def rows(self) -> int:
        """Curvature rows beside the gradient row: none where that is the curvature row."""
        return self.position_groups * max(1, self.passes) if self.passes or self.position_groups > 1 else 0

    @property
    def split(self) -> bool:
        """Whether the gradient is the sum of the curvature rows."""
        return self.rows > 0 and not self.passes

    @property
    def wanted(self) -> tuple[int, int, int]:
        """The fewest steps of a window, the most windows of a run whose length is known, and how many rows a window is made of."""
        return 40, 32, 3840

    def grid(self, batch: float, steps: int | None, *, rank: int, share: float) -> Grid:
        """The windows of a run with so many samples in a step, of a `share` of the rows that are wanted."""
        fewest, most, rows = self.wanted
        seen = max(1, math.ceil(share * rows / max(1, batch * max(1, self.rows))))
        return Grid(max(fewest, math.ceil((steps or 0) / most)), not steps, seen, rank)

    @property
    def own(self) -> bool:
        """Whether each occurrence keeps how much of its curvature its own gradient holds."""
        return False


@dataclass(frozen=True, kw_only=True)
class Empirical(Curvature):
    """The empirical Fisher, from the gradient rows alone: no extra backward pass."""

    kind: ClassVar[str] = "empirical"


@dataclass(frozen=True, kw_only=True)
class Sampled(Curvature):
    """The Fisher from labels drawn from the model's predictions: one more backward pass for each draw."""

    draws: int = 1
    kind: ClassVar[str] = "sampled"

    @property
    def wanted(self) -> tuple[int, int, int]:
        """Fewer and longer windows: few draws of many samples."""
        return (40, 32, 3840) if self.position_groups > 1 else (50, 8, 3000)

    @property
    def passes(self) -> int:
        """One for each draw."""
        return self.draws


@dataclass(frozen=True, kw_only=True)
class Exact(Curvature):
    """The exact Gauss-Newton matrix: one more backward pass for each output entry of a sample."""

    outputs: int
    kind: ClassVar[str] = "exact"

    @property
    def wanted(self) -> tuple[int, int, int]:
        """About 750 samples with all their output entries."""
        return 50, 8, 750 * self.outputs

    @property
    def passes(self) -> int:
        """One for each output entry."""
        return self.outputs


@dataclass(frozen=True, kw_only=True)
class GaussNewton(Curvature):
    """The Gauss-Newton matrix: of each occurrence what its own gradient holds of it, and the rest by windows (`maths.gauss_newton`)."""

    seeds: int = 1  # backward passes of a seen step
    kind: ClassVar[str] = "ggn"

    @property
    def wanted(self) -> tuple[int, int, int]:
        """Few windows: the rest changes slowly, and about 750 samples tell its leading directions."""
        return 50, 4, 750 * self.seeds

    @property
    def passes(self) -> int:
        """Of a seen step."""
        return self.seeds

    @property
    def own(self) -> bool:
        """One number of each occurrence."""
        return True

    def grid(self, batch: float, steps: int | None, *, rank: int, share: float) -> Grid:
        """At most every fourth step is seen where `share` is 1; fewer directions, for a rest is small."""
        usual = super().grid(batch, steps, rank=min(rank, REST_RANK), share=share)
        return usual._replace(seen=min(usual.seen, max(1, round(share * usual.first / SEEN))))


# what "auto" and "ggn" stand for where a sample's loss is a sum over tokens
SEQUENCE_CURVATURE: dict[str, Curvature] = {
    "auto": Empirical(position_groups=6),
    "ggn": Sampled(draws=2, position_groups=6),
}


@dataclass(frozen=True, kw_only=True)
class AutoRank:
    """A rank chosen during warm-up by retained gradient energy."""

    share: float  # of the gradient energy to retain, between 0 and 1
    most: int = MOST_AUTO  # the rank that bounds it

    def __post_init__(self) -> None:
        if not 0 < self.share < 1 or self.most < 1:
            raise _not_a_rank(self)

    @staticmethod
    def parse(text: str) -> "AutoRank":
        """What a short form such as "auto:0.95/16" stands for."""
        fits = AUTO_RANK.fullmatch(text)
        if fits and float(fits["share"]) and fits["most"] != "0":
            return AutoRank(share=float(fits["share"]), most=int(fits["most"] or MOST_AUTO))
        raise _not_a_rank(text)

    def __str__(self) -> str:
        """The short form."""
        return f"auto:{self.share!r}" + (f"/{self.most}" if self.most != MOST_AUTO else "")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is recorded: accuracy and cost.

    `projection` is "learned", "random", "mask" or "full". `rank` is an integer, a pair (out, in), a dict from name patterns to
    either, or "auto:S": as many dimensions as retain a share S of the gradient energy during warm-up, capped at the size of
    rank 32 ("auto:S/R": rank R). `curvature` is "empirical" (empirical Fisher, free), "sampled:D" (sampled Fisher, D draws: D extra
    backward passes, needs `s.outputs`) or "exact:N" (exact GGN, N passes, one per class). A suffix "/K" splits each sequence's
    positions into K position groups. "auto" is "empirical/6" for token-mean losses. For other losses it is "ggn:1" where the first step
    shows at most 32 outputs per sample that go into a cross-entropy or BCE, and "empirical" elsewhere. "ggn:K" is the Gauss-Newton matrix:
    what each sample's gradient holds of it at no cost, and the rest by windows, from K extra backward passes in at most every fourth step.
    "ggn" is two draws for token-mean losses (needs `s.outputs`), otherwise "ggn:1", and an error where "auto" would fall back. With
    `curvature_of="windows"`, the default of a learned projection, the steps of a window share the mean of their curvature samples; with
    "steps" every occurrence keeps its own. `encoding` is "int8" for a learned
    projection, otherwise "float16". `layers` includes names
    and types, and excludes names that begin with "!"; a module's name covers everything below it. Parameters that no layer rule covers are
    recorded by repeating their module's calls (`uncovered="general"`), left out ("skip"), or refused ("error"). `batch_dim` is the dimension
    that holds the samples, where the model's layers do not have the batch first; None finds it. `optimizer_model="sgd"` treats any optimizer's steps as plain SGD. A learned
    projection is computed from the first `warmup_steps` steps, or as many as fit into `warmup_bytes`, and has at most `most_dims`
    coordinates (None: as many as the rank gives). Of a window's curvature `window_rank` directions are kept, made of `window_rows` times as
    many rows as by default.
    """

    projection: str = "learned"
    rank: int | tuple[int, int] | Mapping[str, int | tuple[int, int]] | AutoRank | str = 32
    curvature: Curvature | str = "auto"
    curvature_of: str = "auto"
    layers: Selection | None = None
    uncovered: str = "general"
    batch_dim: int | None = None
    encoding: str = "auto"
    seed: int = 0
    optimizer_model: str = "auto"
    warmup_steps: int = 8
    warmup_bytes: int = 2 << 30
    most_dims: int | None = 12_000
    window_rank: int = 512
    window_rows: float = 1.0

    def __post_init__(self) -> None:
        check_one_of("projection", self.projection, KINDS)
        check_one_of("uncovered", self.uncovered, UNCOVERED)
        check_one_of("curvature_of", self.curvature_of, CURVATURE_OF)
        if self.encoding != "auto":
            check_encoding(self.encoding)
        if self.curvature not in SEQUENCE_CURVATURE:
            object.__setattr__(self, "curvature", str(self.form))
        if (auto := self.auto_rank) is not None:
            object.__setattr__(self, "rank", str(auto))
            if self.projection != "learned":
                raise UsageError(
                    f"rank={self.rank!r} needs projection='learned', the only one that measures gradient energy, got "
                    f"projection={self.projection!r}. Leave projection= out, or give rank= as a number."
                )
        sizes = {name: getattr(self, name) for name in ("warmup_steps", "warmup_bytes", "most_dims", "window_rank")}
        if small := [f"{name}={value}" for name, value in sizes.items() if value is not None and value < 1]:
            raise UsageError(f"{', '.join(sizes)} must be at least 1, got {', '.join(small)}.")
        if self.batch_dim not in (None, 0, 1):
            raise UsageError(f"batch_dim must be 0, 1 or None (to find it), got {self.batch_dim!r}.")
        if not self.window_rows > 0:
            raise UsageError(f"window_rows must be more than 0, got {self.window_rows}.")

    @property
    def form(self) -> Curvature:
        """The curvature samples of an occurrence; those of its gradient where it is "auto" or "ggn", which the first step decides on."""
        if isinstance(self.curvature, str) and self.curvature in SEQUENCE_CURVATURE:
            return Empirical()
        return self.curvature if isinstance(self.curvature, Curvature) else Curvature.parse(self.curvature)

    @property
    def auto_rank(self) -> AutoRank | None:
        """The rank that the warm-up chooses; None where it is given."""
        return auto_rank(self.rank)

    def widths(self) -> Rank | None:
        """The ranks that shapes begin with: None where everything is kept, the ceiling where the warm-up chooses."""
        if self.projection == "full":
            return None
        if (auto := self.auto_rank) is not None:
            return auto.most
        assert not isinstance(self.rank, AutoRank | str)
        return dict(self.rank) if isinstance(self.rank, Mapping) else self.rank

    @property
    def windows(self) -> bool:
        """Whether the steps of a window share their curvature."""
        return self.curvature_of == "windows"

    @property
    def bound(self) -> int | None:
        """The most coordinates of a row; a projection that is not learned has what its rank gives."""
        return self.most_dims if self.projection == "learned" else None

    def resolved(self, loss_reduction: str) -> "Settings":
        """With what "auto" stands for where the losses of samples are combined in this way."""
        check_one_of("loss_reduction", loss_reduction, LOSS_REDUCTIONS)
        sequences = loss_reduction == "token-mean"
        learned, curvature = self.projection == "learned", self.curvature
        by = ("windows" if learned else "steps") if self.curvature_of == "auto" else self.curvature_of
        encoding = ("int8" if learned else "float16") if self.encoding == "auto" else self.encoding
        if self.is_open and (sequences or by == "steps"):
            if self.must_show and not sequences:
                raise UsageError(
                    f"curvature={curvature!r} needs curvature by windows. Record with projection='learned', or choose 'sampled:D' or 'exact:N'."
                )
            if sequences and curvature not in SEQUENCE_CURVATURE:
                raise UsageError(
                    f"curvature={curvature!r} is for samples with few outputs, and loss_reduction='token-mean' says that they are sequences. "
                    "Record with curvature='ggn' or 'sampled:D/K'."
                )
            curvature = SEQUENCE_CURVATURE[str(curvature)] if sequences else Empirical()
        return replace(self, curvature=curvature, curvature_of=by, encoding=encoding)

    @property
    def is_open(self) -> bool:
        """Whether the curvature is "auto", "ggn" or "ggn:K": once resolved, that the first step decides on it."""
        return self.curvature in SEQUENCE_CURVATURE or self.form.own

    @property
    def open_form(self) -> Curvature:
        """What the first step decides for, where it shows a loss that has a Gauss-Newton matrix."""
        return self.form if self.form.own else GaussNewton()

    @property
    def must_show(self) -> bool:
        """Whether it is an error where the first step shows no such loss."""
        return self.is_open and self.curvature != "auto"

    def as_config(self) -> dict[str, Any]:
        """Plain values for config.json; the chosen layers are in its table of layers."""
        plain, rank = {name: getattr(self, name) for name in NAMES if name != "layers"}, self.rank
        plain["rank"] = {k: _plain(r) for k, r in rank.items()} if isinstance(rank, Mapping) else _plain(rank)
        return plain


NAMES = tuple(field.name for field in fields(Settings))


# settings by name: how much a recording may cost, for how good results
PRESETS: dict[str, dict[str, Any]] = {
    "fast": {"rank": 16, "warmup_steps": 4, "window_rank": 256, "window_rows": 0.5},
    "default": {},
    "best": {"curvature": "ggn", "window_rows": 2.0},
}


def settings_of(settings: Settings | None, short: Mapping[str, Any], preset: str | None = None) -> Settings:
    """`settings`, or those of a preset, or the defaults, with those of its fields that were given by name."""
    if preset is not None:
        check_one_of("preset", preset, PRESETS)
        if settings is not None:
            raise UsageError(
                "preset= and settings= cannot be combined. Leave one of them out; single settings can be given by name."
            )
        settings = Settings(**PRESETS[preset])
    if unknown := [name for name in short if name not in NAMES]:
        close = get_close_matches(unknown[0], NAMES, 3)
        raise UsageError(
            f"{unknown[0]}= is not a recording setting. "
            + (f"Did you mean: {', '.join(close)}?" if close else f"Settings are {', '.join(NAMES)}.")
        )
    if not isinstance(settings, Settings | None):
        raise UsageError(f"settings must be a backstory.Settings(...), got {type(settings).__name__}.")
    return replace(settings or Settings(), **short)


def auto_rank(rank: Any) -> AutoRank | None:
    """What "auto:S" and "auto:S/R" stand for; None where `rank` is given in numbers."""
    return AutoRank.parse(rank) if isinstance(rank, str) else rank if isinstance(rank, AutoRank) else None


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


def _plain(rank: Any) -> int | str | list[int]:
    return rank if isinstance(rank, int | str) else list(rank)  # as JSON gives it back: a resumed run compares


def _not_a_rank(rank: Any) -> UsageError:
    return UsageError(
        "rank must be an integer, a pair (out, in), a dict from name patterns to either, or 'auto:S' (such as "
        f"'auto:0.95') to retain a share S of the gradient energy, 0 < S < 1, got {rank!r}. 'auto:S/R' caps the "
        f"projection at the size of rank R (default {MOST_AUTO})."
    )
