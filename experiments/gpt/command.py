"""`python -m experiments gpt, projection, checkpoints`: a small GPT on four domains of text, fine-tuned or from scratch."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from backstory.cli import output
from experiments import tables
from experiments.cli import (
    Cache,
    Json,
    Markdown,
    Methods,
    Mode,
    Seeds,
    Sequences,
    app,
    begin,
    finish,
    names_of,
    numbers_of,
    seeds_of,
    words_of,
)

Result = Mapping[str, Any]
PARTS = ("early", "middle", "late")
EXACT = ("row", "rank, whole run", "rank, early / middle / late", "size, early / middle / late")


@app.command()
def gpt(
    mode: Mode = "finetune",
    seeds: Seeds = "0-2",
    removals: Sequences = 40,
    methods: Methods = None,
    cache: Cache = None,
    markdown: Markdown = None,
    json: Json = False,
) -> None:
    """Rank correlation of every method's scores with retraining on a small GPT, and the ceiling."""
    from experiments.gpt.setups import setup_named
    from experiments.gpt.study import study

    begin(markdown=markdown)
    with output.progress() as say:
        result = study(
            setup_named(mode), seeds_of(seeds), count=removals, only=names_of(methods), cache=cache, say=say
        )  # fmt: skip
    finish(result, print_tables, json=json, files={markdown: as_markdown})


@app.command()
def projection(
    mode: Mode = "finetune",
    seeds: Seeds = "0-2",
    ranks: Annotated[str, typer.Option(help="Of both sides of every layer; the largest is the reference.")] = (
        "16,32,48,64"
    ),
    curvature: Annotated[str, typer.Option(help="As in record.")] = "auto",
    removals: Sequences = 40,
    cache: Cache = None,
    json: Json = False,
) -> None:
    """Random projections against the largest one and against retraining, beside those of LoGRA."""
    from experiments.gpt.projection import study
    from experiments.gpt.setups import setup_named

    begin()
    chosen = numbers_of(ranks)
    with output.progress() as say:
        result = study(
            setup_named(mode), seeds_of(seeds), ranks=chosen, curvature=curvature, count=removals, cache=cache, say=say
        )  # fmt: skip
    finish(result, print_projection, json=json)


@app.command()
def checkpoints(
    mode: Mode = "finetune",
    seeds: Seeds = "0-2",
    numbers: Annotated[str, typer.Option(help="Of checkpoints, with commas; all: one after every step.")] = "5,20,all",
    removals: Sequences = 40,
    rank: Annotated[int, typer.Option(help="Of the learned projection.", min=1)] = 16,
    cache: Cache = None,
    json: Json = False,
) -> None:
    """Rank correlation with retraining of runs made from checkpoints, beside the recorded run, on a small GPT."""
    from experiments.gpt.checkpoints import study
    from experiments.gpt.setups import setup_named

    begin()
    chosen = _checkpoints(numbers)
    with output.progress() as say:
        result = study(
            setup_named(mode), seeds_of(seeds), numbers=chosen, count=removals, rank=rank, cache=cache, say=say
        )  # fmt: skip
    finish(result, print_checkpoints, json=json)


def print_tables(result: Result) -> None:
    """Correlations, differences, and last the cost: the one table whose seconds differ from time to time."""
    top, rows = result["ceiling"], result["rows"]
    title = (
        f"GPT, {result['setup']['mode']}: Spearman with retraining, mean of four domains and of {len(result['seeds'])} "
        f"seeds and its 95 % bootstrap interval, {result['removals']} removals each"
    )
    columns = ("method", "projection", "curvature", "groups", "optimizer", "dims", "mean", "each seed")
    keys = ("projection", "curvature", "groups", "optimizer_model")
    lines: list[tuple[Any, ...]] = [("exact unrolling (ceiling)", "full", "Hessian", "", "adamw", "", *_agreement(top))]
    lines += [(_name(r), *(r[k] for k in keys), f"{r['dims']:,}", *_agreement(r)) for r in rows]
    output.table(title, columns, lines)
    against = [(_name(r), tables.signed(r["against_paper"])) for r in rows if r["against_paper"]]
    against += [(f"{c['method']} − {c['against']}", tables.signed(c)) for c in result["contrasts"]]
    if against:
        title = "Minus the paper (or another row), with 95 % paired bootstrap intervals"
        output.table(title, ("method", "difference"), against)
    output.table("With exact unrolling over all occurrences, by thirds of the run", EXACT, _against_exact(result))
    output.table("With retraining, by thirds of the run", ("method", *PARTS), _retrained(result))
    number = tables.number
    cost = [
        (_name(r), number(r["recording_ratio"], ".1f"), number(r["bytes_per_occurrence"], ",.0f"), f"{r['seconds']:.1f}")
        for r in rows
    ]  # fmt: skip
    names = ("method", "training, × plain", "bytes per occurrence", "seconds to query")
    output.table("Cost, mean of the seeds", names, cost)
    tables.left_out(result["failed"])


def _against_exact(result: Result) -> list[tuple[str, ...]]:
    """Of each row that scores occurrences: rank correlation with exact unrolling, and size relative to it."""
    rows = [row for row in result["rows"] if row["against_exact"]]
    return [
        (row["method"], _by_part(row["against_exact"], ("all",)), _by_part(row["against_exact"]), _by_part(row["size_against_exact"]))
        for row in rows
    ]  # fmt: skip


def _by_part(values: Mapping[str, float | None], parts: tuple[str, ...] = PARTS) -> str:
    return " / ".join(tables.number(values[part], ".2f") for part in parts)


def _retrained(result: Result) -> list[tuple[str, ...]]:
    """Of each row: agreement over the removals of each third, with its interval."""
    rows = [{"method": "exact unrolling", **result["ceiling"]}, *result["rows"]]
    return [(row["method"], *(_interval(row["thirds"][part]) for part in PARTS)) for row in rows]


def _interval(value: Result | None) -> str:
    return tables.DASH if value is None else tables.bounded(value["mean"], value["interval"])


def _name(row: Result) -> str:
    return f"{row['method']} (what record does by itself)" if row["default"] else str(row["method"])


def _agreement(row: Result) -> tuple[str, str]:
    return tables.bounded(row["mean"], row["interval"]), tables.each(row["seeds"])


def as_markdown(result: Result) -> str:
    """Agreement, difference to the paper's method, and cost, on one line each; then other differences, and thirds of the run."""
    top, seeds = result["ceiling"], ", ".join(map(str, result["seeds"]))
    columns = (
        "row",
        "form",
        "dimensions",
        "mean",
        f"seeds {seeds}",
        "− paper",
        "recording",
        "an occurrence",
        "s to query",
    )
    best = ("exact unrolling: **ceiling**", "–", "–", f"{top['mean']:.3f}", tables.each(top["seeds"]), *"––––")
    parts = [tables.markdown(columns, [best, *map(_line, result["rows"])])]
    if result["contrasts"]:
        lines = [(f"`{c['method']}` − `{c['against']}`", tables.signed(c)) for c in result["contrasts"]]
        parts.append(tables.markdown(("difference", "mean"), lines))
    parts.append(tables.markdown(EXACT, _ticked(_against_exact(result))))
    parts.append(tables.markdown(("row", *PARTS), _ticked(_retrained(result))))
    if result["failed"]:
        parts.append("Left out: " + "; ".join(result["failed"]) + ".")
    return "\n\n".join(parts) + "\n"


def _ticked(lines: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Lines whose first cell is code, but for exact unrolling's."""
    return [(name if " " in name else f"`{name}`", *cells) for name, *cells in lines]


def _line(row: Result) -> tuple[str, ...]:
    name = f"`{row['method']}`" + (" (**the default**)" if row["default"] else "")
    ratio, size = row["recording_ratio"], row["bytes_per_occurrence"]
    agreement = f"{row['mean']:.3f}", tables.each(row["seeds"]), tables.signed(row["against_paper"])
    cost = "–" if ratio is None else f"{ratio:.1f} ×", "–" if size is None else f"{size / 1000:.0f} kB"
    return name, row["optimizer_model"], f"{row['dims']:,}", *agreement, *cost, f"{row['seconds']:.1f}"


def print_projection(result: Result) -> None:
    """One line for each method and rank."""
    title = (
        f"GPT, {result['setup']['mode']}, random projections: Spearman with the largest one over all occurrences, and with "
        f"retraining over {result['removals']} removals, mean of {len(result['seeds'])} seeds"
    )
    lines = [
        (r["method"], f"{r['rank']}×{r['rank']}", f"{r['dims_per_layer']:,}", f"{r['dims']:,}", f"{r['largest']:.3f}",
         tables.bounded(r["truth"], r["truth_interval"]), tables.each(r["truth_seeds"]))
        for r in result["rows"]
    ]  # fmt: skip
    columns = ("method", "random", "dims a layer, at most", "dims", "with the largest", "with retraining", "each seed")
    output.table(title, columns, lines)


def _checkpoints(text: str) -> list[int | None]:
    words = words_of(text)
    if not words or not all(word == "all" or (word.isdigit() and int(word)) for word in words):
        raise typer.BadParameter(f"--numbers must be comma-separated numbers or all, such as 5,20,all, got {text!r}.")
    return [None if word == "all" else int(word) for word in words]


def print_checkpoints(result: Result) -> None:
    """One line for each way to have the run."""
    title = (
        f"GPT, {result['mode']}: Spearman with retraining, mean of four domains and of {len(result['seeds'])} seeds, "
        f"{result['removals']} removals each, learned {result['rank']}×{result['rank']}"
    )
    columns = ("checkpoints", "rows from", "Adam's second moment", "mean", "each seed")
    output.table(title, columns, [_checkpoints_line(row, result["steps"]) for row in result["rows"]])


def _checkpoints_line(row: Result, steps: int) -> tuple[str, ...]:
    scores = f"{row['mean']:.3f}", tables.each(row["each"])
    if row["checkpoints"] is None:
        return "–", "the recorded run", "as it was", *scores
    number = "all" if row["checkpoints"] == steps else str(row["checkpoints"])
    where = f"the checkpoint {row['nearest']} the step"
    return number, where, "of the checkpoint" if row["moments"] else "estimated", *scores
