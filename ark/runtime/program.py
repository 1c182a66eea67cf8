"""From a plan to a compiled loop kernel, through the cache. Called by the executor and the CLI."""

from __future__ import annotations

from dataclasses import dataclass

from ark._version import __version__
from ark.backend.protocol import Backend, Binary, Target
from ark.codegen.writer import Emitted, write
from ark.machine import Machine
from ark.plan.types import Plan
from ark.runtime import cache


@dataclass(frozen=True)
class Program:
    """A compiled loop kernel and what fills its task records."""

    emitted: Emitted
    binary: Binary
    cached: bool


def build(plan: Plan, machine: Machine, backend: Backend, arch: str) -> Program:
    """Emits and compiles; the key is the source, the compiler with its flags, and the target."""
    emitted = write(plan, machine, backend.dialect(arch))
    target = Target(arch, machine.threads)
    compiler = backend.compiler()
    name = cache.key(
        __version__, backend.name, emitted.source.text, compiler.key(target), repr(target)
    )
    data = cache.load(cache.PROGRAMS, name)
    if data is not None:
        suffix, _, content = data.partition(b"\0")
        return Program(emitted, Binary(content, suffix.decode()), cached=True)
    binary = compiler.compile(emitted.source, target)
    cache.store(cache.PROGRAMS, name, binary.suffix.encode() + b"\0" + binary.data)
    return Program(emitted, binary, cached=False)
