"""The compiler outputs that tests cache (tests/kept.py): stored completely, and replaced if a part
of the key differs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from ark_cpu import backend

from ark.backend.codegen.dialect import Source
from ark.backend.devices import Binary
from ark.backend.protocol import Target
from tests import kept


class Compiler:
    """A compiler whose binary contains zero bytes. It counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def key(self, target: Target) -> str:
        return target.arch

    def compile(self, source: Source, target: Target) -> Binary:
        self.calls += 1
        return Binary(b"\0\n" + source.text.encode(), ".so", "two\nlines\0")


def test_binary_is_compiled_once_per_source_and_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARK_CACHE_DIR", str(tmp_path))
    compiler = Compiler()
    monkeypatch.setattr(backend, "compiler", lambda: compiler)
    source, target = Source("a"), Target("one", 1)
    first = kept.binary(backend, source, target)
    assert first == kept.binary(backend, source, target) == compiler.compile(source, target)
    assert compiler.calls == 2
    others = (Source("b"), target), (Source("a", parts=1), target), (source, Target("two", 1))
    for other in others:
        kept.binary(backend, *other)
    assert compiler.calls == 5
