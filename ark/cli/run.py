"""`ark run model.onnx --input x.npy --output y.npy`: runs an ONNX model once on NumPy arrays."""

from __future__ import annotations

import argparse
import io

import numpy as np

import ark
from ark.cli.common import write_file
from ark.cli.parser import Subparsers, add_backend, option
from ark.errors import InvalidUsageError
from ark.interop import from_onnx


def register(subparsers: Subparsers) -> None:
    p = subparsers.add_parser(
        "run",
        help="run an ONNX model on NumPy arrays",
        description="Runs an ONNX model once, in one kernel launch.",
    )
    p.add_argument("model", metavar="MODEL.onnx", help="opset 13 to 25; weights may lie beside it")
    option(
        p,
        "--input [NAME=]FILE.npy",
        "an input, by name or in the model's order (default: none)",
        several=True,
    )
    option(
        p,
        "--output [NAME=]FILE.npy",
        "where an output goes, by name or in the model's order; default: shapes are shown",
        several=True,
    )
    option(p, "--dim NAME=N", "size of a symbolic dimension (default: none)", several=True)
    add_backend(p)
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    ark.init(backend=args.backend)
    model = from_onnx(args.model, dimensions(args.dim))
    given = _named(args.input, [p.name for p in model.inputs], "input")
    wanted = _named(args.output, [p.name for p in model.outputs], "output")
    results = model.run({name: _array(file) for name, file in given.items()})
    model.close()
    for port, array in zip(model.outputs, results, strict=True):
        if port.name in wanted:
            data = io.BytesIO()
            np.save(data, array, allow_pickle=False)
            write_file(wanted[port.name], data.getvalue())
        else:
            print(f"{port.name}: {array.dtype} {list(array.shape)}")
    return 0


def dimension(text: str) -> tuple[str, int]:
    """Parses --dim NAME=N to a symbolic dimension and its size."""
    name, _, size = text.rpartition("=")
    if not name or not size.isascii() or not size.isdigit() or len(size) > 9:
        raise InvalidUsageError(
            f"--dim {text!r} is not valid; write it as NAME=N, for example batch=1"
        )
    return name, int(size)


def dimensions(texts: list[str]) -> dict[str, int]:
    """The sizes of symbolic dimensions, by name. Raises InvalidUsageError if a name is given
    twice.
    """
    sizes: dict[str, int] = {}
    for name, size in map(dimension, texts):
        if name in sizes:
            raise InvalidUsageError(f"--dim names {name!r} twice; name each size once")
        sizes[name] = size
    return sizes


def _named(texts: list[str], names: list[str], role: str) -> dict[str, str]:
    """Assigns files to the model's inputs or outputs; returns the file for each name. texts:
    arguments NAME=FILE, or FILE alone. Files without a name are assigned, in order, to the names
    that have no file yet.
    """
    files: dict[str, str] = {}
    plain = []
    for text in texts:
        name, _, file = text.partition("=")
        if file and name in names:
            if name in files:
                raise InvalidUsageError(f"--{role} names {name!r} twice; name each {role} once")
            files[name] = file
        elif file and name.isidentifier():
            raise InvalidUsageError(
                f"the {role} {name!r} does not exist; choose one of {', '.join(names)}"
            )
        else:
            plain.append(text)
    left = [name for name in names if name not in files]
    if len(plain) > len(left):
        raise InvalidUsageError(
            f"{len(texts)} {role}s were given, but the model has {', '.join(names)}"
        )
    return files | dict(zip(left, plain, strict=False))


def _array(file: str) -> np.ndarray:
    try:
        array = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise InvalidUsageError(f"{file} cannot be read as a NumPy array: {error}") from error
    if not isinstance(array, np.ndarray):
        raise InvalidUsageError(f"{file} holds several arrays; give one .npy file for each input")
    return array
