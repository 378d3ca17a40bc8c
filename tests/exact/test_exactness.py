r"""Exact results are the derivative of what torch.optim does: reverse sweep = tangents = differences of whole trainings.

The oracle trains a small language model by an ordinary loop (its own loop over micro-batches, torch's clipping, optimizer and schedule) with the
weights w_z (1−ε) of some occurrences, and takes the five-point difference in ε, which is right to about h⁴ = 1e-11. It uses the
recipe's model, optimizer, loss and data, and no code of `backstory.exact` or `backstory.replay`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.support.oracles import assert_close
from torch import Tensor, nn

from backstory import Recipe
from backstory.exact.reverse import reverse
from backstory.exact.tangent import Group, tangent

D = torch.float64
STEPS, BATCH, LENGTH, VOCABULARY, WIDTH = 6, 4, 5, 7, 4
H = 3e-4  # of the five-point difference
CAUSES = "A ratio of 1/(1−β₁) would mean the bias correction, −1 a wrong sign, a median of 1 with large errors a missing path (m, v, c)."
GROUPS = [Group({0: [1]}), Group({2: [0]}), Group({5: [3]}), Group({0: [0], 1: [0, 1, 2, 3], 3: [2, 1], 4: [0]})]
Optimizer = Callable[[Any], torch.optim.Optimizer]
SGD = partial(torch.optim.SGD, lr=0.3)
ADAMW: Optimizer = partial(torch.optim.AdamW, lr=0.02, betas=(0.8, 0.9), weight_decay=0.3)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run."""

    optimizer: Optimizer = SGD
    clip: float | None = None
    dropout: float = 0.0
    tied: bool = False
    lora: int = 0  # rank of the adapters, which alone are trained
    micro: int = 1  # micro-batches of a step
    token_mean: bool = False  # samples have 1 to LENGTH tokens
    schedule: bool = False
    rates: bool = False  # a parameter group of its own for the embedding
    seed: int = 1  # of weights and data


CASES = {
    "sgd": Case(),
    "momentum": Case(optimizer=partial(SGD, momentum=0.8)),
    "dampening": Case(optimizer=partial(SGD, momentum=0.8, dampening=0.3)),
    "nesterov": Case(optimizer=partial(SGD, lr=0.15, momentum=0.8, nesterov=True)),
    "l2": Case(optimizer=partial(SGD, momentum=0.8, weight_decay=0.05)),
    "adam": Case(optimizer=partial(torch.optim.Adam, lr=0.02, betas=(0.8, 0.9), weight_decay=0.05)),
    "adamw": Case(optimizer=ADAMW),
    "sgd, clipped": Case(optimizer=partial(SGD, momentum=0.8, weight_decay=0.05), clip=0.3),
    "adamw, clipped": Case(optimizer=ADAMW, clip=0.3),
    "accumulation": Case(optimizer=ADAMW, micro=2, clip=0.3),
    "dropout": Case(optimizer=ADAMW, dropout=0.3),
    "tied": Case(optimizer=ADAMW, tied=True),
    "lora": Case(optimizer=ADAMW, lora=2, clip=0.13),
    "rates": Case(optimizer=ADAMW, rates=True),
    "schedule": Case(optimizer=ADAMW, schedule=True),
    "token mean": Case(optimizer=ADAMW, token_mean=True),
    "everything": Case(
        optimizer=ADAMW,
        clip=0.55,
        dropout=0.3,
        tied=True,
        micro=2,
        token_mean=True,
        schedule=True,
        rates=True,
        seed=2,
    ),
}


class Net(nn.Module):
    """The next token from the running mean of those before it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.tokens, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.head = nn.Dropout(case.dropout), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if case.tied:
            self.head.weight = self.tokens.weight
        self.requires_grad_(not case.lora)
        self.adapter = nn.Sequential(*_adapter(case.lora)) if case.lora else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        mixed = self.mix(h) if self.adapter is None else self.mix(h) + self.adapter(h)
        h = h + self.drop(torch.tanh(mixed))
        out: Tensor = self.head(h)
        return out


def _adapter(rank: int) -> list[nn.Module]:
    return [nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)]


def loss(case: Case, model: nn.Module, micros: list[Tensor]) -> Tensor:
    """(B,): of the samples of all micro-batches. Token 0 is padding."""
    return torch.cat([losses(case, model, x) for x in micros])


def losses(case: Case, model: nn.Module, x: Tensor) -> Tensor:
    each = F.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:], reduction="none")
    return (each * (x[:, 1:] > 0)).sum(1) if case.token_mean else each.mean(1)


def tokens(micros: list[Tensor]) -> Tensor:
    return torch.cat([(x[:, 1:] > 0).sum(1) for x in micros])


def make(name: str) -> Recipe:
    case, g = CASES[name], torch.Generator().manual_seed(CASES[name].seed)
    model = Net(case).to(D)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.6 * torch.randn(p.shape, generator=g, dtype=D))
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[1:]}, {"params": trained[:1], "lr": 0.01}] if case.rates else trained
    optimizer = case.optimizer(groups)
    x = torch.randint(1, VOCABULARY, (STEPS * BATCH + 2, LENGTH + 1), generator=g)
    if case.token_mean:
        for i in range(len(x)):
            x[i, 2 + i % LENGTH :] = 0
    batches = [list(part.split(BATCH // case.micro)) for part in x[:-2].split(BATCH)]
    torch.manual_seed(5)  # dropout draws from here on
    return Recipe(
        model=model,
        optimizer=optimizer,
        loss=partial(loss, case),
        batches=[(list(range(BATCH * t, BATCH * t + BATCH)), batch) for t, batch in enumerate(batches)],
        loss_reduction="token-mean" if case.token_mean else "mean",
        tokens=tokens,
        clip_norm=case.clip,
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.6) if case.schedule else None,
        queries={"q": [x[-2:]]},
    )


class Trained(NamedTuple):
    """After a training."""

    theta: Tensor  # (n,)
    losses: Tensor  # (Q,)
    gradients: Tensor  # (Q, n)
    clipped: set[bool]  # whether steps were


def train(name: str, less: Mapping[int, list[int]], eps: float) -> Trained:
    """The oracle: the weights of the occurrences `less` (step -> positions) times 1 − eps."""
    case, recipe = CASES[name], make(name)
    model, optimizer, clipped = recipe.model, recipe.optimizer, set()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for t, (_, micros) in enumerate(recipe.batches):
        w = torch.ones(BATCH, dtype=D)
        w[less.get(t, [])] -= eps
        count = sum(int((x[:, 1:] != 0).sum()) for x in micros) if case.token_mean else BATCH
        for x, part in zip(micros, w.split(BATCH // case.micro), strict=True):  # gradients add up
            (losses(case, model, x) @ part / count).backward()
        if case.clip is not None:
            clipped.add(bool(nn.utils.clip_grad_norm_(parameters, case.clip) > case.clip))
        optimizer.step()
        optimizer.zero_grad()
        if recipe.schedule is not None:
            recipe.schedule.step()
    model.eval()
    after = losses(case, model, recipe.queries["q"][0])
    rows = [torch.autograd.grad(x, parameters, retain_graph=True, allow_unused=True) for x in after]
    flat = [[torch.zeros_like(p) if g is None else g for g, p in zip(row, parameters, strict=True)] for row in rows]
    return Trained(vector(parameters), after.detach(), torch.stack([vector(row) for row in flat]), clipped)


def vector(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.detach().reshape(-1) for x in tensors])


@lru_cache
def differences(name: str) -> tuple[Tensor, Tensor]:
    """`(dθ/dε (G, n), dℓ/dε (G, Q))` of each group, by five points."""
    out = []
    for group in GROUPS:
        runs = {k: train(name, group.out, k * H) for k in (-2, -1, 1, 2)}
        points = {k: torch.cat([x.theta, x.losses]) for k, x in runs.items()}
        out.append((8 * (points[1] - points[-1]) - (points[2] - points[-2])) / (12 * H))
    every = torch.stack(out)
    return every[:, :-2], every[:, -2:]


def summed(scores: Tensor) -> Tensor:
    """Reverse scores (Q, T·B) of the occurrences of each group, (G, Q)."""
    table = scores.reshape(-1, STEPS, BATCH)
    return torch.stack(
        [torch.stack([table[:, t, gone].sum(1) for t, gone in group.out.items()]).sum(0) for group in GROUPS]
    )


@pytest.mark.parametrize("name", CASES)
def test_reverse_tangents_and_differences_of_torch_are_the_same(name: str) -> None:
    theta, queries = differences(name)
    forward = tangent(partial(make, name), GROUPS)[STEPS]
    back = summed(reverse(partial(make, name), "q").scores)
    assert_close(forward, theta, rtol=1e-8, causes=CAUSES)
    assert_close(back, queries, rtol=1e-8, causes=CAUSES)
    assert_close(back, forward @ train(name, {}, 0.0).gradients.T, rtol=1e-10)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.clip is not None])
def test_some_steps_are_clipped_and_some_are_not(name: str) -> None:
    assert train(name, {}, 0.0).clipped == {True, False}
