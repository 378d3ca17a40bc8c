"""The bench of the service starts one, asks it, and ends it."""

import os
from pathlib import Path

import pytest

import backstory
from backstory.benchmarks import serving
from backstory.benchmarks.serving import bench_serve, quantile, service
from backstory.errors import BackstoryError, UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.web.recipes import recorded

    return recorded(tmp_path_factory.mktemp("bench") / "text")


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's recipe can be imported by the service: it looks in the folder that it is started in."""
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
@pytest.mark.usefixtures("beside")
def test_a_run_is_asked_cold_warm_and_by_many(text_run: Path) -> None:
    (row,) = bench_serve(text_run, clients=4, seconds=0.5, questions=5, starts=1)["rows"]
    assert (row["occurrences"], row["dims"], row["clients"], row["errors"]) == (72, 136, 4, 0)
    assert row["answers"] > 0
    assert 0 < row["warm_median_s"] <= row["warm_p95_s"]
    assert row["cold_median_s"] > 0
    if Path("/proc/self/status").exists():
        assert row["bytes"] > 1 << 20
        assert abs(row["memory_growth"]) < 1


@pytest.mark.usefixtures("beside")
def test_the_service_ends_with_the_bench(text_run: Path) -> None:
    with service(text_run) as live:
        assert live.get("/health")["ok"]
        with pytest.raises(BackstoryError, match="/nothing gave 404"):
            live.get("/nothing")
    with pytest.raises(OSError, match="refused"):
        live.get("/health")
    with pytest.raises(ProcessLookupError):
        os.kill(live.pid, 0)


def test_a_service_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(BackstoryError, match="did not start: backstory: "), service(tmp_path):
        pass


def test_a_run_that_cannot_be_asked_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be asked about typed text"):
        serving._texts(None, {"can_type": False})  # type: ignore[arg-type]


def test_quantiles_are_values_that_were_seen() -> None:
    values = [float(x) for x in range(1, 101)]
    assert (quantile(values, 0.95), quantile(values, 0.5), quantile([3.0], 0.95)) == (95.0, 50.0, 3.0)
    assert quantile([1.0, 2.0], 0.95) == 2.0


def test_a_run_is_made_where_none_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "RECIPE", "tests.web.recipes:recipe")
    said: list[str] = []
    path = serving.made_run(tmp_path / "run", {}, said.append)
    run = backstory.open(path)
    assert (run.n_steps, run.config["recipe"], list(run.store.embeddings())) == (24, "tests.web.recipes:recipe", [24])
    assert run.content(["tags"])["tags"]["text"] == "<script>alert"
    assert said == ["serve: recording 24 steps", "serve: embedding"]
