"""`python -m experiments NAME … --json`: the studies by their names, and `bench …`."""

from backstory.cli.app import guarded
from experiments.commands import bench, bench_serve, checkpoints, domains, gpt, planted, small, study, treebank

COMMANDS = (bench_serve, checkpoints, domains, gpt, planted, small, treebank)  # importing them adds their commands

app = study.app
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Run one command."""
    guarded(app)


if __name__ == "__main__":
    main()
