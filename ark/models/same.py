"""Checks that all ranks have opened the same model, which means equal configs and equal bytes of
all weights.

If ranks read the same files, only the files' identity is compared. If they read different files (on
another host, or a copy), each rank hashes all bytes. Called by ark.models.generate.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ark.models.checkpoint import Checkpoint
from ark.models.shards import StoredTensor, read_bytes
from ark.runtime.run import Ranks
from ark.tasks.tokens import mix

PIECE_BYTES = 32 << 20
BLOCK_WORDS = 8192  # words of 8 bytes per block
BOOT = Path("/proc/sys/kernel/random/boot_id")  # identifies the boot of the running system


def check_same_model(ranks: Ranks, checkpoint: Checkpoint) -> None:
    """Raises SystemError with the values, on every rank, unless the config and the name, type,
    shape and bytes of every weight are the same on all ranks.
    """
    ranks.check_same("the model's config and tensors", _described(checkpoint))
    if len(set(ranks.all_gather(_files(checkpoint).encode()))) > 1:
        ranks.check_same("the weights", digest(checkpoint))


def digest(checkpoint: Checkpoint) -> str:
    """A hash of all bytes of all weights, in the order of their names, computed by several threads
    in pieces of 32 MiB.

    Each piece of 64 KiB is reduced to one word: the sum, modulo 2^64, of the piece's words times
    fixed random odd numbers. This sum changes if any single word changes. The hash is the SHA-256
    of all these sums. It detects different weights, but is not secure against deliberate changes.
    It is about six times as fast as the SHA-256 of all bytes.
    """
    factors = _factors()

    def piece(place: tuple[StoredTensor, int]) -> bytes:
        tensor, begin = place
        data = read_bytes(tensor, begin, min(PIECE_BYTES, tensor.nbytes - begin))
        whole = np.pad(data, (0, -len(data) % (8 * BLOCK_WORDS)))
        return (whole.view(np.uint64).reshape(-1, BLOCK_WORDS) @ factors).tobytes()

    hashed = hashlib.sha256()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as workers:
        for part in workers.map(piece, _pieces(checkpoint)):
            hashed.update(part)
    return hashed.hexdigest()[:32]


@cache
def _factors() -> npt.NDArray[np.uint64]:
    return np.array([mix(n) | 1 for n in range(BLOCK_WORDS)], np.uint64)


def _pieces(checkpoint: Checkpoint) -> Iterator[tuple[StoredTensor, int]]:
    for _, tensor in sorted(checkpoint.distinct()):
        for begin in range(0, max(1, tensor.nbytes), PIECE_BYTES):
            yield tensor, begin


def _described(checkpoint: Checkpoint) -> str:
    """A hash of the model's description in the files (names, types and shapes), without the bytes
    of weights.
    """
    hashed = hashlib.sha256(repr(checkpoint.config).encode())
    for name, tensor in sorted(checkpoint.distinct()):
        hashed.update(f"{name} {tensor.dtype_code} {tensor.shape}".encode())
    return hashed.hexdigest()[:16]


def _files(checkpoint: Checkpoint) -> str:
    """An identifier of the files. It is equal on two ranks only if they read the same bytes of the
    same files. If this cannot be determined, the identifier is unique to the process.
    """
    try:
        lines = [BOOT.read_text()]
        for path in sorted({tensor.path for _, tensor in checkpoint.distinct()}):
            s = path.stat()
            lines.append(f"{path.name} {s.st_dev} {s.st_ino} {s.st_size} {s.st_mtime_ns}")
    except OSError:
        return os.urandom(16).hex()
    lines += [f"{name} {t.path.name} {t.offset}" for name, t in sorted(checkpoint.distinct())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
