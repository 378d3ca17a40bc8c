"""From typed text to a ranked answer over HTTP: cold, warm, and for many clients at once; memory of the service.

The service is a process of its own on loopback, started and ended here; the clients are threads of this process, on the same
machine. Texts are passages of the run's own samples, each another one. `cold` is the first question after a start.
"""

import http.client
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from backstory.errors import BackstoryError, UsageError
from backstory.recording.recorder import record
from backstory.replay.recipe import load_recipe, take_step
from backstory.run.run import Run

START = "import sys; from backstory.cli import main; main()"
RECIPE = "experiments.data.passages:recipe"
SCALES: dict[str, dict[str, Any]] = {
    "full": {"steps": 1280, "batch_size": 16, "length": 48, "layers": 2, "width": 48},
    "tiny": {"steps": 12, "batch_size": 8, "length": 24, "layers": 1, "width": 16, "megabytes": 0.05},
}
WARM_SECONDS = 1800.0  # for what the service computes in the background
Say = Callable[[str], None]


class NotReady(BackstoryError):
    """The service asks to come again."""


class Service:
    """A running service."""

    def __init__(self, port: int, pid: int, seconds: float) -> None:
        self.port, self.pid, self.start_s = port, pid, seconds

    def ask(self, link: http.client.HTTPConnection, text: str) -> tuple[int, float]:
        """`(status, seconds)` of one typed question; the whole answer is read."""
        began = time.perf_counter()
        body = json.dumps({"text": text})
        link.request("POST", "/query", body, {"Content-Type": "application/json", "Accept": "application/json"})
        result = link.getresponse()
        result.read()
        return result.status, time.perf_counter() - began

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        link = self.link()
        link.request("GET", path, headers={"Accept": "application/json"})
        result = link.getresponse()
        body = json.loads(result.read())
        link.close()
        if result.status != 200:
            kind = NotReady if result.status == 503 else BackstoryError
            raise kind(f"{path} gave {result.status}: {body['error']['message']}")
        return body

    def link(self) -> http.client.HTTPConnection:
        """A connection that stays open."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)

    @property
    def bytes(self) -> int | None:
        """Memory that the process holds now; None where the system does not say."""
        status = Path(f"/proc/{self.pid}/status")
        if not status.exists():
            return None
        result = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmRSS")]
        return int(result[0]) * 1024


@contextmanager
def service(run: Path, *, timeout: float = 120.0) -> Iterator[Service]:
    """`backstory serve` on a free port, ended afterwards."""
    command = [sys.executable, "-c", START, "serve", str(run), "--trust-recipe", "--port", "0"]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=_environment())
        try:
            port = _port(child, errors, timeout)
            _ready(port, began + timeout)
            yield Service(port, child.pid, time.perf_counter() - began)
        finally:
            child.terminate()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            assert child.stdout is not None
            child.stdout.close()


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def _port(child: "subprocess.Popen[str]", errors: Any, seconds: float) -> int:
    """The port that the service prints; one that prints none in time is ended, which ends the reading."""
    assert child.stdout is not None
    ending = threading.Timer(seconds, child.kill)
    ending.start()
    try:
        for line in child.stdout:
            if "http://127.0.0.1:" in line:
                return int(line.partition("http://127.0.0.1:")[2].split()[0])
    finally:
        ending.cancel()
    errors.seek(0)
    said = errors.read().strip()[-500:] or f"it printed no address within {seconds:g} s; look at `backstory serve`."
    raise BackstoryError(f"the service did not start: {said}")


def _ready(port: int, until: float) -> None:
    while time.perf_counter() < until:
        try:
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            link.request("GET", "/health")
            if link.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.02)
        finally:
            link.close()
    raise BackstoryError("the service did not answer /health in time; look at what `backstory serve` prints.")


def bench_serve(
    run: Path | None = None,
    *,
    scale: str = "full",
    clients: int = 32,
    seconds: float = 60.0,
    questions: int = 100,
    starts: int = 5,
    say: Say | None = None,
) -> dict[str, Any]:
    """Typed questions to a run of text, or to one that is made for it."""
    report = say or (lambda text: None)
    with tempfile.TemporaryDirectory() as folder:
        path = made_run(Path(folder) / "run", SCALES[scale], report) if run is None else run
        cold = []
        for n in range(starts):
            report(f"serve: cold start {n + 1} of {starts}")
            with service(path) as live:
                cold.append((live.start_s, *_first(live)))
        with service(path) as live:
            facts = live.get("/")
            texts = _texts(live, facts)
            _until_warm(live, facts)
            report(f"serve: {questions} questions, one after the other")
            warm = _one_by_one(live, texts, questions)
            report(f"serve: {clients} clients for {seconds:g} s")
            crowd = _crowd(live, texts, clients, seconds)
    first = [x[1] for x in cold]
    row = {
        "occurrences": facts["occurrences"], "dims": facts["dims"], "start_s": statistics.median(x[0] for x in cold),
        "cold_median_s": statistics.median(first), "cold_p95_s": quantile(first, 0.95), "starts": starts,
        "warm_median_s": statistics.median(warm), "warm_p95_s": quantile(warm, 0.95), "questions": questions, **crowd,
    }  # fmt: skip
    return {"threads": 1, "cores": os.cpu_count(), "rows": [row]}


def made_run(path: Path, args: Mapping[str, Any], say: Say) -> Path:
    """A small GPT on text, recorded with small settings and embedded."""
    plan = load_recipe(RECIPE, args)
    say(f"serve: recording {len(plan.batches):,} steps")
    settings: dict[str, Any] = {"rank": 8, "steps": len(plan.batches), "checkpoints": 1, "clip_norm": plan.clip_norm}
    with record(
        plan.model, plan.optimizer, path, loss_reduction="token-mean", recipe=RECIPE, recipe_args=dict(args), **settings
    ) as rec:
        for t, (ids, tokens) in enumerate(plan.batches):
            with rec.step(ids, tokens=None if plan.tokens is None else plan.tokens(tokens)):
                take_step(plan, t)
            shown = [] if plan.page.show is None else [x["text"] for x in plan.page.show(tokens)]
            rec.describe(ids, text=shown, source=[str(i).split("/")[0] for i in ids])
    say("serve: embedding")
    Run(path).embed()
    return path


def _first(live: Service) -> tuple[float]:
    link = live.link()
    status, seconds = live.ask(link, "The first question after a start, on which nobody has worked before.")
    link.close()
    if status != 200:
        raise BackstoryError(f"the first question gave {status}; the run needs a recipe with text=.")
    return (seconds,)


def _texts(live: Service, facts: Mapping[str, Any]) -> list[str]:
    """Texts of the run's samples, cut so that each is its own."""
    if not facts["can_type"]:
        raise UsageError("this run cannot be asked about typed text; give one whose recipe has text=, or none.")
    pages = range(1, 1 + min(10, -(-facts["samples"] // 200)))
    items = [item for n in pages for item in live.get(f"/samples?per=200&sort=step&page={n}")["items"]]
    result = [item["text"][:90] for item in items if item["text"] and len(item["text"]) > 2]
    if not result:
        raise UsageError("the run holds no texts of its samples to ask with; record with rec.describe(ids, text=…).")
    return result


def _until_warm(live: Service, facts: Mapping[str, Any], seconds: float = WARM_SECONDS) -> None:
    """Wait for what the service computes in the background, so that it is not measured along."""
    if not facts["samples"]:
        return
    until = time.perf_counter() + seconds
    path = live.get("/samples?per=1")["items"][0]["path"]
    while True:
        try:
            live.get(path)
            return
        except NotReady:  # within the service's time-out
            if time.perf_counter() >= until:
                raise
            time.sleep(1)


def _one_by_one(live: Service, texts: Sequence[str], n: int) -> list[float]:
    link, result = live.link(), []
    for text in itertools.islice(itertools.cycle(texts), n):
        status, seconds = live.ask(link, text)
        if status != 200:
            raise BackstoryError(f"a typed question gave {status}; ask it by hand to see why.")
        result.append(seconds)
    link.close()
    return result


def _crowd(live: Service, texts: Sequence[str], clients: int, seconds: float) -> dict[str, Any]:
    """All clients at once, each asking again as soon as it has its answer; memory after a first tenth, and at the end."""
    _run_clients(live, texts, clients, seconds / 10)
    before = live.bytes
    times, errors = _run_clients(live, texts, clients, seconds)
    after = live.bytes
    growth = None if before is None or after is None else (after - before) / before
    middle = {"crowd_median_s": statistics.median(times), "crowd_p95_s": quantile(times, 0.95)} if times else {}
    counts = {"clients": clients, "seconds": seconds, "answers": len(times), "errors": errors, **middle}
    return {**counts, "answers_per_s": len(times) / seconds, "bytes": after, "memory_growth": growth}


def _run_clients(live: Service, texts: Sequence[str], clients: int, seconds: float) -> tuple[list[float], int]:
    until, times, errors, lock = time.perf_counter() + seconds, list[float](), [0], threading.Lock()

    def client(number: int) -> None:
        link = live.link()
        for text in itertools.cycle([*texts[number:], *texts[:number]]):
            if time.perf_counter() >= until:
                break
            try:
                status, took = live.ask(link, text)
            except (OSError, http.client.HTTPException):
                status, took, link = 0, 0.0, live.link()
            with lock:
                if status == 200:
                    times.append(took)
                else:
                    errors[0] += 1
        link.close()

    threads = [threading.Thread(target=client, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times, errors[0]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]
