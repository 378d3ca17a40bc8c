r"""Why does a model prefer one answer to another? A loss that is a difference of two.

    ℓ(preferred) − ℓ(other),    with ℓ = −log p:    log p(other) − log p(preferred)

Low is good, as for any loss: a sample that helped made the model prefer the first answer.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..errors import UsageError

BatchLoss = Callable[[nn.Module, Any], Tensor]  # (model, batch) to one loss for each of its queries


def preference(loss: BatchLoss) -> BatchLoss:
    """`loss` of the preferred answers minus that of the others; its batch is a pair of batches for `loss`, answer i of both to question i."""

    def difference(model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise UsageError(
                f"a preference is about a pair (preferred, other) of batches for its loss, got {type(batch).__name__}."
            )
        preferred, other = (loss(model, answers) for answers in batch)
        if preferred.shape != other.shape:
            raise UsageError(
                f"both answers of a preference must have as many losses, got {tuple(preferred.shape)} and {tuple(other.shape)}."
            )
        return preferred - other

    return difference
