"""The study of sources: its truth is retraining, its figures are what their names say."""

import json
from collections.abc import Iterator

import pytest
import torch
from experiments.data.texts import recipe
from experiments.domains.methods import SOURCES, SourceProblem, methods, problem_of
from experiments.domains.study import (
    agreement,
    best_other,
    compared,
    large_signs,
    off_diagonal,
    scale,
    share_inside,
    study,
    within_domains,
)
from experiments.gpt.setups import domain_losses
from experiments.harness import Method, Row, Scores, Seed, Table, select
from tests.experiments.data.test_passages import without_network
from tests.experiments.data.test_texts import TINY

from backstory.errors import NumericalError
from backstory.replay.recipe import take_step, weights
from experiments.domains import study as domains


def seed_of(truth: Table, **rows: Scores) -> Seed:
    n = len(truth["whole"])
    return Seed(truth, {name.replace("_", "-"): Row(x.values, torch.arange(n), x) for name, x in rows.items()})


@pytest.fixture(scope="module", autouse=True)
def text() -> Iterator[None]:
    yield from without_network()


@pytest.fixture
def truth() -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_the_truth_is_training_with_weight_0_for_what_is_removed() -> None:
    said: list[tuple[str, int, int]] = []
    problem = problem_of(TINY, 0)
    problem.say = lambda *x: said.append(x)
    actual = problem.truth()
    assert said[-1] == ("seed 0: retrain", 6, 6)
    for part, source in (("whole", "law"), ("half", "poems")):
        plan, gone = recipe(TINY, 0), set(problem.removals[part][problem.names.index(source)].samples)
        for t, (ids, _) in enumerate(plan.batches):
            w = weights(plan, t)
            w[[i for i, name in enumerate(ids) if name in gone]] = 0
            take_step(plan, t, w)
        with torch.no_grad():
            without = domain_losses(plan.model, problem.queries)
            change = without - domain_losses(problem.trained.model, problem.queries)
        row = actual[part][problem.names.index(source)]
        torch.testing.assert_close(row, change.double(), rtol=1e-2, atol=1e-5)


def test_agreement_of_matrices_that_are_known(truth: torch.Tensor) -> None:
    same = agreement([(4 * truth, truth), (2 * truth, truth)])
    assert [same["all"]["mean"], same["off"]["mean"], same["within"]] == pytest.approx([1.0, 1.0, 1.0])
    assert same["all"]["signs"] == 1.0
    assert same["scale_seeds"] == pytest.approx([0.25, 0.5])
    assert same["scale"] == pytest.approx(0.375)
    assert (same["all"]["lower"], same["all"]["upper"]) == pytest.approx((1.0, 1.0))
    opposite = agreement([(-truth, truth)])
    assert opposite["all"]["seeds"] == pytest.approx([-1.0])
    assert opposite["off"]["signs"] == 0.0


def test_the_diagonal_alone_does_not_count_without_it(truth: torch.Tensor) -> None:
    strong = truth.abs() + 10 * torch.eye(8, dtype=torch.float64)
    score = torch.rand(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    score += 10 * torch.eye(8, dtype=torch.float64)
    actual = agreement([(score, strong)])
    assert actual["all"]["mean"] > actual["off"]["mean"] + 0.1
    assert len(off_diagonal(score)) == 56
    assert float(off_diagonal(score).max()) < 1


def test_within_domains_ranks_sources_not_domains(truth: torch.Tensor) -> None:
    shift = 100 * torch.arange(8, dtype=torch.float64)[None]  # each domain its own level
    assert within_domains(truth + shift, truth) == pytest.approx(1.0)
    assert within_domains(truth.flip(0), truth) < 0.5
    assert scale(torch.zeros(8, 8), truth) == 0.0


def test_study_says_what_it_compares_and_survives_json(monkeypatch: pytest.MonkeyPatch) -> None:
    def overflows(problem: SourceProblem) -> Scores:
        raise NumericalError("the propagator overflowed")

    rows_ = [Method(m.name, overflows if m.name == "paper" else m.scores, group=m.group) for m in methods()]
    monkeypatch.setattr(domains, "methods", lambda: rows_)
    said: list[tuple[str, int, int]] = []
    actual = study(TINY, [0], only=["recorded", "paper", "tracin", "influence"], say=lambda *x: said.append(x))
    assert json.loads(json.dumps(actual)) == actual
    assert actual["domains"] == ["code", "law", "poems"]
    assert actual["failed"] == ["paper: seed 0: the propagator overflowed"]
    assert said[-1] == ("seed 0: methods", 6, 6)
    rows = {row["method"]: row for row in actual["rows"]}
    assert list(rows) == ["default", "tracin-run", "tracin", "influence-0.001", "influence-best"]
    for part in ("whole", "half"):
        assert rows["influence-best"][part]["all"]["mean"] >= rows["influence-0.001"][part]["all"]["mean"]
        less = rows["default"][part]["minus_tracin"]["all"]
        assert less["mean"] == pytest.approx(rows["default"][part]["all"]["mean"] - rows["tracin"][part]["all"]["mean"])
        assert "minus_tracin" not in rows["tracin"][part]
    tables = actual["matrices"][0]
    default, true = (torch.tensor(tables[n]["whole"]) for n in ("default", "truth"))
    assert rows["default"]["whole"]["scale"] == pytest.approx(float((default * true).sum() / (default**2).sum()))
    assert 0 <= actual["inside"]["default"][0] <= 1


def test_the_interval_of_insight_is_held_against_the_truth_of_the_same_cell() -> None:
    from backstory.insight.sources import Sources, Value

    names, truth = ["a", "b"], torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)

    def cell(source: str, domain: str, middle: float) -> Value:
        return Value(source, domain, 5, 5, middle, middle - 0.5, middle + 0.5)

    cells = ((cell("b", "a", 3.0), cell("b", "b", 4.4)), (cell("a", "a", 1.0), cell("a", "b", 9.0)))
    told = Sources("source", ("b", "a"), ("a", "b"), (), cells, at=1)
    seed = Seed({"whole": truth, "half": truth}, notes={"names": names, SOURCES: {"default": told}})
    assert share_inside(seed, "default") == 0.75


def test_signs_of_large_cells_and_the_best_other_source() -> None:
    truth = torch.tensor([[9.0, -0.1, 3.0], [4.0, 8.0, 0.2], [-5.0, 0.3, 7.0]], dtype=torch.float64)
    score = torch.tensor([[1.0, 2.0, -3.0], [-1.0, 8.0, -2.0], [-5.0, 1.0, 7.0]], dtype=torch.float64)
    assert large_signs(score, truth) == pytest.approx(4 / 5)  # of 9, 8, 7, -5 and 4; the last is wrong
    assert best_other(score, truth) == pytest.approx(1 / 3)
    assert best_other(truth + 50 * torch.eye(3), truth) == 1.0


def test_a_difference_is_the_row_minus_tracin(truth: torch.Tensor) -> None:
    far = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = {"default": {"whole": truth, "half": far}, "tracin": {"whole": far, "half": truth}}
    seed = seed_of({"whole": truth, "half": truth}, **{name: Scores(x) for name, x in rows.items()})
    actual = {name: {p: compared([seed], p, [x[p]]) for p in x} for name, x in rows.items()}
    for part, sign in (("whole", 1), ("half", -1)):
        expected = actual["default"][part]["off"]["mean"] - actual["tracin"][part]["off"]["mean"]
        less = actual["default"][part]["minus_tracin"]["off"]
        assert less["mean"] == pytest.approx(expected)
        assert sign * less["mean"] > 0.5
        assert less["lower"] <= less["mean"] <= less["upper"]


def test_the_best_setting_is_the_one_nearest_to_the_truth(truth: torch.Tensor) -> None:
    far = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    settings = {"damping 1": {"whole": far, "half": truth}, "damping 10": {"whole": truth, "half": far}}
    swept = Scores(settings["damping 1"], settings)
    actual = domains._best([seed_of({"whole": truth, "half": truth}, influence_best=swept)], "influence-best")
    assert [actual[p]["chosen"] for p in ("whole", "half")] == ["damping 10", "damping 1"]
    assert actual["whole"]["all"]["mean"] == pytest.approx(1.0)


def test_rows_of_a_recording_and_of_a_sweep_have_one_name() -> None:
    names = [m.name for m in select(methods(), ["exact", "recorded", "influence"])[0]]
    assert names == ["default", "tracin-run", "influence-0.001", "exact", "influence-best"]
