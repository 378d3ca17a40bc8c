"""`python -m experiments NAME … --json`: the studies by their names, and `bench …`."""

from importlib import import_module

from backstory.cli.app import guarded
from experiments.cli import app as app

for study in (
    "fidelity",
    "gpt",
    "domains",
    "planted",
    "treebank",
    "stories",
    "small",
    "picture",
    "bench",
    "demo_queries",
    "lds",
    "quality",
    "timelines",
    "recordings",
    "zoo",
):
    import_module(f"experiments.{study}.command")  # adds its commands to the app


def main() -> None:
    """Run one command."""
    guarded(app)


if __name__ == "__main__":
    main()
