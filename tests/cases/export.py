"""Cases and helpers of tests/unit/cli/test_export.py, which other tests use too."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

PARTS = ("ark.c", "device.c", "safetensors.c", "decoder.c")
STRICT = ("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-g", "-O1")
ADDRESSES = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def compile_c(folder: Path, name: str, out: str, *options: str) -> Path:
    """Compiles a folder's C files and links them with the loop kernel compiled at export."""
    system = shutil.which("gcc")
    command = [system] if system else [sys.executable, "-m", "ziglang", "cc"]
    if not system:  # ziglang's wheel has no runtime of the address sanitizer
        options = tuple("-fsanitize=undefined" if o == ADDRESSES[0] else o for o in options)
    library = str(folder / f"lib{name}_loop.so")
    words = [*command, *STRICT, *options, *PARTS, f"{name}.c", library, "-pthread", "-o", out]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / out


class Library:
    """The functions of a compiled export, called for one instance of the exported model."""

    def __init__(self, path: Path, name: str) -> None:
        self.c = ctypes.CDLL(str(path))
        self.c.ark_error.restype = self.c.ark_status_text.restype = ctypes.c_char_p
        self.instance = ctypes.c_void_p()
        model = ctypes.byref(ctypes.c_char.in_dll(self.c, f"{name}_model"))
        assert self.c.ark_create(model, ctypes.byref(self.instance)) == 0

    def __call__(self, function: str, *arguments: object) -> int:
        return int(getattr(self.c, function)(self.instance, *arguments))

    def execute(self, iterations: Sequence[int]) -> int:
        each = (ctypes.c_uint32 * len(iterations))(*iterations)
        return self("ark_execute", each, ctypes.c_size_t(len(iterations)), None)

    def array(self, function: str, name: str, values: np.ndarray) -> int:
        memory = ctypes.c_void_p(values.ctypes.data)
        return self(function, name.encode(), memory, ctypes.c_size_t(values.nbytes))
