"""Which parameters of a model are recorded, and by which rule.

A block is one parameter: weight and bias of a layer may sit in different optimizer groups.
Knows nothing of steps or files.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import distributed, nn
from torch.optim import Optimizer

from ..errors import CoverageError, UnsupportedError, UsageError
from ..maths.layers import RULES, Rule, rule_for
from ..maths.subspace import Shape, shape_of
from .fingerprint import canonical

Selection = Sequence[str | type[nn.Module]] | Callable[[str, nn.Module], bool]
SHARED = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}  # torch's wrappers for several processes
Rank = int | tuple[int, int] | dict[str, int | tuple[int, int]]


@dataclass(frozen=True)
class Block:
    """One recorded parameter."""

    name: str
    parameter: nn.Parameter
    group: int  # its optimizer group
    shape: Shape


@dataclass(frozen=True)
class Blocks:
    """All recorded parameters, and where each module's parameters go."""

    blocks: list[Block]
    owners: dict[nn.Module, tuple[Rule, dict[str, int]]]  # module -> rule, {local name: number of block}
    left_out: list[str]  # trained parameters that are not recorded


def register(kind: type[nn.Module], rule: Rule) -> None:
    """Teach Backstory a layer: `rule(module, inputs, delta)` gives each parameter's per-sample gradients.

    `inputs` are the tensors that the layer was called with, `delta` is the gradient of the loss with respect
    to its output (batch first). Return `{"weight": tensor of shape (B, *weight.shape), …}` by local name.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise UsageError(f"found {kind!r}; expected a subclass of torch.nn.Module.")
    RULES[kind] = rule


def find_blocks(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    rank: Rank | None,
    layers: Selection | None = None,
    uncovered: str = "error",
) -> Blocks:
    """The recorded parameters of `model`; `rank=None` keeps all coordinates."""
    if uncovered not in ("error", "skip"):
        raise UsageError(f"found uncovered={uncovered!r}; expected 'error' or 'skip'.")
    _refuse_shared(model)
    groups = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) in groups}
    _check_optimizer(model, optimizer)
    owners = _owners(model, {id(p) for p in trained.values()}, layers)
    reached = {id(getattr(m, local)) for m, (_, names) in owners.items() for local in names}
    chosen = {n: p for n, p in trained.items() if id(p) in reached}
    if uncovered == "error":
        _refuse_uncovered(model, trained, reached, layers)
    if not chosen:
        raise CoverageError("no trained parameter is recorded: check `layers=`, `requires_grad` and the optimizer.")
    blocks = [
        Block(canonical(n), p, groups[id(p)], shape_of(p.shape, _rank_of(canonical(n), rank)))
        for n, p in chosen.items()
    ]
    number = {id(b.parameter): i for i, b in enumerate(blocks)}
    table = {
        m: (rule, {local: number[id(getattr(m, local))] for local in names}) for m, (rule, names) in owners.items()
    }
    elsewhere = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in groups]
    return Blocks(blocks, table, [canonical(n) for n in (*trained, *elsewhere) if n not in chosen])


def _owners(model: nn.Module, trained: set[int], layers: Selection | None) -> dict[nn.Module, tuple[Rule, list[str]]]:
    out: dict[nn.Module, tuple[Rule, list[str]]] = {}
    for path, module in model.named_modules():
        rule = rule_for(module)
        names = [
            local
            for local, p in module.named_parameters(recurse=False)
            if id(p) in trained and _selected(canonical(f"{path}.{local}"), module, layers)
        ]
        if rule is not None and names:
            out[module] = (rule, names)
    return out


def _selected(name: str, module: nn.Module, layers: Selection | None) -> bool:
    """`name` is the parameter's; patterns match it, or the module that holds it."""
    if layers is None:
        return True
    path = name.rpartition(".")[0]
    if callable(layers):
        return bool(layers(name, module))
    excluded = [x[1:] for x in layers if isinstance(x, str) and x.startswith("!")]
    included = [x for x in layers if not (isinstance(x, str) and x.startswith("!"))]
    if any(_matches(x, name, path, module) for x in excluded):
        return False
    return not included or any(_matches(x, name, path, module) for x in included)


def _matches(pattern: str | type[nn.Module], name: str, path: str, module: nn.Module) -> bool:
    if isinstance(pattern, str):
        return fnmatchcase(name, pattern) or fnmatchcase(path, pattern)
    return isinstance(module, pattern)


def _refuse_uncovered(
    model: nn.Module, trained: dict[str, nn.Parameter], reached: set[int], layers: Selection | None
) -> None:
    missing = {n: p for n, p in trained.items() if id(p) not in reached and _selected_by_name(model, n, layers)}
    if not missing:
        return
    total = sum(p.numel() for p in trained.values())
    lines = [f"  {canonical(n)}  {p.numel() / total:.1%} of the trained parameters" for n, p in missing.items()]
    raise CoverageError(
        "no layer rule covers these parameters, so their part of every influence would be missing:\n"
        + "\n".join(lines)
        + "\nTeach Backstory the layer with `backstory.register`, leave it out by name with `layers=['!name']`, "
        "or pass uncovered='skip' to record the rest and store the share that is covered."
    )


def _selected_by_name(model: nn.Module, name: str, layers: Selection | None) -> bool:
    return _selected(canonical(name), model.get_submodule(name.rpartition(".")[0]), layers)


def _refuse_shared(model: nn.Module) -> None:
    """With several processes each sees its own samples, while `.grad` is the mean over all of them."""
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if found := kinds & SHARED:
        raise UnsupportedError(
            f"{found.pop()} shares one training run between {distributed.get_world_size()} processes, which is not modelled: "
            "each process sees a part of the samples. Train in one process, accumulating micro-batches with s.batch()."
        )


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    known = {id(p) for p in model.parameters()}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if strangers:
        raise CoverageError(
            f"the optimizer trains {len(strangers)} parameters that do not belong to the model, the first of shape "
            f"{tuple(strangers[0].shape)}. Record a module that holds everything the optimizer trains."
        )


def _rank_of(name: str, rank: Rank | None) -> tuple[int, int] | None:
    if rank is None:
        return None
    if isinstance(rank, dict):
        found = next((r for pattern, r in rank.items() if fnmatchcase(name, pattern)), None)
        if found is None:
            raise UsageError(f"no pattern of rank= matches {name!r}; add one, for example '*': 16.")
        rank = found
    pair = (rank, rank) if isinstance(rank, int) else rank
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(x, int) for x in pair):
        raise UsageError(f"found rank {rank!r} for {name!r}; expected a whole number, or a pair (out, in).")
    if min(pair) < 1:
        raise UsageError(f"found rank {rank!r} for {name!r}; expected at least 1.")
    return pair


def names(blocks: Iterable[Block]) -> list[tuple[str, int]]:
    """`(name, dims)` of each block, in order: the layout of a row."""
    return [(b.name, b.shape.dims) for b in blocks]
