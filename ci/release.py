"""Checks that a tag may be released, and writes its notes. Called by the workflow `release`.

`python ci/release.py vMAJOR.MINOR.PATCH [FILE]` fails where the tag is not the version of
ark/_version.py, or where CHANGELOG.md has no dated section of it with entries; it prints that
section, or writes it to FILE.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECTION = r"^## (\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)$"


def version() -> str:
    """The version of ark, which the build reads from the same file."""
    text = (ROOT / "ark/_version.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.*)"$', text, re.M)[0]


def notes(changelog: str, wanted: str) -> str:
    """The entries of a version; ValueError where the changelog has none."""
    parts = re.split(SECTION, changelog, flags=re.M)
    sections = {parts[i]: parts[i + 2] for i in range(1, len(parts), 3)}
    text = re.split(r"^## ", sections.get(wanted, ""), flags=re.M)[0].strip()
    if not re.search(r"^- ", text, re.M):
        raise ValueError(f"CHANGELOG.md has no entries under `## {wanted} - YYYY-MM-DD`")
    return text + "\n"


def main(argv: list[str]) -> int:
    tag, *files = argv
    if tag != f"v{version()}":
        print(f"the tag is {tag}, but the version is {version()}", file=sys.stderr)
        return 1
    try:
        text = notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version())
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if files:
        Path(files[0]).write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
