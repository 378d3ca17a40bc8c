"""Size timelines on a very small run: sums made here, factors that repair what they must, and the command."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.__main__ import app
from experiments.pages import read_tables
from experiments.timelines.study import (
    TEXTS,
    Case,
    TimelineSetup,
    choices,
    judged,
    measure,
    own_factors,
    sizes,
    study,
    texts_of,
)
from tests.experiments.gpt.test_setups import TINY as GPT
from tests.experiments.gpt.test_setups import without_network
from tests.support.oracles import assert_same
from torch import Tensor
from typer.testing import CliRunner

from backstory import Recipe
from backstory.errors import UsageError
from backstory.exact.reverse import reverse
from backstory.results.influence import Influence
from experiments.gpt import setups as gpt_setups

TINY = TimelineSetup(gpt=GPT, texts=4, parts=3)


@pytest.fixture(autouse=True, scope="module")
def text() -> Iterator[None]:
    yield from without_network()


@pytest.fixture(scope="module")
def case(text: None, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return measure(TINY, 0, tmp_path_factory.mktemp("case"))


def test_texts_are_unseen_single_ones_and_the_last_calibrates() -> None:
    texts, domains = texts_of(TINY, 0)
    assert texts.shape == (5, 13)
    assert len(texts.unique(dim=0)) == 5
    assert domains[:4] == ["speeches", "code-django", "scripture", "law"]
    assert texts[4].min() >= 97 + 5 * domains.index(domains[4])
    assert texts[4].max() < 97 + 5 * domains.index(domains[4]) + 6
    trained = gpt_setups.draw(GPT, 0).training
    assert not {tuple(x) for x in texts.tolist()} & {tuple(x) for x in trained.tolist()}
    with pytest.raises(UsageError, match="multiple of 4"):
        texts_of(TimelineSetup(gpt=GPT, texts=6), 0)


def test_sizes_are_means_of_absolute_values_by_part() -> None:
    scores = torch.tensor([[1.0, -3.0, 2.0, -2.0, 5.0], [0.0, 0.0, 1.0, -1.0, 4.0]])
    answer = Influence(scores, np.array(list("abcde")), np.array([0, 0, 1, 2, 3]), "str", "", at=4)
    assert sizes(answer, 4, 2).tolist() == [[2.0, 3.5], [pytest.approx(1 / 3), 2.5]]


def test_timelines_are_those_of_exact_scores_and_of_the_recording(case: Case) -> None:
    plan = case.make()
    exact = reverse(case.make, lambda model: plan.loss(model, plan.queries[TEXTS])).scores.abs()  # (5, 24), 8 a part
    assert_same(case.exact.float(), exact.reshape(5, 3, 8).mean(2).float(), 24 * 13 * 256)
    assert case.run.n_occurrences == 24
    assert case.calibration == f"{TEXTS}:4"
    assert not torch.allclose(case.recorded, case.exact, rtol=1e-2)


def test_factors_of_one_text_make_its_own_timeline_exact_and_others_that_are_off_alike(case: Case) -> None:
    assert_same(case.recorded[-1] * own_factors(case), case.exact[-1], 4)
    exact = torch.rand(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
    off = Case(case.run, case.make, case.calibration, exact / torch.arange(1, 7) ** 3, exact)
    made = judged(off, own_factors(off))["rows"]
    assert made["calibrated"]["rank"] == pytest.approx([1.0] * 3)
    assert made["calibrated"]["cosine"] == pytest.approx([1.0] * 3)
    assert max(made["recorded"]["cosine"]) < 0.9
    assert max(made["shape"]["rank"]) < 1.0, "another text's timeline is not this one's"
    assert choices(off.recorded, off.exact) == pytest.approx([1.0] * 4)


def test_factors_may_come_from_elsewhere() -> None:
    asked: list[Case] = []

    def elsewhere(case: Case) -> Tensor:
        asked.append(case)
        return torch.ones(TINY.parts, dtype=torch.float64)

    result = study(TINY, [0], calibrate=elsewhere)
    (one,) = result["each"]
    assert one["rows"]["calibrated"] == one["rows"]["recorded"]
    assert asked[0].calibration == f"{TEXTS}:4"


def test_parts_must_fit_the_run() -> None:
    with pytest.raises(UsageError, match="between 2 and the run's 6 steps"):
        study(TimelineSetup(gpt=GPT, texts=4, parts=7), [0])


def test_json_and_page_have_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpt_setups.SETUPS, "scratch", GPT)
    page = tmp_path / "timelines.md"
    call = ["timelines", "--seeds", "0", "--texts", "4", "--parts", "3", "--page", str(page), "--json"]
    done = CliRunner().invoke(app, call, catch_exceptions=False)
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert [row["method"] for row in result["rows"]] == ["recorded", "calibrated", "shape"]
    assert len(result["each"][0]["rows"]["calibrated"]["rank"]) == 4
    _, means, factors, _, each = read_tables(page.read_text())
    assert factors["rows"][0][2] == " ".join(f"{x:.1f}" for x in result["each"][0]["factors"])
    for measured, cell in (("rank", 1), ("cosine", 4)):
        adds, (_, ours, theirs) = result["recording_adds"][measured], (row[measured]["mean"] for row in result["rows"])
        assert adds["mean"] == pytest.approx(ours - theirs)
        assert adds["lower"] <= adds["mean"] <= adds["upper"]
        assert means["rows"][3][cell].startswith(f"{adds['mean']:+.3f} [")
    assert [cells[1][:5] for cells in means["rows"][:3]] == [f"{row['rank']['mean']:.3f}"[:5] for row in result["rows"]]
    assert len(each["rows"]) == 4


def test_calibration_stores_the_factors_that_the_study_makes_itself(tmp_path: Path) -> None:
    """The library measures on one text what repairs the others: the same numbers as here, by other code."""
    setup = replace(TINY, gpt=replace(GPT, steps=20), parts=20)
    case = measure(setup, 0, tmp_path)
    one = texts_of(setup, 0)[0][-1:]

    def make() -> Recipe:
        return replace(case.make(), queries={"one": one})

    quality = case.run.calibrate("one", make, removals=0)
    assert_same(torch.tensor(quality.factors), own_factors(case).float(), 400, dtype=torch.float32)
