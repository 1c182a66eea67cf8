"""Parts of a compiler's machine code that tests read."""

from __future__ import annotations

import struct


def section(elf: bytes, name: str) -> bytes:
    """Returns the bytes of a section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + size * i) for i in range(count)]
    texts = headers[names][4]
    for header in headers:
        at = texts + header[0]
        if elf[at : elf.index(b"\0", at)].decode() == name:
            return elf[header[4] : header[4] + header[5]]
    raise AssertionError(f"section {name} is missing")
