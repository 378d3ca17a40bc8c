"""Which steps the propagator takes together."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .steps import Coefficients, Step


class Between(NamedTuple):
    """A number that follows p within bounds, both of them allowed."""

    least: int
    most: int

    def nearest(self, wanted: int) -> int:
        """`wanted`, or the bound that it passes."""
        return min(max(self.least, wanted), self.most)


CHUNK_ROWS = Between(256, 1024)  # rows of uniform steps taken at once: a quarter of p
LARGE_ROWS = Between(64, 128)  # a step of more rows, with momentum, is taken alone: a 32nd of p


def is_uniform(k: Coefficients) -> bool:
    """Whether the step has one number for all coordinates in everything, so that it can be taken together with others."""
    return not any(isinstance(x, Tensor) for x in k)


def chunk_rows(p: int) -> int:
    """How many rows are taken at once: with more of them products are larger, with fewer the triangles smaller."""
    return CHUNK_ROWS.nearest(p // 4)


def groups(steps: Sequence[Step]) -> list[list[Step]]:
    """Consecutive steps that can be taken at once: uniform ones up to a chunk's rows, others alone."""
    found: list[list[Step]] = []
    rows = 0
    for step in reversed(steps):
        rows += size(step)
        if found and _alike(step, found[0][0]) and (step.orthogonal or rows <= chunk_rows(step.G.shape[1])):
            found[0].insert(0, step)
        else:
            found.insert(0, [step])
            rows = size(step)
    return found


def _alike(step: Step, other: Step) -> bool:
    if not (is_uniform(step.coefficients) and is_uniform(other.coefficients)):
        return False
    if step.orthogonal or other.orthogonal:
        return step.orthogonal == other.orthogonal and step.V is other.V
    return not (is_large(step) or is_large(other))


def is_large(step: Step) -> bool:
    """Whether a uniform step is better taken alone: with momentum chunks need twice the products, steps a pass over the matrices."""
    p = step.G.shape[1]
    return size(step) > (LARGE_ROWS.nearest(p // 32) if step.coefficients.momentum else chunk_rows(p))


def size(step: Step) -> int:
    """Rows that a step brings to its chunk."""
    return len(step.w) + (0 if step.V is None or step.orthogonal else len(step.V))
