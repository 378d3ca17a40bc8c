"""`backstory serve` refuses what would be unsafe before it loads anything, and serves until it is told to end."""

import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console
from tests.cli.hostile import Hostile
from typer.testing import CliRunner

from backstory.cli import output, serve
from backstory.cli.app import app
from backstory.errors import StoreError, UsageError
from backstory.web.limits import Limits
from backstory.web.state import State

TOKEN = "0123456789abcdef"


@pytest.fixture
def listened(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would have been served."""
    calls: list[Any] = []
    monkeypatch.setattr(serve, "_listen", lambda *args: calls.append(args))
    monkeypatch.delenv(serve.TOKEN, raising=False)
    return calls


def run(*args: str) -> None:
    actual = CliRunner().invoke(app, ["serve", *args], catch_exceptions=False)
    assert actual.exit_code == 0, actual.output


def test_loopback_needs_no_token_and_checks_the_host(digits_run: Path, listened: list[Any]) -> None:
    run(str(digits_run))
    path, _, _, host, port, limits, queue, timeout, room = listened[0]
    assert (path, host, port) == (digits_run, "127.0.0.1", 8321)
    assert limits == Limits(token=None, most_bytes=1 << 20, any_host=False)
    assert (queue, timeout, room) == (32, 30.0, 4 << 30)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.3", "example.org"])
def test_beyond_loopback_a_token_is_required(digits_run: Path, listened: list[Any], host: str) -> None:
    with pytest.raises(UsageError, match="no token"):
        run(str(digits_run), "--host", host)
    assert not listened


def test_the_token_comes_from_a_file_or_the_environment(
    digits_run: Path, listened: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    run(str(digits_run), "--host", "0.0.0.0", "--token-file", str(file))
    monkeypatch.setenv(serve.TOKEN, TOKEN + "x")
    run(str(digits_run), "--host", "0.0.0.0")
    assert [call[5] for call in listened] == [Limits(token=t, any_host=True) for t in (TOKEN, TOKEN + "x")]


@pytest.mark.parametrize("token", ["", "short", "a token with spaces in it", "tökens-of-16-letters"])
def test_a_weak_token_is_refused(digits_run: Path, listened: list[Any], tmp_path: Path, token: str) -> None:
    file = tmp_path / "token"
    file.write_text(token)
    with pytest.raises(UsageError, match="must have 16 or more"):
        run(str(digits_run), "--token-file", str(file))
    with pytest.raises(UsageError, match="cannot be read"):
        run(str(digits_run), "--token-file", str(tmp_path / "nothing"))
    assert not listened


def test_the_recipe_is_imported_only_if_it_is_trusted_or_backstorys_own(
    digits_run: Path, hostile: Hostile, listened: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    run(str(hostile.mine))
    run(str(hostile.bare))
    run(str(digits_run))
    run(str(hostile.mine), "--trust-recipe")
    run(str(digits_run), "--recipe", "my.own:recipe")
    own = "backstory.demo.digits:recipe"
    expected = [(None, False), (None, False), (own, False), ("my_training:recipe", True), ("my.own:recipe", True)]
    assert [call[1:3] for call in listened] == expected


def test_a_run_is_opened_without_a_recipe_that_nobody_asked_for(
    digits_run: Path, hostile: Hostile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "out", Console(width=400))
    assert serve._open(hostile.mine, None, False, 0).recipe is None
    said = "note: the recipe my_training:recipe(seed=0), which Python cannot find, was not imported."
    assert said in capsys.readouterr().out
    monkeypatch.setattr("backstory.demo.digits.images", Mock(side_effect=UsageError("the data are not here.")))
    own = "backstory.demo.digits:recipe"
    assert serve._open(digits_run, own, False, 0).recipe is None
    assert "cannot be used: the data are not here." in capsys.readouterr().out
    with pytest.raises(UsageError, match="the data are not here"):
        serve._open(digits_run, own, True, 0)


def test_what_is_no_run_is_refused(tmp_path: Path, listened: list[Any]) -> None:
    with pytest.raises(StoreError):
        run(str(tmp_path))
    assert not listened


def test_a_port_in_use_is_said_before_anything_is_loaded(digits_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(serve.TOKEN, raising=False)
    monkeypatch.setattr("backstory.web.state.State", lambda *_, **__: pytest.fail("the run was loaded"))
    with serve.bound("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} of 127.0.0.1 is in use.*--port 0 pick a free one"):
            run(str(digits_run), "--port", str(port))


def test_a_place_that_is_not_of_this_machine_is_said() -> None:
    with pytest.raises(UsageError, match=r"cannot listen on 203\.0\.113\.1, port 8321.*--host"):
        serve.bound("203.0.113.1", 8321)


def test_work_in_the_background_is_given_up_where_the_service_does_not_come_up(
    digits_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[State] = []

    class Watched(State):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            made.append(self)

    def fails(self: Any, sockets: Any) -> None:
        for each in sockets:
            each.close()
        raise OSError("no more sockets")

    monkeypatch.setattr("backstory.web.state.State", Watched)
    monkeypatch.setattr("uvicorn.Server.run", fails)
    actual = CliRunner().invoke(app, ["serve", str(digits_run), "--trust-recipe", "--port", "0"])
    assert isinstance(actual.exception, OSError)
    assert [opened.stopping.is_set() for opened in made] == [True]


def test_it_serves_until_it_is_told_to_end_and_runs_nothing_of_its_folder_but_the_recipe(
    hostile: Hostile, tmp_path: Path
) -> None:
    script = tmp_path / "backstory"  # as the console script: Python puts the script's own folder first
    script.write_text("from backstory.cli import main\nmain()\n")
    command = [sys.executable, str(script), "serve", str(hostile.mine), "--trust-recipe", "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", serve.TOKEN: TOKEN}
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=hostile.folder
    )
    try:
        assert child.stdout is not None
        assert next(child.stdout) == f"Loading {hostile.mine} …\n"
        line = next(line for line in child.stdout if "http://" in line)
        port = int(line.partition("127.0.0.1:")[2].split()[0])
        actual = {}
        for name, headers in (("without", {}), ("with", {"Authorization": f"Bearer {TOKEN}"})):
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            link.request("GET", "/samples?per=1&queries=test", headers=headers)
            answer = link.getresponse()
            actual[name] = answer.status, json.loads(answer.read())
            assert "server" not in {k.lower() for k, _ in answer.getheaders()}
            link.close()
    finally:
        child.send_signal(signal.SIGINT)
        said = child.communicate(timeout=60)
    assert actual["without"][0] == 401
    assert (actual["with"][0], len(actual["with"][1]["items"])) == (200, 1)
    assert actual["with"][1]["items"][0]["value"] is not None, "the recipe has its late import"
    assert "Traceback" not in said[1], said[1]
    assert hostile.ran() == []


def report(*args: str | Path) -> str:
    actual = CliRunner().invoke(app, ["report", *map(str, args)], env={"COLUMNS": "160"})
    if actual.exception is not None:
        raise actual.exception
    return actual.stdout


def test_a_file_is_written_and_said_to_contain_training_data(digits_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    text = report(digits_run, "-o", out, "--queries", "few", "--trust-recipe", "--json")
    assert json.loads(text.strip().splitlines()[-1]) == {"report": str(out)}
    page = out.read_text(encoding="utf-8")
    assert "This report contains training data." in page
    assert "For the query set few." in page
    assert "it contains training data" in report(digits_run, "-o", out, "--trust-recipe")


def test_a_report_that_would_fail_after_the_work_fails_before_it(digits_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no-such-file"):
        report(digits_run, "-o", tmp_path / "no-such-file" / "r.html", "--trust-recipe")


def test_a_report_does_not_import_a_recipe_that_nobody_trusts(hostile: Hostile, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pass --trust-recipe"):
        report(hostile.mine, "-o", tmp_path / "r.html")


def test_a_package_that_the_report_misses_is_reported(
    digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install '\.\[web\]' in the checkout"):
        report(digits_run, "-o", tmp_path / "r.html", "--trust-recipe")


@pytest.mark.parametrize(
    ("queries", "found"), [("none", "no query set 'none'"), ("few:99", "query set 'few' must be between 0 and 2")]
)
def test_queries_that_a_report_cannot_show_are_refused_before_weights_are_loaded(
    queries: str, found: str, digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backstory.web.state.Checkpoint", None)
    monkeypatch.setattr("backstory.web.state.Catalogue", None)
    with pytest.raises(UsageError, match=found):
        report(digits_run, "-o", tmp_path / "r.html", "--queries", queries, "--trust-recipe")


def test_a_report_on_one_query(digits_run: Path, tmp_path: Path) -> None:
    report(digits_run, "-o", tmp_path / "r.html", "--queries", "few:1", "--trust-recipe")
    assert "For the query set few:1." in (tmp_path / "r.html").read_text(encoding="utf-8")
