"""The program cache: compiled loop kernels by the hash of all that they depend on.

Files are written under another name and renamed, so concurrent processes never see half a file; an
entry whose checksum does not fit is dropped and made again. Called by ark.runtime.program.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from ark.errors import SystemError


def folder() -> Path:
    """$ARK_CACHE_DIR, else `ark` in the XDG cache folder."""
    named = os.environ.get("ARK_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "ark"


def key(*parts: str | bytes) -> str:
    """A hash of parts, each with its length, so that no two lists collide."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def load(name: str) -> bytes | None:
    """The entry's bytes, or None if there is none (or only a damaged one, which is removed)."""
    path = folder() / "programs" / name
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data[32:]).digest() == data[:32]:
        return data[32:]
    with contextlib.suppress(OSError):
        path.unlink()
    return None


def store(name: str, data: bytes) -> None:
    """Writes an entry; a cache that cannot be written is left alone (the next run compiles again)."""
    path = folder() / "programs" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
        with os.fdopen(handle, "wb") as out:
            out.write(hashlib.sha256(data).digest() + data)
        os.replace(temporary, path)
    except OSError:
        return


def clear() -> tuple[int, int]:
    """Removes all entries; returns how many and how many bytes."""
    root = folder() / "programs"
    files = [p for p in root.glob("*") if p.is_file()] if root.is_dir() else []
    total = sum(p.stat().st_size for p in files)
    try:
        if root.is_dir():
            shutil.rmtree(root)
    except OSError as error:
        raise SystemError(f"the cache {root} cannot be removed: {error}") from error
    return len(files), total
