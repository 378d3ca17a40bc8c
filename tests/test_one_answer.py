"""One answer: Python, `--json` on the command line and the JSON of the service give the same numbers, words, caveats and order."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from starlette.testclient import TestClient
from tests.support.plain import assert_alike
from tests.web.recorded import digits_run
from typer.testing import CliRunner

import backstory
from backstory import insight
from backstory.cli.app import app
from backstory.demo import digits
from backstory.replay.queries import part
from backstory.replay.recipe import load_recipe
from backstory.results.effects import BY_TRAINING
from backstory.results.influence import CORRECTED
from backstory.results.origin import BY_REPLAY, EXACT, IN_PART
from backstory.store import RunStore
from backstory.web.app import make_app
from backstory.web.state import State

ROUNDING = 1e-4  # of float32, of sums over a whole training run
SAID = ("headline", "words", "sign", "unit", "origin", "caveats", "quality", "recording", "to_exact", "method", "at")


class Faces(NamedTuple):
    """One run, as it is opened in Python, on the command line and by the service."""

    path: Path
    python: tuple[backstory.Run, Any, Any, dict[str, Any]]  # run, model, loss, query sets
    service: TestClient


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faces]:
    path = digits_run(tmp_path_factory.mktemp("one") / "run")
    with RunStore.open(path, write=True) as store:
        store.update_config(training={"seconds_per_step": 2.0})
    with faced(path) as made:
        yield made


@pytest.fixture(scope="module")
def exact_faces(faces: Faces, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faces]:
    """The same run with exact results: of the mean of the set and of one query."""
    path = tmp_path_factory.mktemp("exact") / "run"
    shutil.copytree(faces.path, path)
    backstory.open(path).exact(["demo", "demo:1"], digits.RECIPE)
    with faced(path) as made:
        yield made


@pytest.fixture(scope="module")
def calibrated_faces(faces: Faces, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faces]:
    """The same run, calibrated on another set than the one that is queried: no result that is compared is exact."""
    path = tmp_path_factory.mktemp("calibrated") / "run"
    shutil.copytree(faces.path, path)
    run = backstory.open(path)
    run.add_queries("other", part(faces.python[3]["test"], 20, 26))
    run.calibrate("other", digits.RECIPE, singles=2, removals=9)
    with faced(path) as made:
        yield made


@contextmanager
def faced(path: Path) -> Iterator[Faces]:
    run = backstory.open(path)
    made = load_recipe(digits.RECIPE, run.config["recipe_args"])
    sets = {"demo": run.queries("demo"), "test": made.queries["test"]}
    with TestClient(make_app(State(path, digits.RECIPE), warm=False), base_url="http://127.0.0.1") as client:
        yield Faces(path, (run, run.load_weights(made.model), made.loss, sets), client)


def one_of(batch: Any) -> Any:
    return part(batch, 1, 2)


class Case(NamedTuple):
    """The same in three ways."""

    python: Callable[[backstory.Run, Any, Any, Any], dict[str, Any]]
    command: list[str]
    path: str | None  # None: the service has no page for it


SAMPLE = "7"
CASES = {
    "query": Case(
        lambda run, model, loss, sets: run.query(model, loss, one_of(sets["demo"])).as_dict(top=4),
        ["query", "--queries", "demo:1", "--top", "4"],
        "/queries/demo/1?top=4",
    ),
    "timeline": Case(
        lambda run, model, loss, sets: insight.timeline(run, model, loss, sets["demo"]).as_dict(),
        ["timeline", "--queries", "demo"],
        "/timeline?queries=demo",
    ),
    "evolution": Case(
        lambda run, model, loss, sets: insight.evolution(run, model, loss, sets["demo"], by="label").as_dict(),
        ["evolution", "--queries", "demo", "--by", "label"],
        "/evolution?queries=demo&by=label",
    ),
    "evolution of samples": Case(
        lambda run, model, loss, sets: insight.evolution(
            run, model, loss, sets["demo"], by={"named": [int(SAMPLE), 9]}
        ).as_dict(),
        ["evolution", "--queries", "demo", "--ids", f"{SAMPLE},9"],
        f"/evolution?queries=demo&ids={SAMPLE}&ids=9",
    ),
    "overwriting": Case(
        lambda run, model, loss, sets: insight.overwriting(run, model, loss, sets["demo"], int(SAMPLE)).as_dict(),
        ["overwriting", "--queries", "demo", "--sample", SAMPLE],
        f"/overwriting?queries=demo&sample={SAMPLE}",
    ),
    "sources": Case(
        lambda run, model, loss, sets: insight.sources(run, model, loss, {"demo": sets["demo"]}, by="label").as_dict(),
        ["sources", "--queries", "demo", "--by", "label"],
        "/sources?queries=demo&by=label",
    ),
    "harmful": Case(
        lambda run, model, loss, sets: insight.harmful(run, model, loss, sets["demo"], top=6, without_last=2).as_dict(),
        ["harmful", "--queries", "demo", "--top", "6", "--without-last", "2"],
        "/harmful?queries=demo&top=6&without_last=2",
    ),
}

LATE = {"named": [6, 7]}
GROUPS = {}
GROUPS["leave out"] = Case(
    lambda run, model, loss, sets: (
        run.leave_out(LATE, digits.RECIPE, twins=1)
        .effects(model, mean_of(loss), sets["demo"], queries=["demo"])
        .as_dict()
    ),
    ["leave-out", "--ids", "6,7", "--twins", "1", "--queries", "demo"],
    None,
)
GROUPS["tangents"] = Case(
    lambda run, model, loss, sets: (
        run.tangents("parts:2", digits.RECIPE).effects(model, mean_of(loss), sets["demo"], queries=["demo"]).as_dict()
    ),
    ["exact", "--groups", "parts:2", "--queries", "demo"],
    None,
)


def mean_of(loss: Any) -> Any:
    return lambda model, batch: loss(model, batch).mean()


def command_line(path: Path, command: list[str]) -> dict[str, Any]:
    name, *options = command
    result = CliRunner().invoke(app, [name, str(path), *options, "--json"])
    assert result.exit_code == 0, result.output
    out: dict[str, Any] = json.loads(result.stdout)
    return out


@pytest.mark.parametrize("name", CASES)
def test_three_faces_give_one_answer(name: str, faces: Faces) -> None:
    result = compared(CASES[name], faces)
    assert f"backstory exact {faces.path} --queries demo" in result["to_exact"]
    assert " minute" in result["to_exact"]
    assert result["origin"].startswith("From the recording")
    quality = result["quality"]
    assert not quality["measured"]
    assert quality["command"] == f"backstory calibrate {faces.path} --queries demo"
    assert quality["seconds"] > 28 * 2.0
    assert quality["sentence"].startswith(
        "Quality: not measured. To measure how reliable the ranking is: `backstory cal"
    )
    assert quality["sentence"].endswith("hours).") or " minutes)." in quality["sentence"]


@pytest.mark.parametrize("name", CASES)
def test_and_where_the_run_was_calibrated(name: str, calibrated_faces: Faces) -> None:
    result = compared(CASES[name], calibrated_faces)
    quality = result["quality"]
    assert quality["measured"]
    assert len(quality["tenths"]) == (9 if name == "harmful" else 10)  # its last two steps do not count
    assert quality["sentence"].startswith(
        "Ranks the uses of steps 0 to 25 " if name == "harmful" else "Overall, ranks uses "
    )
    single = name == "query"
    assert quality["on"] == ("2 single queries of `other`" if single else "the mean of `other`")
    assert quality["on"] in quality["sentence"]
    corrected = [line for line in result["caveats"] if line.startswith(CORRECTED)]
    assert len(corrected) == (name == "timeline")
    if name == "query":
        assert [("of the total |influence| of the top" in line) for line in result["words"]] == [True]
        page = calibrated_faces.service.get("/queries/demo/1?top=4").json()
        sent = calibrated_faces.python[0].query(
            *calibrated_faces.python[1:3], one_of(calibrated_faces.python[3]["demo"])
        )
        assert_alike(page["by_step"]["influence"], sent.by_step().influence.tolist(), rel=ROUNDING, abs=ROUNDING)


@pytest.mark.parametrize("name", CASES)
def test_and_where_exact_results_are_stored(name: str, exact_faces: Faces) -> None:
    result = compared(CASES[name], exact_faces)
    quality = result["quality"]
    assert not quality["measured"]
    assert quality["command"]
    if name == "overwriting":
        assert result["exact"] is not None
        return
    methods = [result["method"]] if isinstance(result["method"], str) else result["method"]
    assert methods[-1] == EXACT
    assert result["origin"] == (BY_REPLAY if set(methods) == {EXACT} else IN_PART)
    if set(methods) != {EXACT}:
        assert not quality["exact"]  # of the values that are recorded
        return
    assert quality["exact"]
    assert "how well exact values predict retraining" in quality["sentence"]


def test_and_where_exact_results_were_compared_with_retraining(calibrated_faces: Faces, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(calibrated_faces.path, path)
    backstory.open(path).exact(["demo", "demo:1"], digits.RECIPE)
    with faced(path) as made:
        for name in ("query", "timeline", "harmful"):
            quality = compared(CASES[name], made)["quality"]
            assert quality["exact"]
            assert quality["measured"]
            assert quality["sentence"].startswith(
                "Exact to first order: exact values predict leave-one-out retraining "
            )
            assert quality["first_order"]["trainings"] == 9


@pytest.mark.parametrize("name", GROUPS)
def test_effects_of_groups_are_never_from_the_recording(name: str, faces: Faces) -> None:
    result = compared(GROUPS[name], faces)
    assert result["origin"] == {"leave out": BY_TRAINING, "tangents": BY_REPLAY}[name]
    assert result["quality"] is None
    assert not result["to_exact"]


def test_the_page_says_that_values_are_exact(exact_faces: Faces) -> None:
    for path in (
        "/timeline?queries=demo",
        "/harmful?queries=demo",
        "/queries/demo/1",
        "/sources?queries=demo&by=label",
    ):
        page = exact_faces.service.get(path, headers={"accept": "text/html"}).text
        assert '<span class="badge exact">Exact</span>' in page, path
        assert 'class="strip"' not in page, path
        assert "To get exact values" not in page, path
    recorded = exact_faces.service.get("/queries/demo/2", headers={"accept": "text/html"}).text
    folder = exact_faces.path
    assert (
        f"Quality: not measured. To measure how reliable the ranking is: <code>backstory calibrate {folder}" in recorded
    )
    assert 'class="badge' not in recorded
    assert f"To get exact values: <code>backstory exact {folder} --queries demo:2</code>" in recorded
    mean = exact_faces.service.get("/timeline?queries=test", headers={"accept": "text/html"}).text
    assert f"<code>backstory exact {folder} --queries test</code>" in mean
    again = exact_faces.service.get("/harmful?queries=demo&top=3", headers={"accept": "text/html"}).text
    assert '<span class="badge exact">Exact</span>' in again, (
        "another set's sweep has the recorded mean of this one too"
    )


def compared(case: Case, faces: Faces) -> dict[str, Any]:
    """The result, once all three faces have given it."""
    python = json.loads(json.dumps(case.python(*faces.python), allow_nan=False))
    command = command_line(faces.path, case.command)
    assert list(command) == list(python)  # --json prints the result as it is
    others = [command]
    if case.path is not None:
        response = faces.service.get(case.path)
        assert response.status_code == 200, response.text
        others.append(response.json())
        assert list(others[1])[: len(python)] == list(python)  # the service sends it first, then what only a page has
    for face in others:
        for key in SAID:
            assert face[key] == python[key], key
        assert_alike({k: face[k] for k in python}, python, rel=ROUNDING, abs=ROUNDING * largest(python))
    out: dict[str, Any] = python
    return out


def largest(value: Any) -> float:
    """The largest influence in a result: numbers much smaller than it are rests of sums that cancel."""
    keys = ("influence", "mean", "matrix", "just_after", "values")
    numbers = [x for key in keys if isinstance(value, dict) and key in value for x in floats(value[key])]
    return max((abs(x) for x in numbers or floats(value.get("hits", value.get("harmful", [])))), default=0.0)


def floats(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [x for v in value.values() for x in floats(v)]
    if isinstance(value, list):
        return [x for v in value for x in floats(v)]
    return [value] if isinstance(value, float) else []
