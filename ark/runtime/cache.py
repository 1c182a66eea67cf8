"""The cache: compiled loop kernels, verified plans, what `ark tune` measured and how compilers did
at known results, by the hash of all that they depend on.

What is read from it runs. So the folder must be this user's alone, and every entry carries a digest
under a key that lies in the folder: an entry that is damaged, or that somebody put there under
another name, is dropped and made again. Files are written under another name and renamed: nobody
sees half a file. Where the cache cannot be used, ark says so in one line and goes on without it.
Called by ark.runtime.program, ark.runtime.measured and ark.models.plans, among others.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from ark import log
from ark.errors import SystemError

PROGRAMS, PLANS, TUNED, CHECKS = KINDS = ("programs", "plans", "tuned", "checks")
KEY = "key"
_DIGEST = 32
_NAME = re.compile(r"[0-9a-f]{64}")
_PARTIAL, _MAKING = ".partial-", ".making-"
# How long one that makes an entry is waited for, and how often is looked.
_PATIENCE_S, _POLL_S = 60.0, 0.01
# An unfinished file of a process that was killed is removed after so long.
_STALE_S = 3600.0


def folder() -> Path:
    """$ARK_CACHE_DIR, else `ark` in the XDG cache folder."""
    named = os.environ.get("ARK_CACHE_DIR")
    if named:
        return _expanded(named)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return _expanded(base) / "ark"


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise SystemError(
            f"the cache folder {path} cannot be found: {error} Set ARK_CACHE_DIR to a folder of "
            "yours"
        ) from error


def key(*parts: str | bytes) -> str:
    """A hash of parts, each with its length, so that no two lists collide."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


@cache
def code_digest() -> str:
    """A hash of ark's own source: plans are made again when the planner has changed."""
    root = Path(__file__).resolve().parent.parent
    parts: list[str | bytes] = []
    for path in sorted(root.rglob("*.py")):
        parts += (str(path.relative_to(root)), path.read_bytes())
    return key(*parts)


def sources_digest(files: Iterable[str]) -> str:
    """A hash of Python files that are not ark's own, which `code_digest` has."""
    root = Path(__file__).resolve().parent.parent
    others = {path for path in (Path(f).resolve() for f in files) if root not in path.parents}
    return key(*(path.read_bytes() for path in sorted(others) if path.is_file()))


def refusal(path: Path) -> str:
    """Why nothing in this folder may be run, with the remedy; empty if only this user writes it."""
    found = path.stat()
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is no folder; set ARK_CACHE_DIR to one of your own"
    if found.st_uid != os.geteuid():
        return (
            f"{path} belongs to user {found.st_uid}, and what lies there would be run as user "
            f"{os.geteuid()}; set ARK_CACHE_DIR to a folder of your own"
        )
    if found.st_mode & 0o022:
        return (
            f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):o}), and what "
            f"lies there is run; mend it with `chmod -R go-w {path}` and `ark cache clear`"
        )
    return ""


def load(kind: str, name: str) -> bytes | None:
    """The entry's bytes, or None if there is none (or only a damaged one, which is removed)."""
    try:
        own = _secret(folder(), make=False)
        data = _read(folder() / kind / name)
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:
        _without(str(error))
        return None
    if hmac.compare_digest(data[:_DIGEST], _digest(own, kind, name, data[_DIGEST:])):
        return data[_DIGEST:]
    drop(kind, name)
    return None


def store(kind: str, name: str, data: bytes) -> None:
    """Writes an entry; where the cache cannot be written, the next run makes it again."""
    try:
        _write(folder() / kind / name, _digest(secret(), kind, name, data) + data)
    except (OSError, RuntimeError) as error:
        _without(str(error))


@contextlib.contextmanager
def making(kind: str, name: str) -> Iterator[None]:
    """Held by whoever makes an entry, so that ranks that want the same one make it once: look again
    inside. Who has waited for long (its maker was stopped, say) goes on without.
    """
    held = _held(folder() / kind / f"{_MAKING}{name}")
    try:
        yield
    finally:
        if held is not None:
            with contextlib.suppress(OSError):
                (folder() / kind / f"{_MAKING}{name}").unlink()
            os.close(held)


def _held(path: Path) -> int | None:
    """The locked file, which its holder removes; None where it cannot be had."""
    end = time.monotonic() + _PATIENCE_S
    handle = None
    try:
        _secret(path.parent.parent, make=True)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        while time.monotonic() < end:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            handle = os.open(path, flags, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.stat(path).st_ino == os.fstat(handle).st_ino:
                    return handle
            except (BlockingIOError, FileNotFoundError):
                time.sleep(_POLL_S)
            os.close(handle)
            handle = None
    except (OSError, RuntimeError):
        if handle is not None:
            os.close(handle)
    return None


def secret() -> bytes:
    """A key of this user's, the same in all his processes that share the cache folder.

    Raises OSError or RuntimeError where that folder cannot be used.
    """
    return _secret(folder(), make=True)


def drop(kind: str, name: str) -> None:
    """Removes an entry that cannot be used."""
    with contextlib.suppress(OSError, RuntimeError):
        (folder() / kind / name).unlink()


def entries() -> list[Path]:
    """All entries, whatever they hold; only files whose names are an entry's."""
    return [p for p in _files() if _NAME.fullmatch(p.name)]


def clear() -> tuple[int, int]:
    """Removes all entries and the key; returns how many entries and how many bytes."""
    sizes = [p.stat().st_size for p in entries()]
    try:
        for path in _files():
            path.unlink(missing_ok=True)
        for kind in KINDS:
            with contextlib.suppress(OSError):  # a file that is not ours stays
                (folder() / kind).rmdir()
        (folder() / KEY).unlink(missing_ok=True)
    except OSError as error:
        raise SystemError(f"the cache {folder()} cannot be removed: {error}") from error
    return len(sizes), sum(sizes)


def _files() -> list[Path]:
    """Entries and what killed processes left of some."""
    found = [p for kind in KINDS for p in (folder() / kind).glob("*") if p.is_file()]
    ours = (_PARTIAL, _MAKING)
    return sorted(p for p in found if _NAME.fullmatch(p.name) or p.name.startswith(ours))


def _digest(own: bytes, kind: str, name: str, data: bytes) -> bytes:
    return hmac.new(own, f"{kind}/{name}/".encode() + data, hashlib.sha256).digest()


@cache
def _without(reason: str) -> None:
    """Says once for each reason that the cache is not used."""
    log.warn(f"going on without the cache: {reason}")


def _secret(root: Path, make: bool) -> bytes:
    """The key in the cache folder; made with the folder if there is none and `make` says so.

    Raises OSError if the folder is not this user's alone or cannot be used.
    """
    if make:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
    reason = refusal(root)
    if reason:
        raise OSError(reason)
    path = root / KEY
    try:
        found = _read(path)
        if len(found) == _DIGEST:
            return found
        path.unlink()
    except FileNotFoundError:
        if not make:
            raise
    made = secrets.token_bytes(_DIGEST)
    _write(path, made, once=True)
    return _read(path)


def _read(path: Path) -> bytes:
    """Reads a regular file of this user's, OSError for anything else; follows no link."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise OSError(f"{path} is not a file of this user; remove it")
        return file.read()


def _write(path: Path, data: bytes, once: bool = False) -> None:
    """Writes a file whole or not at all; once: leaves one that is there."""
    path.parent.mkdir(exist_ok=True, mode=0o700)
    _sweep(path.parent)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=_PARTIAL)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        if not once:
            os.replace(partial, path)
            return
        try:
            os.link(partial, path)
        except FileExistsError:
            return
        except OSError:  # a file system without links
            os.replace(partial, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(partial)


def _sweep(parent: Path) -> None:
    """Removes what processes that were killed in the midst of writing left long ago."""
    for path in parent.glob(f"{_PARTIAL}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()
