"""Modules whose calls are repeated for the gradients of their parameters (`general`), and which modules these are.

Which they are is settled by the first forward pass, in which all modules around recorded parameters are seen. A parameter goes up to
the smallest module around it that sees the batch, if its own module does not: a table of positions, looked up once for all samples;
an expert that is given some tokens of some samples; a weight that the module above uses without calling its owner.
Where shapes do not tell where the batch is, the model is called with one more sample (`places`).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge, register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

from ..errors import UnsupportedError, UsageError
from ..maths.layers import Dense, Outer
from ..maths.projection import group_edges
from .general import Call, General, Where, samples
from .nested import nested, tensors_in, with_tensors
from .places import Place, Places, Scattered, find_places
from .precision import HALF, in_autocast
from .randomness import States, states

if TYPE_CHECKING:
    from .hooks import Sink, Tap

FIRST = (nn.modules.conv._ConvNd, nn.GroupNorm, nn.modules.batchnorm._BatchNorm)  # always have the batch first


class Layer(NamedTuple):
    """Where the batch is in what a layer with a rule gets and gives, where that is not the first dimension alone."""

    dim: int
    flat: bool  # the samples' positions lie in the same dimension


class _Shape(NamedTuple):
    shape: torch.Size
    floating: bool


class _Shapes(NamedTuple):
    """A call in the first forward pass."""

    inputs: tuple[_Shape, ...]
    outputs: tuple[_Shape, ...]
    needed: tuple[bool, ...]  # which outputs may get a gradient


class Repeated:
    """The hooks of these modules, for one tap."""

    def __init__(self, tap: "Tap", general: Mapping[nn.Module, Mapping[str, int]], batch_dim: int | None) -> None:
        self._tap, self._model, self._batch_dim = tap, tap.model, batch_dim
        self.general = {m: dict(names) for m, names in general.items()}
        self._engine = General()
        self._paths = defaultdict[nn.Module, list[str]](list)
        for path, module in self._model.named_modules(remove_duplicate=False):
            self._paths[module].append(path)
        self._layouts: dict[tuple[nn.Module, int, int], Places] = {}  # by how many tensors went in and came out
        self._before: dict[nn.Module, States | None] = {}
        self._journal = defaultdict[nn.Module, list[_Shapes]](list)
        self._depth = 0  # calls under way, in the first forward pass
        self.settled = False
        self._handles: dict[nn.Module, list[RemovableHandle]] = {}

    # -- hooks -----------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """On all modules around recorded parameters until it is settled which are repeated, and then on these."""
        wanted = set(self.general) if self.settled else self._around()
        before, after = torch.compiler.disable(self._before_forward), torch.compiler.disable(self._after_forward)
        for module in wanted - self._handles.keys():
            self._handles[module] = [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True),
            ]
        for module in self._handles.keys() - wanted:
            for handle in self._handles.pop(module):
                handle.remove()

    def watches(self, module: nn.Module) -> bool:
        """Whether the hooks are on it now: one before its forward, and one after it."""
        return module in self._handles

    def detach(self) -> None:
        """Remove them."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()
        self._before.clear()

    def begin(self) -> None:
        """A new step, or a new micro-batch of it."""
        self._depth = 0
        self._before.clear()
        self._journal.clear()
        if self.settled and self._handles.keys() - self.general.keys():
            self.attach()

    def _around(self) -> set[nn.Module]:
        owners = {*self._tap.rules, *self.general}
        paths = [path.split(".") for m in owners for path in self._paths[m] if path]
        above = {".".join(parts[:n]) for parts in paths for n in range(len(parts))}
        return owners | {self._model.get_submodule(path) for path in above}

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Without keywords where a hook before this one, which began the step, has just removed it."""
        if self._tap.listens and module in self._handles:
            self._depth += 1
            self._before[module] = states() if self._may_repeat(module) else None

    def _may_repeat(self, module: nn.Module) -> bool:
        """Whether it is repeated, or may turn out to be."""
        slot = self._tap.slot
        return module in self.general or (not self.settled and slot is not None and self._tap.sizes[slot] > 0)

    def _after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Of several outputs, one may be made from another: each is handed on as a view, which gets only what comes from outside."""
        if not self._tap.listens or module not in self._before:
            return None
        before = self._before.pop(module)
        if self._may_repeat(module) and sum(map(_may_be_sample, tensors_in(output))) > 1:
            output = with_tensors(output, lambda x: x.view_as(x) if _may_be_sample(x) else x)
        returned = tensors_in(output)
        which = tuple(i for i, x in enumerate(returned) if x.requires_grad)
        if not self.settled:
            self._write_down(module, args, kwargs, returned)
        if which and before is not None:
            self._listen(module, args, kwargs, returned, which, before)
        self._depth -= 1
        if not self.settled and self._depth == 0:
            self._settle(module, args, kwargs, returned)
        return output

    def _listen(
        self,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        returned: tuple[Tensor, ...],
        which: tuple[int, ...],
        before: States,
    ) -> None:
        """Await the gradients of the call's outputs."""
        drawn, outputs = before.differ(states()), tuple(returned[i] for i in which)
        kind = outputs[0].device.type
        given = nested((args, kwargs))
        call = Call(
            module,
            nested(given.filled(tuple(map(_snapshot, given.tensors)))),
            tuple(x.requires_grad for x in given.tensors),
            tuple(x.detach() for x in outputs),
            which,
            tuple(x._version for x in outputs),
            before if drawn else None,
            torch.get_autocast_dtype(kind) if in_autocast(kind) else None,
        )
        slot = self._tap.slot
        assert slot is not None
        self._tap.keep(call, [get_gradient_edge(x) for x in outputs])
        take = torch.compiler.disable(lambda grads: self._on_gradients(call, grads, slot))
        if len(outputs) == 1:
            outputs[0].register_hook(lambda delta: take([delta]))
        else:
            register_multi_grad_hook(outputs, take)

    def _on_gradients(self, call: Call, deltas: Sequence[Tensor | None], slot: int) -> None:
        if call.module in self.general and self._tap.takes():
            self.contribute(call, deltas, slot, self._tap.sink)

    # -- contributions ---------------------------------------------------------------------------------------------

    def contribute(self, call: Call, deltas: Sequence[Tensor | None], slot: int, sink: "Sink") -> None:
        """Hand on what the call contributes to the gradients of its samples."""
        names = self.general.get(call.module)
        if not names:
            return
        title, size, tap = self.title(call.module), self._tap.sizes[slot], self._tap
        where = self._where(call, size)
        groups = 1
        apart = list[Tensor | None]()
        for delta, dim in zip(deltas, where.outputs, strict=True):
            some = None if delta is None else _by_groups(delta.detach(), dim, size, tap.groups)
            groups = max(groups, 1 if some is None else len(some))
            apart.append(some)
        apart = [_all_groups(x, groups) for x in apart]
        if call.autocast is not None or any(x is not None and x.dtype in HALF for x in deltas):
            tap.rounded.update(names.values())
        with tap.silent():
            grads = self._engine.gradients(call, list(names), where, apart, title)
        for name, number in names.items():
            rows = grads[name]  # (B, K, *shape)
            if isinstance(rows, Outer):
                sink(slot, number, Outer(rows.left, _wide(rows.right)), None)
                continue
            rows = _wide(rows)
            rows = rows[..., None] if rows.dim() == 2 else rows  # of a single number
            for k in range(groups):
                sink(slot, number, Dense(rows[:, k]), None if groups == 1 else k)

    def title(self, module: nn.Module) -> str:
        """The module's name."""
        return self._paths[module][0] or type(module).__name__

    def _where(self, call: Call, size: int) -> Where:
        inputs = call.inputs.tensors
        known = self._layouts.get((call.module, len(inputs), len(call.which)))
        if known is not None:
            ins, outs = known.inputs, known.outputs
            if all(map(_fits, inputs, ins, [size] * len(ins))) and all(
                map(_fits, call.outputs, outs, [size] * len(outs))
            ):
                return Where(size, _dims(ins), _dims(outs))
        sides = (tuple(self._dim(_shape(x), size) for x in side) for side in (inputs, call.outputs))
        return Where(size, *sides)

    def _dim(self, x: _Shape, size: int) -> int | None:
        """Where a tensor of this shape holds the batch, as far as its shape tells."""
        second = self._batch_dim == 1 and len(x.shape) > (2 if x.floating else 1)
        return next((d for d in ((1, 0) if second else (0,)) if len(x.shape) > d and x.shape[d] == size), None)

    # -- which modules they are --------------------------------------------------------------------------------------

    def _write_down(self, module: nn.Module, args: Any, kwargs: Any, returned: tuple[Tensor, ...]) -> None:
        sides = [tuple(map(_shape, y)) for y in (tensors_in((args, kwargs)), returned)]
        self._journal[module].append(_Shapes(sides[0], sides[1], tuple(x.requires_grad for x in returned)))

    def _settle(self, root: nn.Module, args: Any, kwargs: Any, returned: tuple[Tensor, ...]) -> None:
        """After the first forward pass."""
        slot = self._tap.slot
        size = 0 if slot is None else self._tap.sizes[slot]
        if size == 0:
            return
        self.settled = True
        trial = None
        doubtful = self._batch_dim is None and self._is_doubtful(size)
        if doubtful or not self._is_even(size):
            with self._tap.silent():
                trial = find_places(root, nested((args, kwargs)), size, list(self._journal), self._batch_dim)
            if trial is None and doubtful:
                raise UsageError(_doubt(size))
        if trial is not None:
            self._learn(trial)
        used = _reached(returned) if self._tap.rules.keys() - self._journal.keys() else set()
        for module, (_, numbers) in list(self._tap.rules.items()):
            if module in self._journal:
                if trial is None and self._dim(self._journal[module][0].inputs[0], size) == 1:
                    self._place(module, 1, size)
                stays = trial is None or self._stays(module, trial.get(module, []), size)
            else:
                stays = not any(id(getattr(module, local)) in used for local in numbers)
            if not stays:
                self._go_up(module, self._tap.rules.pop(module)[1], size, trial)
        for module, numbers in list(self.general.items()):
            called = module in self._journal or any(id(module.get_parameter(n)) in used for n in numbers)
            if called and not self._sees_batch(module, size, trial):
                self._go_up(module, self.general.pop(module), size, trial)
        self.attach_general()

    def attach_general(self) -> None:
        """Hooks for those that have become repeated later than the first forward pass has begun."""
        missing = self.general.keys() - self._handles.keys()
        if missing:
            self.attach()

    def _is_even(self, size: int) -> bool:
        """Whether all layers with a rule, and all modules to be repeated, have the batch first, as far as shapes tell."""
        for module, calls in self._journal.items():
            if module in self._tap.rules:
                if not all(self._dim(side[0], size) is not None for call in calls for side in call[:2] if side):
                    return False
            elif module in self.general and not self._sees_batch(module, size, None):
                return False
        return True

    def _is_doubtful(self, size: int) -> bool:
        """Whether another dimension is as long as the batch."""
        if size == 1:
            return False
        sides = (
            x
            for m, calls in self._journal.items()
            if (m in self._tap.rules or m in self.general) and not isinstance(m, FIRST)
            for call in calls
            for x in (*call.inputs, *call.outputs)
        )
        return any(size in (shape[1:-1] if floating else shape[1:]) for shape, floating in sides)

    def _learn(self, trial: Mapping[nn.Module, list[Places]]) -> None:
        for module, calls in trial.items():
            for places in calls:
                shapes = self._journal[module][0] if self._journal[module] else None
                needed = shapes.needed if shapes and len(shapes.needed) == len(places.outputs) else places.floating
                outputs = tuple(p for p, n in zip(places.outputs, needed, strict=True) if n)
                self._layouts.setdefault((module, len(places.inputs), len(outputs)), places._replace(outputs=outputs))

    def _stays(self, module: nn.Module, calls: Sequence[Places], size: int) -> bool:
        """Whether the layer's own rule can be used: in all calls the batch is at one place in what it gets and gives."""
        if not calls:
            return True  # not in eval mode
        inputs, outputs = (
            {side[0] if side else None for side in sides} for sides in zip(*(c[:2] for c in calls), strict=True)
        )
        if module in self._tap.spread and inputs == {None}:
            return True
        place = next(iter(inputs))
        if len(inputs) > 1 or inputs != outputs or not isinstance(place, int):
            return False
        self._place(module, place, size)
        return True

    def _place(self, module: nn.Module, dim: int, size: int) -> None:
        """The batch is here in what a layer with a rule gets."""
        flat = self._journal[module][0].inputs[0].shape[dim] > size
        if dim or flat:
            self._tap.layers[module] = Layer(dim, flat)

    def _sees_batch(self, module: nn.Module, size: int, trial: Mapping[nn.Module, list[Places]] | None) -> bool:
        """Whether a sample's outputs can be computed from its own inputs."""
        if module not in self._journal:
            return False
        if trial is not None:
            known = [x for (m, *_), x in self._layouts.items() if m is module]
            return bool(known) and all(
                any(isinstance(p, int) for p in x.inputs) and Scattered not in x.inputs
                and all(isinstance(p, int) for p in x.outputs)
                for x in known
            )  # fmt: skip
        return all(
            any(self._dim(x, size) is not None for x in call.inputs)
            and all(
                self._dim(x, size) is not None for x, needed in zip(call.outputs, call.needed, strict=True) if needed
            )
            for call in self._journal[module]
        )

    def _go_up(
        self, module: nn.Module, numbers: Mapping[str, int], size: int, trial: Mapping[nn.Module, list[Places]] | None
    ) -> None:
        """Give parameters to the smallest module around theirs that sees the batch."""
        paths = [path.split(".") for path in self._paths[module] if path]
        common = [x for x, *others in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
        common = common[:-1] if len(paths) == 1 else common
        for n in range(len(common) if paths else -1, -1, -1):
            above = self._model.get_submodule(".".join(common[:n]))
            if above is not module and self._sees_batch(above, size, trial):
                inside = ".".join(paths[0][n:])
                self.general.setdefault(above, {}).update({f"{inside}.{local}": i for local, i in numbers.items()})
                return
        name = ".".join(filter(None, (self._paths[module][0], next(iter(numbers)))))
        raise UnsupportedError(
            f"parameter {name!r} is used where no sample can be told from the others: no module around it has only inputs and "
            "outputs with one entry for each sample. Let the model return its outputs instead of the loss (pass no labels), "
            f"pass batch_dim= if the batch is not the first dimension, or leave it out with layers=['!{name}']."
        )


def _shape(x: Tensor) -> _Shape:
    return _Shape(x.shape, x.is_floating_point())


def _fits(x: Tensor, place: Place, size: int) -> bool:
    return place is None or (isinstance(place, int) and x.dim() > place and x.shape[place] % size == 0)


def _dims(places: Sequence[Place]) -> tuple[int | None, ...]:
    return tuple(p if isinstance(p, int) else None for p in places)


def _doubt(size: int) -> str:
    return (
        f"the batch has {size} samples, and another dimension of the model's layers is as long, so which of them holds the samples is "
        "not certain, and calling the model with one more sample did not tell. Pass batch_dim=0 if the batch is the first dimension "
        "everywhere (1: the second), or another number of samples in the first step."
    )


def _reached(returned: Sequence[Tensor]) -> set[int]:
    """Ids of the parameters that these outputs have been computed from."""
    waiting: list[Node | None] = [x.grad_fn for x in returned]
    seen, out = set[Node](), set[int]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            out.add(id(variable))
        waiting += [following for following, _ in node.next_functions]
    return out


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def _may_be_sample(x: Tensor) -> bool:
    """Whether an output gets a gradient, and is no loss of the whole batch, which a trainer knows again by its identity."""
    return x.requires_grad and x.dim() > 0


def _snapshot(x: Tensor) -> Tensor:
    """An input as it is now: what autograd made is the step's own, but data may lie in a buffer that is used again."""
    return x.detach() if x.requires_grad else x.clone()


def _by_groups(delta: Tensor, dim: int | None, size: int, groups: int) -> Tensor:
    """(K, *shape): for each group of positions, the gradient with all others at 0; K = 1 where there are no positions."""
    if groups == 1 or dim is None:
        return delta[None]
    apart = samples(delta, dim, size)
    axis = next((d for d in range(1, apart.dim() - 1) if apart.shape[d] > 1), None)
    if axis is None:
        return delta[None]
    out = []
    for lo, hi in group_edges(apart.shape[axis], groups):
        some = torch.zeros_like(apart)
        some.narrow(axis, lo, hi - lo).copy_(apart.narrow(axis, lo, hi - lo))
        out.append(some.movedim(0, dim).flatten(dim, dim + 1))
    return torch.stack(out)


def _all_groups(x: Tensor | None, groups: int) -> Tensor | None:
    """What has no positions belongs to the last group."""
    if x is None or len(x) == groups:
        return x
    return torch.cat([x.new_zeros(groups - 1, *x.shape[1:]), x])
