"""Prints fifty passages drawn at random, to test that they are understood at first reading.

`python ci/passages.py SEED` draws from docstrings, comments and error messages of the Python files
and from paragraphs of docs/. The same seed and tree give the same passages.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import words

PASSAGES_PER_SEED = 50
MIN_WORDS = 6
KINDS = ("docstring", "comment", "error", "page")


def passages(root: Path = words.ROOT) -> dict[str, list[tuple[str, str]]]:
    """The location and text of every passage, by kind."""
    by_kind: dict[str, list[tuple[str, str]]] = {kind: [] for kind in KINDS}
    for path in words.python_files(root):
        name = path.relative_to(root).as_posix()
        for scope, line, text in words.texts(path.read_text(encoding="utf-8")):
            if scope in by_kind:
                by_kind[scope].append((f"{name}:{line}", text))
    for path in sorted((root / "docs").glob("*.md")):
        paragraphs = path.read_text(encoding="utf-8").split("\n\n")
        name = path.relative_to(root).as_posix()
        by_kind["page"] += [(name, p) for p in paragraphs if not p.startswith(("#", "|", "```"))]
    return {
        kind: [(place, text) for place, text in entries if len(text.split()) >= MIN_WORDS]
        for kind, entries in by_kind.items()
    }


def draw(seed: int, root: Path = words.ROOT) -> list[tuple[str, str, str]]:
    """The kind, location and text of PASSAGES_PER_SEED passages, with the kinds in turn."""
    chosen = random.Random(seed)
    by_kind = passages(root)
    return [
        (k, *chosen.choice(by_kind[k])) for k in (KINDS[n % 4] for n in range(PASSAGES_PER_SEED))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    for number, (kind, place, text) in enumerate(draw(parser.parse_args().seed), 1):
        print(f"{number}. {kind}, {place}\n   {' '.join(text.split())}\n")


if __name__ == "__main__":
    main()
