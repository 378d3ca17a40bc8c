"""From influences of occurrences to the samples at both ends, without sorting all of them.

Shapes:  n occurrences before the step that is asked, M samples.
"""

import numpy as np

from ..results.words import common_words
from .catalogue import Catalogue, Floats, Ints
from .schemas import HELPED, HURT, Hit, Pace, Ranking

NOTHING = "had no influence"


def ends(scores: Floats, catalogue: Catalogue, k: int) -> tuple[Ints, Ints, Floats]:
    """`(the k most helpful samples, the k most harmful, influences (M,))`, of those used so far; occurrences are summed."""
    inverse = catalogue.inverse[: len(scores)]
    sums: Floats = np.bincount(inverse, weights=scores, minlength=len(catalogue)).astype(np.float64)
    used = np.flatnonzero(np.bincount(inverse, minlength=len(catalogue)))
    return _largest(sums, used, k), _largest(-sums, used, k), sums


def _largest(values: Floats, among: Ints, k: int) -> Ints:
    kept = among if len(among) <= k else among[np.argpartition(-values[among], k - 1)[:k]]
    return kept[np.lexsort((kept, -values[kept]))]  # equal values in the order of ids


def hit(j: int, total: float, scores: Floats, catalogue: Catalogue, text: str | None) -> Hit:
    """One sample as it is shown; `text` is the query's."""
    rows = catalogue.rows(j)
    rows = rows[rows < len(scores)]
    most = rows[int(np.abs(scores[rows]).argmax())]
    own = catalogue.text(j)
    return Hit(
        sample=catalogue.sample(j, total),
        step=int(catalogue.steps[most]),
        influence=total,
        words=words(total),
        occurrences=len(rows),
        common=[] if not text or not own else sorted(common_words(own, text)),
    )


def words(influence: float) -> str:
    """The sign in words."""
    return NOTHING if influence == 0 else HELPED if influence > 0 else HURT


def both(scores: Floats, catalogue: Catalogue, k: int, text: str | None) -> tuple[list[Hit], list[Hit]]:
    """The k most helpful and the k most harmful samples."""
    helpful, harmful, sums = ends(scores, catalogue, k)

    def shown(some: Ints) -> list[Hit]:
        return [hit(int(j), float(sums[j]), scores, catalogue, text) for j in some]

    return shown(helpful), shown(harmful)


def without_last(scores: Floats, catalogue: Catalogue, at: int, steps: int) -> Floats:
    """Scores of the uses before the last `steps` steps: late uses weigh most, for nothing came after them."""
    return scores[: int(np.searchsorted(catalogue.steps[: len(scores)], at - steps))] if steps else scores


def last_use(found: Hit, at: int) -> int:
    """The last step before `at` in which a sample was used."""
    return max((s for s in found.sample.steps if s < at), default=0)


def ranking(scores: Floats, catalogue: Catalogue, k: int, at: int) -> Ranking:
    """The ids alone."""
    helpful, harmful, _ = ends(scores, catalogue, k)
    return Ranking(at=at, helpful=[catalogue.ids[j] for j in helpful], harmful=[catalogue.ids[j] for j in harmful])


def pace(scores: Floats, catalogue: Catalogue, at: int) -> Pace:
    """Influence of each step's occurrences: their sum, and their mean size."""
    steps = catalogue.steps[: len(scores)]
    count = np.maximum(1, np.bincount(steps, minlength=at))
    sizes = np.bincount(steps, weights=np.abs(scores), minlength=at) / count
    total = np.bincount(steps, weights=scores, minlength=at)
    return Pace(steps=list(range(at)), influence=total.tolist(), size=sizes.tolist())
