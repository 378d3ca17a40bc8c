"""`python -m experiments timelines`: when influence was large, by a recording and exactly, on a small GPT."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from backstory.cli import output
from experiments import tables
from experiments.cli import Json, Mode, Seeds, app, begin, finish, seeds_of

Result = Mapping[str, Any]
COLUMNS = ("timeline", "rank", "each seed", "least", "cosine", "each seed", "least")
EACH = ("seed", "text", "domain", "rank", "× factors", "cosine", "× factors")
FACTORS = ("seed", "calibration text's domain", "Σ exact / Σ recorded, first part to last")
CHOICES = ("seed", "mean of the choices", "least", "largest")
KINDS = {"recorded": "recording", "calibrated": "recording × factors", "shape": "the other text's, exact"}
WORDS = """# Size timelines: when influence was large

{provenance}

Commit: the one that brought these figures. The tables of this page are also in [{name}.json]({name}.json).

The *size* of a part of the run is the mean |influence| of its occurrences on one text; a run has {parts} equal parts. The recording is the default
one, the exact influences are `run.exact` in the precision of training. Both are compared over the {parts} parts of each of {texts} single texts that no training step used,
as many of each domain: rank correlation and cosine, the mean over texts and seeds with its 95 % interval of 10,000 bootstrap draws of both, each seed's mean, and
the least of all texts. *Recording × factors* multiplies each part by Σ|exact| / Σ|recorded| of one other text, the calibration text. *The other text's, exact* leaves
the recording out: the calibration text's exact timeline stands for every text's.
"""


@app.command()
def timelines(
    mode: Mode = "scratch",
    seeds: Seeds = "40,41",
    texts: Annotated[int, typer.Option(help="Unseen single texts, a multiple of four.", min=4)] = 16,
    parts: Annotated[int, typer.Option(help="Equal parts of the run.", min=2)] = 20,
    page: Annotated[Path | None, typer.Option(help="Write the page, and its tables as JSON beside it.")] = None,
    json: Json = False,
) -> None:
    """Size timelines of a recording against exact ones, before and after calibration with one text."""
    from experiments.gpt.setups import setup_named
    from experiments.timelines.study import TimelineSetup, study

    begin(markdown=page)
    setup = TimelineSetup(gpt=setup_named(mode), texts=texts, parts=parts)
    with output.progress() as say:
        result = study(setup, seeds_of(seeds), say=say)
    if page is not None:
        from experiments.pages import write_page

        command = f"python -m experiments timelines --mode {mode} --seeds {seeds} --json"
        write_page(page, as_page(result, page.stem, command))
    finish(result, print_tables, json=json)


def print_tables(result: Result) -> None:
    """Means, then each text, then other choices of the calibration text."""
    output.table(_title(result), COLUMNS, _lines(result))
    output.table("Each text", EACH, _each(result))
    output.table("Factors", FACTORS, _factors(result))
    output.table("Rank correlation with each text in turn as the calibration text", CHOICES, _choices(result))


def as_page(result: Result, name: str, command: str) -> str:
    """The page of this result."""
    from experiments.pages import provenance

    setup = result["setup"]
    head = WORDS.format(provenance=provenance([command]), name=name, parts=setup["parts"], texts=setup["texts"])
    return "\n".join(
        [
            head,
            f"## {_title(result)}\n\n{tables.markdown(COLUMNS, _lines(result))}\n",
            f"### Factors\n\n{tables.markdown(FACTORS, _factors(result))}\n",
            f"### Other choices of the calibration text\n\n{tables.markdown(CHOICES, _choices(result))}\n",
            f"### Each text\n\n{tables.markdown(EACH, _each(result))}\n",
        ]
    )


def _title(result: Result) -> str:
    kind = {"finetune": "Fine-tuned GPT", "scratch": "GPT from scratch"}[result["setup"]["gpt"]["mode"]]
    return f"{kind}, seeds {', '.join(map(str, result['seeds']))}, {result['setup']['gpt']['steps']} steps"


def _lines(result: Result) -> list[tuple[str, ...]]:
    lines = [(KINDS[row["method"]], *_measured(row["rank"]), *_measured(row["cosine"])) for row in result["rows"]]
    rank, cosine = (tables.signed(result["recording_adds"][measured]) for measured in ("rank", "cosine"))
    return [*lines, ("the second − the third, paired", rank, "", "", cosine, "", "")]


def _measured(value: Result) -> tuple[str, str, str]:
    return tables.bounded(value["mean"], value["interval"]), tables.each(value["seeds"]), f"{value['least']:.2f}"


def _each(result: Result) -> list[tuple[str, ...]]:
    return [
        (str(one["seed"]), str(q), domain,
         *(f"{one['rows'][row][measured][q]:.2f}" for measured in ("rank", "cosine") for row in ("recorded", "calibrated")))
        for one in result["each"]
        for q, domain in enumerate(one["domains"][:-1])
    ]  # fmt: skip


def _factors(result: Result) -> list[tuple[str, ...]]:
    return [(str(one["seed"]), one["domains"][-1], tables.each(one["factors"], ".1f")) for one in result["each"]]


def _choices(result: Result) -> list[tuple[str, ...]]:
    return [
        (str(one["seed"]), *(f"{x:.3f}" for x in (sum(values) / len(values), min(values), max(values))))
        for one in result["each"]
        for values in [one["other_choices"]]
    ]
