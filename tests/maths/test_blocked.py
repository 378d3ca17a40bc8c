"""Embeddings against torch's optimizer, against retraining, against the paper, and against themselves in chunks."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from tests.maths.examples import RULES, P, heavy, joined, plain, random_step, random_steps, recorded
from tests.support.oracles import (
    Group,
    Run,
    Seconds,
    Visit,
    algorithm_1,
    assert_close,
    assert_same,
    difference_embeddings,
    observe,
    reweighted,
    train,
    train_adam,
    unrolled,
)
from torch import Tensor

from backstory.maths import blocked
from backstory.maths.adjoint import Adjoint
from backstory.maths.blocked import Between, Propagator, chunk_rows, group_steps, is_large
from backstory.maths.steps import Coefficients, Contraction, Step

CAUSES = (
    "A ratio of -1 is the sign; 1/w or w a weight too few or too many; a ratio of neighbouring rates the "
    "schedule's index; 1/(1-τ) dampening; errors of 1e-6 ρ of clipping; errors that grow towards the first "
    "steps the order of products, or a transposed propagator."
)
TIMES = 7
RATES = [0.11, 0.07, 0.19, 0.05, 0.13, 0.03, 0.17]  # no two neighbours alike
BATCHES = [[0, 1, 2], [3, 4], [5, 0, 1], [2], [3, 5, 4], [1, 0], [4, 2, 5]]


@dataclass(frozen=True)
class Mode:
    """What SGD is told, and the coefficients that follow from torch's source, by hand; defaults are plain SGD."""

    sgd: dict[str, Any] = field(default_factory=dict)
    l2: float = 0.0
    decay: float = 0.0
    momentum: float = 0.0
    tau: float = 0.0  # from the second update on: the optimizer's first ignores dampening
    a: float = 1.0
    n: float = 0.0
    pace: float = 1.0  # times the schedule

    def at(self, t: int) -> tuple[float, ...]:
        tau = 0.0 if t == 0 else self.tau
        return (self.pace * RATES[t], self.l2, self.decay, self.momentum, tau, self.a, self.n)


PLAIN = Mode()
HEAVY = Mode({"momentum": 0.9}, momentum=0.9)
DAMPENED = Mode({"momentum": 0.8, "dampening": 0.3}, momentum=0.8, tau=0.3)
NOT_DAMPENED = Mode({"dampening": 0.3})  # torch ignores dampening without momentum
NESTEROV = Mode({"momentum": 0.7, "nesterov": True}, momentum=0.7, a=0.7, n=1.0)
L2 = Mode({"weight_decay": 0.2}, l2=0.2)
DECOUPLED = Mode(decay=0.3)
HEAVY_L2 = Mode({"momentum": 0.8, "dampening": 0.2, "weight_decay": 0.1}, l2=0.1, momentum=0.8, tau=0.2, pace=0.7)
HEAVY_DECOUPLED = Mode({"momentum": 0.8}, decay=0.3, momentum=0.8)
NESTEROV_L2 = Mode({"momentum": 0.6, "nesterov": True, "weight_decay": 0.2}, l2=0.2, momentum=0.6, a=0.6, n=1.0)
NESTEROV_DECOUPLED = Mode({"momentum": 0.6, "nesterov": True}, decay=0.2, momentum=0.6, a=0.6, n=1.0)
MODES = {
    "plain": (PLAIN,),
    "momentum": (HEAVY,),
    "dampening": (DAMPENED,),
    "dampening without momentum": (NOT_DAMPENED,),
    "nesterov": (NESTEROV,),
    "l2": (L2,),
    "decoupled": (DECOUPLED,),
    "momentum, dampening, l2": (HEAVY_L2,),
    "momentum, decoupled": (HEAVY_DECOUPLED,),
    "nesterov, l2": (NESTEROV_L2,),
    "two groups": (HEAVY_L2, NESTEROV_DECOUPLED),
    "two groups, one plain": (PLAIN, DAMPENED),
}
CLIPS = {"never": None, "sometimes": 2.6, "always": 0.4}


def quadratic_run(modes: tuple[Mode, ...], max_norm: float | None = None) -> Run:
    g = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    groups = [
        Group(
            size=P // len(modes),
            settings=[{"lr": mode.pace * RATES[t], **mode.sgd} for t in range(TIMES)],
            decay=mode.decay,
        )
        for mode in modes
    ]
    weights = [torch.rand(len(b), generator=g, dtype=torch.float64) + 0.2 for b in BATCHES]
    return Run(
        h=0.5 * normal(6, 2, P), b=normal(6, 2), start=normal(P), batches=BATCHES, weights=weights, groups=groups,
        max_norm=max_norm,
    )  # fmt: skip


def coefficients(modes: tuple[Mode, ...], t: int) -> Coefficients:
    if len(modes) == 1:
        return Coefficients(*modes[0].at(t))
    size = P // len(modes)
    columns = zip(*(mode.at(t) for mode in modes), strict=True)
    return Coefficients(*(torch.tensor(c, dtype=torch.float64).repeat_interleave(size) for c in columns))


def as_steps(run: Run, visits: list[Visit], ks: list[Coefficients]) -> list[Step]:
    """The run as a recorder would keep it, with the true Hessian's rows √w h."""
    steps = []
    for batch, w, visit, k in zip(run.batches, run.weights, visits, ks, strict=True):
        V = torch.cat([w[i].sqrt() * run.h[z] for i, z in enumerate(batch)])
        dots = visit.grads @ visit.gradient, V @ visit.gradient
        steps.append(Step(visit.grads, w, k, V, visit.clip, visit.norm, *dots))
    return steps


def embeddings(run: Run, ks: list[Coefficients]) -> list[Tensor]:
    return Propagator(P, dtype=torch.float64, contraction="never").embed(as_steps(run, observe(run), ks))


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("mode", MODES)
def test_embeddings_are_derivatives_of_torch_sgd(mode: str, clip: str) -> None:
    run = quadratic_run(MODES[mode], CLIPS[clip])
    factors = [visit.clip for visit in observe(run)]
    assert {"never": min(factors) == 1, "sometimes": min(factors) < 0.99 and max(factors) == 1,
            "always": max(factors) < 0.99}[clip], f"the example does not test what it says: {factors}"  # fmt: skip
    result = embeddings(run, [coefficients(MODES[mode], t) for t in range(TIMES)])
    assert_close(torch.cat(result), torch.cat(difference_embeddings(run)), 1e-8, CAUSES)


@dataclass(frozen=True)
class AdamMode:
    """What one parameter group of Adam is told."""

    lr: float
    weight_decay: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-3
    amsgrad: bool = False

    def at(self, t: int) -> dict[str, Any]:
        return {**self.__dict__, "lr": self.lr * RATES[t]}

    def coefficients(self, t: int, second: dict[str, Tensor], decoupled: bool) -> Coefficients:
        """From torch's documentation of the algorithm, by hand; `second` is what the state holds after update t."""
        v = second["max_exp_avg_sq" if self.amsgrad else "exp_avg_sq"] / (1 - self.betas[1] ** (t + 1))
        l2, decay = (0.0, self.weight_decay) if decoupled else (self.weight_decay, 0.0)
        beta = self.betas[0]
        a = 1 / (1 - beta ** (t + 1))
        return Coefficients(self.lr * RATES[t], l2, decay, beta, beta, a, 0.0, 1 / (v.sqrt() + self.eps))


ADAMS: dict[str, tuple[type[torch.optim.Adam], tuple[AdamMode, ...]]] = {
    "adamw": (torch.optim.AdamW, (AdamMode(0.5, 0.3),)),
    "adamw, two groups": (torch.optim.AdamW, (AdamMode(0.5, 0.3), AdamMode(0.2, 0.8))),
    "adamw, two groups, own betas and eps": (
        torch.optim.AdamW,
        (AdamMode(0.5, 0.3), AdamMode(0.2, 0.0, betas=(0.7, 0.8), eps=0.1)),
    ),
    "adam with l2": (torch.optim.Adam, (AdamMode(0.5, 0.3),)),
    "adam with l2, two groups": (torch.optim.Adam, (AdamMode(0.5, 0.3), AdamMode(0.2, 0.8))),
    "amsgrad": (torch.optim.AdamW, (AdamMode(0.5, 0.3, betas=(0.9, 0.5), amsgrad=True), AdamMode(0.2, 0.8))),
}


def adam_run(modes: tuple[AdamMode, ...], max_norm: float | None) -> Run:
    groups = [Group(size=P // len(modes), settings=[mode.at(t) for t in range(TIMES)]) for mode in modes]
    return replace(quadratic_run((PLAIN,), max_norm), groups=groups)


def adam_coefficients(name: str, t: int, seconds: Seconds) -> Coefficients:
    """Of all groups: numbers where there is one, vectors where there are two; P is a vector always."""
    adam, modes = ADAMS[name]
    ks = [mode.coefficients(t, v, adam is torch.optim.AdamW) for mode, v in zip(modes, seconds, strict=True)]
    if len(ks) == 1:
        return ks[0]
    per = P // len(modes)  # P itself is as long already
    columns = (
        [torch.as_tensor(x, dtype=torch.float64).expand(per) for x in column] for column in zip(*ks, strict=True)
    )
    return Coefficients(*(torch.cat(column) for column in columns))


def relative(result: Seconds, expected: Seconds) -> float:
    pairs = [(a[n], b[n]) for a, b in zip(result, expected, strict=True) for n in b]
    return max(((a - b).abs() / b.abs().max()).max().item() for a, b in pairs)


@pytest.mark.parametrize("name", ADAMS)
def test_the_oracle_of_adam_holds_the_second_moments(name: str) -> None:
    """The run played again with its own second moments is itself; another one ends elsewhere, but with the same v."""
    adam, modes = ADAMS[name]
    run = adam_run(modes, CLIPS["sometimes"])
    end, seconds = train_adam(run, adam)
    again, _ = train_adam(run, adam, seconds)
    assert_same(again, end, TIMES * P)
    other, held = train_adam(reweighted(run, 0, 1, 0.9), adam, seconds)
    free, moved = train_adam(reweighted(run, 0, 1, 0.9), adam)
    assert max(relative(a, b) for a, b in zip(held, seconds, strict=True)) < 1e-14  # a few operations on each number
    assert max(relative(a, b) for a, b in zip(moved, seconds, strict=True)) > 1e-3
    assert (other - end).norm() > 1e-4
    assert (other - free).norm() > 1e-4
    if modes[0].amsgrad:
        assert any((s[0]["max_exp_avg_sq"] > s[0]["exp_avg_sq"]).any() for s in seconds), (
            "the maximum does nothing here"
        )


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", ADAMS)
def test_embeddings_are_derivatives_of_torch_adam_with_v_frozen(name: str, clip: str) -> None:
    adam, modes = ADAMS[name]
    run = adam_run(modes, CLIPS[clip])
    visits: list[Visit] = []
    _, seconds = train_adam(run, adam, watch=visits.append)
    factors = [visit.clip for visit in visits]
    assert {"never": min(factors) == 1, "sometimes": min(factors) < 0.99 and max(factors) == 1,
            "always": max(factors) < 0.99}[clip], f"the example does not test what it says: {factors}"  # fmt: skip
    expected = torch.cat(difference_embeddings(run, lambda other: train_adam(other, adam, seconds)[0]))
    steps = as_steps(run, visits, [adam_coefficients(name, t, seconds[t]) for t in range(TIMES)])
    causes = CAUSES + " With Adam: ε inside the root, a bias correction, or v before its update."
    assert_close(
        torch.cat(Propagator(P, dtype=torch.float64, contraction="never").embed(steps)), expected, 1e-8, causes
    )
    adjoint = Adjoint(torch.eye(P, dtype=torch.float64), contraction="never")
    result = [adjoint.influence(step) for step in reversed(steps)][::-1]
    assert_close(torch.cat(result, 1).T, expected, 1e-8, causes)


def test_momentum_switched_on_and_off_in_the_middle() -> None:
    """SGD's buffer is born at the first update with momentum, and is left alone by updates without."""
    born = {2: 0.0, 3: 0.9, 5: 0.9, 6: 0.9}  # μ of the updates with momentum: at t = 2 there is no m to shrink
    ks = [
        Coefficients(RATES[t], 0.0, 0.0, born[t], 0.0, 1.0, 0.0) if t in born
        else Coefficients(RATES[t], 0.0, 0.0, 1.0, 1.0, 0.0, 1.0)  # m stays as it is, θ moves by u alone
        for t in range(TIMES)
    ]  # fmt: skip
    settings = [{"lr": RATES[t], "momentum": 0.9 if t in born else 0.0} for t in range(TIMES)]
    run = replace(quadratic_run((PLAIN,)), groups=[Group(size=P, settings=settings)])
    assert_close(torch.cat(embeddings(run, ks)), torch.cat(difference_embeddings(run)), 1e-8, CAUSES)


@pytest.mark.parametrize("mode", ["plain", "momentum", "nesterov, l2", "two groups"])
def test_on_a_quadratic_the_embedding_is_retraining(mode: str) -> None:
    run = quadratic_run(MODES[mode])
    result = embeddings(run, [coefficients(MODES[mode], t) for t in range(TIMES)])
    with_all = train(run)
    for t, batch in enumerate(BATCHES):
        without = torch.stack([train(reweighted(run, t, i, 0.0)) for i in range(len(batch))])
        assert_close(result[t], without - with_all, 1e-9, CAUSES)


def test_plain_sgd_is_the_papers_algorithm_1() -> None:
    g = torch.Generator().manual_seed(1)
    grads = [0.7 * torch.randn(rows, P, generator=g, dtype=torch.float64) for rows in (3, 1, 4, 2)]
    rates = [0.1, 0.3, 0.2, 0.15]
    expected, M = algorithm_1(grads, rates)
    ones = [torch.ones(len(G), dtype=torch.float64) for G in grads]
    steps = [Step(G, w, plain(rate)) for G, w, rate in zip(grads, ones, rates, strict=True)]
    propagator = Propagator(P, dtype=torch.float64, contraction="never")
    assert_close(torch.cat(propagator.embed(steps)), torch.cat(expected), 1e-12, CAUSES)
    eye = torch.eye(P, dtype=torch.float64)
    assert_close(propagator.sigma, eye - M, 1e-12, "K is I - M only if the first step is folded in too.")


CHUNKED = {
    "all pending": 256,
    "some pending": 9,
    "few pending": 5,
    "none": 0,
}  # rows of a chunk; a larger step goes alone


@pytest.mark.parametrize("contraction", ["never", 1.0, "always"])
@pytest.mark.parametrize("rows", CHUNKED.values(), ids=CHUNKED)
@pytest.mark.parametrize("curvature", [False, True], ids=["fisher", "own rows"])
@pytest.mark.parametrize("clipped", [False, True], ids=["whole", "clipped"])
@pytest.mark.parametrize("rule", RULES)
def test_equals_unrolling_by_autograd(
    rule: str, clipped: bool, curvature: bool, rows: int, contraction: Contraction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "CHUNK_ROWS", Between(rows, rows))
    monkeypatch.setattr(blocked, "LARGE_ROWS", Between(rows, rows))
    monkeypatch.setattr(blocked, "SOLVED_ROWS", 4)
    steps = random_steps(rule, clipped=clipped, curvature=curvature)
    expected, over_all = unrolled([recorded(s, contraction) for s in steps])
    propagator = Propagator(P, dtype=torch.float64, contraction=contraction)
    assert_close(torch.cat(propagator.embed(steps)), torch.cat(expected), 1e-10, CAUSES)
    assert_close(propagator.sigma, over_all, 1e-10, CAUSES)


def in_parts(steps: list[Step], cuts: list[int], contraction: Contraction) -> tuple[Tensor, Tensor]:
    """Embeddings of all rows and the final propagator, the steps given in parts, last part first."""
    propagator = Propagator(P, dtype=torch.float64, contraction=contraction)
    out: list[Tensor] = []
    for lo, hi in reversed(list(zip([0, *cuts], [*cuts, len(steps)], strict=True))):
        out = propagator.embed(steps[lo:hi]) + out
    return torch.cat(out), propagator.sigma


@pytest.mark.parametrize("contraction", ["never", 1.0, "always"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cuts", [[], [4], [1, 2, 6], [3, 7]], ids=str)
def test_chunks_equal_steps_one_at_a_time(rule: str, cuts: list[int], contraction: Contraction) -> None:
    steps = random_steps(rule, clipped=True)
    E, A = in_parts(steps, list(range(1, len(steps))), contraction)
    assert_close(in_parts(steps, cuts, contraction)[0], E, 1e-11, CAUSES)
    assert_close(in_parts(steps, cuts, contraction)[1], A, 1e-11, CAUSES)


@pytest.mark.parametrize("contraction", ["never", "always"])
@pytest.mark.parametrize("rows", [[255, 1], [256, 1], [3, 257, 2], [102, 102, 102, 1, 255, 256, 1]], ids=str)
def test_chunks_at_the_edge_of_their_size(rows: list[int], contraction: Contraction) -> None:
    g = torch.Generator().manual_seed(4)
    steps = [random_step(g, n, plain(0.1 / n)) for n in rows]
    E, A = in_parts(steps, list(range(1, len(steps))), contraction)
    assert_close(in_parts(steps, [], contraction)[0], E, 1e-11, CAUSES)
    assert_close(in_parts(steps, [], contraction)[1], A, 1e-11, CAUSES)


@pytest.mark.parametrize("contraction", ["never", "always"])
@pytest.mark.parametrize("rule", ["plain", "momentum", "nesterov"])
def test_steps_with_and_without_rows_of_their_own_in_one_chunk(rule: str, contraction: Contraction) -> None:
    mixed = zip(random_steps(rule, clipped=True), random_steps(rule, clipped=True, curvature=True), strict=True)
    steps = [pair[t % 2] for t, pair in enumerate(mixed)]
    expected, over_all = unrolled([recorded(s, contraction) for s in steps])
    propagator = Propagator(P, dtype=torch.float64, contraction=contraction)
    assert_close(torch.cat(propagator.embed(steps)), torch.cat(expected), 1e-10, CAUSES)
    assert_close(propagator.sigma, over_all, 1e-10, CAUSES)


@pytest.mark.parametrize("contraction", ["never", 1.0, "always"])
def test_a_step_with_rate_zero_moves_nothing(contraction: Contraction) -> None:
    """Warm-up often begins at 0 and a cosine ends there."""
    g = torch.Generator().manual_seed(5)
    steps = [random_step(g, 3, plain(rate)) for rate in (0.0, 0.2, 0.0, 0.1)]
    E = Propagator(P, dtype=torch.float64, contraction=contraction).embed(steps)
    without = Propagator(P, dtype=torch.float64, contraction=contraction).embed([steps[1], steps[3]])
    assert not E[0].any()
    assert not E[2].any()
    assert_close(torch.cat([E[1], E[3]]), torch.cat(without), 1e-12)


def test_a_step_without_rows_moves_nothing() -> None:
    g = torch.Generator().manual_seed(5)
    first, empty, last = (random_step(g, rows, plain(0.2)) for rows in (3, 0, 2))
    E = Propagator(P, dtype=torch.float64).embed([first, empty, last])
    without = Propagator(P, dtype=torch.float64).embed([first, last])
    assert E[1].shape == (0, P)
    assert_close(torch.cat(E), torch.cat(without), 1e-12)


def one_by_one(steps: list[Step], p: int) -> list[Tensor]:
    """Embeddings of each step, handed over alone, last step first."""
    propagator = Propagator(p, dtype=torch.float64)
    return [propagator.embed([step])[0] for step in reversed(steps)]


def settled(steps: list[Step], p: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """How often a sweep of these steps, handed over one by one, makes matrices of what is pending."""
    count = 0
    multiply_out = Propagator._multiply_out

    def counted(self: Propagator) -> None:
        nonlocal count
        count += bool(self._low_rank.steps)
        multiply_out(self)

    with monkeypatch.context() as patch:
        patch.setattr(Propagator, "_multiply_out", counted)
        one_by_one(steps, p)
    return count


def test_a_run_of_fewer_rows_than_half_of_p_makes_no_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "CHUNK_ROWS", Between(60, 60))
    p, g = 240, torch.Generator().manual_seed(7)
    made = torch.randn(26, 7, p, generator=g, dtype=torch.float64) / 20
    steps = [Step(G, torch.full((7,), 1 / 7, dtype=torch.float64), plain(0.1)) for G in made]
    assert settled(steps[:17], p, monkeypatch) == 0  # 119 rows
    assert settled(steps[:18], p, monkeypatch) == 1  # 126
    assert settled(steps[:25], p, monkeypatch) == 1  # 119, and 56 of a chunk of 60
    assert settled(steps, p, monkeypatch) == 2


def test_rows_before_and_after_a_matrix_is_made_are_the_papers(monkeypatch: pytest.MonkeyPatch) -> None:
    p, g = 300, torch.Generator().manual_seed(7)
    made = torch.randn(40, 7, p, generator=g, dtype=torch.float64) / 20
    steps = [Step(G, torch.full((7,), 1 / 7, dtype=torch.float64), plain(0.1)) for G in made]
    assert settled(steps, p, monkeypatch) == 1
    expected, _ = algorithm_1(list(made), [0.1 / 7] * 40)
    result = Propagator(p, dtype=torch.float64, contraction="never").embed(steps)
    assert_close(torch.cat(result), torch.cat(expected), 1e-11, CAUSES)


def test_steps_without_rows_do_not_pile_up() -> None:
    g = torch.Generator().manual_seed(5)
    propagator = Propagator(P, dtype=torch.float64)
    for _ in range(600):
        propagator.embed([random_step(g, 0, plain(0.2))])
    assert propagator._low_rank.steps <= 257


@pytest.mark.parametrize("curvature", [None, 2], ids=["fisher", "own rows"])
def test_rows_that_change_afterwards_do_not_matter(curvature: int | None) -> None:
    """Pending rows are copies: the caller may use its memory again."""
    step = random_step(torch.Generator().manual_seed(5), 3, plain(0.2), curvature=curvature)
    expected, propagator = (Propagator(P, dtype=torch.float64, contraction="never") for _ in range(2))
    for x in (expected, propagator):
        x.embed([step])
    before = expected.sigma.clone()
    for rows in (step.G, step.V):
        if rows is not None:
            rows.zero_()
    assert_close(propagator.sigma, before, 1e-12)


def test_pending_rows_in_float32_are_as_exact_as_float32_is() -> None:
    """Heavy ball with decays, 560 rows, all pending until the end."""
    g, p = torch.Generator().manual_seed(8), 1200
    made = torch.randn(80, 7, p, generator=g, dtype=torch.float64) / 40
    steps = [Step(G, torch.full((7,), 1 / 7, dtype=torch.float64), heavy(0.05)) for G in made]
    exact = torch.cat(Propagator(p, dtype=torch.float64, contraction="always").embed(steps))
    narrow = [s._replace(G=s.G.float(), w=s.w.float()) for s in steps]
    result = torch.cat(Propagator(p, dtype=torch.float32, contraction="always").embed(narrow))
    assert_close(result.double(), exact, 1e-5)


def test_embed_yields_the_last_step_first() -> None:
    steps = random_steps("momentum")
    at_once = Propagator(P, dtype=torch.float64).embed(steps)
    apart = one_by_one(steps, P)
    for actual, expected in zip(reversed(apart), at_once, strict=True):
        assert_close(actual, expected, 1e-12)


@pytest.mark.parametrize("together", [True, False], ids=["chunk", "single"])
def test_the_implicit_form_contracts_where_the_literal_one_expands(together: bool) -> None:
    """γ = 1 without momentum: ‖∂θ_T/∂θ_t‖ ≤ 1 at every t, however large the rows."""
    g = torch.Generator().manual_seed(6)
    steps = [random_step(g, 4, plain(10.0 ** (t % 4 - 1))) for t in range(12)]
    norms: dict[Contraction, list[float]] = {"never": [], 1.0: []}
    for contraction, result in norms.items():
        propagator = Propagator(P, dtype=torch.float64, contraction=contraction)
        for step in reversed(steps):
            propagator.embed([step] if together else [step._replace(V=step.w.sqrt()[:, None] * step.G)])
            result.append(torch.linalg.matrix_norm(propagator.sigma, 2).item())
    assert max(norms[1.0]) <= 1 + 1e-12
    assert sorted(norms[1.0], reverse=True) == pytest.approx(norms[1.0])
    assert max(norms["never"]) > 1e6, "the rows are not hostile enough to show the difference"


@pytest.mark.parametrize("curvature", [False, True], ids=["fisher", "own rows"])
def test_all_tensors_follow_the_rows_device(curvature: bool) -> None:
    """The `meta` device computes shapes alone, and refuses to meet a tensor of another device."""
    away = []
    for step in random_steps("momentum", clipped=True, curvature=curvature):
        names = ("G", "w", "dot_g", *(["V", "dot_v"] if curvature else []))
        away.append(step._replace(**{name: getattr(step, name).to("meta") for name in names}))
    for contraction in ("never", "always"):
        propagator = Propagator(P, dtype=torch.float64, contraction=contraction, device="meta")
        E = [x for step in reversed(away) for x in propagator.embed([step])]
        assert {e.device.type for e in [*E, propagator.sigma]} == {"meta"}


@pytest.mark.parametrize("contraction", ["always", "never", "when_expanding"])
@pytest.mark.parametrize("clipped", [False, True], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("momentum", [False, True], ids=["whole run", "segment"])
@pytest.mark.parametrize("rule", ["plain", "momentum", "nesterov", "adam", "plain, then momentum"])
@pytest.mark.parametrize("between", [False, True], ids=["all shared", "others between"])
def test_shared_orthogonal_rows_are_a_shorter_way(
    rule: str, momentum: bool, clipped: bool, contraction: Any, between: bool
) -> None:
    """Two windows of steps, each with curvature of its own: as if every step had its own rows."""
    Q = torch.linalg.qr(torch.randn(P, P, generator=torch.Generator().manual_seed(3), dtype=torch.float64)).Q
    shared = [Q[:4] * torch.tensor([[1.5], [1.0], [0.4], [0.1]], dtype=torch.float64), Q[2:5] * 0.8]
    steps = random_steps(rule, clipped=clipped)
    steps = [s._replace(V=V, dot_v=V @ (s.w @ s.G)) for t, s in enumerate(steps) for V in [shared[t >= 5]]]
    alone = {3, 4, 7} if between else set()  # taken as other steps are, before, between and after shared ones
    apart, at_once = (Propagator(P, dtype=torch.float64, contraction=contraction, of_pairs=momentum) for _ in range(2))
    expected = [x for step in reversed(steps) for x in apart.embed([step])][::-1]
    result = at_once.embed([s._replace(orthogonal=t not in alone) for t, s in enumerate(steps)])
    for t, (x, y) in enumerate(zip(result, expected, strict=True)):
        assert_close(x, y, 1e-11, f"step {t}: {CAUSES}")
    assert_close(at_once.sigma, apart.sigma, 1e-11, "what comes before the steps")
    assert (at_once._C is None) == (apart._C is None), "a second matrix where there is no momentum"


def step(rows: int, k: Coefficients | None = None, p: int = 8, curvature: int | None = None) -> Step:
    V = None if curvature is None else torch.zeros(curvature, p)
    return Step(torch.zeros(rows, p), torch.ones(rows), k or plain(0.1), V=V)


def sizes(steps: list[Step]) -> list[list[int]]:
    return [[len(s.w) for s in group] for group in group_steps(steps)]


@pytest.mark.parametrize(
    "chunks",
    [[[255, 1]], [[255], [1, 1]], [[3], [257], [2]], [[102, 102], [102, 102], [1, 255], [256], [1]]],
    ids=["exactly full", "one row more", "a step larger than a chunk", "many"],
)
def test_plain_steps_fill_chunks_from_the_end(chunks: list[list[int]]) -> None:
    assert sizes([step(rows) for chunk in chunks for rows in chunk]) == chunks


@pytest.mark.parametrize(("p", "rows"), [(8, 256), (1024, 256), (2000, 500), (4096, 1024), (50_000, 1024)])
def test_a_chunk_has_a_quarter_of_p_within_bounds(p: int, rows: int) -> None:
    assert chunk_rows(p) == rows
    assert sizes([step(1, p=p), step(rows - 1, p=p)]) == [[1, rows - 1]]
    assert sizes([step(1, p=p), step(rows, p=p)]) == [[1], [rows]]


@pytest.mark.parametrize(("p", "rows"), [(8, 64), (2048, 64), (3200, 100), (4096, 128), (50_000, 128)])
def test_with_momentum_large_steps_go_alone(p: int, rows: int) -> None:
    most, more = step(rows, heavy(0.1), p), step(rows + 1, heavy(0.1), p)
    assert not is_large(most)
    assert is_large(more)
    assert not is_large(step(rows + 1, p=p))
    assert sizes([most, most, more, most]) == [[rows, rows], [rows + 1], [rows]]


def test_curvature_rows_count_beside_gradient_rows() -> None:
    assert sizes([step(1, curvature=127), step(1, curvature=127)]) == [[1, 1]]
    assert sizes([step(1, curvature=127), step(1, curvature=128)]) == [[1], [1]]


def test_steps_of_unequal_groups_of_parameters_go_alone() -> None:
    apart = joined(plain(0.1), plain(0.2), (4, 4))
    assert sizes([step(1), step(2), step(3, apart), step(4, apart), step(5), step(6)]) == [[1, 2], [3], [4], [5, 6]]


def test_orthogonal_rows_go_together_where_they_are_the_same() -> None:
    first, second = (step(300, curvature=2)._replace(orthogonal=True) for _ in range(2))
    assert sizes([step(1), first, first, second, second, second, step(2)]) == [[1], [300] * 2, [300] * 3, [2]]
