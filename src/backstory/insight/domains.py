"""Which query sets are domains: the sets that sources are valued for by default, on the page and in the report.

Every domain's mean loss counts alike, so no query may count twice: a set all of whose queries are in other sets, such as one
passage of each domain or a few hard images out of many, is no domain. Larger sets are looked at first.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def domains(sets: Mapping[str, Any]) -> list[str]:
    """Names of the sets that are domains, in their order; at least one where there are sets."""
    known = {name: _queries(batch) for name, batch in sets.items()}
    left = dict(known)
    for name in sorted(known, key=lambda n: -len(known[n])):
        others = {query for n, queries in left.items() if n != name for query in queries}
        if known[name] and known[name] <= others:
            del left[name]
    return list(left)


def _queries(batch: Any) -> frozenset[tuple[bytes, ...]]:
    """The bytes of each query; none where a batch is not made of tensors."""
    parts = list(_tensors(batch))
    rows = zip(*(_rows(x) for x in parts), strict=False)
    return frozenset() if None in parts else frozenset(rows)


def _tensors(batch: Any) -> Iterator[Tensor | None]:
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, tuple | list):
        for part in batch:
            yield from _tensors(part)
    else:
        yield batch if isinstance(batch, Tensor) and batch.ndim else None


def _rows(x: Tensor | None) -> list[bytes]:
    if x is None:
        return []
    shape = f"{x.dtype} {tuple(x.shape[1:])} ".encode()
    return [shape + row.detach().cpu().contiguous().numpy().tobytes() for row in x]
