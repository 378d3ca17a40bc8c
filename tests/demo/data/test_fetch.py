"""Files out of packages: read safely, checked, kept whole or not at all."""

import io
import os
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from backstory.demo.data import fetch
from backstory.demo.data.fetch import DataError, Files, Package

HELLO = {"a.txt": "5d41402abc4b2a76b9719d911017c592"}  # md5 of "hello"
NPM, PIP, SOURCE = Package("npm", "some", "1.0"), Package("pip", "some", "1.0"), Package("pip-source", "so-me", "1.0")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKSTORY_CACHE", str(tmp_path / "cache"))


def make_zip(path: Path, files: Files) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def make_tar(path: Path, files: Files) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of made-up programs, before all others."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_only_chosen_members_are_read(tmp_path: Path, make: object) -> None:
    files = {"p/a.txt": b"one", "p/deep/b.txt": b"two", "p/c.py": b"no"}
    archive = make(tmp_path / "x.tgz", files)  # type: ignore[operator]
    assert fetch.members(archive, "p/*.txt") == {"p/a.txt": b"one", "p/deep/b.txt": b"two"}
    assert fetch.members(archive, "p/a.txt") == {"p/a.txt": b"one"}
    with pytest.raises(DataError, match=r"has no file q/\*"):
        fetch.members(archive, "p/a.txt", "q/*")


def test_names_lose_their_dot(tmp_path: Path) -> None:
    archive = make_tar(tmp_path / "x.tar", {"./usr/a": b"1"})
    assert fetch.members(archive, "usr/*") == {"usr/a": b"1"}


@pytest.mark.parametrize("name", ["/etc/a.txt", "p/../../a.txt", "../a.txt", "p\\..\\a.txt"])
@pytest.mark.parametrize("make", [make_zip, make_tar])
def test_unsafe_names_are_refused(tmp_path: Path, make: object, name: str) -> None:
    archive = make(tmp_path / "x.tgz", {"good/a.txt": b"", name: b""})  # type: ignore[operator]
    assert fetch.members(archive, "good/*") == {"good/a.txt": b""}
    with pytest.raises(DataError, match="unsafe name"):
        fetch.members(archive, "*.txt")


def test_links_are_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as archive:
        link = tarfile.TarInfo("a.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(link)
    with pytest.raises(DataError, match="has no file"):
        fetch.members(path, "a.txt")


def test_what_is_no_archive_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.tgz").write_bytes(b"nothing of the kind")
    with pytest.raises(DataError, match="neither a zip nor a tar"):
        fetch.members(tmp_path / "x.tgz", "*")


def test_hashes_of_both_kinds() -> None:
    sha = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    for digest in (HELLO["a.txt"], sha):
        fetch.check("a", b"hello", digest, "")
        with pytest.raises(DataError, match=f"must be {digest}.*Do this"):
            fetch.check("a", b"hullo", digest, "Do this.")


def test_what_is_cached_is_not_made_again() -> None:
    def never() -> Files:
        raise AssertionError("made again")

    made = fetch.cached("set", HELLO, lambda: {"a.txt": b"hello", "more": b""})
    assert made == fetch.cached("set", HELLO, never) == {"a.txt": b"hello"}
    assert [p.name for p in (fetch.cache_dir() / "set").iterdir()] == ["a.txt"]


def test_wrong_bytes_are_not_kept() -> None:
    with pytest.raises(DataError, match="is not the expected file"):
        fetch.cached("set", HELLO, lambda: {"a.txt": b"hullo"})
    assert not any((fetch.cache_dir() / "set" / name).exists() for name in HELLO)


def test_damage_in_the_cache_is_told() -> None:
    fetch.keep(fetch.cache_dir() / "set" / "a.txt", b"hullo")
    with pytest.raises(DataError, match=r"a\.txt is not the expected file.*Delete it"):
        fetch.cached("set", HELLO, dict)


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "a.txt"
    fetch.keep(path, b"before")

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DataError, match=r"no space left.*BACKSTORY_CACHE"):
        fetch.keep(path, b"after")
    assert path.read_bytes() == b"before"
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_without_a_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no file a\.txt"):
        fetch.read(tmp_path, HELLO)


def test_npm_gives_a_tar(tmp_path: Path, programs: Path) -> None:
    archive = make_tar(tmp_path / "made.tgz", {"package/a.txt": b"hello"})
    program(programs, "npm", f'[ "$4" = some@1.0 ] && cp {archive} some-1.0.tgz')
    assert fetch.unpack(NPM, "package/*") == {"package/a.txt": b"hello"}


def test_a_wheel_is_a_zip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_zip(tmp_path / "made.whl", {"some/a.txt": b"hello"})
    monkeypatch.setitem(fetch.COMMANDS, "pip", lambda _: ["cp", str(wheel), "."])
    assert fetch.unpack(PIP, "some/*") == {"some/a.txt": b"hello"}


def test_pip_builds_and_installs_nothing() -> None:
    command = fetch.COMMANDS["pip"](PIP)
    assert command[3] == "download"
    assert {"--no-deps", "--only-binary=:all:", "some==1.0"} <= set(command)
    assert "--ignore-scripts" in fetch.COMMANDS["npm"](NPM)


def test_a_source_archive_is_read_where_pip_passes_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = make_tar(
        tmp_path / "so_me-1.0.tar.gz", {"so_me-1.0/data/a.txt": b"hello", "so_me-1.0/setup.py": b"raise SystemExit"}
    )
    said = f"Skipping link: No sources permitted for so-me: {archive.as_uri()}#sha256=12 (from somewhere)"
    monkeypatch.setitem(fetch.COMMANDS, "pip-source", lambda _: ["sh", "-c", f"echo '{said}'; exit 1"])
    assert fetch.unpack(SOURCE, "*/data/*") == {"so_me-1.0/data/a.txt": b"hello"}


def test_a_source_archive_that_pip_does_not_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        fetch.COMMANDS,
        "pip-source",
        lambda _: ["sh", "-c", "echo file:///so_me-1.0.1.tar.gz; echo the index is away >&2; exit 1"],
    )
    with pytest.raises(DataError, match=r"(?s)no source archive so_me-1\.0\.tar\.gz.*the index is away"):
        fetch.unpack(SOURCE, "*")


def test_a_source_archive_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = (tmp_path / "so_me-1.0.tar.gz").as_uri()
    monkeypatch.setitem(fetch.COMMANDS, "pip-source", lambda _: ["echo", f"{address} (from somewhere)"])
    with pytest.raises(DataError, match=r"so_me-1\.0\.tar\.gz could not be downloaded"):
        fetch.unpack(SOURCE, "*")


def test_pip_only_looks_for_a_source_archive() -> None:
    command = fetch.COMMANDS["pip-source"](SOURCE)
    assert {"--no-deps", "--only-binary=:all:", "--platform=none", "so-me==1.0"} <= set(
        command
    )  # so that it builds nothing


def test_a_missing_program_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"program 'npm'.*path of a folder"):
        fetch.unpack(NPM, "*")


def test_python_without_pip_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(DataError, match="needs pip"):
        fetch.unpack(PIP, "*")


def test_a_failing_program_is_quoted(programs: Path) -> None:
    program(programs, "npm", "echo the registry is away >&2; exit 3")
    with pytest.raises(DataError, match=r"npm pack .* failed: the registry is away.*path of a folder"):
        fetch.unpack(NPM, "*")


def test_a_program_that_gives_nothing_is_told(programs: Path) -> None:
    program(programs, "npm", "exit 0")
    with pytest.raises(DataError, match="no archive was found"):
        fetch.unpack(NPM, "*")


def test_a_program_that_hangs_is_stopped(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(programs, "npm", "exec sleep 60")
    monkeypatch.setattr(fetch, "LONGEST", 0.1)
    with pytest.raises(DataError, match=r"not downloaded within 0\.1 seconds"):
        fetch.unpack(NPM, "*")
