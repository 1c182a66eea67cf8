"""The interface of a backend package. The planner, code generation and the runtime use vendors only
through it.

A backend is an import package found through the entry-point group `ark.backends`. It exposes one
module-level object `backend`. Every backend satisfies `Backend`. A backend whose processors share
memory satisfies `KernelBackend`, and ark.runtime.executor runs its plans as loop kernels; a backend
that executes plans itself satisfies ark.runtime.runner.PlanBackend. ark.backend.devices has the
interface of devices. Everything here is vendor-neutral. Called by ark.runtime and ark.cli.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from ark.backend.codegen.dialect import Dialect, Source
from ark.backend.devices import Binary, Device, KernelDevice
from ark.backend.occupancy import Occupancy
from ark.machine import Machine


@dataclass(frozen=True)
class DeviceInfo:
    """A device as reported by `probe`, without creating a context."""

    index: int
    name: str
    arch: str
    memory_bytes: int


@dataclass(frozen=True)
class Probe:
    """The result of looking for a vendor's devices on a machine.

    `reason` is empty if there are devices. Otherwise it explains in a sentence why there are none,
    and `remedy` is the command or step that fixes this. `notes` are remarks for the user, such as
    that the devices are emulated. simulated: True if the devices are simulated; they are used only
    if the user names the backend. emulated: True if an emulator executes the machine code of
    hardware that is not present.
    """

    devices: tuple[DeviceInfo, ...] = ()
    reason: str = ""
    remedy: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    simulated: bool = False
    emulated: bool = False


@dataclass(frozen=True)
class Target:
    """The target of compilation: `arch` in the vendor's own spelling, threads per processor."""

    arch: str
    threads: int


class Compiler(Protocol):
    """Compiles source to a binary, without the hardware."""

    def key(self, target: Target) -> str:
        """The compiler, its version and its flags as text. It is a part of the key in the program
        cache.
        """
        ...

    def compile(self, source: Source, target: Target) -> Binary:
        """Compiles the source for the target. Raises ark.errors.SystemError with the compiler's
        output on failure.
        """
        ...


@runtime_checkable
class LinkingCompiler(Compiler, Protocol):
    """A compiler that can compile the loop once and link the bodies (device functions) of many
    kernels to it.
    """

    def compile_loop(self, source: Source, target: Target) -> Binary:
        """Compiles `source.loop` to an object; raises SystemError as `compile` does."""
        ...

    def link(self, source: Source, target: Target, loop: Binary) -> Binary:
        """Compiles the bodies and links them to `loop`. The binary equals the result of
        `compile`.
        """
        ...


@runtime_checkable
class Backend(Protocol):
    """One vendor."""

    name: str

    def probe(self) -> Probe:
        """Looks for devices; creates no context and never raises."""
        ...

    def machine(self, name: str) -> Machine | None:
        """The machine model of that name, for planning without the device; None if this backend has
        none of that name.
        """
        ...

    def machine_names(self) -> tuple[str, ...]:
        """Names that `machine` accepts, for help texts; a pattern is spelt like `cpu-N`."""
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
        """The architecture to compile for if none is named and there is no device."""
        ...

    def archs(self) -> tuple[str, ...]:
        """The architectures that this backend's tests compile for."""
        ...

    def open(self, index: int) -> KernelDevice: ...


@dataclass(frozen=True)
class Toolchain:
    """The tools that turn a backend's source into device code. name: the name in messages, with
    versions as exact as they are known. key: everything that the code depends on, including the
    driver. remedy: how to install another version.
    """

    name: str
    key: str
    remedy: str


@runtime_checkable
class CheckedBackend(KernelBackend, Protocol):
    """The backend of a vendor whose compiler is installed separately from ark. Before ark uses a
    version of the compiler for a device, kernels that it compiles must give known results on this
    device (ark.runtime.toolchain).
    """

    def toolchain(self, arch: str) -> Toolchain | None:
        """The tools that make code for `arch`; None if no check is needed because there is no real
        device.
        """
        ...


@runtime_checkable
class PredictingBackend(KernelBackend, Protocol):
    """A vendor with a model that predicts launch times on its products, which need not be present
    (`ark bench --model`).
    """

    def predict(self, name: str) -> None:
        """Makes the devices of this process imitate the product `name`: a timing model predicts the
        product's launch times.

        Raises InvalidUsageError if there is no timing model of that name.
        """
        ...


@dataclass(frozen=True)
class LoopFigures:
    """Statistics of the machine code of one loop of a kernel: the loop that uses the matrix units
    for most issue slots. instructions: the number of instructions of each kind. matrix_share: the
    fraction of the loop's issue slots that matrix units use. registers: vector registers per lane
    in the whole kernel; spills: the number of registers that are kept in memory; scratch_bytes:
    stack memory per lane. bank_conflicts: the fraction of the loop's shared-memory cycles that bank
    conflicts cause; None if it was not counted.
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
        """Compiles for `arch` and analyses the loop that multiplies matrices.

        Raises InvalidUsageError if the kernel has no such loop.
        """
        ...

    def counting(self, arch: str) -> AbstractContextManager[Callable[[], tuple[int, int]] | None]:
        """A context in which a simulated device replaces this backend's devices and counts accesses
        to shared memory as the architecture `arch` would execute them. It yields a function that
        returns two numbers for the last launch: the cycles in which shared memory was in use, and
        how many of these were spent in bank conflicts. It yields None if the architecture's banks
        are unknown.
        """
        ...


@runtime_checkable
class OccupancyBackend(KernelBackend, Protocol):
    """A vendor that reads registers and spills of a binary (`ark emit --binary`)."""

    def occupancy(self, binary: Binary, target: Target, dynamic_bytes: int) -> Occupancy:
        """The occupancy of the loop kernel in `binary`, launched with the target's threads and this
        many bytes of dynamic shared memory. Raises SystemError if the binary does not contain the
        necessary data.
        """
        ...


@runtime_checkable
class ExportBackend(KernelBackend, Protocol):
    """A vendor for which models can be exported as C libraries (ark.cli.export)."""

    def export_source(self) -> str:
        """C source of the functions of ark/cli/export/c/device.h, for C11 without extensions."""
        ...


@runtime_checkable
class SourceBackend(ExportBackend, Protocol):
    """A vendor whose loop kernels are host code, so that they can be linked into an exported
    program (ark.cli.export).
    """

    def source_flags(self) -> tuple[str, ...]:
        """The options with which an exported program's loop kernel must be compiled, besides
        -march.
        """
        ...
