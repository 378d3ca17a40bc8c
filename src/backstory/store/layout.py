"""The folder of a run and its `config.json`: what makes a folder a run, and in which format."""

import shutil
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..errors import FormatError, StoreError, UsageError
from ..maths import encoding as enc
from ..maths.encoding import Block
from .files import TEMPORARY, read_json

FORMAT = 1
# rows kept as two factors a matrix; curvature kept for windows of steps; what of it each occurrence's own gradient holds
FACTORS, WINDOWS, OWN = "factors", "windows", "own"
FEATURES = (FACTORS, WINDOWS, OWN)  # what a reader must know beyond the format
FIXED = ("format", "features", "layers", "encoding", "groups", "curvature_rows", "split", "diagonal")
_TABLES = ("rows.lance", "steps.lance", "samples.lance", "batches.lance")
_OURS = (*_TABLES, "recipe.json", "spool", "window", "lock", "damaged", "config.json" + TEMPORARY)


def new_config(
    layers: Sequence[tuple[str, int]],
    encoding: str,
    n_groups: int,
    extra: Mapping[str, Any],
    curvature_rows: int = 0,
    split: bool = False,
    diagonal: bool = False,
    factors: Sequence[tuple[int, int] | None] | None = None,
    windows: bool = False,
    own: bool = False,
) -> dict[str, Any]:
    """The contents of a new run's `config.json`."""
    enc.check(encoding)
    if not layers or any(p < 1 for _, p in layers) or n_groups < 1:
        raise UsageError(
            "a run needs at least one layer, at least one coordinate per layer and at least one parameter group, got "
            f"layers {list(layers)} and {n_groups} groups. Check which parameters are recorded."
        )
    if split and not curvature_rows:
        raise UsageError(
            "a split run sums curvature samples instead of storing gradients, so curvature_rows must be at least 1, got 0."
        )
    if taken := [key for key in FIXED if key in extra]:
        raise UsageError(f"the config must not set {taken}: the store sets these keys itself. Rename them.")
    fixed = {
        "format": FORMAT,
        "features": [*([WINDOWS] if windows else []), *([OWN] if own else [])],
        "layers": layer_table(layers),
        "encoding": encoding,
        "groups": n_groups,
    }
    whole = {**fixed, "curvature_rows": curvature_rows, "split": split, "diagonal": diagonal, **extra}
    return whole if factors is None else with_factors(whole, factors)


def with_factors(config: Mapping[str, Any], factors: Sequence[tuple[int, int] | None]) -> dict[str, Any]:
    """The config of a run that keeps the factors (m, n) of these layers' rows, and no others."""
    plain = [{k: v for k, v in layer.items() if k != "factors"} for layer in config["layers"]]
    table = [x if pair is None else {**x, "factors": list(pair)} for x, pair in zip(plain, factors, strict=True)]
    others = [name for name in config["features"] if name != FACTORS]
    return {**config, "features": [FACTORS, *others] if any(factors) else others, "layers": table}


def with_own(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a run whose occurrences keep their own curvature."""
    others = [name for name in config["features"] if name != OWN]
    return {**config, "features": [*others, OWN]}


def layer_table(layers: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """Where each layer lies in a row."""
    starts = accumulate((int(p) for _, p in layers), initial=0)
    return [{"name": name, "offset": at, "dims": int(p)} for (name, p), at in zip(layers, starts, strict=False)]


def kept_blocks(config: Mapping[str, Any]) -> list[Block]:
    """Numbers of each layer in a row, or (m, n) where its factors are kept."""
    return [tuple(layer["factors"]) if "factors" in layer else int(layer["dims"]) for layer in config["layers"]]


def read_config(folder: Path) -> dict[str, Any]:
    """The checked contents of `config.json`."""
    if not (folder / "config.json").exists():
        what = "is not a run (it has no config.json)" if folder.exists() else "does not exist"
        runs = [str(p.parent) for p in sorted(folder.glob("*/steps.lance")) if (p.parent / "config.json").exists()]
        hint = "Check the path: it must be the folder of a recorded run."
        where = f"Did you mean {' or '.join(runs[:3])}?" if runs else hint
        raise StoreError(f"{folder} {what}. {where}")
    raw = read_json(folder / "config.json")
    if raw.get("format") != FORMAT:
        raise FormatError(
            f"{folder} has format {raw.get('format')!r}, but this version of Backstory reads format {FORMAT}. Open it "
            "with the version that wrote it, or record the run again."
        )
    if missing := [key for key in FIXED if key not in raw]:
        raise FormatError(f"{folder}/config.json is missing {missing}. Restore it from a copy of the run.")
    if unknown := [name for name in raw["features"] if name not in FEATURES]:
        raise FormatError(
            f"{folder} uses {', '.join(map(str, unknown))}, which this version of Backstory cannot read (it supports "
            f"{', '.join(FEATURES)}). Open it with a newer version."
        )
    check_encoding(folder, raw["encoding"])
    return raw


def check_encoding(path: Path, encoding: str) -> None:
    """Raise where numbers are stored in a way that only a newer version knows."""
    if encoding not in enc.DTYPES:
        raise FormatError(
            f"{path} stores numbers as {encoding}, which this version of Backstory cannot read (it supports "
            f"{', '.join(enc.DTYPES)}). Open it with a newer version."
        )


def check_free(folder: Path) -> None:
    """Raise if `folder` is a run, or holds anything that a half-created run would not."""
    if (folder / "config.json").exists():
        raise StoreError(
            f"{folder} already contains a run. Choose another path, delete the folder, or continue that run with "
            "`resume=True` and `start=`, the step that your checkpoint continues from."
        )
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file, not a folder. Choose another path.")
    foreign = [p.name for p in folder.iterdir() if p.name not in _OURS] if folder.exists() else []
    if foreign:
        raise StoreError(
            f"{folder} contains files that do not belong to a run ({', '.join(sorted(foreign)[:3])}). Choose an empty or new folder."
        )


def clear_half_created(folder: Path) -> None:
    """Remove what an interrupted creation left, but the lock."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()
