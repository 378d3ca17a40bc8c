"""A plan against what a recording then takes; seconds are checked as a formula only, never against a clock."""

import copy
import dataclasses
import json
import re
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstory
from backstory.errors import UsageError
from backstory.exact import costs
from backstory.recording.plan import _Costs
from backstory.recording.plan_trial import Trial, _each, _Size, trial
from backstory.recording.settings import Exact, Settings
from backstory.replay.recipe import Recipe, take_step
from backstory.results.plan import Plan
from backstory.store import RunStore, Writer

QUICK: dict[str, Any] = {"seconds": 0.01, "repeats": 1}
Make = Callable[..., Recipe]


def class_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def mlp(steps: int = 200, **optimizer: Any) -> Recipe:
    """SGD, 12 samples a step of 300."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(300, 10, generator=g), torch.randint(0, 3, (300,), generator=g)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 14), nn.GELU(), nn.Linear(14, 3))
    order = [[(12 * t + i) % 300 for i in range(12)] for t in range(steps)]
    return Recipe(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), **{"lr": 0.05, **optimizer}),
        loss=class_losses,
        batches=[(ids, (x[ids], y[ids])) for ids in order],
    )


class TinyGPT(nn.Module):
    """One block over 9 tokens of 20."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, 12), nn.Embedding(8, 12)
        self.norm = nn.LayerNorm(12)
        self.qkv, self.out, self.head = nn.Linear(12, 36), nn.Linear(12, 12), nn.Linear(12, 20, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) -> (B, 8, 20)."""
        h = self.tokens(x) + self.places(torch.arange(8)[None])
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        logits: Tensor = self.head(h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return logits


def token_sums(model: nn.Module, batch: Tensor) -> Tensor:
    actual = F.cross_entropy(model(batch[:, :-1]).transpose(1, 2), batch[:, 1:], reduction="none")
    return actual.sum(1)


def gpt(steps: int = 90) -> Recipe:
    """AdamW, token-mean, clipped, with a schedule."""
    x = torch.randint(0, 20, (200, 9), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = [[(6 * t + i) % 200 for i in range(6)] for t in range(steps)]
    return Recipe(
        model=model,
        optimizer=optimizer,
        loss=token_sums,
        batches=[(ids, x[ids]) for ids in order],
        loss_reduction="token-mean",
        tokens=lambda batch: torch.full((len(batch),), batch.shape[1] - 1),
        clip_norm=1.0,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t)),
    )


def recorded_bytes(made: Recipe, path: Path, **settings: Any) -> int:
    """The whole run, recorded as a user records it."""
    chosen = {"loss_reduction": made.loss_reduction, "steps": len(made.batches), **settings}
    with backstory.record(made.model, made.optimizer, path, **chosen) as rec:
        for t, (ids, batch) in enumerate(made.batches):
            with rec.step(ids, tokens=None if made.tokens is None else made.tokens(batch)):
                take_step(made, t)
    return RunStore.open(path).size_bytes()


@pytest.fixture
def _even_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial of as many steps on a busy machine as on any other."""
    ticks = count()
    monkeypatch.setattr("backstory.recording.plan_trial._now", lambda: 0.001 * next(ticks))


@pytest.fixture(autouse=True)
def _commits_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the writer commits by the clock, and more files take more bytes."""
    defaults = Writer.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "commit_seconds", 3600.0)


CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "mlp": (mlp, {}),
    "mlp with checkpoints": (mlp, {"checkpoints": 3, "rank": 4, "encoding": "int8"}),
    "mlp random, small rows": (mlp, {"projection": "random", "rank": 2}),
    "gpt": (gpt, {}),
    "gpt with checkpoints": (gpt, {"checkpoints": 2, "rank": 4}),
    "gpt mask, diagonal kept": (gpt, {"projection": "mask", "rank": 6, "curvature": "empirical"}),
}


@pytest.mark.usefixtures("_even_clock")
@pytest.mark.parametrize("case", [pytest.param("gpt", marks=pytest.mark.slow), *(x for x in CASES if x != "gpt")])
def test_the_store_is_as_large_as_planned(case: str, tmp_path: Path) -> None:
    make, settings = CASES[case]
    planned = backstory.plan(make, **QUICK, **settings)
    ratio = planned.store_bytes / recorded_bytes(make(), tmp_path / "run", **settings)
    assert abs(ratio - 1) < 0.1, (
        f"the planned store is {ratio:.3f} × the real one. Above 1 by a tenth or two: what each file costs was counted for "
        "every row; far below 1: curvature rows, the basis or the checkpoints are missing."
    )


def test_the_parts_make_the_whole() -> None:
    p = backstory.plan(gpt, steps=5000, checkpoints=1, **QUICK)
    parts = p.row_bytes * p.occurrences + p.step_bytes * p.steps + p.window_bytes + p.fixed_bytes + p.checkpoint_bytes
    assert p.store_bytes == pytest.approx(parts, rel=1e-6)
    assert (p.steps, p.batch, p.occurrences) == (5000, 6, 30_000)
    assert p.checkpoint_bytes > 3 * sum(x.nbytes for x in gpt().model.state_dict().values())
    assert p.curvature == "empirical/6", "the default of `record` for a token-mean loss"


def test_the_final_weights_are_planned_without_checkpoints() -> None:
    def wide() -> Recipe:
        made = mlp()
        made.model.register_buffer("table", torch.zeros(10**6))
        return made

    p = backstory.plan(wide, **QUICK)
    assert p.checkpoint_bytes == sum(x.nbytes for x in wide().model.state_dict().values())
    assert p.fixed_bytes < p.checkpoint_bytes / 2, "the trial's own weights are not planned again"
    assert p.store_bytes == pytest.approx(
        p.row_bytes * p.occurrences + p.step_bytes * p.steps + p.window_bytes + p.fixed_bytes + p.checkpoint_bytes,
        rel=1e-6,
    )


def test_the_suggested_rank_is_the_largest_that_fits() -> None:
    budget = 700_000
    p = backstory.plan(mlp, max_bytes=budget, **QUICK)
    assert p.suggested_rank is not None
    assert 1 < p.suggested_rank < 14
    with_it, above = (backstory.plan(mlp, rank=p.suggested_rank + more, **QUICK).store_bytes for more in (0, 1))
    assert with_it < 1.03 * budget
    assert above > 0.97 * budget


@pytest.mark.usefixtures("_even_clock")
@pytest.mark.parametrize(
    ("make", "settings", "budget"),
    [
        (mlp, {"projection": "full"}, 700_000),
        (mlp, {"rank": "auto:0.6"}, 700_000),
        (gpt, {"rank": 2, "projection": "mask", "curvature": "empirical"}, 400_000),
    ],
    ids=["from full", "from a share", "with a diagonal"],
)
def test_the_largest_rank_fills_the_budget(make: Make, settings: dict[str, Any], budget: int, tmp_path: Path) -> None:
    rank = backstory.plan(make, max_bytes=budget, **settings, **QUICK).suggested_rank
    assert rank is not None
    assert rank > 1
    theirs = {**settings, "projection": "mask" if settings.get("projection") == "mask" else "learned"}
    if settings.get("projection") == "full":  # the rest is that of the full projection
        theirs |= {"curvature_of": "steps", "encoding": "float16"}
    sizes = [recorded_bytes(make(), tmp_path / str(more), **{**theirs, "rank": rank + more}) for more in (0, 1)]
    assert sizes[0] < 1.05 * budget, "it does not fit"
    assert sizes[1] > 0.95 * budget, "a larger one fits"


def test_a_budget_too_small_for_any_rank() -> None:
    p = backstory.plan(mlp, max_bytes=1000, **QUICK)
    assert p.suggested_rank is None
    assert "does not fit into 1 kB; no rank fits" in str(p)


def test_nothing_of_the_users_is_touched(tmp_path: Path) -> None:
    made = gpt()
    for t in range(3):
        take_step(made, t)
    made.model.norm.eval()  # type: ignore[union-attr]
    before = copy.deepcopy((made.model.state_dict(), made.optimizer.state_dict(), made.schedule.state_dict()))
    gradients = [None if p.grad is None else p.grad.clone() for p in made.model.parameters()]
    modes = [m.training for m in made.model.modules()]
    generator = torch.get_rng_state()

    def drawing() -> Recipe:
        torch.rand(3)
        return made

    backstory.plan(drawing, folder=tmp_path, **QUICK)
    after = (made.model.state_dict(), made.optimizer.state_dict(), made.schedule.state_dict())
    assert _same(before, after)
    assert _same(gradients, [p.grad for p in made.model.parameters()])
    assert [m.training for m in made.model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), generator)
    assert not made.model._forward_hooks
    assert list(tmp_path.iterdir()) == []


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("calls", [3, 60], ids=["in the warm-up", "after it"])
def test_an_error_leaves_no_file(calls: int, tmp_path: Path) -> None:
    made, seen = mlp(), []

    def failing(model: nn.Module, batch: Any) -> Tensor:
        seen.append(len(list(tmp_path.iterdir())))
        if len(seen) > calls:
            raise RuntimeError("the user's own")
        return class_losses(model, batch)

    recipe = Recipe(model=made.model, optimizer=made.optimizer, loss=failing, batches=made.batches)
    with pytest.raises(RuntimeError, match="the user's own"):
        backstory.plan(lambda: recipe, folder=tmp_path, seconds=10.0)
    assert max(seen) == 1, "the trial was not in the folder that was given"
    assert list(tmp_path.iterdir()) == []


class Scaled(nn.Module):
    """A layer that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(10))

    def forward(self, x: Tensor) -> Tensor:
        """x ∘ factor."""
        return x * self.factor.exp()


def partly_covered() -> Recipe:
    made = mlp()
    model = nn.Sequential(Scaled(), made.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return Recipe(model=model, optimizer=optimizer, loss=class_losses, batches=made.batches)


def test_layers_that_would_be_left_out_are_named() -> None:
    plain = backstory.plan(partly_covered, **QUICK)
    assert (plain.left_out, plain.refused, plain.coverage) == ((), None, 1)
    assert plain.general == ("0.factor",)
    assert "general rule  0.factor" in str(plain)
    strict = backstory.plan(partly_covered, uncovered="error", **QUICK)
    assert strict.left_out == ("0.factor",)
    assert strict.refused is not None
    assert "0.factor" in strict.refused
    assert 0 < strict.coverage < 1
    assert "left out: 0.factor" in str(strict)
    assert "record() would raise" in str(strict)
    assert backstory.plan(partly_covered, uncovered="skip", **QUICK).refused is None
    chosen = backstory.plan(partly_covered, layers=["!0.factor", "!1.0.*"], **QUICK)
    assert (chosen.left_out, chosen.refused) == (("0.factor", "1.0.weight", "1.0.bias"), None)


def test_parameters_of_no_group_are_named() -> None:
    made = mlp()
    made.optimizer.param_groups[0]["params"] = list(made.model.parameters())[:-1]
    actual = backstory.plan(lambda: made, **QUICK)
    assert len(actual.elsewhere) == 1
    assert "1 parameters are in no optimizer group" in str(actual)


@pytest.mark.parametrize(
    ("make", "matrices"), [(mlp, 2), (lambda: mlp(momentum=0.9), 3), (gpt, 3)], ids=["sgd", "momentum", "adamw"]
)
def test_memory_of_the_propagator(make: Make, matrices: int, tmp_path: Path) -> None:
    p = backstory.plan(make, rank=4, steps=1000, **QUICK)
    recorded_bytes(make(), tmp_path / "run", rank=4)
    dims = RunStore.open(tmp_path / "run").dims
    assert p.dims == sum(dims)
    chunk = 2 * torch.zeros(256, p.dims).nbytes  # the rows of one, and as many effects
    assert p.propagator_bytes == matrices * torch.zeros(p.dims, p.dims).nbytes + chunk
    each = matrices * sum(torch.zeros(n, n).nbytes for n in dims) + chunk
    assert p.propagator_bytes_per_layer == pytest.approx(each, rel=0.1)  # a schedule changes what is learned, a little


def test_a_short_run_holds_its_rows_and_no_matrix() -> None:
    """Two numbers for each of a row while all rows are fewer than half of the numbers in one."""
    p = backstory.plan(mlp, projection="full", steps=8, **QUICK)
    assert 2 * p.occurrences <= p.dims
    assert p.propagator_bytes == 2 * torch.zeros(p.occurrences, p.dims).nbytes
    longer = backstory.plan(mlp, projection="full", steps=p.dims, **QUICK)
    assert longer.propagator_bytes > 2 * torch.zeros(p.dims, p.dims).nbytes


def test_a_short_run_of_unequal_coordinates_holds_matrices() -> None:
    """Adam's own second moment, or groups of parameters that differ: every step goes alone."""
    p = backstory.plan(gpt, projection="full", steps=1, **QUICK)
    assert 2 * 6 * p.occurrences <= p.dims
    assert p.propagator_bytes == 3 * torch.zeros(p.dims, p.dims).nbytes
    apart = backstory.plan(in_two_groups, projection="full", steps=8, **QUICK)
    assert 2 * apart.occurrences <= apart.dims
    assert apart.propagator_bytes == 2 * torch.zeros(apart.dims, apart.dims).nbytes


def in_two_groups() -> Recipe:
    made = mlp()
    first, *others = made.model.parameters()
    groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.01}, {"params": others}]
    return dataclasses.replace(made, optimizer=torch.optim.SGD(groups, lr=0.05))


def test_memory_of_a_question_is_rows_and_one_line_for_each_occurrence() -> None:
    short, long = (backstory.plan(mlp, rank=4, steps=steps, curvature_of="steps", **QUICK) for steps in (100, 10_100))
    ids = np.array(["299"] * 120_000).nbytes  # as an answer holds them
    assert short.rows_bytes == 3 * torch.zeros(1200, short.dims).nbytes
    assert long.rows_bytes == 3 * min(32 << 20, torch.zeros(121_200, long.dims).nbytes)
    lines = [p.query_bytes - p.rows_bytes for p in (short, long)]
    assert lines[1] - lines[0] == 120_000 * (8 + 16) + 2 * ids


def test_the_slowdown_is_that_of_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(*args: Any, **settings: Any) -> Trial:
        tried = trial(*args, **settings)
        times = tried._replace(
            plain_seconds=0.1, recorded_seconds=0.14, unseen_seconds=0.1, window_steps=25, window_seconds=0.5
        )
        return times._replace(learning_seconds=5.0, opening_seconds=0.25, closing_seconds=0.25)

    monkeypatch.setattr("backstory.recording.plan.trial", timed)
    p = backstory.plan(mlp, steps=100, window_rows=2.0, **QUICK)
    assert p.warmup_steps == 8
    assert p.warmup_seconds == pytest.approx(5.0 - 8 * 0.1)
    assert p.recorded_seconds == pytest.approx(0.13), "25 of the 50 steps of a window give rows, twice one in four"
    assert p.slowdown == pytest.approx((0.5 + 5.0 + 92 * 0.12 + 2 * 0.5) / 10.0)
    assert "1.75 × over the whole run: a step takes 130 ms instead of 100 ms (1.30 ×)" in str(p)
    assert p.exact_seconds["reverse"] == pytest.approx({n: 10.0 * costs.reverse(n) for n in (1, 4, 16)})
    assert (p.exact_seconds["leave_out"][8], p.exact_seconds["tangent"][8]) == pytest.approx((120.0, 102.0))
    assert (
        "exact         1 query about 44 seconds, 4 queries about 2 minutes, 16 queries about 6 minutes: influence"
        in str(p)
    )
    assert "8 groups about 2 minutes: training again without each group" in str(p)
    assert p.once_seconds == pytest.approx(0.5)
    told = "4.2 s to learn the projection in the first 8 steps, 500 ms to open and close the run (47 ms per step"
    assert told in str(p)


@pytest.mark.parametrize(
    ("steps", "short", "each", "closings"),
    [
        (400, 50, 0.14, 8),  # as many steps as a planned window: its own average
        (400, 40, 0.132, 8),  # ten more that give no rows
        (400, 10, 0.12, 8),  # all of these gave rows, so that 25 like them do in a planned one
        (390, 50, 0.14, 8),  # of the last window 40 steps
        (360, 50, 0.14, 7.4),  # of the last 10, all of which may give rows
        (800, 50, 0.12, 8),  # windows of 100 steps
    ],
)
def test_a_planned_window_is_made_of_a_short_one(steps: int, short: int, each: float, closings: float) -> None:
    trial = SimpleNamespace(
        batch=12, warmup_steps=8, recorded_seconds=0.14, unseen_seconds=0.1, window_steps=short, window_seconds=2.0,
        settings=SimpleNamespace(windows=True, window_rank=512, window_rows=0.4, form=Exact(outputs=3)),
    )  # fmt: skip
    costs = _Costs(cast(Recipe, None), cast(Trial, trial), steps=steps, checkpoints=None)
    n = max(50, steps // 8)
    assert costs.grid.seen == 25
    assert costs._window_steps == n
    assert costs.step_seconds == pytest.approx(each)
    assert costs.windows_seconds == pytest.approx(2.0 * closings)
    assert costs.recorded_seconds == pytest.approx(each + 2.0 / n)


@pytest.mark.parametrize(("closing", "times", "expected"), [(0.5, 1, 0.7), (0.5, 3, 0.7 + 2 * 0.3), (0.1, 3, 0.3)])
def test_joining_files_takes_longer_in_a_longer_run(closing: float, times: int, expected: float) -> None:
    trial = SimpleNamespace(
        opening_seconds=0.2, closing_seconds=closing, closed_bytes=1000, batch=1, row_bytes=100, step_bytes=0, basis_bytes=0,
        other_bytes=0, model_bytes=0, settings=Settings(curvature_of="steps"),
    )  # fmt: skip
    costs = _Costs(cast(Recipe, None), cast(Trial, trial), steps=10 * times, checkpoints=None)
    assert costs.once_seconds() == pytest.approx(expected)


def test_turns_do_not_train() -> None:
    made, seen = mlp(), []

    def watched(model: nn.Module, batch: Any) -> Tensor:
        seen.append(sum(float(p.detach().sum()) for p in model.parameters()))
        return class_losses(model, batch)

    recipe = Recipe(model=made.model, optimizer=made.optimizer, loss=watched, batches=made.batches)
    backstory.plan(lambda: recipe, projection="random", rank=2, **QUICK)
    assert len(seen) >= 8  # on a busy machine every turn is a single step
    seen.sort()
    apart = [b - a for a, b in pairwise(seen) if b - a > 1e-5]  # rounding: 200 numbers of float32
    assert len(apart) == 1, "one plain step moves its model; else a net that has learned its batches by heart is timed"


def test_fewer_steps_than_the_warm_up() -> None:
    p = backstory.plan(mlp, steps=6, **QUICK)
    assert (p.steps, p.warmup_steps, p.occurrences) == (6, 6, 72)


def test_curvature_that_needs_outputs() -> None:
    steps = {"curvature_of": "steps", "encoding": "float16", **QUICK}
    p = backstory.plan(mlp, rank=4, curvature="sampled:2", **steps)
    plain = backstory.plan(mlp, rank=4, **steps)
    assert p.row_bytes - plain.row_bytes == pytest.approx(2 * (2 * p.dims + 4 * p.layers + 16), rel=0.05)


def test_every_number_has_its_unit() -> None:
    p = backstory.plan(mlp, max_bytes=10**9, **QUICK)
    report = str(p)
    units = r"(?: steps| samples| occurrences| dimensions| parameters|%| bytes| [kMGT]B| ms| s\b| ×|, float16"
    units += r"| quer(?:y|ies)| groups| (?:second|minute|hour)s?\b)"
    allowed = r"rank \d+|int8|(?:exact|ggn):\d+|first \d+ steps|fits is \d+|float(?:16|32)|× \d+ float32|\d+ × \d+"
    bare = re.findall(rf"(?<![\w.,])\d[\d,.]*(?!{units})(?![\w.,])", re.sub(allowed, "", report))
    assert bare == [], f"without a unit: {bare} in\n{report}"


def test_a_plan_is_plain() -> None:
    p = backstory.plan(mlp, rank={"0.*": (4, 6), "*": 3}, **QUICK)
    actual = json.loads(json.dumps(p.as_dict()))
    assert actual["rank"] == {"0.*": [4, 6], "*": 3}
    assert "rank 0.*: 4 × 6, *: 3" in str(p)
    assert isinstance(p, Plan)
    with pytest.raises(AttributeError):
        p.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": 0}, "planned number of optimizer steps, must be at least 1, got 0"),
        ({"path": "run"}, "path="),
        ({"repeats": 0}, "repeats=0"),
        ({"rank": 0}, "rank must be at least 1, got 0"),
        ({"encoding": "float8"}, "float8"),
    ],
)
def test_what_cannot_be_planned(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        backstory.plan(mlp, **{**QUICK, **settings})


@pytest.mark.parametrize("encoding", [pytest.param("float16", marks=pytest.mark.slow), "int8"])
def test_the_compressed_store_is_as_large_as_planned(encoding: str, tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"encoding": encoding, "curvature_of": "steps"}
    planned = backstory.plan(gpt, **chosen, **QUICK)
    recorded_bytes(gpt(), tmp_path / "run", **chosen)
    real = backstory.open(tmp_path / "run").compress(tmp_path / "small").bytes_after
    assert planned.compressed_bytes == pytest.approx(real, rel=0.1)
    assert "after `backstory compress`" in str(planned)
    assert backstory.plan(mlp, rank=4, **QUICK).compressed_bytes is None


def test_a_recipe_is_expected() -> None:
    with pytest.raises(UsageError, match=r"must return a backstory\.Recipe, got dict"):
        backstory.plan(lambda: {}, **QUICK)  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match="no batches"):
        backstory.plan(lambda: mlp(steps=0), steps=10, **QUICK)


def test_what_a_file_costs_is_not_counted_for_every_line() -> None:
    assert _each(_Size(files=3, bytes=3 * 1000 + 7 * 500, lines=500), _Size(1, 1000 + 7 * 10, 10)) == pytest.approx(7)
    assert _each(_Size(2, 2 * 1070, 20), _Size(1, 1070, 10)) == 107, "no two sizes to tell them apart"


@pytest.mark.parametrize(("make", "rank"), [(mlp, "auto:0.6"), (gpt, "auto:0.7/4")], ids=["mlp", "gpt"])
def test_a_rank_that_the_warm_up_chooses_is_chosen_in_the_trial(make: Make, rank: str, tmp_path: Path) -> None:
    p = backstory.plan(make, rank=rank, **QUICK)
    real = recorded_bytes(make(), tmp_path / "run", rank=rank)
    store = RunStore.open(tmp_path / "run")
    assert p.store_bytes == pytest.approx(real, rel=0.1), f"× {p.store_bytes / real:.3f}"
    assert p.dims == pytest.approx(store.width, rel=0.05), "the trial's first steps are the run's, but for the schedule"
    assert p.energy == pytest.approx(store.config["energy"], rel=0.05)
    assert p.rank == json.loads(json.dumps(p.as_dict()))["rank"] == rank
    assert f"chosen in the trial: {p.dims:,} dimensions retain {p.energy:.1%} of the gradient energy" in str(p)


def test_a_number_is_not_chosen() -> None:
    p = backstory.plan(mlp, rank=4, **QUICK)
    assert p.energy is None
    assert "chosen in the trial" not in str(p)
