"""By what a model divides the losses of its samples: measured on the loss that it gave.

    loss of a micro-batch  =  Σ_z ℓ_z / D,      w_z = factor / D

D is the number of items of the whole step where the trainer passes it on and the model uses it, else that of the micro-batch; the
factor is what the trainer multiplied the loss by before it was differentiated.
"""

from dataclasses import dataclass

from ..errors import UnsupportedError

CLOSE = 1e-2  # how far a loss may be from the sum of its samples' losses: half precision is that coarse


@dataclass
class Part:
    """One micro-batch: what the sum of its samples' losses may be divided by, and whether its loss was differentiated."""

    items: int | None  # num_items_in_batch, where the Trainer gave it to the model
    samples: int | None  # for a mean over the micro-batch itself
    weighed: bool = False

    def divisors(self) -> list[int]:
        """Both, the Trainer's first."""
        return [x for x in (self.items, self.samples) if x]


def fitting(loss: float, total: float, divisors: list[int]) -> list[int]:
    """The divisors by which the samples' losses, `total` in all, make the model's loss."""
    fit = [by for by in divisors if abs(loss - total / by) <= CLOSE * abs(total / by) + 1e-9]
    if divisors and not fit:
        raise UnsupportedError(
            f"the model's loss is {loss:.6g}, but the cross-entropies of its samples, divided by {divisors}, make "
            f"{[float(f'{total / by:.6g}') for by in divisors]}. Something else is in it: an auxiliary loss (set "
            "output_router_logits=False) or a loss function of its own. Leave it out, or write the loop by hand with backstory.record."
        )
    return fit[:1]


def weight(factor: float, by: int) -> float:
    """factor / by; where the factor is 1/K but for rounding, K is taken for exact."""
    parts = round(1 / factor) if 0 < factor <= 1 else 0
    return 1.0 / (by * parts) if parts and abs(factor * parts - 1) < 1e-6 else factor / by
