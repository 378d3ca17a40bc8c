"""What the picture shows, from the run of `backstory demo`: the query is the model's own prediction of one test image."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from backstory.demo import digits
from backstory.exact.leave_out import leave_out
from backstory.replay.tape import Removal
from backstory.results.influence import Hit, Influence
from backstory.run.queries import open_queries
from backstory.run.run import Run
from experiments.picture.drawing import Example, Floats, Story


def tell(path: Path, index: int, top: int) -> Story:
    """Query the prediction of a test image, and train again without the images that helped it most."""
    queries = open_queries(path, [f"test:{index}"], digits.RECIPE)
    image, label = queries.batches[f"test:{index}"]
    with torch.no_grad():
        chances = queries.model(image).softmax(1)[0]
    predicted = chances.argmax()
    batch = (image, predicted[None])
    answer = queries.run.query(queries.model, queries.loss, batch)
    towards, away = answer.top(top), answer.bottom(top)
    args, sides = (
        queries.run.config["recipe_args"],
        [Removal(tuple(hit.sample for hit in side)) for side in (towards, away)],
    )
    changes = leave_out(lambda: digits.recipe(**args), sides, lambda model: digits.loss(model, batch))  # (2, 1)
    without = (chances.max() * torch.exp(-changes[:, 0])).tolist()
    up, down = by_step(answer)
    uses = len(answer) // len(answer.per_sample()[0])
    return Story(
        image=digits.png(image[0, 0]),
        label=str(int(label)),
        predicted=str(int(predicted)),
        probability=float(chances.max()),
        towards=_examples(queries.run, towards),
        away=_examples(queries.run, away),
        up=up,
        down=down,
        epochs=uses,
        without_towards=without[0],
        without_away=without[1],
    )


def by_step(answer: Influence) -> tuple[Floats, Floats]:
    """Positive and negative influences of each step's images, summed apart."""
    scores = answer.scores[0].numpy()
    parts = (scores.clip(min=0), scores.clip(max=0))
    up, down = (np.bincount(answer.steps, weights=part, minlength=answer.at).astype(float) for part in parts)
    return up, down


def _examples(run: Run, hits: Sequence[Hit]) -> list[Example]:
    content = run.content([str(hit.sample) for hit in hits])
    return [
        Example(content[str(hit.sample)]["image"], str(content[str(hit.sample)]["label"]), hit.step) for hit in hits
    ]
