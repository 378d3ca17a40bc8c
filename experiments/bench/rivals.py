"""Rivals in virtual environments of their own, each one script of `peers` run there on the same workloads.

An environment is made once, with the torch of this one; the scripts are copied to a scratch folder, where the rival may
leave what it likes. A rival that does not install, run or end in time is a line with the reason.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from backstory.errors import UsageError
from experiments.bench.children import last_line
from experiments.bench.recording import Say, quiet

HERE = Path(__file__).parent
INSTALL_SECONDS, RUN_SECONDS = 900.0, 900.0
Pip = tuple[str, ...]  # arguments of one `pip install`


class Rival(NamedTuple):
    """How to install and run one rival."""

    name: str
    script: str  # a module of `peers`
    environment: str
    install: tuple[Pip, ...]
    left_out: Mapping[str, str] = MappingProxyType({})  # workload -> why it is not run there


_TORCH = f"torch=={torch.__version__.partition('+')[0]}"
_DATTRI = ((_TORCH, "dattri"),)
_BERGSON = ("accelerate", "datasets", "jaxtyping", "ml_dtypes", "natsort", "scipy", "peft>=0.17", "petname", "pyarrow")
_NO_MARGIN = "its margins are of classifiers, and it draws its dense projection of all parameters anew for each batch"
RIVALS = (
    Rival("dattri DVEmb", "dattri_dvemb", "dattri", _DATTRI),
    Rival("dattri LoGRA", "dattri_logra", "dattri", _DATTRI),
    Rival("LogIX", "logix_logra", "logix", (
        (_TORCH, "numpy", "einops", "pyyaml", "tqdm"), ("--no-deps", "--ignore-requires-python", "logix-ai"),
    )),
    Rival("bergson", "bergson_index", "bergson", (
        (_TORCH, *_BERGSON, "pyyaml", "simple-parsing", "torchopt", "transformers>=5"), ("--no-deps", "bergson"),
    )),
    Rival("kronfluence", "kronfluence_ekfac", "kronfluence", (
        (_TORCH, "accelerate", "safetensors", "tqdm", "datasets", "scikit-learn"),
        ("--no-deps", "kronfluence", "einconv", "einops", "opt_einsum"),
    )),
    Rival("traker", "traker_trak", "traker", ((_TORCH, "numpy", "tqdm"), ("--no-deps", "traker")), {"B": _NO_MARGIN}),
    Rival("Opacus", "opacus_samples", "opacus", ((_TORCH, "numpy", "scipy", "opt_einsum"), ("--no-deps", "opacus"))),
)  # fmt: skip


class Failed(Exception):
    """Why a rival has no figures."""


def named(names: str) -> Sequence[Rival]:
    """The rivals of these names, with commas."""
    known = {rival.name: rival for rival in RIVALS}
    if odd := [name for name in names.split(",") if name not in known]:
        raise UsageError(f"there is no rival {odd[0]!r}. Name some of {', '.join(known)}.")
    return [known[name] for name in names.split(",")]


def bench_rivals(
    venvs: Path, *, scale: str = "full", rivals: Sequence[Rival] = RIVALS, workloads: str = "AB", say: Say = quiet
) -> list[dict[str, Any]]:
    """One line for each rival and workload: its figures, or why there are none."""
    lines = []
    for rival in rivals:
        for workload in workloads:
            say(f"peers: {rival.name} on {workload}")
            lines.append({"rival": rival.name, "workload": workload, **_figures(venvs, rival, workload, scale)})
    return lines


def _figures(venvs: Path, rival: Rival, workload: str, scale: str) -> dict[str, Any]:
    if workload in rival.left_out:
        return {"failed": f"not run: {rival.left_out[workload]}"}
    try:
        return with_ratios(run_script(environment(venvs, rival), rival.script, workload, scale))
    except Failed as reason:
        return {"failed": str(reason)}


def with_ratios(result: dict[str, Any]) -> dict[str, Any]:
    """Recording and index beside plain training of the same steps."""
    out = dict(result)
    for part in ("record", "index"):
        if f"{part}_s" in result:
            out[f"{part}_over_plain"] = result[f"{part}_s"] / result["plain_s"]
    return out


def environment(venvs: Path, rival: Rival) -> Path:
    """The python of the rival's environment, made where it is missing."""
    folder = (venvs / rival.environment).absolute()
    python = folder / "bin" / "python"
    if (folder / "ready").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    _call([sys.executable, "-m", "venv", str(folder)], "making its environment", INSTALL_SECONDS)
    for arguments in rival.install:
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
        _call(command, f"installing {arguments[-1]}", INSTALL_SECONDS)
    (folder / "ready").touch()
    return python


def run_script(python: Path, script: str, workload: str, scale: str) -> dict[str, Any]:
    """What the script's last line says."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "experiments" / "bench"  # as the scripts import each other
        shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns("__pycache__"))
        command = [str(python), "-W", "ignore", "-m", f"experiments.bench.peers.{script}"]
        text = _call([*command, "--workload", workload, "--scale", scale], "running", RUN_SECONDS, cwd=scratch)
    try:
        figures: dict[str, Any] = json.loads(last_line_of(text))
    except ValueError as error:
        raise Failed(f"running: its last line is no JSON ({last_line(text)})") from error
    return figures


def last_line_of(text: str) -> str:
    """The last line, whole."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def _call(command: Sequence[str], what: str, seconds: float, cwd: str | None = None) -> str:
    ready = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TQDM_DISABLE": "1", "PYTHONPATH": cwd or ""}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=ready, cwd=cwd, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{what}: not done after {seconds:.0f} s") from error
    except OSError as error:
        raise Failed(f"{what}: {error}") from error
    if done.returncode:
        raise Failed(f"{what}: {last_line(done.stderr)}")
    return done.stdout
