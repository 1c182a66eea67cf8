"""The cache on disk. It has compiled loop kernels, verified plans, measurements of `ark tune` and
results of compiler checks. The name of an entry is a hash of everything that the entry depends on.

Entries contain code that is executed, so only this user may be able to write the folder, and every
entry has a digest made with a secret key, which is in the folder. An entry that is damaged, or was
written without the key, is removed and created again. Files are written under a temporary name and
renamed, so readers never see a partial file. If the cache cannot be used, ark logs one line and
continues without it. Called by ark.runtime.program, ark.runtime.measured and ark.models.plans,
among others.
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
_DIGEST_BYTES = 32
_NAME = re.compile(r"[0-9a-f]{64}")
_PARTIAL, _MAKING = ".partial-", ".making-"
# How long to wait for another process that creates the same entry, and how often to check.
_PATIENCE_S, _POLL_S = 60.0, 0.01
# Unfinished files older than this were left by killed processes, and are removed.
_STALE_S = 3600.0


def folder() -> Path:
    """The cache's root folder: $ARK_CACHE_DIR, or if it is not set, `ark` in the XDG cache
    folder.
    """
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
            f"the cache folder {path} cannot be resolved: {error} Set ARK_CACHE_DIR to a folder "
            "that only you can write"
        ) from error


def key(*parts: str | bytes) -> str:
    """Returns the name of a cache entry: a hash of all parts. The length of each part is hashed
    before it, so that different lists of parts have different hashes.
    """
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


@cache
def code_digest() -> str:
    """A hash of ark's own source. Cached plans depend on it, so they are not used after the planner
    has changed.
    """
    root = Path(__file__).resolve().parent.parent
    parts: list[str | bytes] = []
    for path in sorted(root.rglob("*.py")):
        parts += (str(path.relative_to(root)), path.read_bytes())
    return key(*parts)


def sources_digest(files: Iterable[str]) -> str:
    """A hash of Python files outside of ark, which `code_digest` does not include."""
    root = Path(__file__).resolve().parent.parent
    others = {path for path in (Path(f).resolve() for f in files) if root not in path.parents}
    return key(*(path.read_bytes() for path in sorted(others) if path.is_file()))


def refusal(path: Path) -> str:
    """Returns an empty text if only this user can write the folder; otherwise an error message that
    says why its entries must not be executed, and how to correct it.
    """
    status = path.stat()
    if not stat.S_ISDIR(status.st_mode):
        return f"{path} is not a folder; set ARK_CACHE_DIR to a folder of your own"
    if status.st_uid != os.geteuid():
        return (
            f"{path} belongs to user {status.st_uid}, and its files would be executed by user "
            f"{os.geteuid()}; set ARK_CACHE_DIR to a folder of your own"
        )
    if status.st_mode & 0o022:
        return (
            f"{path} is writable by other users (mode {stat.S_IMODE(status.st_mode):o}), and "
            f"its files are executed; fix it with `chmod -R go-w {path}` and `ark cache clear`"
        )
    return ""


def load(kind: str, name: str) -> bytes | None:
    """The entry's bytes; None if there is no such entry. A damaged entry is removed."""
    try:
        own = _secret(folder(), make=False)
        data = _read(folder() / kind / name)
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as error:
        _without(str(error))
        return None
    if hmac.compare_digest(data[:_DIGEST_BYTES], _digest(own, kind, name, data[_DIGEST_BYTES:])):
        return data[_DIGEST_BYTES:]
    drop(kind, name)
    return None


def store(kind: str, name: str, data: bytes) -> None:
    """Writes an entry. If the cache cannot be written, nothing is stored, and the next run creates
    the entry again.
    """
    try:
        _write(folder() / kind / name, _digest(secret(), kind, name, data) + data)
    except (OSError, RuntimeError) as error:
        _without(str(error))


@contextlib.contextmanager
def making(kind: str, name: str) -> Iterator[None]:
    """A context manager that holds a lock while an entry is created, so that several ranks that
    need the same entry create it only once. The caller must look for the entry again once it has
    the lock. If the lock is not available after a long time (for instance because its holder was
    stopped), the context begins without the lock.
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
    """Opens and locks the lock file of an entry; the caller closes and removes it. Returns the
    file's descriptor, or None if the file cannot be locked.
    """
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
    """A random key of this user. All processes that share the cache folder get the same key.

    Raises OSError or RuntimeError if the cache folder cannot be used.
    """
    return _secret(folder(), make=True)


def drop(kind: str, name: str) -> None:
    """Removes an entry that a caller has found to be unusable, such as a binary that does
    not load.
    """
    with contextlib.suppress(OSError, RuntimeError):
        (folder() / kind / name).unlink()


def entries() -> list[Path]:
    """The files of all entries, valid or not."""
    return [p for p in _files() if _NAME.fullmatch(p.name)]


def clear() -> tuple[int, int]:
    """Removes all entries and the key; returns the number of entries and of bytes."""
    sizes = [p.stat().st_size for p in entries()]
    try:
        for path in _files():
            path.unlink(missing_ok=True)
        for kind in KINDS:
            with contextlib.suppress(OSError):  # files that ark did not write stay
                (folder() / kind).rmdir()
        (folder() / KEY).unlink(missing_ok=True)
    except OSError as error:
        raise SystemError(f"the cache {folder()} cannot be removed: {error}") from error
    return len(sizes), sum(sizes)


def _files() -> list[Path]:
    """The files of entries, and the unfinished files of processes that were killed."""
    paths = [p for kind in KINDS for p in (folder() / kind).glob("*") if p.is_file()]
    ours = (_PARTIAL, _MAKING)
    return sorted(p for p in paths if _NAME.fullmatch(p.name) or p.name.startswith(ours))


def _digest(own: bytes, kind: str, name: str, data: bytes) -> bytes:
    return hmac.new(own, f"{kind}/{name}/".encode() + data, hashlib.sha256).digest()


@cache
def _without(reason: str) -> None:
    """Logs that the cache is not used, once for each reason."""
    log.warn(f"continuing without the cache: {reason}")


def _secret(root: Path, make: bool) -> bytes:
    """The secret key in the cache folder. make: create the folder and the key if they do not exist.

    Raises OSError if other users can write the folder or it cannot be used.
    """
    if make:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
    reason = refusal(root)
    if reason:
        raise OSError(reason)
    path = root / KEY
    try:
        existing = _read(path)
        if len(existing) == _DIGEST_BYTES:
            return existing
        path.unlink()
    except FileNotFoundError:
        if not make:
            raise
    new_key = secrets.token_bytes(_DIGEST_BYTES)
    _write(path, new_key, once=True)
    return _read(path)


def _read(path: Path) -> bytes:
    """Reads a regular file that this user owns, without following links. Raises OSError for any
    other file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise OSError(f"{path} is not a regular file of this user; remove it")
        return file.read()


def _write(path: Path, data: bytes, once: bool = False) -> None:
    """Writes a file completely or not at all. once: True to leave an existing file unchanged."""
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
    """Removes old unfinished files of processes that were killed while writing."""
    for path in parent.glob(f"{_PARTIAL}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                path.unlink()
