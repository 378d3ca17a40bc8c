"""Which parameters of a model are recorded, and by which rule.

A block is one parameter: weight and bias of a layer may sit in different optimizer groups. A tied parameter is chosen, or left
out, under any of its names, and as a whole: rows from only some of its uses would not add up to its gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import accumulate

from torch import distributed, nn
from torch.optim import Optimizer

from ..errors import CoverageError, UnsupportedError, UsageError
from ..maths.layers import RULES, Rule, covers, rule_for
from ..maths.projection import Shape, narrow, shape_of
from .fingerprint import canonical

Selection = Sequence[str | type[nn.Module]] | Callable[[str, nn.Module], bool]
SHARED = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}  # torch's wrappers for several processes
FUNCTIONAL = (nn.MultiheadAttention,)  # these use the weights of modules below them without calling the modules
# not called, or not with samples: what they hold is used by a module around them
HELD = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict, nn.utils.parametrize.ParametrizationList)
UNCOVERED = ("general", "skip", "error")  # what becomes of parameters without a layer rule
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
    elsewhere: list[str] = field(default_factory=list)  # in no group of the optimizer, though they need a gradient
    # modules whose calls are repeated -> {name of the parameter inside: number of block}
    general: dict[nn.Module, dict[str, int]] = field(default_factory=dict)


def register(kind: type[nn.Module], rule: Rule) -> None:
    """Add a layer rule: `rule(module, inputs, delta)` returns each parameter's per-sample gradients.

    `inputs` are the tensors that the layer was called with, `delta` is the gradient of the loss with respect
    to its output (batch first). Return `{"weight": tensor of shape (B, *weight.shape), …}` by local name.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise UsageError(f"kind must be a subclass of torch.nn.Module, got {kind!r}.")
    RULES[kind] = rule


def find_blocks(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    rank: Rank | None,
    layers: Selection | None = None,
    uncovered: str = "general",
    most: int | None = None,
) -> Blocks:
    """The recorded parameters of `model`; `rank=None` means no projection, `most` bounds the coordinates of all together."""
    _refuse_shared(model)
    groups = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) in groups}
    _check_optimizer(model, optimizer)
    _check_names(model, layers)
    selected = _selected(model, {id(p) for p in trained.values()}, layers)
    owners, general = _owners(model, selected)
    reached = {id(getattr(m, local)) for m, (_, names) in owners.items() for local in names}
    others = {id(m.get_parameter(name)) for m, names in general.items() for name in names}
    if uncovered == "error":
        _refuse_uncovered(trained, others)
    if uncovered == "skip":
        owners, general = _owners(model, reached - others)
        reached, others = reached - others, set()
    chosen = {n: p for n, p in trained.items() if id(p) in reached | others}
    if not chosen:
        raise CoverageError(
            "no trained parameter would be recorded. Check `layers=`, `requires_grad` and the optimizer."
        )
    shapes = [shape_of(p.shape, _rank_of(canonical(n), rank)) for n, p in chosen.items()]
    shapes = shapes if most is None else narrow(shapes, most)
    blocks = [
        Block(canonical(n), p, groups[id(p)], shape) for (n, p), shape in zip(chosen.items(), shapes, strict=True)
    ]
    number = {id(b.parameter): i for i, b in enumerate(blocks)}
    table = {
        m: (rule, {local: number[id(getattr(m, local))] for local in names}) for m, (rule, names) in owners.items()
    }
    repeated = {m: {name: number[id(m.get_parameter(name))] for name in names} for m, names in general.items()}
    elsewhere = [canonical(n) for n, p in model.named_parameters() if p.requires_grad and id(p) not in groups]
    return Blocks(blocks, table, [canonical(n) for n in trained if n not in chosen], elsewhere, repeated)


def owners_of(model: nn.Module, blocks: Sequence[Block]) -> Blocks:
    """These blocks, found in `model`, with the modules that use them."""
    number = {id(b.parameter): i for i, b in enumerate(blocks)}
    owners, general = _owners(model, set(number))
    table = {m: (rule, {x: number[id(getattr(m, x))] for x in names}) for m, (rule, names) in owners.items()}
    repeated = {m: {x: number[id(m.get_parameter(x))] for x in names} for m, names in general.items()}
    return Blocks(list(blocks), table, [], general=repeated)


Owners = dict[nn.Module, tuple[Rule, list[str]]]


def _owners(model: nn.Module, wanted: set[int]) -> tuple[Owners, dict[nn.Module, list[str]]]:
    """The layers with a rule, and the modules to be repeated, each with the names of its parameters."""
    owners: Owners = {}
    general: dict[nn.Module, list[str]] = {}
    inside = {
        id(m)
        for user in model.modules()
        if isinstance(user, FUNCTIONAL) and rule_for(user) is None
        for m in user.modules()
    }
    for path, module in model.named_modules():
        names = [local for local, p in module.named_parameters(recurse=False) if id(p) in wanted]
        if not names:
            continue
        rule = None if id(module) in inside else rule_for(module)
        covered = [] if rule is None else [x for x in names if covers(rule, x)]
        if rule is not None and covered:
            owners[module] = (rule, covered)
        if rest := [x for x in names if x not in covered]:
            user, prefix = _user(model, path, inside)
            general.setdefault(user, []).extend(prefix + x for x in rest)
    return owners, general


def _user(model: nn.Module, path: str, inside: set[int]) -> tuple[nn.Module, str]:
    """The nearest module, itself or around it, that is called with samples and uses its own parameters; and the way down from there."""
    parts = path.split(".") if path else []
    for n in range(len(parts), -1, -1):
        module = model.get_submodule(".".join(parts[:n]))
        held = isinstance(module, HELD) or (id(module) in inside and not isinstance(module, FUNCTIONAL))
        if not held or n == 0:
            break
    return module, "".join(f"{x}." for x in parts[n:])


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """`(name, the module that holds it, parameter)`; a tied parameter comes once for each name."""
    for path, module in model.named_modules(remove_duplicate=False):
        for local, p in module.named_parameters(recurse=False):
            yield canonical(f"{path}.{local}" if path else local), module, p


def _selected(model: nn.Module, trained: set[int], layers: Selection | None) -> set[int]:
    """Those of the trained parameters, by id, that `layers` includes under one of their names and excludes under none."""
    if layers is None:
        return trained
    places = [(name, module, id(p)) for name, module, p in _places(model) if id(p) in trained]
    if callable(layers):
        return {p for name, module, p in places if layers(name, module)}
    excluded = [x[1:] for x in layers if isinstance(x, str) and x.startswith("!")]
    included = [x for x in layers if not (isinstance(x, str) and x.startswith("!"))]
    chosen = {p for name, module, p in places if not included or any(_matches(x, name, module) for x in included)}
    return chosen - {p for name, module, p in places if any(_matches(x, name, module) for x in excluded)}


def taken_as_frozen(names: Sequence[str]) -> str:
    """The caveat for parameters that are in no optimizer group."""
    return f"{len(names)} parameters are in no optimizer group and are treated as frozen"


def _matches(pattern: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    """Whether a type, a plain name or a pattern means the parameter `name` of `module`."""
    if not isinstance(pattern, str):
        return isinstance(module, pattern)
    if _plain(pattern):
        return f"{name}.".startswith(f"{_unwrapped(pattern)}.")  # the parameter itself, or all below a module
    # itself, or a module it is below
    return any(fnmatchcase(x, pattern) for x in accumulate(name.split("."), "{}.{}".format))


def _plain(pattern: str) -> bool:
    return not any(x in pattern for x in "*?[")


def _unwrapped(path: str) -> str:
    """A module's or a parameter's name without the prefixes that wrappers add; empty for a wrapper itself."""
    return canonical(f"{path}.")[:-1]


def _check_names(model: nn.Module, layers: Selection | None) -> None:
    """Refuse plain names that the model does not have."""
    if layers is None or callable(layers):
        return
    if isinstance(layers, str):
        raise UsageError(f"layers must be a list of names and types, got {layers!r}. Pass [{layers!r}].")
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    known = [x for x in dict.fromkeys([*map(_unwrapped, paths), *(name for name, _, _ in _places(model))]) if x]
    for given in layers:
        if not isinstance(given, str | type):
            raise UsageError(
                f"layers must contain names, patterns with '*' and types such as nn.Linear, got {given!r}."
            )
        if isinstance(given, str) and _plain(given) and _unwrapped(given.removeprefix("!")) not in known:
            raise UsageError(
                f"layers contains {given!r}, but the model has no module or parameter of that name. "
                f"{_names_to_try(_unwrapped(given.removeprefix('!')), known)} Patterns with '*' work too."
            )


def _names_to_try(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, 5) or [x for x in known if name and name in x][:5]
    outermost = [x for x in known if "." not in x]
    return f"Did you mean: {', '.join(close)}?" if close else f"The model has {', '.join(outermost[:8])}."


def _refuse_uncovered(trained: dict[str, nn.Parameter], others: set[int]) -> None:
    total = sum(p.numel() for p in trained.values())
    missing = [(canonical(n), p.numel() / total) for n, p in trained.items() if id(p) in others]
    if missing:
        lines = "\n".join(f"  {name}  {share:.1%} of the trained parameters" for name, share in missing)
        raise CoverageError(
            f"no layer rule covers these parameters:\n{lines}\n"
            "Record them by repeating their module's calls (uncovered='general', the default), register a rule with `backstory.register`, "
            "exclude them with layers=['!name'] (a parameter, or a module and everything below it), or pass uncovered='skip' to record the rest."
        )


def _refuse_shared(model: nn.Module) -> None:
    """With several processes each sees its own samples, while `.grad` is the mean over all of them."""
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if wrappers := kinds & SHARED:
        raise UnsupportedError(
            f"{wrappers.pop()} splits training across {distributed.get_world_size()} processes, so each process sees "
            "only some of the samples. That is not supported. Train in one process and accumulate micro-batches with s.batch()."
        )


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    known = {id(p) for p in model.parameters()}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if strangers:
        raise CoverageError(
            f"the optimizer updates {len(strangers)} parameters that are not in the model (the first has shape "
            f"{tuple(strangers[0].shape)}). Record a module that contains everything the optimizer updates."
        )


def _rank_of(name: str, rank: Rank | None) -> tuple[int, int] | None:
    if rank is None:
        return None
    if isinstance(rank, dict):
        matching = next((r for pattern, r in rank.items() if fnmatchcase(name, pattern)), None)
        if matching is None:
            raise UsageError(f"no pattern in rank= matches {name!r}. Add one, for example '*': 16.")
        rank = matching
    pair = (rank, rank) if isinstance(rank, int) else rank
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(x, int) for x in pair):
        raise UsageError(f"rank must be an integer or a pair (out, in), got {rank!r} for {name!r}.")
    if min(pair) < 1:
        raise UsageError(f"rank must be at least 1, got {rank!r} for {name!r}.")
    return pair
