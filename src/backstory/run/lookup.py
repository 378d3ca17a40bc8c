"""Find the stored exact result of what is queried: of the mean loss of a batch, or of each of its queries.

A result belongs to the run as it is, to a batch and a step (its name is a hash of them), and to one loss. Whether the loss that is queried
is that one is told by its value and its gradient's norm at this step, which are stored with the result. So a result is used where the
batch is the same to the byte and these two are the same up to rounding; the highest precision wins. Results of replays that did not have to agree with the run and results
of later steps alone (`since`) do not count.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from ..capture.fingerprint import batch_fingerprint
from ..replay.queries import part, size
from ..results.influence import Influence
from ..store import RunStore
from .exact import PREFIX, Stored, name_dtype, name_result, read, read_about
from .same_loss import rounding, same_loss, same_slope
from .scoring import collect_best

PRECISIONS = (
    "float64",
    "float32",
    "",
    "bfloat16",
    "float16",
)  # that a result may have been computed in; "": the recipe's own


class Lookup(NamedTuple):
    """What was found, and what is to be said where something was found but not used."""

    result: Influence | None = None
    notes: tuple[str, ...] = ()


class Known(NamedTuple):
    """The name of a stored result, and what the run says of it."""

    name: str
    about: Stored


def find(
    store: RunStore,
    batch: Any,
    at: int,
    evaluate: Callable[[], Tensor],
    measure: Callable[[bool], list[float]],
    *,
    mean: bool = False,
) -> Lookup:
    """The exact influence on the queries of a batch, or on their mean.

    Where it comes to that, `evaluate` gives their losses at `at`, and `measure` the norms of the first ones' gradients, or that of the mean's.
    """
    names = {name for name in store.tensor_names() if name.startswith(PREFIX)}
    if not names or not (count := count_queries(batch)):
        return Lookup()
    store.read_config()
    whole, each = _best(store, names, batch, at), _each(store, names, batch, at, count)
    if whole is None and not each:
        return Lookup()
    losses = evaluate().detach().reshape(-1)
    notes: tuple[str, ...] = ()
    if whole is not None and (mean or len(losses) == 1):
        if not (notes := _differences([whole], losses.mean()[None], lambda: measure(True))):
            return Lookup(read(store, [whole.name]))
    if each and len(losses) == count and not (notes := _differences(each, losses, lambda: measure(False))):
        result = read(store, [x.name for x in each])
        return Lookup(_averaged(result) if mean else result)
    return Lookup(None, notes)


def count_queries(batch: Any) -> int:
    """How many queries a batch has; 0 for what is no batch."""
    with suppress(TypeError, StopIteration, IndexError, KeyError):
        return size(batch)
    return 0


def _best(store: RunStore, names: set[str], batch: Any, at: int) -> Known | None:
    """The stored result of the mean of a batch, in the highest precision."""
    mark = batch_fingerprint(batch)
    made = [name_result(store, mark, at, 0, precision, True) for precision in PRECISIONS]
    known = [Known(name, read_about(store, name)) for name in made if name in names]
    return min(known, key=lambda x: rounding(x.about.computed_in), default=None)


def _each(store: RunStore, names: set[str], batch: Any, at: int, count: int) -> list[Known]:
    """The stored results of all its queries; none where one is missing."""
    out: list[Known] = []
    for i in range(count):
        one = _best(store, names, part(batch, i, i + 1), at)
        if one is None:
            return []
        out.append(one)
    return out


def _differences(known: Sequence[Known], losses: Tensor, measure: Callable[[], list[float]]) -> tuple[str, ...]:
    """What to say where a loss is not the one whose result is stored."""
    evaluated = name_dtype(losses.dtype)
    for x, loss in zip(known, losses.tolist(), strict=True):
        if not same_loss(loss, x.about.loss, evaluated, x.about.computed_in):
            return _unused(f"{x.about.loss:.4g} there, {loss:.4g} here")
    for x, slope in zip(known, measure(), strict=False):  # of the first ones
        known_slope = x.about.slope
        if known_slope is not None and not same_slope(slope, known_slope, evaluated, x.about.computed_in):
            return _unused(f"the same value, but a gradient of norm {known_slope:.4g} there, {slope:.4g} here")
    return ()


def _unused(why: str) -> tuple[str, ...]:
    return (f"an exact result of the same batch is stored, but of another loss ({why}); it is not used",)


def _averaged(result: Influence) -> Influence:
    """The mean of all queries as one."""
    told = f"influence on the mean loss of {result.n_queries} queries"
    return replace(result.only("mean"), caveats=(*result.caveats[:-1], told, result.caveats[-1]))


def keep_ends(result: Influence, keep: int) -> Influence:
    """The `keep` highest and lowest occurrences of each query alone."""
    values, rows = collect_best(iter([(0, result.scores)]), result.n_queries, keep)
    best = keep if values.shape[1] < len(result) else None
    ids, steps = (x[rows.numpy()] for x in (result.sample_ids, result.steps))
    return replace(result, scores=values, sample_ids=ids, steps=steps, complete=False, best=best, index=None)
