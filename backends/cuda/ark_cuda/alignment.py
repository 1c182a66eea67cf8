"""Checks in a linked kernel's ELF file that the toolchain kept the alignment of shared memory.

Dynamic shared memory begins after the kernel's static section. Bodies XOR its addresses and pass
them to copy engines and matrix units. So a section that is shorter or less aligned than requested
would give wrong results without an error. Called by ark_cuda.compiler for every binary.
"""

from __future__ import annotations

import struct

SHARED_ALIGNMENT_BYTES = 1024  # bytes; ARK_SHARED_ALIGNMENT in prelude.h
_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian


def check_alignment(elf: bytes, entry: str) -> str:
    """The reason why dynamic shared memory does not start where task bodies (device functions)
    require it, or an empty string if it does.

    Without a static section, dynamic shared memory begins at the start of the shared memory window.
    """
    try:
        shared = _sections(elf).get(f".nv.shared.{entry}")
    except (struct.error, ValueError, IndexError) as error:
        return f"the compiler's output is not a readable ELF file ({error})"
    if shared is None:
        return ""
    size, alignment = shared
    if size % SHARED_ALIGNMENT_BYTES == 0 and alignment % SHARED_ALIGNMENT_BYTES == 0:
        return ""
    return (
        f"the kernel's static shared memory has {size:#x} bytes, aligned to {alignment}; both must "
        f"be multiples of {SHARED_ALIGNMENT_BYTES}"
    )


def _sections(elf: bytes) -> dict[str, tuple[int, int]]:
    """Size and alignment of each section, in bytes, by name."""
    if not elf.startswith(_MAGIC):
        raise ValueError("the first bytes differ")
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + size * i) for i in range(count)]
    texts = headers[names][4]

    def name(at: int) -> str:
        return elf[texts + at : elf.index(b"\0", texts + at)].decode()

    return {name(header[0]): (header[5], header[8]) for header in headers}
