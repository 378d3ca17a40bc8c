"""Rivals: what they print is taken over, and whatever goes wrong is a line with the reason. Nothing is installed."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from experiments.bench.rivals import RIVALS, Failed, Rival, bench_rivals, environment, run_script

from backstory.errors import UsageError
from experiments.bench import rivals


def fake(folder: Path, body: str, name: str = "some") -> Rival:
    """A rival whose environment is ready, with a shell script in the place of its python."""
    python = folder / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    (folder / name / "ready").touch()
    return Rival("Some", "some_script", name, (), {"C": "it has no C"})


def test_figures_come_with_their_ratios(tmp_path: Path) -> None:
    line = json.dumps({"plain_s": 2.0, "record_s": 3.0, "index_s": 5.0, "query_s": 0.5})
    rival = fake(tmp_path, f"echo chatter; echo '{line}'")
    actual = bench_rivals(tmp_path, rivals=[rival], workloads="A")
    assert actual == [
        {"rival": "Some", "workload": "A", "plain_s": 2.0, "record_s": 3.0, "index_s": 5.0, "query_s": 0.5,
         "record_over_plain": 1.5, "index_over_plain": 2.5}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("echo first >&2; echo 'ImportError: no torchvision' >&2; exit 1", "running: ImportError: no torchvision"),
        ("echo no figures", "no JSON (no figures)"),
        ("exit 3", "running: no message"),
        ("sleep 60", "not done after 1 s"),
    ],
)
def test_a_rival_that_fails_is_a_line_with_the_reason(
    body: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rivals, "RUN_SECONDS", 1.0)
    actual = bench_rivals(tmp_path, rivals=[fake(tmp_path, body)], workloads="A")
    assert reason in actual[0]["failed"]
    assert actual[0].keys() == {"rival", "workload", "failed"}


def test_one_failure_does_not_stop_the_others(tmp_path: Path) -> None:
    good = fake(tmp_path, "echo '{\"plain_s\": 1.0}'", "good")
    actual = bench_rivals(tmp_path, rivals=[fake(tmp_path, "exit 1", "bad"), good], workloads="AC")
    assert ["failed" in line for line in actual] == [True, True, False, True]
    assert actual[3]["failed"] == "not run: it has no C"


def test_an_install_that_fails_is_tried_again_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, int("broken" in command), "", "ERROR: no matching distribution")

    monkeypatch.setattr("experiments.bench.rivals.subprocess.run", run)
    rival = Rival("Some", "some_script", "some", (("torch==1", "numpy"), ("--no-deps", "broken")))
    for _ in range(2):
        with pytest.raises(Failed, match="installing broken: ERROR: no matching distribution"):
            environment(tmp_path, rival)
    assert [c[-2:] for c in commands] == 2 * [
        ["venv", str(tmp_path / "some")],
        ["torch==1", "numpy"],
        ["--no-deps", "broken"],
    ]
    assert not (tmp_path / "some" / "ready").exists()


def test_an_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        (tmp_path / "some").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("experiments.bench.rivals.subprocess.run", run)
    rival = Rival("Some", "some_script", "some", (("torch==1",),))
    assert environment(tmp_path, rival) == environment(tmp_path, rival) == tmp_path / "some" / "bin" / "python"
    assert [c[-1] for c in commands] == [str(tmp_path / "some"), "torch==1"]


@pytest.mark.parametrize("rival", RIVALS, ids=lambda r: r.script)
def test_scripts_need_their_rival_only_when_they_measure(rival: Rival) -> None:
    assert callable(import_module(f"experiments.bench.peers.{rival.script}").measure)


def test_scripts_run_where_backstory_is_not(tmp_path: Path) -> None:
    """By a python that does not see the package: a missing rival is what stops them, and nothing before it."""
    blind, code = (
        tmp_path / "python",
        (
            'import sys, runpy; sys.modules["backstory"] = None; sys.path.insert(0, ""); sys.argv = sys.argv[1:]; '
            'runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)'
        ),
    )
    blind.write_text(f"#!/bin/sh\nshift 3  # -W ignore -m\nexec {sys.executable} -c '{code}' \"$@\"\n")
    blind.chmod(0o755)
    with pytest.raises(Failed, match="running: ModuleNotFoundError: No module named 'dattri'"):
        run_script(blind, "dattri_dvemb", "A", "tiny")


def test_each_rival_of_the_list_is_named_once() -> None:
    assert len({r.name for r in RIVALS}) == len(RIVALS) == 7


def test_rivals_are_chosen_by_name() -> None:
    assert [rival.script for rival in rivals.named("bergson,dattri DVEmb")] == ["bergson_index", "dattri_dvemb"]
    with pytest.raises(UsageError, match=r"no rival 'dattri'. Name some of dattri DVEmb, dattri LoGRA"):
        rivals.named("bergson,dattri")
