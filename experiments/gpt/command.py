"""`python -m experiments gpt, projection`: a small GPT on four domains of text, fine-tuned or from scratch."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from backstory.cli import output
from experiments.cli import Cache, Json, Markdown, Methods, Mode, Seeds, Sequences, app, names_of, seeds_of


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
    import torch

    from experiments.gpt.setups import setup_named
    from experiments.gpt.study import study as run
    from experiments.gpt.text import markdown as as_markdown

    torch.set_num_threads(1)
    with output.progress() as say:
        found = run(setup_named(mode), seeds_of(seeds), count=removals, only=names_of(methods), cache=cache, say=say)
    if markdown is not None:
        markdown.write_text(as_markdown(found), encoding="utf-8")
    if json:
        output.emit(found)
    else:
        _gpt_tables(found)


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
    import torch

    from experiments.gpt.setups import setup_named
    from experiments.gpt.study import projection as run

    torch.set_num_threads(1)
    with output.progress() as say:
        found = run(
            setup_named(mode), seeds_of(seeds), ranks=_ranks(ranks), curvature=curvature, count=removals,
            cache=cache, say=say,
        )  # fmt: skip
    if json:
        output.emit(found)
    else:
        _projection_table(found)


def _ranks(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise typer.BadParameter(f"found ranks {text!r}; expected whole numbers with commas, such as 16,32.") from None


def _gpt_tables(found: Mapping[str, Any]) -> None:
    """Correlations, differences, and last the cost: the one table whose seconds differ from time to time."""
    top, rows = found["ceiling"], found["rows"]
    title = (
        f"GPT, {found['setup']['mode']}: Spearman with retraining, mean of four domains and of {len(found['seeds'])} "
        f"seeds and its 95 % bootstrap interval, {found['removals']} removals each"
    )
    columns = ("method", "projection", "curvature", "groups", "optimizer", "dims", "mean", "each seed")
    lines: list[tuple[Any, ...]] = [("exact unrolling (ceiling)", "full", "Hessian", "", "adamw", "", *_agreement(top))]
    keys = ("projection", "curvature", "groups", "optimizer_model")
    lines += [(_name(r), *(r[k] for k in keys), f"{r['dims']:,}", *_agreement(r)) for r in rows]
    output.table(title, columns, lines)
    against = [(_name(r), _interval(r["against_paper"])) for r in rows if r["against_paper"]]
    against += [(f"{c['method']} − {c['against']}", _interval(c)) for c in found["contrasts"]]
    if against:
        output.table(
            "Minus the paper (or another row), with 95 % paired bootstrap intervals", ("method", "difference"), against
        )
    cost = [
        (_name(r), _number(r["recording_ratio"], ".1f"), _number(r["bytes_per_occurrence"], ",.0f"), f"{r['seconds']:.1f}")
        for r in rows
    ]  # fmt: skip
    output.table(
        "Cost, mean of the seeds", ("method", "training, × plain", "bytes per occurrence", "seconds to ask"), cost
    )
    for line in found["failed"]:
        output.out.print(f"left out: {line}", soft_wrap=True)


def _projection_table(found: Mapping[str, Any]) -> None:
    title = (
        f"GPT, {found['setup']['mode']}, random projections: Spearman with the largest one over all occurrences, and with "
        f"retraining over {found['removals']} removals, mean of {len(found['seeds'])} seeds"
    )
    lines = [
        (r["method"], f"{r['rank']}×{r['rank']}", f"{r['dims_per_layer']:,}", f"{r['dims']:,}", f"{r['largest']:.3f}",
         _bounded(r["truth"], r["truth_interval"]), _each(r["truth_seeds"]))
        for r in found["rows"]
    ]  # fmt: skip
    columns = ("method", "random", "dims a layer, at most", "dims", "with the largest", "with retraining", "each seed")
    output.table(title, columns, lines)


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['method']} (what record does by itself)" if row["default"] else str(row["method"])


def _agreement(row: Mapping[str, Any]) -> tuple[str, str]:
    return _bounded(row["mean"], row["interval"]), _each(row["seeds"])


def _bounded(mean: float, bounds: Mapping[str, float]) -> str:
    return f"{mean:.3f} [{bounds['lower']:.3f}, {bounds['upper']:.3f}]"


def _each(values: list[float]) -> str:
    return " ".join(f"{x:.2f}" for x in values)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _interval(value: Mapping[str, float]) -> str:
    return f"{value['mean']:+.3f} [{value['lower']:+.3f}, {value['upper']:+.3f}]"
