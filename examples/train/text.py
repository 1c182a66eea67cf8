"""Makes the training text from the Debian package `sword-text-web`; run by hand before train.py.

The package contains a public-domain Bible translation in modern English as a SWORD `zText` module:
one zlib block per book, with OSIS mark-up. The result is plain text: a chapter is a block of lines
between blank lines, a line is a paragraph, quotation marks and dashes are ASCII.

    apt-get download sword-text-web
    python examples/train/text.py sword-text-web_426.0-1_all.deb -o bible.txt
"""

from __future__ import annotations

import argparse
import io
import re
import struct
import sys
import tarfile
import zlib
from collections.abc import Iterator
from html import unescape
from pathlib import Path

AR_MAGIC = b"!<arch>\n"
AR_HEADER = 60

GLUED_NOTE = re.compile(r"</note>(?=<w|\w)")
DROPPED = re.compile(r"<(note|title)\b[^>]*>.*?</\1>", re.S)
CHAPTER = re.compile(r'<chapter\b[^>]*\bsID="[^>]*>')
PARAGRAPH = re.compile(r'<div\b[^>]*\btype="x-p"[^>]*>|<lg\b[^>]*>')
TAG = re.compile(r"<[^>]*>")
ASCII = str.maketrans(
    {"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "–": "-", "…": "...", "\u00a0": " "}
)


def archive_members(deb: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of each member of an `ar` archive (see ar(5))."""
    if not deb.startswith(AR_MAGIC):
        raise SystemExit("not a Debian package: the file does not begin with '!<arch>'")
    at = len(AR_MAGIC)
    while at < len(deb):
        name, size = deb[at : at + 16].decode().strip(), int(deb[at + 48 : at + 58])
        at += AR_HEADER
        yield name.rstrip("/"), deb[at : at + size]
        at += size + size % 2


def module_files(deb: bytes) -> dict[str, bytes]:
    """The zText files of the package, by file name (ot.bzs, ot.bzz, nt.bzs, nt.bzz, ...)."""
    for name, content in archive_members(deb):
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                files = [m for m in tar.getmembers() if "/ztext/" in m.name and m.isfile()]
                return {Path(m.name).name: tar.extractfile(m).read() for m in files}
    raise SystemExit("the Debian package has no data.tar member")


def books(files: dict[str, bytes]) -> Iterator[str]:
    """The OSIS text of each book. An entry of .bzs is (offset, stored bytes, plain bytes),
    uint32.
    """
    for testament in ("ot", "nt"):
        index, data = files[f"{testament}.bzs"], files[f"{testament}.bzz"]
        for offset, size, _ in struct.iter_unpack("<III", index):
            if size:
                yield zlib.decompress(data[offset : offset + size]).decode("utf-8")


def chapters(osis: str) -> Iterator[list[str]]:
    """The paragraphs of each chapter of a book, without notes, titles and mark-up."""
    spaced = GLUED_NOTE.sub("</note> ", osis)
    for chapter in CHAPTER.split(DROPPED.sub("", spaced))[1:]:
        plain = (TAG.sub("", part) for part in PARAGRAPH.split(chapter))
        words = (" ".join(unescape(part).translate(ASCII).split()) for part in plain)
        paragraphs = [part for part in words if part]
        if paragraphs:
            yield paragraphs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("package", type=Path, help="the .deb file of sword-text-web")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    files = module_files(args.package.read_bytes())
    text = ["\n".join(c) for book in books(files) for c in chapters(book)]
    args.output.write_text("\n\n".join(text) + "\n", encoding="utf-8")
    print(f"{len(text)} chapters, {args.output.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
