"""Caches compiler results for tests that call a compiler directly. The results are in ark's cache,
and the key includes everything on which they depend. A test run compiles only what has changed
since the last run, and its workers share the results.

Tests that compare two compilations of the same text, or test a compiler's errors, call the compiler
without this cache.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from ark.backend.codegen.dialect import Source
from ark.backend.devices import Binary
from ark.backend.protocol import KernelBackend, Target
from ark.runtime import cache as kept


def data(make: Callable[[], bytes], *parts: str) -> bytes:
    """Returns the result of `make`, from the cache if it was computed from the same `parts`
    before.
    """
    name = kept.key("tests", *parts)
    result = kept.load(kept.PROGRAMS, name)
    if result is None:
        with kept.making(kept.PROGRAMS, name):
            result = kept.load(kept.PROGRAMS, name)
            if result is None:
                result = make()
                kept.store(kept.PROGRAMS, name, result)
    return result


def text(make: Callable[[], str], *parts: str) -> str:
    """As `data`, for text."""
    return data(lambda: make().encode(), *parts).decode()


def binary(backend: KernelBackend, source: Source, target: Target) -> Binary:
    """Returns the binary with the compiler's log."""
    compiler = backend.compiler()
    module = inspect.getsource(sys.modules[type(compiler).__module__])  # has its flags

    def make() -> bytes:
        result = compiler.compile(source, target)
        return json.dumps([result.suffix, result.log]).encode() + b"\n" + result.data

    parts = ("binary", module, compiler.key(target), repr(source), repr(target))
    head, _, content = data(make, *parts).partition(b"\n")
    suffix, log = json.loads(head)
    return Binary(content, suffix, log)


@cache
def _clang() -> str:
    """The versions on which clang's results depend, besides its arguments."""
    from ark_rocm_emulator import compile as emulated

    words = emulated.toolchain().clang
    done = subprocess.run([*words, "--version"], capture_output=True, text=True, check=True)
    own = Path(emulated.__file__ or "").read_text()
    return f"{words} {done.stdout} {own} {emulated.PRELUDE.read_text()}"


def to_assembly(source: str, arch: str, options: Sequence[str] = ("-O3",)) -> tuple[str, str]:
    """As ark_rocm_emulator.compile.to_assembly."""
    from ark_rocm_emulator import compile as emulated

    def make() -> str:
        return "\0".join(emulated.to_assembly(source, arch, options))

    assembly, _, warnings = text(
        make, "assembly", _clang(), source, arch, repr(tuple(options))
    ).partition("\0")
    return assembly, warnings


def compile_hip(source: str, arch: str, options: Sequence[str] = ("-O3",)) -> bytes:
    """As ark_rocm_emulator.compile.compile_hip."""
    from ark_rocm_emulator import compile as emulated

    parts = ("code", _clang(), source, arch, repr(tuple(options)))
    return data(lambda: emulated.compile_hip(source, arch, options), *parts)


def assemble(assembly: str, arch: str, options: Sequence[str] = ()) -> bytes:
    """As ark_rocm_emulator.compile.assemble."""
    from ark_rocm_emulator import compile as emulated

    parts = ("assembled", _clang(), assembly, arch, repr(tuple(options)))
    return data(lambda: emulated.assemble(assembly, arch, options), *parts)
