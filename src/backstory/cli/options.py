"""Options that several commands share, each described once, and the values of what people type."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import UsageError

CONTRACTIONS = ("auto", "always", "never", "when_expanding")


def parse_step(text: str) -> int | str:
    """`final`, or a step."""
    if text == "final" or text.isdecimal():
        return text if text == "final" else int(text)
    raise typer.BadParameter(f"must be 'final' or a step number, got {text!r}.")


def parse_contraction(text: str) -> str | float:
    """A name of `CONTRACTIONS`, or a number."""
    if text in CONTRACTIONS:
        return text
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"must be {', '.join(CONTRACTIONS)} or a number, got {text!r}.") from None


RunPath = Annotated[Path, typer.Argument(help="The folder of a recorded run.", show_default=False)]
Queries = Annotated[
    str,
    typer.Option(metavar="NAME[:INDEX]", help="Query set (its mean loss), or one of its queries by index."),
]
At = Annotated[
    Any,
    typer.Option(parser=parse_step, metavar="final|STEP", help="Model: final, or the step of a checkpoint."),
]
Top = Annotated[int, typer.Option(help="Results per side.", min=1)]
Per = Annotated[
    Literal["sample", "occurrence"], typer.Option(help="Rank samples (their occurrences summed) or single occurrences.")
]
PerLayer = Annotated[
    bool,
    typer.Option(
        "--per-layer", help="Treat each parameter tensor as independent of the others, as Wang et al. (ICLR 2025) do."
    ),
]
Contraction = Annotated[
    Any,
    typer.Option(
        parser=parse_contraction, metavar=f"{'|'.join(CONTRACTIONS)}|NUMBER",
        help="Contraction of each step; never is the recursion of Wang et al. (ICLR 2025), which noisy curvature can make diverge.",
    ),
]  # fmt: skip
Encoding = Annotated[str, typer.Option(help="Number format of vectors: float16, int8, float32 or float64.")]
Method = Annotated[
    Literal["auto", "exact", "adjoint", "embeddings"],
    typer.Option(
        help="auto: the exact result if it is stored, else from the recording; exact; adjoint: a reverse sweep over the recording; embeddings."
    ),
]
RecipeName = Annotated[str | None, typer.Option("--recipe", help="Recipe to use: package.module:function.")]
TrustRecipe = Annotated[bool, typer.Option("--trust-recipe", help="Import the run's recipe without a prompt.")]
Workers = Annotated[int, typer.Option(help="Parallel processes.", min=1)]
Plot = Annotated[Path | None, typer.Option(help="Write the figures to this HTML file.")]
Notes = Annotated[bool, typer.Option("--notes", help="Show all notes on the result: sign, unit, caveats, quality.")]
Json = Annotated[bool, typer.Option("--json", help="Output JSON.")]


def parse_ids(run: Path, texts: Sequence[str]) -> list[int | str]:
    """Ids as the run has them: ints where the run's ids are ints."""
    from ..run.run import Run

    if Run(run).config.get("ids") != "int":
        return list(texts)
    if odd := [x for x in texts if re.fullmatch(r"[+-]?\d+", x.strip()) is None]:
        raise UsageError(f"the sample ids of this run are integers, got {odd[0]!r}.")
    return [int(x) for x in texts]
