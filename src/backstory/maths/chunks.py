"""Which steps the propagator takes together.

Knows nothing of what it does with them.
"""

from collections.abc import Sequence

from torch import Tensor

from .steps import Coefficients, Step

CHUNK_ROWS = range(256, 1024)  # least and most rows of uniform steps taken at once, a quarter of p between them


def is_uniform(k: Coefficients) -> bool:
    """Whether the step has one number for all coordinates in everything, so that it can be taken together with others."""
    return not any(isinstance(x, Tensor) for x in k)


def chunk_rows(p: int) -> int:
    """How many rows are taken at once: with more of them products are larger, with fewer the triangles smaller."""
    return min(max(CHUNK_ROWS.start, p // 4), CHUNK_ROWS.stop)


def groups(steps: Sequence[Step]) -> list[list[Step]]:
    """Consecutive steps that can be taken at once: uniform ones up to a chunk's rows, others alone."""
    found: list[list[Step]] = []
    rows, most = 0, chunk_rows(steps[0].G.shape[1]) if steps else 0
    for step in reversed(steps):
        own = size(step)
        fits = found and is_uniform(step.coefficients) and is_uniform(found[0][0].coefficients)
        alike = (
            found
            and step.orthogonal == found[0][0].orthogonal
            and not (step.orthogonal and step.V is not found[0][0].V)
        )
        if fits and alike and (step.orthogonal or rows + own <= most):
            found[0].insert(0, step)
        else:
            found.insert(0, [step])
            rows = 0
        rows += own
    return found


def size(step: Step) -> int:
    """Rows that a step brings to its chunk."""
    return len(step.w) + (0 if step.V is None or step.orthogonal else len(step.V))
