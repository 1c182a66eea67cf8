"""Builds the compiled loop kernel of a plan, or reads it from the cache. Called by the executor and
the command line.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ark import log
from ark._version import __version__
from ark.backend.codegen.dialect import Source
from ark.backend.codegen.writer import Emitted, write
from ark.backend.devices import Binary, KernelDevice
from ark.backend.protocol import Backend, KernelBackend, LinkingCompiler, Target
from ark.errors import BaseError, ModelError, SystemError
from ark.machine import Machine
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.runtime import cache
from ark.tasks.custom import CUSTOM
from ark.tasks.custom_form import complaints


@dataclass(frozen=True)
class Program:
    """A compiled loop kernel. emitted: its source, with the box maps (tensor maps for TMA)
    and the numbers by which tasks select device functions. cached: True if the binary comes from
    the cache. name: the name of its cache entry.
    """

    emitted: Emitted
    binary: Binary
    cached: bool
    name: str


def load(
    plan: Plan,
    machine: Machine,
    backend: KernelBackend,
    device: KernelDevice,
    phases: range | None = None,
) -> tuple[Program, object]:
    """Builds the loop kernel and loads it. If a cached kernel cannot be loaded, it is compiled
    again.

    phases: the phases that the kernel runs, by default all. Returns the program and the result of
    Device.load.
    """
    program = build(plan, machine, backend, device.arch, phases)
    try:
        return program, device.load(program.binary)
    except BaseError:
        if not program.cached:
            raise
    cache.drop(cache.PROGRAMS, program.name)
    program = build(plan, machine, backend, device.arch, phases)
    return program, device.load(program.binary)


Compiled = tuple[Binary, bool]  # True: it was in the cache
_begun: dict[
    str, Future[Compiled]
] = {}  # kernels being compiled, by cache name; `build` removes them
_loops: dict[str, Binary] = {}  # compiled loops, by cache name


def begin(plan: Plan, backend: Backend, arch: str) -> None:
    """Starts to compile, in other threads, all kernels that `build` will need. The plan may still
    be a draft. Errors of the compiler are raised by `build`.
    """
    if not isinstance(backend, KernelBackend):
        return
    for phases in plan.kernels:
        _begin(plan, backend, arch, phases)


def _begin(plan: Plan, backend: KernelBackend, arch: str, phases: range) -> None:
    try:
        machine = machine_of(plan, phases[0])
        emitted, target, name = _emitted(plan, machine, backend, arch, phases)
    except BaseError:
        return
    if name in _begun or _kept(name) is not None:
        return
    worker = ThreadPoolExecutor(1, "ark-compile")
    _begun[name] = worker.submit(_compiled, name, emitted, target, backend)
    worker.shutdown(wait=False)


def build(
    plan: Plan, machine: Machine, backend: KernelBackend, arch: str, phases: range | None = None
) -> Program:
    """The compiled loop kernel. Its key in the cache is computed from the source, the compiler with
    its flags, and the target.
    """
    emitted, target, name = _emitted(plan, machine, backend, arch, phases)
    begun = _begun.pop(name, None)
    try:
        binary, cached = begun.result() if begun else _compiled(name, emitted, target, backend)
    except SystemError as error:
        raise _of_user(error, plan, arch) or error from None
    return Program(emitted, binary, cached, name)


def _of_user(error: SystemError, plan: Plan, arch: str) -> ModelError | None:
    """A ModelError with the compiler's messages about the source of a custom op. None if
    compilation did not fail because of a custom op.
    """
    ops = [op.params for op in plan.ops if op.kind == CUSTOM]
    complaint = complaints(str(error), ((str(p["name"]), str(p["digest"])) for p in ops))
    if not complaint:
        return None
    names = ", ".join(dict.fromkeys(str(p["name"]) for p in ops))
    return ModelError(
        f"the source of a custom op ({names}) does not compile for {arch}:\n{complaint}"
    )


def _compiled(name: str, emitted: Emitted, target: Target, backend: KernelBackend) -> Compiled:
    """The compiled kernel. It is read from the cache if the cache has it."""

    def compiled() -> Binary:
        compiler, source = backend.compiler(), emitted.source
        with (
            log.slow(
                f"compiling the loop kernel for {target.arch}: a compiler's first use on a "
                "machine may take minutes"
            ),
            log.timed(f"compiled the loop kernel for {target.arch}"),
        ):
            if not source.loop or not isinstance(compiler, LinkingCompiler):
                return compiler.compile(source, target)
            return compiler.link(source, target, _loop(compiler, source, target, backend))

    binary, cached = _once(name, compiled)
    if cached:
        log.debug(f"the kernel for {target.arch} is in the cache: {len(binary.data):,} bytes")
    return binary, cached


def _loop(
    compiler: LinkingCompiler, source: Source, target: Target, backend: KernelBackend
) -> Binary:
    """The compiled object of the kernel's loop (without task bodies). Kernels with the same loop
    share it.
    """
    name = _name("loop", source.loop, target, backend)
    if name not in _loops:
        _loops[name], _ = _once(name, lambda: compiler.compile_loop(source, target))
    return _loops[name]


def _once(name: str, make: Callable[[], Binary]) -> Compiled:
    """The cache entry of that name. If there is none, `make` creates it. Ranks of one host compile
    a source only once.
    """
    cached = _kept(name)
    if cached is not None:
        return cached, True
    with cache.making(cache.PROGRAMS, name):
        cached = _kept(name)
        if cached is not None:
            return cached, True
        binary = make()
        cache.store(cache.PROGRAMS, name, binary.suffix.encode() + b"\0" + binary.data)
        return binary, False


def _kept(name: str) -> Binary | None:
    data = cache.load(cache.PROGRAMS, name)
    if data is None:
        return None
    suffix, _, content = data.partition(b"\0")
    return Binary(content, suffix.decode())


def _emitted(
    plan: Plan, machine: Machine, backend: KernelBackend, arch: str, phases: range | None
) -> tuple[Emitted, Target, str]:
    """The kernel's source, the target for which it is compiled, and the name of its cache entry."""
    emitted = write(plan, machine, backend.dialect(arch), phases)
    target = Target(arch, machine.threads)
    return emitted, target, _name("kernel", repr(emitted.source), target, backend)


def _name(part: str, source: str, target: Target, backend: KernelBackend) -> str:
    """The name of the cache entry for the machine code that is compiled from a source."""
    flags = backend.compiler().key(target)
    return cache.key(__version__, backend.name, part, source, flags, repr(target))
