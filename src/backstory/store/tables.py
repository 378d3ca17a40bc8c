"""Tables on disk: the only file that touches Lance, by the rules measured on pylance 14.0.2.

A commit is durable: data files are flushed first, then the manifest that names them is written and
flushed. A table has one writer (the run's lock sees to it): a commit on version v must give v + 1.
Rows keep their order under appends, deletes and compaction, so a row is known by its position.
"""

import os
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import lance
import pyarrow as pa
from lance.fragment import write_fragments
from lance.optimize import Compaction, CompactionOptions

from ..errors import DiskError, StoreError
from .files import disk_full, fsync, remove

FORMAT: Final = "2.0"  # Lance's own file format: read 1.5 to 5 times faster than 2.2
_LAST = 2**64 - 1  # manifests are named _LAST - version, so that the newest sorts first
_MANIFEST = re.compile(r"(\d{20})\.manifest")


def _quiet_fork() -> None:
    """Lance warns at every fork. DataLoader workers do fork, and `Table` refuses to work in a child.

    Runs right before Lance's own hook (the last registered comes first): a filter set once would be lost where
    filters are reset, as pytest does for every test.
    """
    warnings.filterwarnings("ignore", message="lance is not fork-safe")


os.register_at_fork(before=_quiet_fork)


@contextmanager
def _lance(path: Path, doing: str) -> Iterator[None]:
    """Turn whatever Lance raises into our own errors; a Rust panic is not even an `Exception`."""
    try:
        yield
    except StoreError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if disk_full(error):
            raise DiskError(
                f"the disk is full: {doing} {path} failed. Everything committed before is safe. Free some space and try again."
            ) from error
        raise StoreError(
            f"{doing} {path} failed: {error}. If the files were copied or edited, restore them; `backstory inspect "
            "--verify` lists what is damaged."
        ) from error


def _open(path: Path, version: int | None = None) -> Any:
    """A handle with small caches: the default session grows for as long as a writer lives."""
    session = lance.Session(index_cache_size_bytes=1 << 20, metadata_cache_size_bytes=8 << 20)  # type: ignore[attr-defined]
    return lance.dataset(str(path), version=version, session=session)


def _fsync_data(path: Path, fragments: Iterable[Any]) -> None:
    names = [file.path for fragment in fragments for file in fragment.files]
    for name in names:
        fsync(path / "data" / name)
    if names:
        fsync(path / "data")


def _fsync_folder(folder: Path) -> None:
    if folder.exists():
        for file in folder.iterdir():
            fsync(file)
        fsync(folder)


def _fsync_version(path: Path, version: int) -> None:
    fsync(path / "_versions" / f"{_LAST - version:020d}.manifest")
    fsync(path / "_versions")
    fsync(path)


def create(path: Path, schema: pa.Schema) -> None:
    """Commit an empty table."""
    with _lance(path, "creating"):
        lance.write_dataset(schema.empty_table(), str(path), schema=schema, data_storage_version=FORMAT)
        _fsync_version(path, 1)


def write_fragment(path: Path, table: pa.Table) -> list[Any]:
    """Write rows that no version names yet; give the result to `commit_overwrite`."""
    mode = "overwrite" if (path / "_versions").exists() else "create"
    with _lance(path, "writing"):
        fragments: list[Any] = write_fragments(table, str(path), mode=mode, data_storage_version=FORMAT)
        _fsync_data(path, fragments)
        return fragments


def commit_overwrite(path: Path, schema: pa.Schema, fragments: Sequence[Any]) -> int:
    """Make `fragments`, in this order, the whole table; the new version. Older versions stay readable."""
    with _lance(path, "committing"):
        old = _open(path).version if (path / "_versions").exists() else None
        operation = lance.LanceOperation.Overwrite(schema, list(fragments))
        new = lance.LanceDataset.commit(str(path), operation, read_version=old, max_retries=0)
        _fsync_version(path, new.version)
        return int(new.version)


class Table:
    """One open table, at its latest version or at a fixed one.

    `message` says what had to be done to open it, if anything.
    """

    def __init__(self, path: Path, *, write: bool = False, version: int | None = None) -> None:
        self.path = path
        self.message = ""
        self._write = write
        self._fixed = version is not None
        self._pid = os.getpid()
        with _lance(path, "opening"):
            self._ds = _open(path, version) if self._fixed else self._open_latest()

    def _open_latest(self) -> Any:
        """The latest version; a damaged last manifest is moved aside once the one before is proven good."""
        versions = self._versions()
        try:
            latest = _open(self.path)
            if not latest.schema.names:  # a manifest of zeros, as after a power cut, opens without complaint
                raise StoreError("its manifest has no columns")
            return latest
        except Exception as error:
            if len(versions) < 2:
                raise
            before = _open(self.path, versions[-2])
            before.count_rows()
            self._set_aside(versions, error)
            return _open(self.path) if self._write else before

    def _set_aside(self, versions: list[int], error: Exception) -> None:
        name = f"{_LAST - versions[-1]:020d}.manifest"
        problem = f"the latest manifest of {self.path.name} (version {versions[-1]}) is damaged ({str(error)[:90]}); "
        if not self._write:
            self._fixed = True
            self.message = problem + f"using version {versions[-2]} instead. Open the run for writing to repair it."
            return
        aside = self.path.parent / "damaged"
        aside.mkdir(exist_ok=True)
        os.replace(self.path / "_versions" / name, aside / f"{self.path.stem}-{name}")
        remove(self.path / "_versions" / "latest_version_hint.json")
        fsync(self.path / "_versions")
        self.message = problem + f"it was moved to {aside}, and the table continues from version {versions[-2]}."

    def _versions(self) -> list[int]:
        names = os.listdir(self.path / "_versions") if (self.path / "_versions").exists() else []
        return sorted(_LAST - int(m[1]) for name in names if (m := _MANIFEST.fullmatch(name)))

    @property
    def schema(self) -> pa.Schema:
        """The table's columns."""
        return self._ds.schema

    @property
    def version(self) -> int:
        """The version that is open."""
        return int(self._ds.version)

    def _ready(self) -> None:
        if os.getpid() != self._pid:
            raise StoreError(
                f"{self.path} was opened in process {self._pid} and used in its forked child {os.getpid()}. Lance "
                "does not survive a fork: open the run in a process started with `spawn`."
            )

    def refresh(self) -> None:
        """See what another process has committed; a writer sees its own commits anyway."""
        self._ready()
        if not self._write and not self._fixed:
            with _lance(self.path, "reading"):
                self._ds.checkout_latest()

    def count(self) -> int:
        """Number of rows."""
        self._ready()
        with _lance(self.path, "counting"):
            return int(self._ds.count_rows())

    def scan(
        self,
        columns: Sequence[str],
        lo: int = 0,
        hi: int | None = None,
        *,
        where: str | None = None,
        batch_rows: int | None = None,
    ) -> pa.RecordBatchReader:
        """Rows `lo` to `hi` by position (of those that fulfil `where`), in order, as a stream."""
        self.refresh()  # a compaction elsewhere may have removed the version seen last
        limit = None if hi is None else hi - lo
        with _lance(self.path, "reading"):
            return self._ds.scanner(
                columns=list(columns), filter=where, offset=lo or None, limit=limit, scan_in_order=True,
                batch_size=batch_rows, batch_readahead=2, fragment_readahead=2,
            ).to_reader()  # fmt: skip

    def batches(self, columns: Sequence[str], lo: int, hi: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """`scan`, batch by batch, with Lance's errors as ours."""
        if hi <= lo:
            return
        with _lance(self.path, "reading"):
            yield from self.scan(columns, lo, hi, batch_rows=batch_rows)

    def table(
        self, columns: Sequence[str], lo: int = 0, hi: int | None = None, *, where: str | None = None
    ) -> pa.Table:
        """`scan`, all at once."""
        if hi is not None and hi <= lo:
            return pa.schema([self.schema.field(name) for name in columns]).empty_table()
        with _lance(self.path, "reading"):
            return self.scan(columns, lo, hi, where=where).read_all().combine_chunks()

    def take(self, columns: Sequence[str], rows: Sequence[int]) -> pa.Table:
        """Single rows by position, in the order given."""
        self.refresh()
        with _lance(self.path, "reading"):
            return self._ds.take(list(rows), columns=list(columns)).combine_chunks()

    def append(self, table: pa.Table) -> None:
        """Add rows at the end, durably."""
        with _lance(self.path, "appending to"):
            fragments = write_fragments(table, self._ds, mode="append", data_storage_version=FORMAT)
            _fsync_data(self.path, fragments)
            self._commit(lance.LanceOperation.Append(fragments))

    def upsert(self, key: str, table: pa.Table) -> None:
        """Replace the rows whose `key` is in `table`, add the others, durably."""
        with _lance(self.path, "writing"):
            merge = self._ds.merge_insert(key).when_matched_update_all().when_not_matched_insert_all()
            transaction, _ = merge.execute_uncommitted(table)
            _fsync_data(self.path, transaction.operation.new_fragments)
            _fsync_folder(self.path / "_deletions")
            self._commit(transaction)

    def delete(self, where: str) -> int:
        """Remove the rows that fulfil `where`, durably; how many."""
        self._ready()
        with _lance(self.path, "deleting from"):
            hit = [(f, n) for f in self._ds.get_fragments() if (n := f.count_rows(where))]
            if not hit:
                return 0
            left = {f.fragment_id: f.delete(where) for f, _ in hit}
            _fsync_folder(self.path / "_deletions")
            updated = [meta for meta in left.values() if meta is not None]
            removed = [id for id, meta in left.items() if meta is None]
            self._commit(lance.LanceOperation.Delete(updated, removed, where))
            return sum(n for _, n in hit)

    def _commit(self, operation: Any) -> None:
        self._ready()
        old = self._ds.version
        self._ds = lance.LanceDataset.commit(self._ds, operation, read_version=old, max_retries=0)
        _fsync_version(self.path, self._ds.version)
        if self._ds.version != old + 1:
            raise StoreError(
                f"{self.path} went from version {old} to {self._ds.version} in one commit, so another process wrote "
                "to it without holding the run's lock. Stop that process, then run `backstory inspect --verify`."
            )

    def compact(self, target_rows: int, *, least: int = 2, must: bool = False) -> bool:
        """Join small fragments and drop deleted rows, if `least` fragments gain and the disk has room.

        With `must`, too little room is an error.
        """
        self._ready()
        with _lance(self.path, "compacting"):
            options = CompactionOptions(target_rows_per_fragment=target_rows, materialize_deletions_threshold=0.0)
            tasks = Compaction.plan(self._ds, options).tasks
            old = [fragment for task in tasks for fragment in task.fragments]
            if len(old) < least or not self._room(old, must):
                return False
            results = [task.execute(self._ds) for task in tasks]
            _fsync_folder(self.path / "data")
            Compaction.commit(self._ds, results)
            self._ds.checkout_latest()
            _fsync_version(self.path, self._ds.version)
            return True

    def _room(self, fragments: Iterable[Any], must: bool) -> bool:
        needed = 2 * sum(file.file_size_bytes or 0 for fragment in fragments for file in fragment.files)
        free = shutil.disk_usage(self.path).free
        if must and free <= needed:
            raise DiskError(
                f"rewriting {self.path} without the deleted samples needs {needed:,} bytes of disk space, but only "
                f"{free:,} are free. The samples are no longer visible, but still on disk: free some space and repeat."
            )
        return free > needed

    def cleanup(self) -> None:
        """Delete old versions and files that no version names."""
        self._ready()
        with _lance(self.path, "cleaning"):
            self._ds.cleanup_old_versions(older_than=timedelta(0), delete_unverified=True)
