"""What tests read of the machine code that a compiler made."""

from __future__ import annotations

import struct


def section(elf: bytes, name: str) -> bytes:
    """The bytes of a section of an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + size * i) for i in range(count)]
    texts = headers[names][4]
    for header in headers:
        at = texts + header[0]
        if elf[at : elf.index(b"\0", at)].decode() == name:
            return elf[header[4] : header[4] + header[5]]
    raise AssertionError(f"section {name} is missing")
