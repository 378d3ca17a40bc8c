"""`python -m experiments picture RUN`: the picture of the README, from the run of `backstory demo`."""

from pathlib import Path
from typing import Annotated

import typer

from backstory.cli import output
from experiments.cli import app, begin


@app.command()
def picture(
    run: Annotated[Path, typer.Argument(help="The run that `backstory demo` recorded, such as demo/run.")],
    write: Annotated[Path, typer.Option(help="The SVG file to write.")] = Path("docs/images/influence.svg"),
    index: Annotated[int, typer.Option(help="Which test image.", min=0)] = 110,
    top: Annotated[int, typer.Option(help="Training images on each side.", min=1)] = 5,
) -> None:
    """Draw one prediction and the training images behind it on the time axis."""
    from experiments.picture.drawing import draw
    from experiments.picture.study import tell

    begin(markdown=write)
    story = tell(run, index, top)
    write.write_text(draw(story), encoding="utf-8")
    output.out.print(
        f"Test image {index}, a {story.label}: predicted {story.predicted} ({story.probability:.1%}); trained again without the "
        f"{top} most helpful images {story.without_towards:.1%}, without the {top} most harmful {story.without_away:.1%}. Wrote {write}.",
        soft_wrap=True,
    )
