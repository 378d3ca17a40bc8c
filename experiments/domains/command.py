"""`python -m experiments domains`: what each source of text is worth for each domain, against retraining without it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from backstory.cli import output
from experiments.cli import Cache, Json, Mode, Seeds, app, names_of, seeds_of

Only = Annotated[str | None, typer.Option(help="recorded, paper, tracin, influence, exact; without it, all.")]


@app.command()
def domains(
    mode: Mode = "finetune",
    seeds: Seeds = "0-2",
    methods: Only = None,
    cache: Cache = None,
    plot: Annotated[Path | None, typer.Option(help="Write a page with the matrices, such as domains.html.")] = None,
    json: Json = False,
) -> None:
    """Source × domain: summed influence against retraining without each source, or half of it, on a small GPT."""
    import torch

    from experiments.data.texts import setup_named
    from experiments.domains.page import page
    from experiments.domains.study import study as run

    output.plotting(plot)
    torch.set_num_threads(1)
    with output.progress() as say:
        found = run(setup_named(mode), seeds_of(seeds), only=names_of(methods), cache=cache, say=say)
    if plot is not None:
        plot.write_text(page(found), encoding="utf-8")
    if json:
        output.emit(found)
    else:
        _tables(found)


def _tables(found: Mapping[str, Any]) -> None:
    columns = (
        "method",
        "all cells",
        "without the diagonal",
        "other sources in a domain",
        "best other",
        "signs",
        "large ones",
        "scale",
        "− tracin",
    )
    for part in ("whole", "half"):
        title = (
            f"GPT, {found['setup']['mode']}: Spearman with retraining without {'each source' if part == 'whole' else 'half of each source'}, "
            f"mean of {len(found['seeds'])} seeds and its 95 % bootstrap interval"
        )
        output.table(title, columns, [_line(row["method"], row[part]) for row in found["rows"]])
    for line in found["failed"]:
        output.out.print(f"left out: {line}", soft_wrap=True)


def _line(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    less = row.get("minus_tracin")
    said = f"{name} ({row['chosen'].partition('-')[2]})" if "chosen" in row else name
    shares = [f"{x:.0%}" for x in (row["best_other"], row["all"]["signs"], row["large_signs"])]
    difference = _interval(less["all"]) if less else "–"
    ranks = _bounded(row["all"]), _bounded(row["off"]), f"{row['within']:.3f}"
    return said, *ranks, *shares, f"{row['scale']:.3g}", difference


def _bounded(value: Mapping[str, float]) -> str:
    return f"{value['mean']:.3f} [{value['lower']:.3f}, {value['upper']:.3f}]"


def _interval(value: Mapping[str, float]) -> str:
    return f"{value['mean']:+.3f} [{value['lower']:+.3f}, {value['upper']:+.3f}]"
