"""The command line's reference: every command's own `--help`, put in place of COMMANDS when the site is built; notes of unbuilt pages go."""

import re
from collections.abc import Iterator
from typing import Any

import typer
from typer.testing import CliRunner

from backstory.cli.app import app as backstory_app

PLACE = "COMMANDS\n"
UNBUILT = re.compile(r"^\*Built by `make docs`\. .*\*\n\n?", flags=re.M)  # for those who read a page in a checkout


def names(group: Any, before: str = "") -> Iterator[str]:
    """Every command, in the order of the help text; the command line itself is the empty name."""
    yield before
    for name, command in getattr(group, "commands", {}).items():
        yield from names(command, f"{before} {name}".strip())


def help_of(command: str) -> str:
    """What `backstory COMMAND --help` prints on 80 columns."""
    size = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    shown = CliRunner().invoke(backstory_app, [*command.split(), "--help"], prog_name="backstory", env=size)
    return "\n".join(line.rstrip() for line in shown.output.strip().splitlines())


def write_commands(app: Any, docname: str, source: list[str]) -> None:
    """Put the help texts into the page that has their place."""
    if docname == "reference/cli":
        listed = names(typer.main.get_command(backstory_app))
        parts = [f"## `{f'backstory {name}'.strip()}`\n\n```text\n{help_of(name)}\n```\n" for name in listed]
        source[0] = source[0].replace(PLACE, "\n".join(parts))


def drop_note(app: Any, docname: str, source: list[str]) -> None:
    """A page that is built needs no note that it is not."""
    source[0] = UNBUILT.sub("", source[0])


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("source-read", write_commands)
    app.connect("source-read", drop_note)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
