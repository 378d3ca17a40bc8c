"""Recorded loops with Adam, and the slow truth about them, from torch's own state and one backward pass for each sample.

The truth shares no code with `backstory`; only `record` and `pieces` call it.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.support.bases import as_matrix
from tests.support.loops import Batch, Losses, batch_of, cross_entropy, ids_of, one_backward_each, trained_names
from torch import Tensor, nn

import backstory
from backstory.store import RowBlock, RunStore


class Tiny(nn.Module):
    """Tokens (of 9, two of which no batch has), one attention written out, LayerNorm, and a head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.token, self.norm = nn.Embedding(9, 4), nn.LayerNorm(4)
        self.qkv, self.out, self.head = nn.Linear(4, 12), nn.Linear(4, 4, bias=False), nn.Linear(4, 9, bias=not tied)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.token(tokens)
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.mT).masked_fill(~causal, -torch.inf)
        out: Tensor = self.head((h + self.out(scores.softmax(-1) @ v)).tanh())
        return out


class Seen(NamedTuple):
    """One step as it truly was; p counts all trained parameters in their order."""

    rows: Tensor  # (B, p) ∇ℓ of each sample
    pieces: Tensor  # (B, K, p) the same, by groups of positions
    whole: Tensor  # (p,) the gradient of the step's loss before clipping
    half: Tensor  # (p,) P^½, factored
    P: Tensor  # (p,) the diagonal itself


def second_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Tensor, Tensor]:
    """`(P^½ factored, P)` over all trained parameters, after a step, entry by entry as the formulas say."""
    halves, diagonals = [], []
    for name in trained_names(model):
        p = model.get_parameter(name)
        (group,) = [g for g in optimizer.param_groups if any(p is q for q in g["params"])]
        state = optimizer.state[p]
        v = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
        root = (v / (1 - group["betas"][1] ** state["step"].item())).sqrt() + group["eps"]
        diagonals.append((1 / root).flatten())
        halves.append(_factored(root, v).flatten())
    return torch.cat(halves), torch.cat(diagonals)


def _factored(root: Tensor, v: Tensor) -> Tensor:
    if root.dim() == 1:
        return torch.where(v > 0, root**-0.5, 0.0)
    u, v = root.flatten(1) ** 2, v.flatten(1)
    u = torch.where((v.sum(1, keepdim=True) > 0) & (v.sum(0) > 0), u, 0.0)  # the seen rows and columns alone
    out = torch.zeros_like(u)
    for i in range(u.shape[0]):
        for j in range(u.shape[1]):
            if v[i].sum() > 0 and v[:, j].sum() > 0:
                out[i, j] = (u[i].sum() * u[:, j].sum() / u.sum()) ** -0.25
    return out


def group_rows(model: nn.Module, batch: Batch, losses: Losses, names: Sequence[str], K: int) -> Tensor:
    """(B, K, p): each layer called once more with only the positions of one group in the gradient of its output."""
    twin = copy.deepcopy(model)
    calls: list[tuple[nn.Module, tuple[Tensor, ...], Tensor]] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        out.retain_grad()
        calls.append((module, args, out))

    for module in twin.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(keep)
    samples = []
    for i in range(len(batch[0])):
        calls.clear()
        losses(twin, tuple(x[i : i + 1] for x in batch)).sum().backward()
        met = list(calls)
        samples.append(torch.stack([_of_group(twin, met, names, k, K) for k in range(K)]))
    return torch.stack(samples)


def _of_group(twin: nn.Module, calls: Sequence[Any], names: Sequence[str], k: int, K: int) -> Tensor:
    total = {n: torch.zeros_like(twin.get_parameter(n)) for n in names}
    for module, args, out in calls:
        delta = torch.zeros_like(out)
        channels_first = isinstance(module, nn.Conv1d)
        view, source = (x.mT if channels_first else x for x in (delta, out.grad))
        S = view.shape[1] if view.dim() > 2 else 1
        lo, hi = k * S // K, (k + 1) * S // K
        if view.dim() > 2:
            view[:, lo:hi] = source[:, lo:hi]
        elif hi > lo:
            delta.copy_(out.grad)
        again = module(*(x.detach() for x in args))
        held = {n: p for n, p in twin.named_parameters() if n in total and any(p is q for q in module.parameters())}
        actual = torch.autograd.grad(again, list(held.values()), delta, allow_unused=True)
        for n, g in zip(held, actual, strict=True):
            total[n] = total[n] + (0 if g is None else g)
    return torch.cat([total[n].flatten() for n in names])


def record(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    losses: Losses = cross_entropy,
    batch: Callable[[Sequence[int]], Batch] = batch_of,
    size: int = 3,
    max_norm: float | None = None,
    groups: int = 1,
    micro: int = 1,
    tokens: int | None = None,
    planned: int | None = None,
    **settings: Any,
) -> list[Seen]:
    """A recorded loop with a mean loss, and what each of its steps truly was."""
    seen = []
    settings = {"loss_reduction": "mean", "encoding": "float64", "steps": planned, **settings}
    names = trained_names(model)
    with backstory.record(model, optimizer, path, **settings) as rec:
        for t in range(steps):
            ids = ids_of(t, size)
            rows = one_backward_each(model, batch(ids), losses, names)
            apart = group_rows(model, batch(ids), losses, names, groups) if groups > 1 else rows[:, None]
            optimizer.zero_grad()
            with rec.step() as s:
                for part in torch.tensor(ids).chunk(micro):
                    s.batch(part, tokens=None if tokens is None else [tokens] * len(part))
                    (losses(model, batch(part.tolist())).sum() / size).backward()
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
            seen.append(Seen(rows, apart, rows.mean(0), *second_moments(model, optimizer)))
    return seen


def met(rows: Tensor, seen: Seen, t: int, model: nn.Module, path: Path) -> Tensor:
    """⟨row, ∇L⟩ of rows (…, p) of step t: whole during the warm-up, else between the sides of the basis, without its core."""
    store = RunStore.open(path)
    if t < int(store.tensor_metadata("basis").get("warmup", "0")):
        return rows @ seen.whole
    against = torch.where(seen.half > 0, seen.whole / seen.half, 0.0)
    return projected(rows * seen.half, model, path, core=False) @ projected(against, model, path, core=False)


def projected(rows: Tensor, model: nn.Module, path: Path, *, core: bool = True) -> Tensor:
    """Rows (…, p) in the stored basis of a run: vec(LᵀGR) of each parameter, and then its core where there is one."""
    sides = RunStore.open(path).load_tensors("basis")
    out, lo = [], 0
    for name in trained_names(model):
        p = model.get_parameter(name)
        G = rows[..., lo : lo + p.numel()].unflatten(-1, (len(p), -1))
        lo += p.numel()
        left, right = (sides.get(f"{name}/{side}") for side in ("left", "right"))
        G = G if left is None else torch.einsum("...ij,ir->...rj", G, left.double())
        G = G if right is None else torch.einsum("...ij,jr->...ir", G, right.double())
        x = G.flatten(-2)
        out.append(x @ as_matrix(sides.get(f"{name}/core"), x.shape[-1]) if core else x)
    return torch.cat(out, -1)


def block_of(path: Path) -> RowBlock:
    """All rows of a run with their curvature rows."""
    store = RunStore.open(path)
    return store.read(0, store.n_rows(), samples=True, dtype=torch.float64, curvature=True)


def adamw(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    """Two groups with rates and decays of their own: matrices and vectors."""
    wide, thin = ([p for p in model.parameters() if (p.dim() > 1) == w] for w in (True, False))
    groups = [{"params": wide, "lr": 0.02, "weight_decay": 0.3}, {"params": thin, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.9), eps=1e-6, **settings)
