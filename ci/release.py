"""Checks that a git tag may be released, and writes the release notes. Called by the workflow
`release`.

`python ci/release.py vMAJOR.MINOR.PATCH [FILE]` fails if the tag is not the version of
ark/_version.py, or if CHANGELOG.md has no dated section with entries for that version. Otherwise it
prints the section, or writes it to FILE. `python ci/release.py --cut YYYY-MM-DD` moves the
unreleased entries of CHANGELOG.md to the section of that version, which gets the date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADINGS = ("Added", "Changed", "Fixed")
SECTION = r"^## (\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)$"


def version() -> str:
    """The version of ark, which the build reads from the same file."""
    text = (ROOT / "ark/_version.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.*)"$', text, re.M)[0]


def notes(changelog: str, wanted: str) -> str:
    """The entries of a version. Raises ValueError if the changelog has none."""
    parts = re.split(SECTION, changelog, flags=re.M)
    sections = {parts[i]: parts[i + 2] for i in range(1, len(parts), 3)}
    text = re.split(r"^## ", sections.get(wanted, ""), flags=re.M)[0].strip()
    if not re.search(r"^- ", text, re.M):
        raise ValueError(f"CHANGELOG.md has no entries under `## {wanted} - YYYY-MM-DD`")
    return text + "\n"


def _entries(section: str) -> dict[str, str]:
    """The text under each heading of a version."""
    _, *parts = re.split(r"^### (.*)$", section, flags=re.M)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def cut(changelog: str, released: str, date: str) -> str:
    """The changelog after a release. Unreleased entries become entries of the version, before those
    that it already has.
    """
    head, *sections = re.split(r"^## ", changelog, flags=re.M)
    moved = [s for s in sections if s.startswith(("Unreleased\n", f"{released} - "))]
    parts = [_entries(section) for section in moved]
    text = f"Unreleased\n\n## {released} - {date}\n"
    for heading in HEADINGS:
        entries = [part[heading].strip() for part in parts if part.get(heading, "").strip()]
        text += f"\n### {heading}\n\n" + "\n".join(entries) + "\n" if entries else ""
    older = [f"## {s}" for s in sections if s not in moved]
    return f"{head}## {text}" + ("\n" + "".join(older) if older else "")


def main(argv: list[str]) -> int:
    tag, *files = argv
    if tag == "--cut":
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", "".join(files)):
            print("--cut needs the date of the release, as YYYY-MM-DD", file=sys.stderr)
            return 1
        path = ROOT / "CHANGELOG.md"
        text = cut(path.read_text(encoding="utf-8"), version(), *files)
        path.write_text(text, encoding="utf-8")
        return 0
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
