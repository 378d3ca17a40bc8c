"""`backstory study`: the paper's experiments and ours, as commands.

Knows nothing of how anything is computed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from . import show

app = typer.Typer(help="Compare attribution methods with retraining; one thread, all from seeds.", no_args_is_help=True)
KINDS = ("single", "all")
AGAINST = "single_against_paper"
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object last.")]


@app.callback()
def root() -> None:
    """Compare attribution methods with retraining; one thread, all from seeds."""


@app.command()
def fidelity(
    setup: Annotated[str, typer.Option(help="gelu, paper-mlp, paper-mlp-10, paper-cnn or tiny.")] = "gelu",
    seeds: Annotated[str, typer.Option(help="Such as 0-4, or 0,2,5: data, start, order and removals.")] = "0-4",
    removals: Annotated[int, typer.Option(help="Samples to remove, for each seed.", min=2)] = 100,
    methods: Annotated[str | None, typer.Option(help="Names of rows, with commas; without it, all.")] = None,
    images: Annotated[int | None, typer.Option(help="Train on fewer images than the set-up says.", min=2)] = None,
    epochs: Annotated[int | None, typer.Option(help="Other than the set-up says.", min=1)] = None,
    cache: Annotated[Path | None, typer.Option(help="Folder for the retrained results, to go on from.")] = None,
    json: Json = False,
) -> None:
    """Rank correlation of every method's scores with retraining, and the ceiling."""
    import torch

    from ..studies.fidelity import study
    from ..studies.fidelity_setups import setup_named

    torch.set_num_threads(1)
    chosen = setup_named(setup, images, epochs)
    names = None if methods is None else [m.strip() for m in methods.split(",")]
    with show.progress() as say:
        found = study(chosen, _seeds(seeds), count=removals, only=names, cache=cache, say=say)
    if json:
        show.emit(found)
    else:
        _table(setup, found)


def _seeds(text: str) -> list[int]:
    """ "0-4" or "0,2,5" as numbers."""
    try:
        parts = [[int(x) for x in part.split("-")] for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"found seeds {text!r}; expected such as 0-4, or 0,2,5.") from None
    return list(dict.fromkeys(s for part in parts for s in range(part[0], part[-1] + 1)))


def _table(setup: str, found: Mapping[str, Any]) -> None:
    """Correlations, differences, and last the cost: the one table whose seconds differ from time to time."""
    top, rows = found["ceiling"], found["rows"]
    title = f"{setup}: Spearman with retraining, mean of {len(found['seeds'])} seeds, {found['removals']} removals each"
    lines = [("exact unrolling (ceiling)", "full", "Hessian", "sgd", _r(top["single"]), _r(top["all"]))]
    what = ("method", "subspace", "curvature", "optimizer_model")
    lines += [(*(r[k] for k in what), _r(r["single"]), _r(r["all"])) for r in rows]
    show.table(title, ("method", "subspace", "curvature", "optimizer", "single", "all"), lines)
    against = [
        (r["method"], "paper", *(_interval(r[f"{k}_against_paper"]) for k in KINDS)) for r in rows if AGAINST in r
    ]
    against += [(c["method"], c["against"], *(_interval(c[k]) for k in KINDS)) for c in found["contrasts"]]
    if against:
        show.table("Differences and their 95 % paired bootstrap intervals", ("method", "minus", *KINDS), against)
    cost = [(r["method"], f"{r['seconds']:.1f}", f"{r['store_bytes'] / 1e6:.1f}") for r in rows]
    show.table("Cost, mean of the seeds", ("method", "seconds", "MB"), cost)
    for line in found["skipped"]:
        show.out.print(f"left out: {line}", soft_wrap=True)


def _r(value: float) -> str:
    return f"{value:.3f}"


def _interval(value: Mapping[str, float]) -> str:
    return f"{value['mean']:+.3f} [{value['lower']:+.3f}, {value['upper']:+.3f}]"
