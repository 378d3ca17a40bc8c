"""Which method a query uses: a stored exact result, stored embeddings or segments, or a reverse sweep over the recording."""

from ..errors import UsageError, check_one_of
from ..maths.blocked import ALGORITHM
from ..maths.steps import Contraction
from ..store import RunStore
from .embed import ContractionChoice
from .segments import path_to

METHODS = ("auto", "exact", "adjoint", "embeddings")


def seeks_exact(
    method: str = "auto", per_layer: bool = False, contraction: ContractionChoice = "auto", mode: str = "eval"
) -> bool:
    """Whether a stored exact result is used: not with another method, nor where a form of the recording was chosen, nor in train mode."""
    default = method == "auto" and not per_layer and contraction == "auto"
    if method == "exact" and mode != "eval":
        raise UsageError(
            f"exact results are evaluated in eval mode, so method='exact' needs mode='eval', got {mode!r}."
        )
    return mode == "eval" and (default or method == "exact")


def choose_method(store: RunStore, method: str, step: int, per_layer: bool, contraction: Contraction) -> str:
    """How the recording is used: "embeddings" or "segments" where they are stored in this form, else "adjoint"."""
    check_one_of("method", method, METHODS)
    if method == "exact":
        raise UsageError(
            "method='exact' needs the queries themselves: a gradient does not tell which of the stored results is its "
            "own. Use run.query with a batch."
        )
    settings = store.embeddings().get(step)
    wanted = {"per_layer": per_layer, "contraction": contraction, "algorithm": ALGORITHM}
    fits = settings is not None and all(settings.get(k) == v for k, v in wanted.items())
    stored = "embeddings" if fits else "segments" if path_to(store, step, per_layer, contraction) else None
    if method == "embeddings" and stored is None:
        raise UsageError(
            f"there are no embeddings for step {step} with per_layer={per_layer}, contraction={contraction!r}. "
            "Call run.embed(...) with these arguments first, or query a step where a segment ends."
        )
    return stored if stored is not None and method != "adjoint" else "adjoint"
