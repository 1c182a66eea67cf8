"""Reads the headers of safetensors files: the names, types, shapes and offsets of tensors.

Called by the checkpoint reader. The `safetensors` package cannot read bfloat16, or slices of such
tensors, into NumPy, and its errors do not state a remedy. So the header is read here. A file
consists of 8 bytes with the header's length, the header as JSON, and the tensors' bytes without
gaps (https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ark.errors import ModelError, UnsupportedError
from ark.models.fields import Fields, check_file

DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Types of weights that are not quantised."""
ELEMENTS: dict[str, np.dtype[Any]] = {
    **DTYPES,
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
"""Types of all tensors that ark reads."""
LENGTH_BYTES = 8
PIECE_BYTES = 16 << 20  # bytes that are compared at a time
MAX_HEADER_BYTES = 100_000_000
_ANY, _MAX_NAME_BYTES = (
    ("utf-8", "surrogatepass"),
    255,
)  # encoding and longest length of a file's name, in bytes
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: name and type as in the file, shape, and bytes."""

    name: str
    path: Path
    dtype_code: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy type (bfloat16 is that of ml_dtypes). Raises UnsupportedError for types that
        NumPy lacks.
        """
        if self.dtype_code not in DTYPES:
            raise UnsupportedError(
                f"{self.path} holds {self.name} as {self.dtype_code}, but ark reads float32, "
                "float16 and bfloat16 weights. Convert the checkpoint to one of these."
            )
        return DTYPES[self.dtype_code]


def find_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint directory, by stored name, from a single file or from several
    shards.

    Reads headers only. Raises ModelError if a file is missing, truncated or damaged, and
    UnsupportedError if the weights are in another format.
    """
    if (directory / SINGLE).exists():
        return read_header(directory / SINGLE)
    if (directory / INDEX).exists():
        return find_sharded(directory)
    others = [
        path.name
        for pattern in ("*.bin", "*.pth", "*.pt", "*.gguf", "*.h5", "*.msgpack")
        for path in sorted(directory.glob(pattern))
    ]
    if others and others[0].endswith(".gguf"):
        raise UnsupportedError(
            f"{directory} holds its weights in {others[0]}, but ark reads a GGUF file by its own "
            f"name; give that file: {directory / others[0]}"
        )
    if others:
        raise UnsupportedError(
            f"{directory} holds its weights in {others[0]}, but ark reads safetensors "
            f"({SINGLE}, or shards with {INDEX}). Convert the checkpoint: load it with "
            "transformers and save it by save_pretrained, with safetensors."
        )
    stray = sorted(path.name for path in directory.glob("*.safetensors"))
    hint = f" It holds {stray[0]}, but not under one of these names." if stray else ""
    raise ModelError(
        f"{directory} has neither {SINGLE} nor {INDEX}, so it holds no weights.{hint} "
        "Give the directory that holds them, or download them."
    )


def find_sharded(directory: Path) -> dict[str, StoredTensor]:
    """The tensors that the index file names, each read from its shard."""
    fields = Fields.read(directory / INDEX)
    table = fields.table("weight_map")
    if table is None or any(type(shard) is not str for shard in table.values.values()):
        raise fields.wrong("weight_map", "an object from tensor names to shard files")
    shards = sorted(set(table.values.values()))
    outside = [
        s for s in shards if Path(s).name != s or not 0 < len(s.encode(*_ANY)) <= _MAX_NAME_BYTES
    ]
    if outside:
        raise ModelError(
            f"{fields.source} names the shard {outside[0]!r:.300}, but a shard is a file beside "
            "the index. Correct weight_map, or download the index again."
        )
    missing = [shard for shard in shards if not (directory / shard).exists()]
    if missing:
        raise ModelError(
            f"{directory} lacks {len(missing)} of the {len(shards)} shards that {INDEX} names: "
            f"{', '.join(missing[:4])}{', ...' if len(missing) > 4 else ''}. Download the missing "
            "files."
        )
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        tensors.update(read_header(directory / shard))
    for name, shard in table.values.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise ModelError(
                f"{fields.source} says that {shard} holds {name}, but it does not. The index and "
                "the shards are of different checkpoints: download them again."
            )
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors in one safetensors file. The header is checked against the file's length."""
    check_file(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(LENGTH_BYTES)
            if start.startswith(b"version "):
                raise ModelError(
                    f"{path} is a Git LFS pointer ({size} bytes), not the weights themselves. "
                    "Fetch them with 'git lfs pull', or download the file."
                )
            length = int.from_bytes(start, "little")
            end = LENGTH_BYTES + length
            if size < LENGTH_BYTES or length > MAX_HEADER_BYTES:
                raise damaged(path, f"it has {size} bytes and no header of a possible length")
            if end > size:
                raise truncated(path, size, end)
            text = file.read(length)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read ({error.strerror}). Make it readable, then try again."
        ) from None
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError):
        raise damaged(path, "its header is not JSON") from None
    if not isinstance(entries, dict):
        raise damaged(path, "its header is not an object")
    entries.pop("__metadata__", None)
    tensors = {name: read_entry(path, name, entry, end) for name, entry in entries.items()}
    check_layout(path, tensors, end, size)
    return tensors


def read_bytes(tensor: StoredTensor, begin: int, nbytes: int) -> np.ndarray:
    """Reads bytes of a tensor from `begin` on. Raises ModelError if the file has changed since it
    was opened.
    """
    try:
        content = np.fromfile(tensor.path, np.uint8, nbytes, offset=tensor.offset + begin)
    except OSError as error:
        raise ModelError(
            f"{tensor.path} can no longer be read ({error.strerror or error}). Do not change "
            "the checkpoint while it is loaded; try again."
        ) from None
    if len(content) < nbytes:
        raise ModelError(
            f"{tensor.path} has been truncated since it was opened: {tensor.name} ends after "
            f"{begin + len(content)} of {tensor.nbytes} bytes. Do not change the checkpoint "
            "while it is loaded; try again."
        )
    return content


def read_array(tensor: StoredTensor) -> np.ndarray:
    """Reads a whole tensor that has one of the types in ELEMENTS."""
    content = read_bytes(tensor, 0, tensor.nbytes)
    return content.view(ELEMENTS[tensor.dtype_code]).reshape(tensor.shape)


def read_entry(path: Path, name: str, entry: Any, base: int) -> StoredTensor:
    """Reads one header entry {dtype, shape, data_offsets}. base: the offset of the data in the
    file.
    """
    try:
        code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        whole = [begin, end, *shape]
    except (KeyError, TypeError, ValueError):
        raise damaged(path, f"the header entry of {name} does not describe a tensor") from None
    if type(code) is not str or any(type(n) is not int or n < 0 for n in whole) or end < begin:
        raise damaged(path, f"the header entry of {name} has values out of range")
    tensor = StoredTensor(name, path, code, tuple(shape), base + begin, end - begin)
    if code in ELEMENTS and math.prod(shape) * ELEMENTS[code].itemsize != tensor.nbytes:
        raise damaged(
            path, f"{name} has {tensor.nbytes} bytes, which does not match {code} of shape {shape}"
        )
    return tensor


def check_layout(path: Path, tensors: dict[str, StoredTensor], base: int, size: int) -> None:
    """Raises ModelError unless the bytes of the tensors fill the file from offset `base` to its
    end, without gaps.
    """
    at = base
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != at:
            raise damaged(path, f"the bytes of {tensor.name} do not follow those before them")
        at += tensor.nbytes
    if at > size:
        raise truncated(path, size, at)
    if at < size:
        raise damaged(path, f"it has {size} bytes, but its header describes {at}")


def truncated(path: Path, size: int, expected: int) -> ModelError:
    """The error for a safetensors file that is shorter than its header states."""
    return ModelError(
        f"{path} is truncated: it has {size} bytes, but its header describes {expected}. The "
        "download or copy was cut short: fetch the file again."
    )


def damaged(path: Path, fault: str) -> ModelError:
    """The error for a file that is not a valid safetensors file."""
    return ModelError(
        f"{path} is not an intact safetensors file: {fault}. Download or copy the file again."
    )


def same_bytes(first: StoredTensor, second: StoredTensor) -> bool:
    """True if two tensors have the same type, shape and bytes."""
    if (first.dtype_code, first.shape) != (second.dtype_code, second.shape):
        return False
    for begin in range(0, first.nbytes, PIECE_BYTES):
        size = min(PIECE_BYTES, first.nbytes - begin)
        if not np.array_equal(read_bytes(first, begin, size), read_bytes(second, begin, size)):
            return False
    return True
