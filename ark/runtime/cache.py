"""The cache: compiled loop kernels and verified plans by the hash of all that they depend on.

Files are written under another name and renamed, so concurrent processes never see half a file; an
entry whose checksum does not fit is dropped and made again. Called by ark.runtime.program and
ark.models.generate.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from ark.errors import SystemError

PROGRAMS, PLANS = KINDS = ("programs", "plans")


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


@cache
def code_digest() -> str:
    """A hash of ark's own source: plans are made again when the planner has changed."""
    root = Path(__file__).resolve().parent.parent
    return key(*(part for p in sorted(root.rglob("*.py")) for part in (p.name, p.read_bytes())))


def load(kind: str, name: str) -> bytes | None:
    """The entry's bytes, or None if there is none (or only a damaged one, which is removed)."""
    path = folder() / kind / name
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(data[32:]).digest() == data[:32]:
        return data[32:]
    with contextlib.suppress(OSError):
        path.unlink()
    return None


def store(kind: str, name: str, data: bytes) -> None:
    """Writes an entry; where the cache cannot be written, the next run makes it again."""
    path = folder() / kind / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
        with os.fdopen(handle, "wb") as out:
            out.write(hashlib.sha256(data).digest() + data)
        os.replace(temporary, path)
    except OSError:
        return


def entries() -> list[Path]:
    """All entries, whatever they hold."""
    return sorted(p for kind in KINDS for p in (folder() / kind).glob("*") if p.is_file())


def clear() -> tuple[int, int]:
    """Removes all entries; returns how many and how many bytes."""
    files = entries()
    total = sum(p.stat().st_size for p in files)
    try:
        for kind in KINDS:
            if (folder() / kind).is_dir():
                shutil.rmtree(folder() / kind)
    except OSError as error:
        raise SystemError(f"the cache {folder()} cannot be removed: {error}") from error
    return len(files), total
