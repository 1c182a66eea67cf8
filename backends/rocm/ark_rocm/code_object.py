"""Reads the resources of a code object's loop kernel: registers, spills, scratch and LDS.

The figures are in the code object's metadata note (LLVM's "User Guide for AMDGPU Backend", Code
Object Metadata), a MessagePack map. Called by ark_rocm.__init__ for `ark emit --binary`.
"""

from __future__ import annotations

import struct

import msgspec

from ark.backend.occupancy import Occupancy, Used, occupancy
from ark.backend.protocol import Target
from ark.errors import SystemError
from ark_rocm import machines

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_NOTE_SECTION = 7  # SHT_NOTE
_METADATA = (b"AMDGPU\0", 32)  # name and type of the note
KERNEL = "ark_loop"


class _Kernel(msgspec.Struct, frozen=True):
    """A kernel's entry in the metadata, with only those members that are used here."""

    name: str = msgspec.field(name=".name")
    vgprs: int = msgspec.field(name=".vgpr_count")
    sgprs: int = msgspec.field(name=".sgpr_count")
    scratch: int = msgspec.field(name=".private_segment_fixed_size")
    lds: int = msgspec.field(name=".group_segment_fixed_size")
    accumulators: int = msgspec.field(name=".agpr_count", default=0)
    vgpr_spills: int = msgspec.field(name=".vgpr_spill_count", default=0)
    sgpr_spills: int = msgspec.field(name=".sgpr_spill_count", default=0)


class _Metadata(msgspec.Struct, frozen=True):
    kernels: list[_Kernel] = msgspec.field(name="amdhsa.kernels")


def _metadata(elf: bytes) -> bytes:
    """Decodes the metadata note. Raises ValueError if the code object has none."""
    if not elf.startswith(_MAGIC):
        raise ValueError("it is not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count = struct.unpack_from("<HH", elf, 58)
    for index in range(count):
        _, kind, _, _, begin, length = struct.unpack_from("<IIQQQQ", elf, table + size * index)
        at = begin
        while kind == _NOTE_SECTION and at < begin + length:
            name, described, number = struct.unpack_from("<III", elf, at)
            text = at + 12 + (name + 3) // 4 * 4
            if (elf[at + 12 : at + 12 + name], number) == _METADATA:
                return elf[text : text + described]
            at = text + (described + 3) // 4 * 4
    raise ValueError("it has no metadata note")


def used(elf: bytes, kernel: str = KERNEL) -> Used:
    """The resources of a kernel. Raises SystemError if the code object does not list them."""
    try:
        metadata = msgspec.msgpack.decode(_metadata(elf), type=_Metadata)
    except (ValueError, OverflowError, struct.error, msgspec.MsgspecError) as error:
        raise SystemError(f"the code object cannot be read: {error}") from error
    entry = next((k for k in metadata.kernels if k.name == kernel), None)
    if entry is None:
        raise SystemError(f"the code object has no kernel {kernel!r}")
    return Used(
        registers=entry.vgprs,
        accumulators=entry.accumulators,
        scalar_registers=entry.sgprs,
        spills=entry.vgpr_spills,
        scalar_spills=entry.sgpr_spills,
        scratch_bytes=entry.scratch,
        shared_bytes=entry.lds,
    )


def occupancy_of(elf: bytes, target: Target, dynamic_bytes: int) -> Occupancy:
    """The occupancy of the loop kernel; see ark.backend.protocol.OccupancyBackend."""
    arch = machines.describe(target.arch)
    warps = -(-target.threads // arch.lanes)
    return occupancy(used(elf), arch.limits, warps, dynamic_bytes)
