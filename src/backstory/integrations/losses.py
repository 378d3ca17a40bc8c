r"""What a labelled forward pass of a Hugging Face model reveals about its samples: which tokens have a loss, each sample's loss and weight.

    ℓ_z = Σ_s −log p(y_zs | …)    over the positions s whose label is not −100
    loss of a micro-batch  =  Σ_z ℓ_z / D,      w_z = factor / D

Models of the next token compare the logits at s with the label at s + 1, so that the first label is never predicted. D is
measured on the loss that the model gave: the number of items of the whole step where the trainer passes it on and the model
uses it, else that of the micro-batch; the factor is what the trainer multiplied the loss by before it was differentiated.
Shapes:  B samples, S positions, V classes. Labels (B, S) with logits (B, S, V), or labels (B,) with logits (B, V).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UnsupportedError

CLOSE = 1e-2  # how far a loss may be from the sum of its samples' losses: half precision is that coarse
IGNORED = -100
# logits and labels at the same position
IN_PLACE = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")


class Scored(NamedTuple):
    """Logits beside the labels that they are compared with."""

    logits: Tensor  # (B, …, V)
    labels: Tensor  # (B, …), IGNORED where there is no loss

    def each(self) -> Tensor:
        """ℓ of each sample, (B,), in the graph of the logits."""
        terms = _terms(self.logits.reshape(-1, self.logits.shape[-1]), self.labels.reshape(-1), "none")
        return terms.reshape(len(self.labels), -1).sum(1)

    def losses(self) -> Tensor:
        """The same outside of the graph, one sample at a time, since logits of a large vocabulary are large."""
        with torch.no_grad():
            pairs = zip(self.logits.detach(), self.labels, strict=True)
            return torch.stack(
                [_terms(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), "sum") for logits, labels in pairs]
            )


def shifts(model: nn.Module) -> bool | None:
    """Whether the model's loss is that of the next token; None where it is not one of transformers' cross-entropies."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    adapted: Any = model
    inner = adapted.get_base_model() if hasattr(model, "get_base_model") else adapted
    if not hasattr(inner, "loss_function"):
        return None
    causal = LOSS_MAPPING["ForCausalLM"]
    loss = LOSS_MAPPING.get(str(getattr(inner, "loss_type", None)), causal)  # as transformers itself falls back
    in_place = getattr(inner.config, "is_encoder_decoder", False) or "MaskedLM" in type(inner).__name__
    if loss is causal:
        return not in_place
    return False if loss in [LOSS_MAPPING.get(name) for name in IN_PLACE] else None


def targets(inputs: dict[str, Any], shifted: bool) -> Tensor | None:
    """The labels beside each position's logits, (B, S), or (B,); None where the inputs hold none."""
    if isinstance(given := inputs.get("shift_labels"), Tensor):
        return given
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return None
    return F.pad(labels, (0, 1), value=IGNORED)[..., 1:] if shifted and labels.dim() == 2 else labels


def counts(labels: Tensor) -> Tensor:
    """How many tokens of each sample have a loss, (B,)."""
    return (labels != IGNORED).reshape(len(labels), -1).sum(1)


def scored(inputs: dict[str, Any], outputs: Any, shifted: bool) -> Scored | None:
    """Logits and labels, where both are there and fit."""
    labels, logits = targets(inputs, shifted), field(outputs, "logits")
    if labels is None or not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape or logits.shape[-1] < 2:
        return None
    return Scored(logits, labels)


def field(outputs: Any, name: str) -> Any:
    """An entry of a model's outputs, by name; of a plain tuple, the loss is the first."""
    if isinstance(outputs, dict):
        return outputs.get(name)
    if isinstance(outputs, tuple):
        at = ("loss", "logits").index(name)
        return outputs[at] if len(outputs) > at else None
    return getattr(outputs, name, None)


def _terms(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels.to(wide.device), ignore_index=IGNORED, reduction=reduction)


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
            f"the model's loss is {loss:.6g}, but its samples' cross-entropies divided by {divisors} give "
            f"{[float(f'{total / by:.6g}') for by in divisors]}. It seems to contain an auxiliary loss (set "
            "output_router_logits=False) or to be a custom loss. Leave it out, or write the loop yourself with "
            "backstory.record."
        )
    return fit[:1]


def weight(factor: float, by: int) -> float:
    """factor / by; where the factor is 1/K but for rounding, K is taken for exact."""
    parts = round(1 / factor) if 0 < factor <= 1 else 0
    return 1.0 / (by * parts) if parts and abs(factor * parts - 1) < 1e-6 else factor / by
