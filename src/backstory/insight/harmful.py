"""The samples that hurt most, and those that helped most, with what the run holds to show of them."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from ..results.influence import Hit
from ..run.embed import Asked, Progress
from ..run.gradients import LossFn
from ..run.run import Run
from . import plots
from .asking import SIGN, mean_answer, said
from .notebook import InNotebook
from .words import Piece, marked

UNIT = "influence of a sample, its occurrences summed, in units of the queries' mean loss"


@dataclass(frozen=True)
class Shown:
    """A sample, its influence, and its content where the run has it."""

    sample: int | str
    influence: float
    step: int  # where it mattered most
    occurrences: int
    text: str | None = None
    label: str | None = None
    source: str | None = None

    def marked(self, query: str) -> list[Piece]:
        """Its text in pieces, those in common with the query's text marked."""
        return marked(self.text or "", query)


@dataclass(frozen=True)
class Extremes(InNotebook):
    """The ends of a ranking."""

    at: int
    harmful: tuple[Shown, ...]  # lowest influence first
    helpful: tuple[Shown, ...]  # highest first
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "sign": SIGN, "unit": UNIT}

    def figure(self) -> Any:
        """Bars of influence, with text to hover over."""
        drawn = plots.figure(("Hurt most", "Helped most"), "sample", ("influence", "influence"), shared=False)
        for row, (side, colour) in enumerate(((self.harmful, plots.COLOURS[1]), (self.helpful, plots.COLOURS[2])), 1):
            drawn.add_bar(
                x=[str(s.sample) for s in side], y=[s.influence for s in side], hovertext=[_said(s) for s in side],
                marker={"color": colour}, showlegend=False, row=row, col=1,
            )  # fmt: skip
            drawn.update_xaxes(type="category", row=row, col=1)
        return drawn

    def to_pandas(self) -> Any:
        """A DataFrame with one line for each sample."""
        rows = [asdict(s) for s in (*self.harmful, *self.helpful)]
        return plots.frame({k: [r[k] for r in rows] for k in Shown.__dataclass_fields__})


def harmful(
    run: Run,
    model: nn.Module,
    loss: LossFn,
    batch: Any,
    at: int | str = "final",
    *,
    k: int = 10,
    per_layer: bool = False,
    contraction: Asked = "auto",
    unverified: bool = False,
    progress: Progress | None = None,
) -> Extremes:
    """The k most harmful and most helpful samples for the queries' mean loss."""
    answer = mean_answer(
        run,
        model,
        loss,
        batch,
        at,
        per_layer=per_layer,
        contraction=contraction,
        unverified=unverified,
        progress=progress,
    )
    bottom, top = answer.bottom(k), answer.top(k)
    return Extremes(answer.at, _shown(run, bottom), _shown(run, top), said(answer))


def _shown(run: Run, hits: list[Hit]) -> tuple[Shown, ...]:
    content = run.content([h.sample for h in hits])
    of = [content.get(str(h.sample), {}) for h in hits]
    return tuple(
        Shown(h.sample, h.influence, h.step, h.occurrences, c.get("text"), c.get("label"), c.get("source"))
        for h, c in zip(hits, of, strict=True)
    )


def _said(shown: Shown) -> str:
    """What a person sees of a sample, in one line of text."""
    text = (shown.text or "")[:300].replace("<", "&lt;")
    return "<br>".join(x for x in (f"step {shown.step}", shown.label, shown.source, text) if x)
