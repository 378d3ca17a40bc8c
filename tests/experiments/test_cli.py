"""The list of experiments: every name with one line, and no torch to print it."""

import subprocess
import sys
from pathlib import Path

from experiments.__main__ import app
from typer.main import get_command

ROOT = Path(__file__).parents[2]
NAMES = {
    "fidelity", "gpt", "projection", "checkpoints", "domains", "planted", "treebank", "stories", "picture", "limit", "kinks", "bound", "duplicates",
    "ablation", "bench", "lds", "quality", "timelines", "recordings", "demo-queries"}  # fmt: skip


def test_every_name_has_its_line() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert set(commands) == NAMES
    assert all(command.get_short_help_str() for command in commands.values())


def test_the_list_is_printed_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['experiments', '--help']\n"
        "from experiments.__main__ import main\n"
        "try:\n    main()\n"
        "except SystemExit:\n    print('LOADED', sorted({'torch', 'numpy', 'pandas', 'lance', 'plotly'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "LOADED []" in done.stdout, done.stdout + done.stderr
    assert "fidelity" in done.stdout
