"""`python -m experiments fidelity` as a person types it."""

import json
import re
from pathlib import Path

import pytest
from experiments.__main__ import app
from experiments.cli import seeds_of
from experiments.fidelity.command import as_markdown
from rich.console import Console
from typer.testing import CliRunner

from backstory.cli import output
from backstory.errors import UsageError

ARGS = ["fidelity", "--model", "tiny", "--seeds", "0", "--removals", "6", "--methods", "paper,gradient-dot"]


def call(*args: str) -> str:
    actual = CliRunner().invoke(app, list(args), env={"COLUMNS": "200"}, catch_exceptions=False)
    assert actual.exit_code == 0, actual.output
    return actual.stdout


def test_json_has_rows_and_ceiling() -> None:
    actual = json.loads(call(*ARGS, "--json").strip().splitlines()[-1])
    assert [row["method"] for row in actual["rows"]] == ["paper", "gradient-dot"]
    assert {"single", "all"} <= actual["ceiling"].keys()
    assert {"lower", "upper"} == actual["rows"][0]["single_interval"].keys()
    assert actual["removals"] == 6


def test_the_same_command_twice_prints_the_same_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "out", Console(width=200))  # so that no cell is wrapped
    once, again = (call(*ARGS).split("Cost,")[0] for _ in range(2))
    assert once == again
    assert re.search(r"exact unrolling \(ceiling\).*│ sgd\s*│ \d\.\d+ \[-?\d\.\d+, \d\.\d+\]", once)
    assert re.search(r"gradient-dot\s*│ paper\s*│ [-+]\d\.\d+ \[[-+]", once)


def test_a_set_up_can_be_scaled_down() -> None:
    actual = json.loads(call(*ARGS, "--images", "48", "--epochs", "2", "--json").strip().splitlines()[-1])
    assert (actual["setup"]["images"], actual["setup"]["epochs"]) == (48, 2)


def test_seeds_are_ranges_or_lists() -> None:
    assert seeds_of("0-4") == [0, 1, 2, 3, 4]
    assert seeds_of("2,0,2-3") == [2, 0, 3]
    actual = CliRunner().invoke(app, ["fidelity", "--seeds", "many"])
    assert actual.exit_code == 2
    assert "0-4" in actual.output


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_the_optimizer_is_an_option(optimizer: str) -> None:
    args = [*ARGS[:-1], "paper,full-exact,full-exact-corrected", "--optimizer", optimizer, "--activation", "gelu"]
    actual = json.loads(call(*args, "--json").strip().splitlines()[-1])
    assert [row["optimizer_model"] for row in actual["rows"]] == ["sgd proxy, literal", f"{optimizer}, literal"]
    assert actual["skipped"] == ["full-exact-corrected: it is for sgd only"]
    assert (actual["setup"]["optimizer"], actual["setup"]["activation"]) == (optimizer, "gelu")


def test_the_scatter_page_is_written_beside_the_table(tmp_path: Path) -> None:
    page = tmp_path / "scatter.html"
    actual = json.loads(call(*ARGS, "--scatter", str(page), "--json").strip().splitlines()[-1])
    assert actual["rows"]
    assert "gradient-dot: all" in page.read_text(encoding="utf-8")


def test_unknown_names_are_errors_with_a_way_out() -> None:
    for name, known in (
        ("model", "mlp, cnn, tiny"),
        ("optimizer", "sgd, momentum, adamw"),
        ("activation", "gelu, relu"),
    ):
        with pytest.raises(UsageError, match=f"{name} must be one of {known}, got 'none'"):
            CliRunner().invoke(app, ["fidelity", f"--{name}", "none"], catch_exceptions=False)


FOUND = {
    "seeds": [0, 3],
    "ceiling": {"single": 0.9876, "all": 0.5, "single_seeds": [0.98, 0.99], "all_seeds": [0.4, 0.6]},
    "rows": [
        {
            "method": "paper", "projection": "full", "curvature": "empirical", "optimizer_model": "sgd", "single": 0.25,
            "all": -0.125, "single_seeds": [0.2, 0.3], "all_seeds": [-0.1, -0.15], "seconds": 1.26, "store_bytes": 2.5e9,
        },
        {
            "method": "ours", "projection": "learned", "curvature": "exact", "optimizer_model": "sgd", "single": 0.75,
            "all": 0.5, "single_seeds": [0.7, 0.8], "all_seeds": [0.5, 0.5], "seconds": 3.0, "store_bytes": 0,
            "single_against_paper": {"mean": 0.5, "lower": 0.25, "upper": 0.625},
            "all_against_paper": {"mean": 0.625, "lower": -0.5, "upper": 0.75},
        },
    ],
    "contrasts": [
        {
            "method": "ours", "against": "theirs", "single": {"mean": 0.1, "lower": 0.0, "upper": 0.2},
            "all": {"mean": -0.1, "lower": -0.2, "upper": 0.0},
        }
    ],
    "skipped": ["ekfac: not installed"],
}  # fmt: skip


def test_every_figure_stands_in_its_column() -> None:
    lines = as_markdown(FOUND).splitlines()
    assert "| exact unrolling: **ceiling** | full | Hessian | – | 0.988 | 0.500 | – | – | – | – |" in lines
    assert "| `paper` | full | empirical | sgd | 0.250 | -0.125 | – | – | 1.3 | 2.5 GB |" in lines
    ours = "| `ours` | learned | exact | sgd | 0.750 | 0.500 | +0.500 [+0.250, +0.625] | +0.625 [-0.500, +0.750] | 3.0 | – |"
    assert ours in lines
    assert "| `ours` − `theirs` | +0.100 [+0.000, +0.200] | -0.100 [-0.200, +0.000] |" in lines
    assert "Each seed (0, 3):" in lines
    assert "| ours | 0.70 0.80 | 0.50 0.50 |" in lines
    assert lines[-1] == "Left out: ekfac: not installed."


def test_without_differences_there_is_no_table_of_them() -> None:
    assert "difference" not in as_markdown({**FOUND, "contrasts": [], "skipped": []})
