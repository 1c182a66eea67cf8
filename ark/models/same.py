"""Whether ranks opened the same model: the config and every byte of every weight.

Ranks that read the very same files need not read them twice; where files are others (another host,
a copy), each rank hashes all bytes. Called by ark.models.generate.
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
WORDS = 8192  # of 8 bytes
BOOT = Path("/proc/sys/kernel/random/boot_id")  # of the running system; no two have one


def check_same_model(ranks: Ranks, checkpoint: Checkpoint) -> None:
    """Raises SystemError on every rank, with the values, unless the config, and the name, type,
    shape and every byte of each weight are the same on all of them.
    """
    ranks.check_same("the model's config and tensors", _described(checkpoint))
    if len(set(ranks.all_gather(_files(checkpoint).encode()))) > 1:
        ranks.check_same("the weights", digest(checkpoint))


def digest(checkpoint: Checkpoint) -> str:
    """A hash of all bytes of all weights, in the order of their names; read and hashed by several
    threads, a piece of 32 MiB each at a time.

    Each 64 KiB become one word: the sum, modulo 2^64, of their words times odd numbers without
    pattern, which no change of one word leaves. SHA-256 of these words is the hash. It tells other
    weights, and is no signature. It is about six times as fast as SHA-256 of the bytes.
    """
    factors = _factors()

    def piece(place: tuple[StoredTensor, int]) -> bytes:
        tensor, begin = place
        data = read_bytes(tensor, begin, min(PIECE_BYTES, tensor.nbytes - begin))
        whole = np.pad(data, (0, -len(data) % (8 * WORDS)))
        return (whole.view(np.uint64).reshape(-1, WORDS) @ factors).tobytes()

    made = hashlib.sha256()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as workers:
        for part in workers.map(piece, _pieces(checkpoint)):
            made.update(part)
    return made.hexdigest()[:32]


@cache
def _factors() -> npt.NDArray[np.uint64]:
    return np.array([mix(n) | 1 for n in range(WORDS)], np.uint64)


def _pieces(checkpoint: Checkpoint) -> Iterator[tuple[StoredTensor, int]]:
    for _, tensor in sorted(checkpoint.distinct()):
        for begin in range(0, max(1, tensor.nbytes), PIECE_BYTES):
            yield tensor, begin


def _described(checkpoint: Checkpoint) -> str:
    """A hash of all that the files say of the model beside the weights' bytes."""
    made = hashlib.sha256(repr(checkpoint.config).encode())
    for name, tensor in sorted(checkpoint.distinct()):
        made.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
    return made.hexdigest()[:16]


def _files(checkpoint: Checkpoint) -> str:
    """The files themselves: equal on two ranks only if they read the same bytes of the same ones.
    Something of this process alone where that cannot be told.
    """
    try:
        said = [BOOT.read_text()]
        for path in sorted({tensor.path for _, tensor in checkpoint.distinct()}):
            s = path.stat()
            said.append(f"{path.name} {s.st_dev} {s.st_ino} {s.st_size} {s.st_mtime_ns}")
    except OSError:
        return os.urandom(16).hex()
    said += [f"{name} {t.path.name} {t.offset}" for name, t in sorted(checkpoint.distinct())]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()
