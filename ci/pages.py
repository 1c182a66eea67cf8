"""Checks the pages of docs/: their length, the width of their lines, their words, their openings.

`python ci/pages.py --check` fails if a page has more than 300 lines, a line has more than 100
columns, a page does not begin by naming its intended readers, a relative link or anchor does not
exist, or the pages outside of reference and history have more than 45,000 words in total. Pages of
the project outside of the site, such as CONTRIBUTING.md, are checked for widths and links. Some
limits have exceptions. Rows of tables and words longer than a line cannot be broken and may be
wider. Generated pages and the dated logs of docs/history may have more lines, and these logs are
not checked for their words. `python ci/pages.py --wrap` breaks paragraphs that are too wide. The
lint session runs the check.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
MAX_LINES, MAX_COLUMNS, MAX_WORDS = 300, 100, 45_000
# Pages in the navigation's section Reference, beside the generated ones.
REFERENCE = (
    *("environment.md", "ark-interface.md", "ops.md", "glossary.md", "device-abi.md"),
    *("reliability.md", "project.md", "errors.md"),
)
OPENING = re.compile(r"\bfor\s+(users|contributors|authors|readers|those)\b")
# At the start of a line these begin a list, a heading, a quotation, a table or a rule.
MARKUP = re.compile(r"([-+*>|#=]+|\d+[.)])$|[|>#]")
ITEM = re.compile(r"\s*([-+*]|\d+[.)])\s+")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def pages() -> list[Path]:
    """All pages of the site, the README, and the pages of the project beside them."""
    beside = [p for p in sorted(ROOT.glob("*.md")) if p.name not in ("README.md", "CHANGELOG.md")]
    for folder in ("examples", "backends"):
        beside += sorted((ROOT / folder).rglob("*.md"))
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *beside]


def kind(page: Path) -> str:
    """The kind of a page: `generated`, `reference`, `history`, `project` (outside of the site) or
    `page`.
    """
    name = page.relative_to(ROOT).as_posix()
    if name.startswith("docs/history/"):
        return "history"
    if name.startswith("docs/reference/") or name == "docs/performance.md":
        return "generated"
    if name != "README.md" and not name.startswith("docs/"):
        return "project"
    return "reference" if name.removeprefix("docs/") in REFERENCE else "page"


def _fenced(lines: list[str]) -> Iterator[tuple[str, bool]]:
    """Each line of a page, and True if the line is in a code block."""
    inside = False
    for line in lines:
        fence = line.lstrip().startswith("```")
        yield line, inside or fence
        inside ^= fence


def words(text: str) -> int:
    """The number of words of a page outside of code blocks."""
    prose = (line for line, code in _fenced(text.splitlines()) if not code)
    return sum(len(re.findall(r"\S*\w\S*", line)) for line in prose)


def slug(title: str) -> str:
    """The anchor that mkdocs gives a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", title)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def _anchors(page: Path) -> set[str]:
    lines = _fenced(page.read_text(encoding="utf-8").splitlines())
    titles = [line.lstrip("#") for line, code in lines if line.startswith("#") and not code]
    return {slug(title) for title in titles}


def _opening(text: str) -> str:
    """The first paragraph after the title."""
    parts = text.split("\n\n")
    return next((part for part in parts[1:] if part.strip()), "")


def faults(page: Path) -> Iterator[str]:
    """The faults of a page, one line each."""
    text = page.read_text(encoding="utf-8")
    lines = text.splitlines()
    sort, name = kind(page), page.relative_to(ROOT).as_posix()
    if sort in ("page", "reference") and len(lines) > MAX_LINES:
        yield f"{name}: {len(lines)} lines, at most {MAX_LINES}; split it"
    if sort != "generated" and wrapped(text) != text:
        yield f"{name}: lines of more than {MAX_COLUMNS} columns; run `python ci/pages.py --wrap`"
    for number, (line, code) in enumerate(_fenced(lines), 1):
        if code and len(line) > MAX_COLUMNS and sort in ("page", "reference", "project"):
            yield f"{name}:{number}: a line of code of {len(line)} columns; break it"
    if page.is_relative_to(ROOT / "docs") and not OPENING.search(_opening(text)):
        yield f"{name}: the first paragraph does not say for whom the page is"
    for link in LINK.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{name}: {link} leads nowhere"
        elif anchor and target.suffix == ".md" and anchor not in _anchors(target):
            yield f"{name}: {link} names no heading of that page"


def total() -> int:
    """The number of words of all pages outside of reference and history."""
    return sum(words(p.read_text(encoding="utf-8")) for p in pages() if kind(p) == "page")


def _wrapped(block: list[str]) -> list[str]:
    """Wraps a paragraph or a list item at spaces."""
    item = ITEM.match(block[0])
    first = item[0] if item else re.match(r"\s*", block[0])[0]  # type: ignore[index]
    rest = " " * len(first)
    if len(block) > 1:
        rest = re.match(r"\s*", block[1])[0]  # type: ignore[index]
    broken, line = [], first
    parts = " ".join([block[0][len(first) :], *block[1:]]).split()
    for at, part in enumerate(parts):
        # If a word would be markup at the start of a line, it stays on the line of the word before
        # it.
        following = parts[at + 1] if at + 1 < len(parts) else ""
        tail = len(following) + 1 if MARKUP.match(following) else 0
        empty = line in (first, rest) and not line.strip(" -+*0123456789.)")
        if not empty and len(line) + 1 + len(part) + tail > MAX_COLUMNS and not MARKUP.match(part):
            broken.append(line.rstrip())
            line = rest + part
        else:
            line += part if empty else " " + part
    return [*broken, line.rstrip()]


def wrapped(text: str) -> str:
    """The page's text, in which every paragraph with a line that is too wide is wrapped again."""
    lines: list[str] = []
    block: list[str] = []

    def close() -> None:
        wide = any(len(line) > MAX_COLUMNS for line in block)
        lines.extend(_wrapped(block) if wide else block)
        block.clear()

    for line, code in _fenced(text.splitlines()):
        if code or not line.strip() or re.match(r"\s*(\||#|<|:::)", line):
            close()
            lines.append(line)
            continue
        if ITEM.match(line):
            close()
        block.append(line)
    close()
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    if "--wrap" in argv:
        for page in pages():
            text = page.read_text(encoding="utf-8")
            if kind(page) != "generated" and wrapped(text) != text:
                page.write_text(wrapped(text), encoding="utf-8")
        return 0
    messages = [fault for page in pages() for fault in faults(page)]
    if total() > MAX_WORDS:
        messages.append(
            f"pages outside of reference and history have {total():,} words, at most "
            f"{MAX_WORDS:,}; cut, or move what is dated to docs/history"
        )
    print("\n".join(messages) or f"pages: {total():,} words outside of reference and history")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
