"""Files that are whole or absent, digests that show damage, locks, the cache folder."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from prunex_jax.base.errors import UserError

# Keeps a second run out of a folder; it stays there, and says nothing by itself.
_LOCK = ".lock"


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes a file by rename: readers see the old content or the new, nothing else.

    Its folder exists, and other processes must not write it too.
    """
    unfinished = path.with_name(f".{path.name}.tmp")
    with open(unfinished, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Our folder in the user's cache folder, as the XDG specification has it.

    Raises:
      RuntimeError: There is no home folder.
    """
    chosen = Path(environ.get("XDG_CACHE_HOME", ""))
    base = chosen if chosen.is_absolute() else Path("~/.cache").expanduser()
    return base / "prunex_jax"


def write_json(path: Path, content: Any, *, sort_keys: bool = False) -> None:
    """Writes strict JSON by `write_whole`; ValueError for numbers not finite."""
    text = json.dumps(content, indent=2, sort_keys=sort_keys, allow_nan=False)
    write_whole(path, text + "\n")


def read_object(path: Path) -> dict[str, Any] | None:
    """Reads a file that holds a JSON object; None if it does not, or is missing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, FileNotFoundError):
        return None
    return content if isinstance(content, dict) else None


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path, with the home folder for `~`; a UserError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"there is no home folder here for {str(path)!r}; write the whole path"
        ) from error


def check_whole(path: Path, size: int) -> None:
    """Refuses a file that has fewer bytes than when it was opened.

    Who reads a mapped file beyond its end is killed by a signal.
    """
    try:
        found = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if found < size:
        raise UserError(
            f"{path} has {found} bytes and had {size} when it was opened; put the "
            "whole file back"
        )


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Gives an empty folder that takes the place of another when it has been filled.

    It lies beside `path`, and is renamed at the end, after its files are on the disk.
    If an exception is raised it is removed, and what was at `path` stays.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    replaced = path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        for written in (*unfinished.iterdir(), unfinished):
            _flush(written)
        if path.exists():
            path.rename(replaced)
        unfinished.rename(path)
        _flush(path.parent)
    finally:
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        for leftover in (unfinished, replaced):
            shutil.rmtree(leftover, ignore_errors=True)


def _flush(path: Path) -> None:
    """Makes sure that a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digests_of(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, which may be missing, by path with `/`."""
    return {
        path.relative_to(folder).as_posix(): digest_of(path)
        for path in sorted(path for path in folder.rglob("*") if path.is_file())
    }


def digest_of(path: Path) -> str:
    """Takes the SHA-256 of a file, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_damage(files: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Says which file is missing or altered, by their digests; empty for none."""
    for name, digest in files.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != digest:
            return f"{name} is not as it was written"
    return ""


@contextlib.contextmanager
def alone_in(workdir: Path | str, is_primary: bool) -> Iterator[None]:
    """Keeps a second run out of a run folder, which would spoil the first.

    The folder is locked until the context is left or the process has ended, however it
    ends. File systems that cannot lock, such as some of networks, keep nobody out; nor
    do processes that are not primary, and do not write.

    Raises:
      UserError: Another process trains into it.
    """
    if not is_primary:
        yield
        return
    path = expanded(workdir).absolute()
    # A soft lock would outlive a process that was killed.
    lock = FileLock(path / _LOCK, fallback_to_soft=False)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout as error:
        raise UserError(
            f"--workdir={workdir} is in use: another process trains into it; wait "
            "for its end, stop it, or choose another folder"
        ) from error
    except OSError:
        pass  # What cannot be made or read is refused by whoever writes into it.
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Makes other processes wait that would do the same at the same time.

    File systems that cannot lock, such as some of networks, make nobody wait. The
    folder of the lock file exists.
    """
    lock = FileLock(path, fallback_to_soft=False)
    with contextlib.suppress(OSError):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
