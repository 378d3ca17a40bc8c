"""`python -m experiments NAME … --json`: the studies by their names, and `bench …`."""

from backstory.cli.app import guarded
from experiments.bench import command as bench
from experiments.bench import serve_command
from experiments.cli import app as app
from experiments.domains import command as domains
from experiments.fidelity import command as fidelity
from experiments.gpt import checkpoints_command, command
from experiments.planted import command as planted
from experiments.small import command as small
from experiments.treebank import command as treebank

COMMANDS = (
    fidelity,
    command,
    checkpoints_command,
    domains,
    planted,
    small,
    treebank,
    serve_command,
)  # each adds its own

app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run one command."""
    guarded(app)


if __name__ == "__main__":
    main()
