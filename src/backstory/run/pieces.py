"""Long exact work in pieces: each writes its results as finished files beside the run's, which then takes them in.

A piece is a function with plain arguments, so that it can run in another process. Its results lie in the folder `exact-work` of the
run under their final names until the run takes them in; so what was finished before a kill is there for the next call. What a
killed write left (`.tmp`) is removed by the call that computes the same file again.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UsageError
from ..replay.tape import Progress, RecipeSource, tell
from ..store import RunStore
from ..store.files import TEMPORARY
from ..workers import spread

WORK = "exact-work"  # what is on its way
RESULTS = ("exact-", "change-")  # how the names of results begin


class Piece(NamedTuple):
    """One piece of work: what its function gets, and the files that it writes there."""

    args: tuple[Any, ...]
    files: tuple[str, ...]  # without the ending


def work_folder(path: Path) -> Path:
    """Where pieces write."""
    folder = path / WORK
    folder.mkdir(exist_ok=True)
    return folder


def compute(
    store: RunStore,
    work: Callable[..., None],
    pieces: Sequence[Piece],
    workers: int,
    recipe: RecipeSource,
    progress: Progress | None,
) -> None:
    """Compute the pieces and take what they give into the run, in this process or in `workers` others."""
    if workers > 1 and not isinstance(recipe, str):
        raise UsageError("workers > 1 imports the recipe in each process. Pass it as 'package.module:function'.")
    folder = work_folder(store.path)
    for name in (name for piece in pieces for name in piece.files):
        (folder / f"{name}.safetensors{TEMPORARY}").unlink(missing_ok=True)
    if workers > 1 and len(pieces) > 1:
        for done, _ in enumerate(spread(work, [piece.args for piece in pieces], workers), 1):
            take_in(store)
            tell(progress, done, len(pieces))
    else:
        for done, piece in enumerate(pieces):
            work(*piece.args, progress=within(progress, done, len(pieces)))
            take_in(store)
    with suppress(OSError):  # other work is on its way there
        folder.rmdir()


def take_in(store: RunStore) -> None:
    """Take finished files into the run."""
    done = [file for file in sorted((store.path / WORK).glob("*.safetensors")) if file.name.startswith(RESULTS)]
    if done:
        with RunStore.open(store.path, write=True) as writable:
            for file in done:
                with suppress(FileNotFoundError):  # another call took it in
                    writable.adopt_tensors(file)


def within(progress: Progress | None, done: int, pieces: int) -> Progress | None:
    """Progress of one piece among several."""
    return None if progress is None else lambda a, b: progress(done * b + a, pieces * b)


def split_evenly(items: Sequence[Any], most: int, workers: int) -> list[list[Any]]:
    """Blocks of at most `most` items, and at least one for each worker where there are so many."""
    size = max(1, min(most, -(-len(items) // max(1, workers))))
    return [list(items[k : k + size]) for k in range(0, len(items), size)]
