r"""The general rule: per-sample gradients of any module, from the inputs and output gradients that its hooks see.

The module is a function s = f(W; a) of the parameters W in question and of its inputs. With δ = ∂L/∂s, the gradient of sample b is

    g_b = (∂f(W; a_b) / ∂W)ᵀ δ_b        one vector–Jacobian product for each sample, by `torch.func` (`vmap` of `vjp`)

in chunks of bounded size, or by a loop over the samples where `vmap` cannot. All other parameters are constants, so that layers with
a rule of their own keep it. Where the call has drawn random numbers (dropout), it is repeated from the generators' states of that
call: by `vmap`, whose draws for a batch are those of the batch, or, where that is not so, on the whole batch, with a backward pass from
each sample's outputs. Of every repeated call the outputs must be those of the first, and of the first one with other weights too.

Shapes:  B samples, K groups of positions (1: not taken apart). A sample's tensors keep their batch dimension, of size 1 (or n
where n positions and the batch were flattened into one).
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from ..errors import UnsupportedError
from ..maths.layers import Outer
from ..maths.recurrent import can_unroll, gradients, unroll
from .nested import Nested, tensors_in
from .randomness import States, own_randomness

MOST_NUMBERS = 2**25  # in what a chunk of samples holds at a time
SAME = {torch.float64: 1e-5, torch.float32: 1e-3}  # relative; some models compute in float32 inside
SAME_HALF = 1e-1
Dims = tuple[int | None, ...]  # of each tensor, the dimension that holds the batch; None: shared by all samples
Gradients = dict[str, Tensor]  # (B, K, *shape) of each parameter


class Call(NamedTuple):
    """One call of a module, as its hooks saw it."""

    module: nn.Module
    inputs: Nested  # (args, kwargs)
    carry: tuple[bool, ...]  # which of the input tensors a gradient goes on to
    outputs: tuple[Tensor, ...]  # those that may get a gradient
    which: tuple[int, ...]  # their places among all tensors that it returned
    versions: tuple[int, ...]  # of the outputs, after the call
    before: States | None  # of the generators, where the call has drawn from them
    autocast: torch.dtype | None  # the type of the autocast around it


class Where(NamedTuple):
    """Where the batch is in a call's tensors."""

    size: int
    inputs: Dims
    outputs: Dims  # of those that may get a gradient


class _Work(NamedTuple):
    """A call, and what came back to it, sample by sample."""

    call: Call
    where: Where
    apart: tuple[Tensor, ...]  # (B, …) of the inputs that hold the batch
    deltas: tuple[Tensor, ...]  # (B, K, …)
    used: tuple[int, ...]  # places, among `call.outputs`, of the outputs that got a gradient


Weights = Mapping[str, Tensor]
Found = tuple[Gradients, tuple[Tensor, ...]]  # gradients, and the used outputs (B, …)
# an outer product has its positions still apart: it is that of all groups
Rows = tuple[Mapping[str, Tensor | Outer], tuple[Tensor, ...]]
Way = Callable[[_Work, Weights], Rows]


class General:
    """The general rule for the modules of one model; it remembers in which way each can be differentiated."""

    def __init__(self) -> None:
        self._ways: dict[tuple[nn.Module, bool], Way] = {}

    def gradients(
        self, call: Call, names: Sequence[str], where: Where, deltas: Sequence[Tensor | None], title: str
    ) -> Mapping[str, Tensor | Outer]:
        """Per-sample gradients of the parameters `names`; `deltas` (K, *shape) of each output, None where nothing came back."""
        given = [(i, x, where.outputs[i]) for i, x in enumerate(deltas) if x is not None]
        inputs = zip(call.inputs.tensors, where.inputs, strict=True)
        apart = tuple(samples(x, dim, where.size) for x, dim in inputs if dim is not None)
        moved = tuple(samples(x, dim + 1, where.size) for _, x, dim in given if dim is not None)
        if len(moved) < len(given) or not apart:
            raise UnsupportedError(f"layer {title!r} {BLIND}")
        work = _Work(call, where, apart, moved, tuple(i for i, _, _ in given))
        weights = {n: call.module.get_parameter(n).detach() for n in names}
        key = (call.module, call.before is not None)
        if key not in self._ways:
            self._ways[key] = _way(work, weights, title)
        with _as_in_training(call):
            grads, outputs = self._ways[key](work, weights)
        if not _as_before(work, outputs):
            raise UnsupportedError(f"layer {title!r} {OTHER}")
        return grads


BLIND = (
    "owns parameters without a layer rule, and not all of its outputs hold one entry for each sample. With activation checkpointing, pass "
    "use_reentrant=False. Register a rule with "
    "`backstory.register`, or exclude the parameters with layers=['!name']."
)
OTHER = (
    "owns parameters without a layer rule, and gives other outputs when it is called again for one sample at a time: it mixes the "
    "samples of a batch, keeps a state between calls, calls torch.utils.checkpoint inside, or draws random numbers in an order of its own. Register a rule with "
    "`backstory.register`, or exclude the parameters with layers=['!name']."
)


def samples(x: Tensor, dim: int, size: int) -> Tensor:
    """(…, B·n, …) as (B, …, n, …)."""
    apart: Tensor = x.unflatten(dim, (size, -1))
    return apart.movedim(dim, 0)


def _way(work: _Work, weights: Weights, title: str) -> Way:
    """The first way whose outputs are the module's own, with the weights as they are and with others."""
    cause: Exception | None = None
    others = {n: _shaken(w, n) for n, w in weights.items()}
    mixes = any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in work.call.module.modules())
    drawn = (by_vmap,) if mixes else (by_vmap, on_whole_batch)
    module = work.call.module
    cheaper: tuple[Way, ...] = (
        (looked_up,) if isinstance(module, nn.Embedding) else (unrolled,) if can_unroll(module) else ()
    )
    for way in (*cheaper, by_vmap, one_by_one) if work.call.before is None else drawn:
        try:
            with _as_in_training(work.call):
                plain = way(work, weights)[1]
            with _as_in_training(work.call):
                shaken = way(work, others)[1]
            with _as_in_training(work.call), torch.no_grad():
                whole = _outputs(work, others, work.call.inputs.tensors)
        except Exception as error:  # whatever a module has against being called like this
            cause = error
            continue
        dims = [work.where.outputs[i] for i in work.used]
        expected = [samples(x, d, work.where.size) for x, d in zip(whole, dims, strict=True) if d is not None]
        if _as_before(work, plain) and all(map(_same, shaken, expected)):
            return way
    raise UnsupportedError(f"layer {title!r} {OTHER}") from cause


def by_vmap(work: _Work, weights: Weights) -> Found:
    """All samples of a chunk at once."""

    def one(apart: tuple[Tensor, ...], deltas: tuple[Tensor, ...]) -> Found:
        outputs, back = vjp(lambda w: _outputs(work, w, _inputs(work, apart)), dict(weights))[:2]
        if len(deltas[0]) > 1:
            return vmap(lambda *d: back(d)[0])(*deltas), outputs
        return {n: g[None] for n, g in back(tuple(d[0] for d in deltas))[0].items()}, outputs

    chunk = None if work.call.before is not None else _chunk(work, weights)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # operations without a batching rule are only slower
        out: Found = vmap(one, randomness="different", chunk_size=chunk)(work.apart, work.deltas)
    return out


def one_by_one(work: _Work, weights: Weights) -> Found:
    """A forward and a backward pass for each sample."""
    rows: list[Gradients] = []
    seen: list[tuple[Tensor, ...]] = []
    for b in range(work.where.size):
        leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
        with torch.enable_grad():
            outputs = _outputs(work, leaves, _inputs(work, tuple(x[b] for x in work.apart)))
        rows.append(_pulled(outputs, leaves, [d[b] for d in work.deltas]))
        seen.append(tuple(x.detach() for x in outputs))
    return {n: torch.stack([row[n] for row in rows]) for n in weights}, tuple(map(torch.stack, zip(*seen, strict=True)))


def looked_up(work: _Work, weights: Weights) -> Rows:
    """A table with a forward of its own that looks rows up: in a table of numbers 0, 1, … it looks up which."""
    module, where, call = work.call.module, work.where, work.call
    (table,) = weights.values()
    dim = where.outputs[0]
    if dim is None or not isinstance(module, nn.Embedding) or module.max_norm is not None or module.scale_grad_by_freq:
        raise UnsupportedError("no plain table")
    numbers = torch.arange(len(table), dtype=torch.float64, device=table.device)[:, None]
    with torch.no_grad():
        (found,) = _outputs(work, dict.fromkeys(weights, numbers), call.inputs.tensors)
        index = samples(found[..., 0].round().long(), dim, where.size)
        outputs = table[index]
    right = work.deltas[0].sum(1).flatten(1, -2)  # (B, S, d) of all groups
    index = index.flatten(1)
    if module.padding_idx is not None:
        right = right * (index != module.padding_idx).unsqueeze(-1)
    return dict.fromkeys(weights, Outer(index, right)), (outputs,)


def unrolled(work: _Work, weights: Weights) -> Found:
    """Recurrent layers, all samples at once, one step of time after another."""
    module, where = work.call.module, work.where
    assert isinstance(module, nn.RNNBase)
    x, *start = work.apart
    if len(work.apart) < len(where.inputs) or x.dim() != 4 or x.shape[1 if module.batch_first else 2] != 1:
        raise UnsupportedError("only whole batches of sequences are unrolled")
    time = 1 if module.batch_first else 2  # where a sample's own batch dimension is
    own = {n: p.detach() for n, p in module.named_parameters()} | dict(weights)
    with torch.enable_grad():
        run = unroll(module, own, x.squeeze(time), [s.squeeze(2) for s in start])
        every = (run.outputs.unsqueeze(time), *(s.unsqueeze(2) for s in run.states))
    outputs = tuple(every[work.call.which[i]] for i in work.used)
    zeros = [x for layer in run.layers for x in (layer.at_inputs, layer.at_hidden)]
    rows = []
    for k in range(work.deltas[0].shape[1]):
        deltas = torch.autograd.grad(
            outputs, zeros, [d[:, k] for d in work.deltas], retain_graph=True, allow_unused=True
        )
        filled = [torch.zeros_like(z) if d is None else d for d, z in zip(deltas, zeros, strict=True)]
        rows.append(gradients(run.layers, filled))
    return {n: torch.stack([row[n] for row in rows], 1) for n in weights}, tuple(x.detach() for x in outputs)


def on_whole_batch(work: _Work, weights: Weights) -> Found:
    """One call with the random numbers of the first, and a backward pass from each sample's outputs alone."""
    size, dims = work.where.size, [work.where.outputs[i] or 0 for i in work.used]
    leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
    pairs = zip(work.call.inputs.tensors, work.call.carry, strict=True)
    inputs = tuple(x.clone().requires_grad_(carries) for x, carries in pairs)
    with torch.enable_grad():
        outputs = tuple(samples(x, d, size) for x, d in zip(_outputs(work, leaves, inputs), dims, strict=True))
        each = [tuple(x[b] for x in outputs) for b in range(size)]
    apart = {f"input {i}": x for i, x in enumerate(inputs) if x.requires_grad and work.where.inputs[i] is not None}
    rows = []
    for b in range(size):
        pulled = _pulled(each[b], {**leaves, **apart}, [d[b] for d in work.deltas])
        for key in apart:
            dim = work.where.inputs[int(key.split()[1])] or 0
            reached = samples(pulled.pop(key)[0], dim, size).flatten(1).abs().amax(1) > 0
            if bool(reached.any()) and int(reached.sum()) != int(reached[b]):
                raise UnsupportedError("samples mix")
        rows.append(pulled)
    return {n: torch.stack([row[n] for row in rows]) for n in weights}, tuple(x.detach() for x in outputs)


def _pulled(outputs: tuple[Tensor, ...], leaves: Weights, deltas: Sequence[Tensor]) -> Gradients:
    """Gradients (K, *shape) of Σ ⟨output, δ_k⟩; those of other graphs stay as they are."""
    kept = [(x, d) for x, d in zip(outputs, deltas, strict=True) if x.requires_grad]
    rows = []
    for k in range(len(deltas[0])):
        grads = torch.autograd.grad(
            [x for x, _ in kept], list(leaves.values()), [d[k] for _, d in kept], retain_graph=True, allow_unused=True
        ) if kept else [None] * len(leaves)  # fmt: skip
        rows.append([torch.zeros_like(w) if g is None else g for g, w in zip(grads, leaves.values(), strict=True)])
    return {n: torch.stack([row[i] for row in rows]) for i, n in enumerate(leaves)}


def _inputs(work: _Work, apart: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The call's tensors for one sample: its own, and those that all share."""
    own, sizes = iter(apart), zip(work.call.inputs.tensors, work.where.inputs, strict=True)
    return tuple(x if dim is None else next(own) for x, dim in sizes)


def _outputs(work: _Work, weights: Weights, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The used outputs of the module, called with these weights; everything else of it is constant, and stays as it is."""
    call, module = work.call, work.call.module
    args, kwargs = call.inputs.filled(tensors)
    state = {n: p.detach() for n, p in module.named_parameters()} | {n: b.clone() for n, b in module.named_buffers()}
    with _kept_activations(module):
        out = tensors_in(functional_call(module, {**state, **weights}, args, kwargs, tie_weights=False))
    return tuple(out[call.which[i]] for i in work.used)


@contextmanager
def _kept_activations(module: nn.Module) -> Iterator[None]:
    """Without the checkpoints of `transformers`: they would compute again when these weights are no longer in place."""
    flags = [m for m in module.modules() if getattr(m, "gradient_checkpointing", None) is True]
    try:
        for m in flags:
            m.__dict__["gradient_checkpointing"] = False
        yield
    finally:
        for m in flags:
            m.__dict__["gradient_checkpointing"] = True


@contextmanager
def _as_in_training(call: Call) -> Iterator[None]:
    """The random numbers and the autocast of the call."""
    kind = call.outputs[0].device.type
    with torch.autocast(kind, call.autocast, enabled=call.autocast is not None, cache_enabled=False):
        if call.before is None:
            yield
            return
        with own_randomness():
            call.before.restore()
            yield


def _chunk(work: _Work, weights: Weights) -> int | None:
    """How many samples at a time: their gradients, and about what the call itself keeps of them; None for all."""
    each = sum(w.numel() for w in weights.values()) + 8 * sum(x[0].numel() for x in (*work.apart, *work.deltas))
    most = max(1, MOST_NUMBERS // max(1, each))
    return most if most < work.where.size else None


def _as_before(work: _Work, outputs: tuple[Tensor, ...]) -> bool:
    """Whether the outputs are those of the call; not to be seen where they have been changed in place since."""
    for i, x in zip(work.used, outputs, strict=True):
        then, dim = work.call.outputs[i], work.where.outputs[i]
        unchanged = then._version == work.call.versions[i] and dim is not None
        if unchanged and dim is not None and not _same(x, samples(then, dim, work.where.size)):
            return False
    return True


def _same(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape:
        return False
    if bool((x - y).norm() <= SAME.get(y.dtype, SAME_HALF) * y.norm()):
        return True
    finite = y.isfinite()
    off = torch.where(finite, x - y, torch.zeros_like(y)).norm()
    return not bool(off > SAME.get(y.dtype, SAME_HALF) * torch.where(finite, y, torch.zeros_like(y)).norm())


def _shaken(w: Tensor, name: str) -> Tensor:
    """Other weights of about the same size: a table of zeros would not show where it is read."""
    size = w.float().square().mean().sqrt().clamp_min(1e-2)
    noise = torch.randn(w.shape, generator=torch.Generator().manual_seed(len(name)))
    return w + (0.3 * size * noise.to(w.device)).to(w.dtype)
