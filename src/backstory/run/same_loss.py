"""Whether a loss is the one of which a result is stored, by what it is at the result's step, up to rounding."""

ROUNDING = {"float64": 1e-8, "float32": 1e-4}  # of a loss, relative; a hundredth of it where the loss is 0
COARSE = 2e-2  # of half precision


def rounding(precision: str) -> float:
    """The largest relative error that rounding explains."""
    return ROUNDING.get(precision, COARSE)


def same_loss(x: float, y: float, *precisions: str) -> bool:
    """Whether two values are of one loss, by the coarsest of the precisions in which they were computed."""
    return abs(x - y) <= max(map(rounding, precisions)) * (max(abs(x), abs(y)) + 0.01)
