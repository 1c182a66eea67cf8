"""The words of public-domain books in Debian packages: a dictionary, Bibles and commentaries, about
ten million words.

    apt-get download dict-gcide sword-text-kjv sword-text-web sword-comm-mhcc sword-comm-scofield \
        sword-comm-tdavid
"""

from __future__ import annotations

import gzip
import io
import re
import struct
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from examples.train.text import archive_members

TAG = re.compile(r"<[^>]*>|\{|\}|\[[^\]]*\]")
WORD = re.compile(r"[a-z]+")
DICTIONARY, MODULE = ".dict.dz", (".bzz", ".czz")


def _files(package: Path) -> dict[str, bytes]:
    """The package's files by name."""
    files = {}
    for name, content in archive_members(package.read_bytes()):
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                for member in filter(tarfile.TarInfo.isfile, tar.getmembers()):
                    files[member.name] = tar.extractfile(member).read()
    return files


def books(package: Path) -> Iterator[str]:
    """The texts of a package: the text of a dictionary (dictd), or the blocks of a SWORD module.
    The module's index has three uint32 for each block: offset, stored bytes, plain bytes.
    """
    files = _files(package)
    for name, content in files.items():
        if name.endswith(DICTIONARY):
            yield gzip.decompress(content).decode("utf-8", "replace")
        elif name.endswith(MODULE):
            for offset, size, _ in struct.iter_unpack("<III", files[name[:-1] + "s"]):
                if size:
                    block = zlib.decompress(content[offset : offset + size])
                    yield block.decode("utf-8", "replace")


def texts(packages: list[Path], length: int = 128) -> list[list[str]]:
    """The words of packages, in lower case, in texts of `length` words."""
    words = [
        w for p in packages for book in books(p) for w in WORD.findall(TAG.sub(" ", book).lower())
    ]
    return [words[i : i + length] for i in range(0, len(words), length)]
