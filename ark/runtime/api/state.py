"""Saves and loads state dictionaries in the safetensors format: names, types, shapes and bytes.

4-bit elements are written two to a byte, as in memory; the metadata contain their type and shape.
The format contains no objects, so a file from an untrusted source can only give arrays and can run
no code. Other values (numbers, text, lists of them) are JSON in the file's metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

from ark import log
from ark.errors import InvalidUsageError
from ark.frontend.foreign import as_array
from ark.ir.dtype import PACKED
from ark.ir.packed import from_memory, to_memory

_TYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F32": np.float32,
    "F64": np.float64,
}
_PACKED_NAMES = {t.name: t for t in PACKED}
_PACKED = {np.dtype(t.numpy): t for t in PACKED}
_NAMES = {np.dtype(t): name for name, t in _TYPES.items()}


def save(state_dict: Mapping[str, object], state_dict_file_path: str | Path) -> None:
    """Writes a state dictionary: names to NumPy arrays (or torch tensors), in safetensors format.

    Other values are written with a warning; they must be JSON-able. Raises InvalidUsageError for
    other values, and if the file cannot be written.

    Examples:
        >>> import tempfile
        >>> path = f"{tempfile.mkdtemp()}/state.safetensors"
        >>> ark.save({"w": torch.ones(2).numpy()}, path)
        >>> ark.load(path)
        {'w': array([1., 1.], dtype=float32)}
    """
    path = state_dict_file_path
    arrays: dict[str, np.ndarray] = {}
    packed: dict[str, list[Any]] = {}
    plain: Any = state_dict
    if isinstance(state_dict, Mapping):
        plain = {}
        for name, value in state_dict.items():
            if hasattr(value, "shape") and hasattr(value, "dtype"):
                array = _contents(str(name), value)
                if array.dtype in _PACKED:
                    dtype = _PACKED[array.dtype]
                    packed[str(name)] = [dtype.name, list(array.shape)]
                    array = to_memory(np.atleast_1d(array), dtype)
                arrays[str(name)] = array
            else:
                plain[str(name)] = value
    else:
        log.warn("save was given a value that is not a state dictionary; it is written as it is")
    order = [str(name) for name in state_dict] if isinstance(state_dict, Mapping) else None
    try:
        about = json.dumps({"order": order, "plain": plain, "packed": packed})
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidUsageError(
            f"save takes arrays and plain values: {error}; convert it to NumPy arrays first"
        ) from error
    try:
        _write(arrays, about, path)
    except OSError as error:
        raise InvalidUsageError(f"{path} cannot be written: {error}") from error


def _write(arrays: Mapping[str, np.ndarray], about: str, path: str | Path) -> None:
    """Writes the length of the header, the header as JSON, and the arrays' bytes; arrays are
    aligned, those with the largest items first.
    """
    header: dict[str, Any] = {"__metadata__": {"ark": about}}
    end = 0
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    for name, array in ordered:
        begin, end = end, end + array.nbytes
        entry = {"dtype": _NAMES[array.dtype], "shape": array.shape, "data_offsets": [begin, end]}
        header[name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, array in ordered:
            out.write(array.tobytes())


def _contents(name: str, value: Any) -> np.ndarray:
    array = as_array(value)
    if array.dtype not in _NAMES and array.dtype not in _PACKED:
        raise InvalidUsageError(
            f"{name!r} has the type {array.dtype}, which cannot be saved; cast it to a number type"
        )
    return array


def load(state_dict_file_path: str | Path) -> Any:
    """Reads what `save` wrote, and any other safetensors file as names to NumPy arrays.

    InvalidUsageError if the file is missing, damaged or of another format (a pickle, say).

    Examples:
        >>> import tempfile
        >>> path = f"{tempfile.mkdtemp()}/state.safetensors"
        >>> ark.save({"w": torch.ones(2).numpy()}, path)
        >>> ark.load(path)
        {'w': array([1., 1.], dtype=float32)}
    """
    path = state_dict_file_path
    try:
        if not Path(path).is_file():
            raise InvalidUsageError(
                f"{path} cannot be read: it does not exist or is not a regular file"
            )
        data = Path(path).read_bytes()
        with safetensors.safe_open(str(path), framework="np") as opened:
            metadata = opened.metadata() or {}
        arrays = {name: _array(name, entry) for name, entry in safetensors.deserialize(data)}
        about = json.loads(metadata.get("ark", "{}"))
        for name, (dtype, shape) in about.get("packed", {}).items():
            arrays[name] = _unpacked(name, arrays[name], dtype, shape)
        plain, order = about.get("plain", {}), about.get("order", sorted(arrays))
        if order is None:
            return plain
        return {name: arrays[name] if name in arrays else plain[name] for name in order}
    except OSError as error:
        raise InvalidUsageError(f"{path} cannot be read: {error}") from error
    except (
        safetensors.SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        if isinstance(error, InvalidUsageError):
            raise
        raise InvalidUsageError(
            f"{path} is not a saved state: {error}; write it with ark.save (files of objects, such "
            "as pickles, are not read)"
        ) from error


def _unpacked(name: str, data: np.ndarray, dtype: str, shape: list[int]) -> np.ndarray:
    kind = _PACKED_NAMES[dtype]
    sizes = [int(n) for n in shape]
    wide = [*sizes[:-1], -(-sizes[-1] // kind.per_item)] if sizes else [1]
    if data.dtype != np.uint8 or min(sizes, default=1) < 0 or math.prod(wide) != data.size:
        raise ValueError(f"{name!r} has {data.size} bytes for {dtype} of shape {shape}")
    return from_memory(data, sizes or [1], kind).reshape(sizes)


def _array(name: str, entry: Mapping[str, Any]) -> np.ndarray:
    if entry["dtype"] not in _TYPES:
        raise ValueError(f"{name!r} has the type {entry['dtype']}, which is not supported")
    kind = np.dtype(_TYPES[entry["dtype"]])
    shape = tuple(entry["shape"])
    if len(entry["data"]) != math.prod(shape) * kind.itemsize:
        raise ValueError(f"{name!r} has {len(entry['data'])} bytes for shape {list(shape)}")
    return np.frombuffer(bytearray(entry["data"]), kind).reshape(shape)
