"""`backstory inspect`: what a run has, on one screen."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from . import output
from .options import Json, Notes, RunPath

MOST = 6  # items of a list, and parameters, that one screen shows
SETTINGS = ("projection", "rank", "curvature", "encoding", "loss_reduction", "warmup_steps")
USED = ("L2 decay", "decoupled decay", "momentum")  # coefficients that are 0 where they are not used


def inspect(
    run: RunPath,
    verify: Annotated[bool, typer.Option("--verify", help="Check every file against its checksums.")] = False,
    notes: Notes = False,
    json: Json = False,
) -> None:
    """Show a run's contents and check its integrity."""
    from ..run.export import inspect as inspect_run

    contents = inspect_run(run, verify=verify)
    if json:
        output.emit(contents)
    else:
        print_contents(contents, notes)
    if contents.get("damage"):
        raise typer.Exit(1)


def print_contents(contents: Mapping[str, Any], everything: bool) -> None:
    """Print the facts, then the measured quality in one sentence; with everything: all settings and notes instead."""
    output.facts({**_run(contents), **_training(contents), **_recording(contents, everything), **_damage(contents)})
    if (quality := contents.get("quality")) is None:
        output.sentence("The run has no steps yet.")
    else:
        texts = [quality["sentence"], *contents["caveats"], *contents["recording"]["words"]]
        output.notes(quality["sentence"], texts, everything)


def _run(contents: Mapping[str, Any]) -> dict[str, str]:
    from ..results.words import command_on

    run, made = contents["run"], contents["provenance"]
    state = "closed" if run["closed"] else "not closed: still recording, or interrupted"
    waiting = run["warm-up steps waiting"]
    return {
        "Run": f"{run['path']} (format {run['format']}, {state})",
        "Steps": f"{run['steps']:,}" + (f"; {waiting:,} warm-up steps are not projected yet" if waiting else ""),
        "Occurrences": f"{run['occurrences']:,}, {run['bytes per occurrence']:,} bytes each",
        "On disk": f"{run['bytes'] / 1e6:,.1f} MB",
        "Recorded": f"{made.get('began', 'at an unknown time')}, on {made.get('device', 'an unknown device')}",
        "Versions": ", ".join(f"{name} {made[name]}" for name in ("backstory", "torch", "python") if name in made),
        "Checkpoints": _checkpoints(run["checkpoints"], run["steps"]),
        "Embeddings": _some(run["embeddings"], "at step ") or f"none: run `{command_on(run['path'], 'embed')}`",
        "Segments": _some(run["segments"], "steps "),
        "Query sets": _some(run["query sets"]) or "none in the run",
        "Exact results": _some(run["exact results"]),
        "Recipe": run["recipe"] or "none",
    }


def _training(contents: Mapping[str, Any]) -> dict[str, str]:
    optimizer, gradients = contents["optimizer"], contents.get("gradients")
    used = [f"{name} {optimizer[name]}" for name in USED if optimizer.get(name, "0") != "0"]
    words = [str(optimizer["class"]), f"learning rate {optimizer.get('learning rate', 'not known')}", *used]
    if gradients is None:
        return {"Optimizer": ", ".join(words)}
    clipped, covered = gradients["share of steps clipped"], gradients["share of squared norm covered, mean"]
    return {
        "Optimizer": ", ".join(words),
        "Gradients": f"largest norm {gradients['largest norm']:.3g} at step {gradients['at step']:,}; {clipped:.0%} of steps clipped; "
        f"recorded parameters cover {covered:.1%} (squared norm)",
    }  # fmt: skip


def _recording(contents: Mapping[str, Any], everything: bool) -> dict[str, str]:
    settings, parameters = contents["settings"], contents["parameters"]
    names = list(settings) if everything else [name for name in SETTINGS if name in settings]
    sizes = [f"{name} {size.replace('->', '→').removesuffix(' numbers a row')}" for name, size in parameters.items()]
    more = f"; {len(sizes) - MOST:,} more: --notes" if len(sizes) > MOST and not everything else ""
    return {
        "Settings": ", ".join(f"{name} {settings[name]}" for name in names),
        "Parameters": "; ".join(sizes if everything else sizes[:MOST]) + more,
    }


def _damage(contents: Mapping[str, Any]) -> dict[str, str]:
    if "damage" not in contents:
        return {"Integrity": "not checked: pass --verify"}
    return {"Integrity": "; ".join(map(str, contents["damage"])) or "every file matches its checksum"}


def _checkpoints(steps: Sequence[int], end: int) -> str:
    """Where weights are stored; those that were requested lie between the start and the end."""
    return f"{_some(steps)}; {sum(0 < step < end for step in steps):,} between start and end"


def _some(items: Sequence[Any], before: str = "") -> str:
    """The items of a list, of a long one the first and the last."""
    texts = [str(x) for x in items]
    if len(texts) > MOST:
        texts = [*texts[: MOST - 2], "…", texts[-1] + f" ({len(items):,} in all)"]
    return before + ", ".join(texts) if texts else ""
