"""Cases and helpers of tests/codegen/test_rocm_compile.py, which other tests use too."""

from __future__ import annotations

import re

from ark_rocm import backend, compiler, machines

from ark.backend.codegen.dialect import Source
from ark.backend.protocol import Target
from ark.machine import Machine
from tests import kept

ARCHS = backend.archs()
MACHINES = {model.arch: name for name, model in machines.MODELS.items()}


def machine_for(arch: str) -> Machine:
    machine = backend.machine(MACHINES[arch])
    assert machine is not None and machine.arch == arch
    return machine


def target(arch: str) -> Target:
    return Target(arch, machine_for(arch).threads)


def assembly(source: Source, arch: str) -> str:
    """Returns the source's assembly; an earlier compilation is taken from the cache."""
    key = repr((backend.compiler().key(target(arch)), source.text))
    return kept.text(lambda: compiler.assembly(source, target(arch)), key)


def fact(text: str, name: str) -> int:
    matches = re.search(rf"\.{name}:\s+(\d+)", text)
    assert matches, name
    return int(matches.group(1))
