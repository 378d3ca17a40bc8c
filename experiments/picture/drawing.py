"""One prediction on the time axis, as an SVG: what each training step did to it, and the images that did most, at their step.

The picture has a light card of its own, so that it can stand on a white or a dark page, and no fonts or files of others.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
WIDTH, HEIGHT = 960, 506
LEFT, RIGHT, AXIS = 236, 928, 276  # of the time axis, in pixels
TALLEST = 62  # of a bar
THUMB, GAP = 54, 66  # side of a small picture, and the least distance of two
ABOVE, BELOW = 122, 388  # top of the rows of small pictures
INK, QUIET, LINE, CARD = "#1f2328", "#59636e", "#d1d9e0", "#ffffff"
TOWARDS, AWAY = "#0969da", "#bc4c00"


@dataclass(frozen=True)
class Example:
    """A training image that did much."""

    image: bytes  # PNG
    label: str
    step: int  # where it mattered most


@dataclass(frozen=True)
class Story:
    """What the picture tells of one prediction."""

    image: bytes  # PNG of the test image
    label: str
    predicted: str
    probability: float
    towards: Sequence[Example]  # most helpful to the prediction
    away: Sequence[Example]  # most harmful to it
    up: Floats  # (steps,) positive influences of each step's images, summed
    down: Floats  # (steps,) negative ones
    epochs: int
    without_towards: float  # the probability after training again without `towards`
    without_away: float  # … without `away`


def draw(story: Story) -> str:
    """The whole picture."""
    parts = [
        _frame(story),
        _question(story),
        _bars(story),
        _axis(story),
        *_row(story, 1),
        *_row(story, -1),
        _words(story),
    ]
    return "\n".join((*parts, "</svg>\n"))


def _frame(story: Story) -> str:
    told = (
        f"A test image of a {story.label} that the model predicts as {story.predicted}, and the training images that pushed it "
        f"towards or away from {story.predicted}, placed on the time axis of training."
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        'font-family="system-ui, -apple-system, \'Segoe UI\', Helvetica, Arial, sans-serif" font-size="14">\n'
        f"<title>{escape(told)}</title>\n"
        f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="12" fill="{CARD}" stroke="{LINE}"/>'
    )


def _question(story: Story) -> str:
    title = f"Why does the model take this {story.label} for a {story.predicted}?"
    return "\n".join(
        (
            _text(32, 48, title, size=23, weight=600),
            _picture(story.image, 32, AXIS - 80, 132, INK, 1),
            _text(98, AXIS + 74, f"test image: a {story.label}", anchor="middle"),
            _text(
                98, AXIS + 95, f"predicted: {story.predicted} ({story.probability:.0%})", weight=600, anchor="middle"
            ),
        )
    )


def _bars(story: Story) -> str:
    """One bar up and one bar down for each step."""
    most = max(float(story.up.max()), float(-story.down.min())) or 1.0
    width = (RIGHT - LEFT) / len(story.up)
    shapes = []
    for values, colour in ((story.up, TOWARDS), (story.down, AWAY)):
        path = "".join(
            f"M{_x(story, t):.1f} {AXIS}v{-value / most * TALLEST:.1f}"
            for t, value in enumerate(values.tolist())
            if value
        )
        shapes.append(f'<path d="{path}" stroke="{colour}" stroke-width="{width * 0.8:.2f}" fill="none"/>')
    return "\n".join(shapes)


def _axis(story: Story) -> str:
    steps, end = len(story.up), AXIS + TALLEST + 6
    parts = [f'<path d="M{LEFT} {AXIS}H{RIGHT}" stroke="{INK}" stroke-width="1.5"/>']
    for k in range(story.epochs + 1):
        x = LEFT + (RIGHT - LEFT) * k / story.epochs
        parts.append(f'<path d="M{x:.0f} {AXIS - TALLEST - 6}V{end}" stroke="{LINE}" stroke-dasharray="3 4"/>')
        name = f"step {steps * k // story.epochs}"
        parts.append(_text(x, end + 14, name, size=12, colour=QUIET, anchor="end" if k == story.epochs else "middle"))
    return "\n".join(parts)


def _row(story: Story, sign: int) -> list[str]:
    """The small pictures of one side, each with a line to its step."""
    examples = sorted(story.towards if sign > 0 else story.away, key=lambda example: example.step)
    colour, top = (TOWARDS, ABOVE) if sign > 0 else (AWAY, BELOW)
    steps = [_x(story, example.step) for example in examples]
    out = []
    for example, x, at in zip(examples, _spread(steps), steps, strict=True):
        start, end = (top + THUMB, AXIS - 3) if sign > 0 else (top, AXIS + 3)
        out.append(f'<path d="M{x:.1f} {start}L{at:.1f} {end}" stroke="{colour}" stroke-width="1.5" fill="none"/>')
        out.append(f'<circle cx="{at:.1f}" cy="{AXIS}" r="4" fill="{colour}" stroke="{CARD}"/>')
        out.append(_picture(example.image, x - THUMB / 2, top, THUMB, colour, 2))
        text = f"step {example.step}"
        out.append(_text(x, top - 7 if sign > 0 else top + THUMB + 16, text, size=12, colour=colour, anchor="middle"))
    return out


def _words(story: Story) -> str:
    """What up and down mean, and what training again without each side's images does."""
    digit, now, n, m = story.predicted, f"{story.probability:.0%}", len(story.towards), len(story.away)
    sides = (
        (84, TOWARDS, f"▲ Towards {digit}: the {n} strongest training images.", n, story.without_towards),
        (484, AWAY, f"▼ Away from {digit}: the {m} strongest training images.", m, story.without_away),
    )
    parts = []
    for y, colour, what, count, then in sides:
        proof = f"Trained again without these {count}: {digit} goes from {now} to {then:.0%}."
        parts += [_text(32, y, what, colour=colour, weight=600), _text(RIGHT, y, proof, colour=colour, anchor="end")]
    parts += [
        _text(32, y, line, size=12, colour=QUIET)
        for y, line in (
            (ABOVE + 18, "Each bar is one training step:"),
            (ABOVE + 35, "the summed effect of all images"),
            (ABOVE + 52, "of its batch on this prediction."),
        )
    ]
    return "\n".join(parts)


def _x(story: Story, step: int) -> float:
    """The place of a step on the axis."""
    return LEFT + (RIGHT - LEFT) * (step + 0.5) / len(story.up)


def _spread(places: Sequence[float]) -> list[float]:
    """Places in order, moved apart as little as possible (least squares), none beyond the ends of the axis.

    Places that are GAP apart are equal once k · GAP is taken off: neighbours out of order take their mean.
    """
    pools: list[list[float]] = []
    for k, place in enumerate(places):
        pools.append([place - k * GAP])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    low, high = LEFT + THUMB / 2, RIGHT - THUMB / 2 - (len(places) - 1) * GAP
    means = [min(max(float(np.mean(pool)), low), high) for pool in pools for _ in pool]
    return [mean + k * GAP for k, mean in enumerate(means)]


def _text(
    x: float, y: float, words: str, *, size: float = 14, colour: str = INK, weight: int = 400, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{colour}" font-weight="{weight}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


def _picture(png: bytes, x: float, y: float, side: float, colour: str, border: float) -> str:
    data = base64.b64encode(png).decode()
    return (
        f'<image x="{x:.1f}" y="{y:.1f}" width="{side}" height="{side}" style="image-rendering: pixelated" '
        f'href="data:image/png;base64,{data}"/>\n'
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{side}" height="{side}" rx="2" fill="none" stroke="{colour}" stroke-width="{border}"/>'
    )
