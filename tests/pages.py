"""Reads the content of pages of docs/: their Python blocks, and their commands with the printed
output.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def python_blocks(page: str) -> list[str]:
    """The Python blocks of a page, in order."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)


def commands(page: str) -> list[tuple[list[str], list[str]]]:
    """The words of each `$ ark ...` command of a page, and the lines below it."""
    results = []
    for block in re.findall(r"```console\n(.*?)```", (DOCS / page).read_text(), re.S):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, *lines = part.splitlines()
            if command.startswith("ark "):
                results.append((shlex.split(command)[1:], [line for line in lines if line]))
    return results


def shown(lines: list[str], out: str) -> bool:
    """True if the output contains the lines, in order. "..." matches any text. The alignment of
    words and the frames of tables are ignored.
    """
    parts = [" ".join(part.split()) for line in lines for part in line.split("...")]
    words = " ".join(re.sub(r"[\u2500-\u257f]", " ", out).split())
    return re.search(".*?".join(map(re.escape, parts)), words) is not None
