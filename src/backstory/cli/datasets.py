"""`backstory data`: which data sets there are, and fetching them."""

from typing import Annotated

import typer

from . import show
from .options import Json

app = typer.Typer(help="The data sets that demos and experiments use: list them, fetch them.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """The data sets that demos and experiments use: list them, fetch them."""


@app.command("list")
def list_all(json: Json = False) -> None:
    """All data sets: size, whether they are in the cache, licence."""
    from ..demo.data import cache_dir
    from ..demo.data.catalogue import catalogue

    entries = catalogue().values()
    if json:
        show.emit({"cache": str(cache_dir()), "data": [entry.as_dict() for entry in entries]})
        return
    rows = [(e.name, f"{e.megabytes:.1f}", "yes" if e.cached else "no", e.licence, e.what) for e in entries]
    show.table("Data sets", ("name", "MB", "cached", "licence", "what"), rows)
    show.out.print(f"Cache: {cache_dir()} (BACKSTORY_CACHE names another)", soft_wrap=True)


@app.command()
def fetch(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Names of `list`; corpus: its sources; all: everything.")
    ],
    json: Json = False,
) -> None:
    """Fetch data sets into the cache, and check every byte."""
    from ..demo.data.catalogue import chosen

    entries = chosen(names)
    with show.progress() as say:
        for done, entry in enumerate(entries):
            say(f"fetch {', '.join(names)}", done, len(entries))
            entry.get()
            if not json:
                show.out.print(f"{entry.name}: {entry.path} (hash checked; {entry.licence})", soft_wrap=True)
        say(f"fetch {', '.join(names)}", len(entries), len(entries))
    if json:
        show.emit({"fetched": [{**entry.as_dict(), "checked": True} for entry in entries]})
