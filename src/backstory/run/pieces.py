"""Long exact work in pieces: each writes its results as finished files beside the run's, which then takes them in.

A piece is a function with plain arguments, so that it can run in another process. Its results lie in the folder `exact-work` of the
run under their final names until the run takes them in; so what was finished before a kill is there for the next call. What a
killed process left (progress, halves of files) is named in a note, and goes when its results are there, whoever computed them.
"""

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UsageError
from ..exact.cache import digest
from ..replay.tape import Progress, RecipeSource, tell
from ..store import RunStore
from ..store.files import TEMPORARY, read_json, write_json
from ..workers import spread

WORK = "exact-work"  # what is on its way
RESULTS = ("exact-", "change-", "quality-")  # how the names of results begin


class Piece(NamedTuple):
    """One piece of work: what its function gets, and the names of the files that it writes, without the ending."""

    args: tuple[Any, ...]
    results: tuple[str, ...]
    progress: str = ""  # where it is saved on its way

    @property
    def note(self) -> str:
        """The file that says which results the piece gives, while some of them are missing."""
        return f"piece-{digest([self.results, self.progress])}.json"


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
    for piece in pieces:
        write_json(work_folder(store.path) / piece.note, {"results": piece.results, "progress": piece.progress})
    if workers > 1 and len(pieces) > 1:
        for done, _ in enumerate(spread(work, [piece.args for piece in pieces], workers), 1):
            settle(store)
            tell(progress, done, len(pieces))
    else:
        for done, piece in enumerate(pieces):
            work(*piece.args, progress=within(progress, done, len(pieces)))
            settle(store)


def settle(store: RunStore) -> None:
    """Take finished files into the run, and remove what pieces left behind whose results are all there."""
    folder = store.path / WORK
    done = [file for file in sorted(folder.glob("*.safetensors")) if file.name.startswith(RESULTS)]
    if done:
        with RunStore.open(store.path, write=True) as writable:
            for file in filter(Path.exists, done):  # another call may have taken it in
                writable.adopt_tensors(file)
    known = set(store.tensor_names())
    for note in folder.glob("piece-*.json"):
        about = read_json(note)
        if known.issuperset(about["results"]):
            _remove_rest(folder, note, [*about["results"], about["progress"]])
    with suppress(OSError):  # there is none, or other work is on its way there
        folder.rmdir()


def _remove_rest(folder: Path, note: Path, names: Sequence[str]) -> None:
    """Remove the progress of a piece, halves of its files, and its note last."""
    for name in filter(None, names):
        for ending in (".safetensors", f".safetensors{TEMPORARY}"):
            (folder / f"{name}{ending}").unlink(missing_ok=True)
    note.with_name(note.name + TEMPORARY).unlink(missing_ok=True)
    note.unlink(missing_ok=True)


def clear_work(path: Path, folder: str) -> None:
    """Remove a folder of unfinished work that is finished now."""
    shutil.rmtree(path / WORK / folder, ignore_errors=True)
    with suppress(OSError):  # there is none, or other work is on its way there
        (path / WORK).rmdir()


def within(progress: Progress | None, done: int, pieces: int) -> Progress | None:
    """Progress of one piece among several."""
    return None if progress is None else lambda a, b: progress(done * b + a, pieces * b)


def split_evenly(items: Sequence[Any], most: int, workers: int) -> list[list[Any]]:
    """Blocks of at most `most` items, and at least one for each worker where there are so many."""
    size = max(1, min(most, -(-len(items) // max(1, workers))))
    return [list(items[k : k + size]) for k in range(0, len(items), size)]
