"""What pages of docs/ show: their blocks of Python, and their commands with what these print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"


def python_blocks(page: str) -> list[str]:
    """The blocks of Python of a page, in order."""
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)


def commands(page: str) -> list[tuple[list[str], list[str]]]:
    """The words of each `$ ark ...` of a page, and the lines under it."""
    results = []
    for block in re.findall(r"```console\n(.*?)```", (DOCS / page).read_text(), re.S):
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            command, *lines = part.splitlines()
            if command.startswith("ark "):
                results.append((shlex.split(command)[1:], [line for line in lines if line]))
    return results


def shown(lines: list[str], out: str) -> bool:
    """True where the output has the lines, in order. "..." stands for any text; how words
    are aligned, and the frames of tables, do not count.
    """
    parts = [" ".join(part.split()) for line in lines for part in line.split("...")]
    words = " ".join(re.sub(r"[\u2500-\u257f]", " ", out).split())
    return re.search(".*?".join(map(re.escape, parts)), words) is not None
