"""The bench of the service starts one, asks it, and ends it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from experiments.bench.serving import NotReady, Service, bench_serve, quantile, service

import backstory
from backstory.errors import BackstoryError, UsageError
from experiments.bench import serving

ROOT = Path(__file__).parents[3]


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


def test_a_service_that_prints_no_address_is_ended_in_time() -> None:
    silent = "import time; print('something else', flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", silent], stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryFile("w+") as errors, pytest.raises(BackstoryError, match="no address within 1 s"):
        serving._port(child, errors, 1)
    assert child.wait(60) != 0
    assert child.stdout is not None
    child.stdout.close()


class Busy(Service):
    """A service that fails some times before it answers."""

    def __init__(self, *failures: BackstoryError) -> None:
        super().__init__(0, 0, 0.0)
        self.failures, self.asked = list(failures), 0

    def get(self, path: str) -> Any:
        if path.startswith("/samples?"):
            return {"items": [{"path": "/samples/a"}]}
        self.asked += 1
        if self.failures:
            raise self.failures.pop(0)
        return {}


def test_what_is_computed_in_the_background_is_waited_for_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    slow = Busy(NotReady("a"), NotReady("b"))
    serving._until_warm(slow, {"samples": 1})
    assert slow.asked == 3
    with pytest.raises(NotReady):
        serving._until_warm(Busy(NotReady("a")), {"samples": 1}, seconds=0)
    with pytest.raises(BackstoryError, match="404"):
        serving._until_warm(Busy(BackstoryError("404")), {"samples": 1})


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
    assert (run.n_steps, run.config["recipe"], list(run._store.embeddings())) == (24, "tests.web.recipes:recipe", [24])
    assert run.content(["tags"])["tags"]["text"] == "<script>alert"
    assert said == ["serve: recording 24 steps", "serve: embedding"]
