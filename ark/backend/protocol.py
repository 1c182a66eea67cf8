"""What a backend package must offer; the planner, the writer and the runtime see vendors only so.

A backend is an import package found through the entry-point group `ark.backends`. It exposes one
module-level object `backend`. All satisfy `Backend`; those whose processors share memory satisfy
`KernelBackend`, run by the loop kernel of ark.codegen and ark.runtime.executor; one that runs plans
itself satisfies ark.runtime.runner.PlanBackend. What devices offer is in ark.backend.devices.
Everything here is vendor-neutral: a further vendor implements these classes in a package of its
own. Called by ark.runtime and ark.cli.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ark.backend.devices import Binary, Device, KernelDevice
from ark.codegen.dialect import Dialect, Source
from ark.machine import Machine


@dataclass(frozen=True)
class DeviceInfo:
    """One device as `probe` sees it, without creating a context."""

    index: int
    name: str
    arch: str
    memory_bytes: int


@dataclass(frozen=True)
class Probe:
    """What a machine has of one vendor.

    `reason` is empty when there are devices; otherwise it says, in a sentence, why there are none.
    `remedy` is the command or step that mends it. `notes` hold what a user should know, such as
    that the devices are emulated. simulated: nobody gets them who has not named the backend.
    """

    devices: tuple[DeviceInfo, ...] = ()
    reason: str = ""
    remedy: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    simulated: bool = False


@dataclass(frozen=True)
class Target:
    """What a source is compiled for: `arch` in the vendor's own spelling, threads per processor."""

    arch: str
    threads: int


class Compiler(Protocol):
    """Turns source into a binary; works without the hardware."""

    def key(self, target: Target) -> str:
        """Names compiler, version and flags: part of the program cache's key."""
        ...

    def compile(self, source: Source, target: Target) -> Binary:
        """Compiles; raises ark.errors.SystemError with the compiler's words if it cannot."""
        ...


@runtime_checkable
class Backend(Protocol):
    """One vendor."""

    name: str

    def probe(self) -> Probe:
        """Looks for devices; creates no context and never raises."""
        ...

    def machine(self, name: str) -> Machine | None:
        """The machine model of that name, for planning without the device; None if not ours."""
        ...

    def machine_names(self) -> tuple[str, ...]:
        """Names that `machine` knows, for help texts; a pattern is spelt like `cpu-N`."""
        ...

    def open(self, index: int) -> Device: ...


@runtime_checkable
class KernelBackend(Backend, Protocol):
    """A vendor whose devices run loop kernels."""

    def dialect(self, arch: str) -> Dialect:
        """The source dialect for one architecture."""
        ...

    def compiler(self) -> Compiler: ...

    def default_arch(self) -> str:
        """The architecture to compile for when nobody names one and there is no device."""
        ...

    def archs(self) -> tuple[str, ...]:
        """The architectures that this backend's tests compile for."""
        ...

    def open(self, index: int) -> KernelDevice: ...


@dataclass(frozen=True)
class Toolchain:
    """What turns a backend's source into code that a device runs. name: for people, with versions
    as exact as they are known. key: all that the code depends on, the driver included. remedy: what
    to do for another version.
    """

    name: str
    key: str
    remedy: str


@runtime_checkable
class CheckedBackend(KernelBackend, Protocol):
    """A vendor whose compiler is installed apart from ark: each version has to give known results
    on a device before ark uses it there (ark.runtime.toolchain).
    """

    def toolchain(self, arch: str) -> Toolchain | None:
        """What makes code for `arch`; None where nothing is to be checked (no real device)."""
        ...


@runtime_checkable
class PredictingBackend(KernelBackend, Protocol):
    """A vendor with a timing model of products that need not be there (`ark bench --model`)."""

    def predict(self, name: str) -> None:
        """From now on this process' devices are stand-ins for the product of that name, and the
        times of launches are predictions of a model.

        Raises InvalidUsageError if there is no timing model of that name.
        """
        ...


@dataclass(frozen=True)
class LoopFigures:
    """What a compiler made of a kernel's busiest matrix loop. instructions: by kind. matrix_share:
    of the issue slots of the loop, matrix units have so many. registers: vector registers a lane
    of the whole kernel; spills: of them; scratch_bytes: a lane. bank_conflicts: the share of the
    cycles for which the loop keeps shared memory busy that lanes wait for each other's banks; None
    where nobody counted.
    """

    instructions: dict[str, int]
    matrix_share: float
    registers: int
    spills: int
    scratch_bytes: int
    bank_conflicts: float | None = None


@runtime_checkable
class InspectedBackend(KernelBackend, Protocol):
    """A vendor whose machine code can be read without its hardware (`ark bench ops --isa`)."""

    def inspect(self, source: Source, arch: str) -> LoopFigures:
        """Compiles for `arch` and looks at the loop that multiplies matrices.

        Raises InvalidUsageError if there is none.
        """
        ...

    def counting(self, arch: str) -> AbstractContextManager[Callable[[], tuple[int, int]] | None]:
        """Within it this backend's devices are stand-ins for `arch`, and what it gives says for how
        many cycles the last launch kept shared memory busy, and how many of these lanes spent in
        waiting for each other's banks; None if nobody knows the architecture's banks.
        """
        ...


@runtime_checkable
class ExportBackend(KernelBackend, Protocol):
    """A vendor for which models leave as C libraries (ark.export)."""

    def export_source(self) -> str:
        """C source of the functions of ark/export/c/device.h, for C11 without extensions."""
        ...


@runtime_checkable
class SourceBackend(ExportBackend, Protocol):
    """A vendor whose loop kernels are the host's own code, so that a program can be linked with
    them (ark.export).
    """

    def source_flags(self) -> tuple[str, ...]:
        """What a C++ compiler is told beside -march."""
        ...
