"""Calibration against numbers made by hand: exact sweeps, retraining, SciPy-free ranks; stored, stale, and interrupted."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.replay.test_reproduction import recorded
from tests.support import examples

import backstory
from backstory import Recipe, insight
from backstory import exact as exactly
from backstory.errors import StoreError, UsageError
from backstory.exact.losses import QuerySet
from backstory.replay.recipe import take_step
from backstory.results.influence import CORRECTED
from backstory.results.quality import SIZES, part_of
from backstory.run import calibrate as calibration
from backstory.run.run import Run
from backstory.store.files import write_tensors

REMOVALS = 24


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = recorded(tmp_path_factory.mktemp("calibrate") / "run", optimizer="momentum", clip=0.3)
    made.calibrate("q", examples.NAME, removals=REMOVALS)
    return made


def ranks(x: Any, y: Any) -> float:
    """Spearman's correlation by pandas, which shares no code with ours."""
    return float(pd.Series(np.asarray(x)).corr(pd.Series(np.asarray(y)), method="spearman"))


def longer() -> Recipe:
    """As many steps as there are factors, at least."""
    made = examples.make("momentum")
    return replace(made, batches=list(made.batches) * 3)


def scores(run: Run, name: str, make: Any = examples.NAME) -> tuple[Any, Any]:
    """`(recorded, exact)` influences of all occurrences on one selection."""
    exact, recipe = run.exact(name, make), longer() if make is longer else examples.make(**run.config["recipe_args"])
    model = run.load_weights(recipe.model)
    batch = recipe.queries["q"] if ":" not in name else tuple(x[int(name[-1]) :][:1] for x in recipe.queries["q"])
    made = run.query(model, lambda m, b: recipe.loss(m, b).mean(), batch, method="adjoint")
    return made.scores[0].numpy(), exact.scores[0].numpy()


def test_ranks_are_those_of_recorded_and_exact_scores(run: Run) -> None:
    x, y = scores(run, "q")
    steps = run.occurrences()[1]
    quality = run.quality(mean=True)
    assert quality.whole is not None
    assert quality.whole.rank == pytest.approx(ranks(x, y), abs=1e-9)
    third = steps * 3 // run.n_steps
    assert [t.rank for t in quality.thirds] == pytest.approx(
        [ranks(x[third == k], y[third == k]) for k in range(3)], abs=1e-9
    )
    assert quality.on == "the mean of `q`"


def test_single_queries_are_a_kind_of_their_own(run: Run) -> None:
    each = [ranks(*scores(run, f"q:{k}")) for k in range(3)]
    quality = run.quality()
    assert quality.on == "3 single queries of `q`"
    assert quality.whole is not None
    assert quality.whole.rank == pytest.approx(np.mean(each), abs=1e-9)
    z = np.arctanh(np.clip(each, -0.999999, 0.999999))
    reach = 1.96 * math.sqrt(z.var(ddof=1) * (1 + 1 / 3) + 1.06 / (run.n_occurrences - 3))
    assert quality.whole.low == pytest.approx(math.tanh(z.mean() - reach), abs=1e-9)
    assert quality.whole.high == pytest.approx(math.tanh(z.mean() + reach), abs=1e-9)


def test_first_order_is_exact_beside_training_again(run: Run) -> None:
    exact = run.exact("q", examples.NAME)
    removals = calibration.draw_removals(exact, REMOVALS, seed=0)
    thirds = [r.steps[0] * 3 // run.n_steps for r in removals if r.steps]
    assert [thirds.count(k) for k in range(3)] == [8, 8, 8]
    after = exactly.leave_out(
        examples.NAME, removals, QuerySet("q", mean=True), args=run.config["recipe_args"], dtype=torch.float64
    )
    predicted = [float(exact.sum_over(r.samples, steps=r.steps)[0]) for r in removals]
    first_order = run.quality(mean=True, exact=True).first_order
    assert first_order is not None
    assert first_order.rank == pytest.approx(ranks(predicted, after[:, 0]), abs=1e-9)
    assert first_order.trainings == REMOVALS
    for k, part in enumerate(run.quality(mean=True, exact=True).retrained):
        of = [i for i, third in enumerate(thirds) if third == k]
        assert part.uses == 8
        assert part.rank is not None
        assert part.rank == pytest.approx(ranks([predicted[i] for i in of], after[of, 0]), abs=1e-9)
        reach = 1.96 * math.sqrt(1.06 / (8 - 3))
        z = math.atanh(min(part.rank, 1 - 6 / (8**3 - 8)))
        assert [part.low, part.high] == pytest.approx([math.tanh(z - reach), math.tanh(z + reach)])
    assert run.quality(mean=True).retrained == run.quality(mean=True, exact=True).retrained


def test_sizes_over_time_are_corrected_to_the_exact_ones(tmp_path: Path) -> None:
    long = recorded(tmp_path / "run", make=longer)
    assert long.n_steps >= SIZES
    long.calibrate("q", longer, removals=0)
    x, y = scores(long, "q", longer)
    part = part_of(long.occurrences()[1], long.n_steps, SIZES)
    expected = [np.abs(y[part == k]).sum() / np.abs(x[part == k]).sum() for k in range(SIZES)]
    assert long.quality(mean=True).factors == pytest.approx(expected, rel=1e-5)
    recipe = longer()
    when = insight.timeline(long, long.load_weights(recipe.model), recipe.loss, recipe.queries["q"], method="adjoint")
    rate, sizes = (
        long.steps().groups["rate"].max(1),
        np.bincount(
            part_of(np.arange(long.n_steps), long.n_steps, SIZES),
            weights=np.nan_to_num(when.size * long.steps().groups["rate"].max(1) * long.steps().rows),
        ),
    )
    exact_sizes = [np.abs(y[part == k]).sum() for k in range(SIZES)]
    assert rate.min() > 0
    assert sizes.tolist() == pytest.approx(exact_sizes, rel=1e-5)
    assert any(text.startswith(CORRECTED) for text in when.caveats)


def test_what_was_measured_is_read_by_another_process_and_every_result(run: Run) -> None:
    again = backstory.open(run.path)
    assert again.quality() == run.quality()
    recipe = examples.make(**run.config["recipe_args"])
    result = again.query(again.load_weights(recipe.model), recipe.loss, recipe.queries["q"], method="adjoint")
    assert result.quality == run.quality()
    assert result.quality is not None
    assert result.quality.sentence in result.remarks
    assert run.quality(3) != run.quality(), "an earlier model was not measured"
    assert not run.quality(3).measured
    assert run.quality(3).command.endswith("--at 3")


def test_another_form_makes_it_stale_and_says_so(run: Run, tmp_path: Path) -> None:
    assert "it was measured on another form of the recording (per layer none)" in run.quality(per_layer=True).sentence
    assert "backstory calibrate" not in run.quality(per_layer=True).sentence, "which would measure the default form"
    sampled = recorded_sampled(tmp_path / "sampled")
    sampled.calibrate("q", examples.make, removals=0)
    assert sampled.quality().measured
    sampled.embed(encoding="int8")
    assert "another form of the recording (encoding none)" in sampled.quality().sentence
    sampled.embed(encoding="float32")
    assert sampled.quality().measured, "finer encodings change no rank"
    sampled.compress(tmp_path / "small", rank=2)
    small = backstory.open(tmp_path / "small")
    assert "another form of the recording (windows none, rank none)" in small.quality().sentence
    assert small.quality(exact=True).measured == sampled.quality(exact=True).measured
    small.calibrate("q", examples.make, removals=0)
    assert small.quality().measured


def recorded_sampled(path: Path) -> Run:
    recipe = examples.make()
    with backstory.record(
        recipe.model, recipe.optimizer, path, loss_reduction="mean", projection="full", curvature="sampled:1",
        steps=len(recipe.batches), checkpoints=2,
    ) as rec:  # fmt: skip
        for t, (ids, _) in enumerate(recipe.batches):
            with rec.step(ids) as s:
                seen = recipe.model.register_forward_hook(lambda _, __, y, s=s: s.outputs(y, kind="cross-entropy"))
                take_step(recipe, t)
                seen.remove()
    return Run(path)


def test_a_run_that_goes_on_is_not_measured(run: Run, tmp_path: Path) -> None:
    name = calibration.name_calibration(run._store, run.n_steps)
    assert name in run._store.tensor_names()
    run._store.config["fingerprints"] = {**run._store.config["fingerprints"], "more": "x"}
    try:
        assert calibration.read_calibration(run._store, run.n_steps) is None
    finally:
        run._store.read_config()


def test_a_killed_calibration_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = recorded(tmp_path / "run")
    calls = list[int]()

    def killed(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(calibration, "retrain", killed)
        with pytest.raises(KeyboardInterrupt):
            started.calibrate("q", examples.NAME, removals=REMOVALS)
    assert not started.quality().measured
    sweeps = len(started.exact_results())
    monkeypatch.setattr("backstory.run.exact.sweep_block", lambda *args, **options: calls.append(1))
    quality = started.calibrate("q", examples.NAME, removals=REMOVALS)
    assert quality.measured
    assert not calls, "the sweeps were stored"
    assert len(started.exact_results()) == sweeps
    assert not (started.path / "exact-work").exists()


def test_what_another_version_stored_is_not_read_and_is_said_to_be_so(tmp_path: Path) -> None:
    """The first version had no thirds of what was left out: a file as it wrote it, and one of a version to come."""
    made = recorded(tmp_path / "run")
    made.calibrate("q", examples.NAME, removals=0)
    name, stored = calibration.name_calibration(made._store, 8), calibration.read_calibration(made._store, 8)
    assert stored is not None
    rows = [{k: v for k, v in asdict(x).items() if k != "retrained_thirds"} for x in stored.measured]
    first = {**asdict(stored), "measured": rows, "trainings": 24}
    del first["left_out"]
    for other in (first, {**asdict(stored), "version": 99}):
        write_tensors(
            made.path / f"{name}.safetensors", {"about": torch.zeros(1)}, {"about": json.dumps(other)}, checked=True
        )
        for exact in (False, True):
            quality = backstory.open(made.path).quality(exact=exact)
            assert not quality.measured
            assert (
                "not measured for these values: they were calibrated by another version of Backstory"
                in quality.sentence
            )
            assert f"`backstory calibrate {made.path} --queries NAME`" in quality.sentence
    made.calibrate("q", examples.NAME, removals=0)
    assert backstory.open(made.path).quality().measured


def test_damage_is_found(tmp_path: Path) -> None:
    made = recorded(tmp_path / "run")
    made.calibrate("q", examples.NAME, removals=0)
    (file,) = made.path.glob("quality-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(StoreError):
        backstory.open(made.path).quality()
    assert any(file.name in str(x) for x in made._store.verify())


@pytest.mark.parametrize(
    ("options", "says"),
    [({"singles": -1}, "at least 0"), ({"removals": 3}, "removals must be 0 or at least 8"), ({"queries": "q:1"}, "Pass 'q'"), ({"queries": "none"}, "no query set")],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_any_work(run: Run, options: dict[str, Any], says: str) -> None:
    queries = options.pop("queries", "q")
    with pytest.raises(UsageError, match=says):
        run.calibrate(queries, examples.NAME, **options)


def test_queries_are_spread_over_the_set() -> None:
    assert calibration.selections("q", 100, 4) == ["q", "q:12", "q:37", "q:62", "q:87"]
    assert calibration.selections("q", 1, 4) == ["q:0"]
    assert calibration.selections("q", 3, 0) == ["q"]
    assert calibration.selections("q", 2, 4) == ["q", "q:0", "q:1"]


# -- which quality a result has -------------------------------------------------------------------------------------


def test_a_result_has_the_quality_of_its_kind(run: Run) -> None:
    """What is measured on single queries does not speak of the mean of several, nor the other way round."""
    recipe = examples.make(**run.config["recipe_args"])
    model, q = run.load_weights(recipe.model), recipe.queries["q"]
    each = run.query(model, recipe.loss, q, method="adjoint")
    mean, single = "the mean of `q`", "3 single queries of `q`"
    assert (each.quality and each.quality.on, each.only("mean").quality) == (single, run.quality(mean=True))
    assert each.only(1).quality == run.quality()
    late = each.between(4, 8).only("mean")
    assert late.quality == run.quality(mean=True).between(4, 8)
    assert run.query(model, lambda m, b: recipe.loss(m, b).mean(), q, method="adjoint").quality == run.quality(
        mean=True
    )
    run.describe(range(12), source=["a", "b"] * 6)
    assert insight.sources(run, model, recipe.loss, {"q": q}, method="adjoint").quality == run.quality(mean=True)
    overwritten = insight.overwriting(run, model, recipe.loss, q, 3)
    assert overwritten.quality == run.quality(mean=True)
    assert insight.overwriting(run, model, recipe.loss, q, 3, per_layer=True).quality == run.quality(per_layer=True)
    one = tuple(x[:1] for x in q)
    exact = {
        single: [run.query(model, recipe.loss, one), insight.mean.mean_influence(run, model, recipe.loss, one), run.exact("q:0", examples.NAME), run.exact(["q", "q:0"], examples.NAME)],
        mean: [run.query(model, lambda m, b: recipe.loss(m, b).mean(), q), insight.mean.mean_influence(run, model, recipe.loss, q), run.exact("q", examples.NAME)],
    }  # fmt: skip
    for on, results in exact.items():
        assert [x.quality and (x.quality.exact, x.quality.on) for x in results] == [(True, on)] * len(results)
    assert run.exact("q", examples.NAME, each=True).only("mean").quality == run.quality(mean=True, exact=True)


def test_one_loss_over_the_rows_of_a_text_is_one_query(tmp_path: Path) -> None:
    """Its rows are pieces of one text, unless they are known to be the queries of a set."""
    made = recorded(tmp_path / "run", optimizer="momentum", clip=0.3)
    made.calibrate("q", examples.NAME, removals=0)
    recipe, single, mean = examples.make("momentum", 0.3), "3 single queries of `q`", "the mean of `q`"
    model, q = made.load_weights(recipe.model), recipe.queries["q"]
    rows = tuple(x[:2] for x in q)
    one_loss = {
        "sum": lambda m, b: recipe.loss(m, b).sum(),
        "mean": lambda m, b: recipe.loss(m, b).mean(),
    }

    def judged(run: Run, batch: Any, loss: Any) -> list[Any]:
        results = (
            run.query(model, loss, batch, method="adjoint"),
            insight.timeline(run, model, loss, batch, method="adjoint"),
            insight.overwriting(run, model, loss, batch, 3),
        )
        return [x.quality.on for x in results if x.quality is not None]

    for loss in one_loss.values():
        assert judged(made, rows, loss) == [single] * 3
        assert judged(made, q, loss) == [mean] * 3, "the set that was calibrated"
    assert judged(made, rows, recipe.loss) == [single, mean, mean], "several losses are several queries"
    named = made.reopen()
    named.name_queries({"pair": rows})
    made.add_queries("pair", tuple(x[1:] for x in q))
    for run, batch in ((named, rows), (backstory.open(made.path), tuple(x[1:] for x in q))):
        assert judged(run, batch, one_loss["mean"]) == [mean] * 3
    assert judged(named, tuple(x[:1] for x in q), one_loss["sum"]) == [single] * 3


def test_sizes_of_the_mean_are_corrected_by_its_own_factors_and_once(tmp_path: Path) -> None:
    long = recorded(tmp_path / "run", make=longer)
    long.calibrate("q", longer, removals=0)
    recipe = longer()
    each = long.query(long.load_weights(recipe.model), recipe.loss, recipe.queries["q"], method="adjoint")
    sizes = long.exact("q", longer).by_step().size
    part = part_of(np.arange(long.n_steps), long.n_steps, SIZES)
    expected, actual = (np.bincount(part, weights=x) for x in (sizes, each.by_step("mean").size))
    assert actual == pytest.approx(expected, rel=1e-5)
    once = each.corrected()
    assert once.corrected() is once
    assert once.only("mean").by_step().size == pytest.approx(
        np.bincount(each.steps, once.scores.mean(0).abs().numpy()) / 4
    )
    exact = long.exact("q", longer)
    assert exact.corrected() is exact


def test_checkpoints_are_corrected_alike(tmp_path: Path) -> None:
    """A corrected value stands beside corrected or exact ones, never beside what is as it was recorded."""
    long = recorded(tmp_path / "run", make=longer, checkpoints=1)
    recipe = longer()
    model, q = recipe.model, recipe.queries["q"]

    def means(**options: Any) -> Any:
        return insight.evolution(long, model, recipe.loss, q, by="steps", method="adjoint", **options)

    before, steps = means().mean, [c for c in long.checkpoints if c]
    assert len(steps) == 2
    long.calibrate("q", longer, removals=0)
    half = means()
    np.testing.assert_array_equal(half.mean, before)
    assert not any(text.startswith(CORRECTED) for text in half.caveats)
    long.calibrate("q", longer, steps[0], removals=0)
    assert any(text.startswith(CORRECTED) for text in means().caveats)
    both = means()
    for k, at in enumerate(steps):
        result = insight.mean.mean_influence(long, long.load_weights(model, at), recipe.loss, q, at, method="adjoint")
        factors = np.asarray(long.quality(at, mean=True).factors)[part_of(result.steps, at, SIZES)]
        early = (result.scores[0].numpy() * factors)[result.steps * 3 < long.n_steps].sum()
        assert both.mean[0, k] * both.samples[0, k] == pytest.approx(early)


def test_embeddings_count_where_they_are_used(tmp_path: Path) -> None:
    made = recorded(tmp_path / "run")
    made.calibrate("q", examples.make, removals=0)
    made.embed(segments=2, encoding="int8")
    assert "another form of the recording (encoding none)" in made.quality().sentence
    assert made.quality(method="adjoint").measured
    recipe = examples.make()
    model, q = made.load_weights(recipe.model), recipe.queries["q"]
    assert made.query(model, recipe.loss, q, method="adjoint").quality == made.quality(method="adjoint")
    assert insight.mean.mean_influence(made, model, recipe.loss, q, method="adjoint").quality == made.quality(
        mean=True, method="adjoint"
    )
    assert not made.query(model, recipe.loss, q, method="embeddings").quality == made.quality(method="adjoint")
    made.calibrate("q", examples.make, removals=0)
    assert made.quality().measured
    assert "backstory calibrate" not in made.quality(method="adjoint").sentence, "which would measure the embeddings"


def test_a_step_without_weights_is_refused_before_any_work(tmp_path: Path) -> None:
    made = recorded(tmp_path / "run")
    assert 4 not in made.checkpoints
    with pytest.raises(StoreError, match="no weights at step 4"):
        made.calibrate("q", examples.make, 4, removals=0)
    assert not made.exact_results()


# -- numbers by hand ------------------------------------------------------------------------------------------------


def measured(**parts: Any) -> calibration.Calibration:
    """Of two single queries, over 100 uses in as many steps."""
    about = {
        "query": "q",
        "mean": False,
        "whole": 0.5,
        "thirds": [0.5] * 3,
        "tenths": [0.5] * 10,
        "retrained": None,
        "retrained_thirds": [None] * 3,
    }
    sizes = {"exact": [6.0] * SIZES, "recorded": [2.0] * SIZES}
    rows = [calibration.Measured(**{**about, **sizes, **{k: v[i] for k, v in parts.items()}}) for i in range(2)]
    return calibration.Calibration(
        100, "q", "", {}, {"thirds": [33, 33, 34], "tenths": [10] * 10}, rows, [8] * 3, 20, 1.0
    )


def test_a_part_of_which_nothing_was_recorded_takes_no_factor_from_the_others() -> None:
    quality = calibration.quality_of(
        measured(recorded=[[0.0, 3.0, *[2.0] * 18], [0.0, 0.0, *[2.0] * 18]]), exact=False, mean=False
    )
    assert quality.factors == (1.0, 2.0, *[3.0] * 18)
    huge = calibration.quality_of(measured(recorded=[[5e-324, *[2.0] * 19]] * 2), exact=False, mean=False)
    assert huge.factors == (1.0, *[3.0] * 19)
    apart = calibration.quality_of(measured(exact=[[1.0] * SIZES, [9.0] * SIZES]), exact=False, mean=False)
    assert apart.factors == (2.5,) * SIZES, "the middle of 0.5 and 4.5"


def test_the_interval_of_first_order_has_the_spread_between_queries() -> None:
    quality = calibration.quality_of(measured(retrained=[0.6, 0.9]), exact=True, mean=False)
    z = np.arctanh([0.6, 0.9])
    reach = 1.96 * math.sqrt(z.var(ddof=1) * (1 + 1 / 2) + 1.06 / (24 - 3))
    assert quality.first_order is not None
    assert quality.first_order.rank == pytest.approx(0.75)
    assert [quality.first_order.low, quality.first_order.high] == pytest.approx(
        [math.tanh(z.mean() - reach), math.tanh(z.mean() + reach)]
    )


def test_a_third_is_judged_by_the_uses_that_were_left_out_of_it() -> None:
    """First order fails early, where every displacement grows, and holds late: what was left out of each third ranks it."""
    g = torch.Generator().manual_seed(0)
    steps = np.arange(300)
    truth = torch.randn(1, 300, generator=g).double()
    exact = backstory.Influence(truth, steps.astype(str), steps, "int", "exact unrolling", at=300)
    rows = torch.cat([torch.arange(100 * k, 100 * k + 9) for k in range(3)])
    predicted, third = truth[0, rows][:, None], np.repeat(np.arange(3), 9)
    noise = torch.tensor([3.0, 0.7, 0.0]).repeat_interleave(9)[:, None] * torch.randn(27, 1, generator=g).double()
    removed = calibration.Removed(predicted + noise, predicted, third)
    recorded_too = truth + 0.3 * torch.randn(1, 300, generator=g)
    measured = calibration.measure(["q"], [True], exact, recorded_too, removed)
    made = calibration.Calibration(300, "q", "", {}, calibration.count_uses(steps, 300), measured, [9] * 3, 27, 1.0)
    quality, left = calibration.quality_of(made, exact=False, mean=True), (predicted + noise)[:, 0]
    of_first_order = [ranks(predicted[third == k, 0], left[third == k]) for k in range(3)]
    of_recorded = [ranks(recorded_too[0, steps // 100 == k], truth[0, steps // 100 == k]) for k in range(3)]
    whole = ranks(predicted[:, 0], left)
    assert of_first_order[0] < of_recorded[0], "first order is the limit in the first third"
    assert of_first_order[2] > of_recorded[2] > whole, "the whole run's first order would judge the last third too low"
    assert quality.by_third == pytest.approx(np.minimum(of_first_order, of_recorded))
    assert quality.rank == pytest.approx(whole)
    late = quality.between(200, 300)
    assert late.rank == pytest.approx(np.mean([x.rank for x in quality.tenths[6:]]), abs=0.02)
    assert "limit" not in late.sentence


def test_a_perfect_rank_of_few_uses_says_no_more_than_its_neighbour() -> None:
    """One exchange of neighbours among 12 uses is all that divides 1 from 0.993."""
    near = 1 - 12 / (12**3 - 12)
    assert ranks(range(12), [1, 0, *range(2, 12)]) == pytest.approx(near)
    low, _ = calibration.interval([1.0, near, near, near], 12)
    assert low > 0.95
    assert calibration.interval([1.0], 10_000)[0] > 0.99999


def test_uses_without_any_influence_are_not_ranked() -> None:
    """As at a learning rate of 0: there is no order that a recording could have missed."""
    steps = np.arange(90)
    truth = torch.where(torch.arange(90) < 30, 0.0, torch.arange(90) * 0.1)[None].double()
    exact = backstory.Influence(truth, steps.astype(str), steps, "int", "exact unrolling", at=90)
    recorded_too = truth + (torch.arange(90) < 30) * torch.randn(90, generator=torch.Generator().manual_seed(0))
    none = calibration.Removed(torch.zeros(0, 1), torch.zeros(0, 1), np.zeros(0, int))
    (row,) = calibration.measure(["q"], [True], exact, recorded_too, none)
    assert row.thirds == [None, 1.0, 1.0]
    blind, *_ = calibration.measure(["q"], [True], exact, truth * 0, none)
    assert blind.thirds == [None, 0.0, 0.0], "what the recording does not see, it does not rank"
    turned = torch.cat([truth[:, :81], truth[:, 81:].flip(1)], 1)
    (late,) = calibration.measure(["q"], [True], exact, turned, none)
    assert late.tenths == [None, None, None, *[1.0] * 6, -1.0]


def test_an_earlier_model_is_measured_on_trainings_that_end_there(tmp_path: Path) -> None:
    made = recorded(tmp_path / "run", optimizer="momentum", clip=0.3)
    made.calibrate("q", examples.NAME, 5, singles=0, removals=REMOVALS)
    exact = made.exact("q", examples.NAME, 5)
    removals = calibration.draw_removals(exact, REMOVALS, seed=0)
    mean = QuerySet("q", mean=True)
    after = exactly.leave_out(examples.NAME, removals, mean, args=made.config["recipe_args"], at=5)
    stored = calibration.read_calibration(made._store, 5)
    assert stored is not None
    predicted = [float(exact.sum_over(r.samples, steps=r.steps)[0]) for r in removals]
    assert stored.measured[0].retrained == pytest.approx(ranks(predicted, after[:, 0]), abs=1e-9)
    assert sum(stored.uses["thirds"]) == len(exact) == 20


def test_clear_changes_are_larger_than_what_any_twin_shows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = run.exact("q", examples.NAME)
    drawn = calibration.draw_removals(exact, 9, seed=0)
    effects, twins = torch.tensor([3.0, -4, 2, -1, 0.1, 5, 1, 1, 1])[:, None], torch.tensor([[0.5], [-2.5], [1.0]])
    monkeypatch.setattr(calibration, "retrain", lambda *_, **__: (effects, twins))
    assert calibration._retrain(run._store, examples.NAME, None, ["q"], exact, drawn, 1, None)[2] == 3
