"""The command `ark-rocm-emulator`: runs a kernel of an AMD code object on the CPU, with arguments
from files, and reports the results of the checks. It needs neither ROCm nor ark's ROCm backend.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ark.errors import BaseError, InvalidUsageError
from ark_rocm_emulator.engine import core

TYPES = ("int8", "uint8", "float16", "int32", "uint32", "float32", "int64", "uint64", "float64")
MOST_BYTES = 1 << 32  # the largest buffer
EXAMPLE = """ark-rocm-emulator run k.co --kernel add --grid 4 --block 64 \\
    x.npy y.npy=float32:256 int32=3"""
ARGUMENTS = f"""arguments, in the kernel's order:
  FILE.npy             a buffer with the file's contents
  +FILE.npy            the same, written back to the file afterwards
  FILE.npy=TYPE:COUNT  a new, uninitialised buffer, written to the file
  TYPE=VALUE           a number
TYPE is one of {", ".join(TYPES[:5])},
{", ".join(TYPES[5:])}.

{EXAMPLE}"""


@dataclass(frozen=True)
class Given:
    """A kernel argument: a buffer or a number. data: the initial bytes of the buffer, or the bytes
    of the number. nbytes: the size of the buffer; 0 for a number. keep: the file to which the
    buffer is written after the launch, as an array of `dtype` and `shape`.
    """

    data: bytes
    nbytes: int = 0
    keep: Path | None = None
    dtype: Any = None
    shape: tuple[int, ...] = ()


def parse(text: str) -> Given:
    """Parses an argument. Raises InvalidUsageError if the text is not valid."""
    name, equals, value = text.partition("=")
    if name in TYPES and equals:
        dtype = np.dtype(name)
        try:
            number = dtype.type(float(value) if dtype.kind == "f" else int(value, 0))
        except (ValueError, OverflowError) as error:
            raise InvalidUsageError(f"{text!r}: {error}; expected TYPE=VALUE") from None
        return Given(number.tobytes())
    path = Path(name.removeprefix("+"))
    if path.suffix != ".npy":
        raise InvalidUsageError(
            f"the argument {text!r} is neither a .npy file nor TYPE=VALUE with a type of "
            f"{', '.join(TYPES)}"
        )
    if equals:
        kind, _, count = value.partition(":")
        if kind not in TYPES or not count.isdecimal() or not 0 < int(count) <= MOST_BYTES:
            raise InvalidUsageError(f"{text!r}: expected FILE.npy=TYPE:COUNT, TYPE of {TYPES}")
        dtype = np.dtype(kind)
        return Given(b"", dtype.itemsize * int(count), path, dtype, (int(count),))
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InvalidUsageError(f"{path} cannot be read as an array: {error}") from None
    keep = path if name.startswith("+") else None
    return Given(array.tobytes(), max(array.nbytes, 1), keep, array.dtype, array.shape)


def sizes(text: str) -> tuple[int, int, int]:
    """Parses a grid or a block of the form `X,Y,Z`; missing sizes are 1."""
    words = text.split(",")
    if len(words) > 3 or not all(w.isdecimal() and 0 < int(w) < 1 << 32 for w in words):
        raise argparse.ArgumentTypeError(f"expected sizes X[,Y[,Z]] of at least 1, got {text!r}")
    x, y, z = (*map(int, words), 1, 1)[:3]
    return x, y, z


def _kernel(code: Any, name: str | None) -> Any:
    kernels = {k.name: k for k in code.kernels}
    if name is None and len(kernels) == 1:
        return next(iter(kernels.values()))
    there = ", ".join(kernels) or "no kernel"
    if name is None:
        raise InvalidUsageError(f"the code object has {there}; choose a kernel with --kernel")
    if name not in kernels:
        raise InvalidUsageError(f"the kernel {name!r} does not exist; the code object has {there}")
    return kernels[name]


def run(options: argparse.Namespace) -> int:
    """Runs the kernel. Returns the exit code: 0, or 1 if the kernel was stopped."""
    try:
        code = core().CodeObject(options.file.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidUsageError(f"{options.file} cannot be run: {error}") from None
    kernel = _kernel(code, options.kernel)
    places = [a for a in kernel.args if not a.value_kind.startswith("hidden_")]
    given = [parse(text) for text in options.arguments]
    if len(given) != len(places):
        wanted = ", ".join(f"{a.value_kind} of {a.size} bytes" for a in places) or "no arguments"
        raise InvalidUsageError(f"{kernel.name} takes {wanted}; {len(given)} arguments were given")
    machine = core().Machine([code.arch])
    packed = bytearray(max((a.offset + a.size for a in places), default=0))
    buffers: list[tuple[Given, int]] = []
    for number, (place, argument) in enumerate(zip(places, given, strict=True)):
        word = argument.data
        if argument.nbytes:
            address = machine.allocate(0, "device", argument.nbytes, f"argument {number}")
            if argument.data:
                machine.write(address, argument.data)
            buffers.append((argument, address))
            word = address.to_bytes(8, "little")
        if len(word) != place.size or bool(argument.nbytes) != (place.value_kind != "by_value"):
            raise InvalidUsageError(
                f"argument {number} of {kernel.name} is {place.value_kind} of {place.size} bytes; "
                f"{options.arguments[number]!r} does not fit it"
            )
        packed[place.offset : place.offset + place.size] = word
    launch = core().LaunchOptions(seed=options.seed, checks=options.checks, stale=options.stale)
    desc = core().LaunchDesc(
        machine.load(code), kernel.name, options.grid, options.block, bytes(packed), 0, launch
    )
    result = machine.run(desc)
    if not result.ok:
        print(f"{kernel.name} was stopped ({result.kind}): {result.message}", file=sys.stderr)
        return 1
    for argument, address in buffers:
        if argument.keep is not None:
            size = argument.nbytes if argument.shape else argument.dtype.itemsize
            raw = machine.read(address, size)
            values = np.frombuffer(raw, argument.dtype).reshape(argument.shape)
            try:
                np.save(argument.keep, values)
            except OSError as error:
                raise InvalidUsageError(f"{argument.keep} cannot be written: {error}") from None
    print(
        f"{kernel.name} on emulated {code.arch}: {result.instructions} wave-instructions; "
        "results, no times of a GPU"
    )
    return 0


def seed(text: str) -> int:
    """Parses a seed of the scheduler. Raises an argparse error unless it is a whole number of 32
    bits.
    """
    if not text.isascii() or not text.isdigit() or int(text) >= 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a whole number from 0 to 4294967295")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    command = argparse.ArgumentParser(
        prog="ark-rocm-emulator",
        description="Runs a kernel of an AMD code object on the CPU.",
        epilog=ARGUMENTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("action", choices=("run",), help="run a kernel")
    command.add_argument("file", type=Path, metavar="CODE_OBJECT", help="for gfx90a to gfx1100")
    command.add_argument("--kernel", metavar="NAME", help="the kernel (default: the only one)")
    command.add_argument(
        "--grid", type=sizes, default=(1, 1, 1), metavar="X,Y,Z", help="workgroups"
    )
    command.add_argument("--block", type=sizes, default=(64, 1, 1), metavar="X,Y,Z", help="lanes")
    command.add_argument(
        "--seed", type=seed, default=0, help="0 to 4294967295, of the scheduler (default: 0)"
    )
    command.add_argument(
        "--no-checks", dest="checks", action="store_false", help="only bounds are checked"
    )
    command.add_argument("--stale", action="store_true", help="caches hold old values")
    command.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="see below")
    return command


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code, which is 2 if an argument is not valid."""
    options = parser().parse_intermixed_args(words)
    try:
        return run(options)
    except BaseError as error:
        print(f"ark-rocm-emulator: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
