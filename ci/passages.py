"""Prints fifty passages drawn at random, to test that they are understood at first reading.

`python ci/passages.py SEED` draws from docstrings, comments and error messages of the Python files,
from comments of the C++ files and from paragraphs of docs/. Each passage is printed with what a
reader of the file sees around it: the definition that a docstring belongs to, the code after a
comment and the C++ declarations around it, the condition before an error, the headings above a
paragraph, the introduction of a list. Each item of a list is one passage. The same seed and tree
give the same passages. `--under docs tests` draws only from these folders.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import words

PASSAGES_PER_SEED = 50
MIN_WORDS = 6
KINDS = ("docstring", "comment", "error", "page")
CPP_ENDINGS = (".h", ".hpp", ".cpp", ".cu")
CODE_LINES_AFTER_COMMENT = 4
CODE_LINES_BEFORE_ERROR = 3
LIST_ITEM = re.compile(r"\s*([-*+]|\d+\.)\s+")


@dataclass(frozen=True)
class Passage:
    """A text to read. place: the file's path and the line. context: lines of the file that are
    shown with the text, such as the signature of the function that a docstring describes.
    """

    kind: str
    place: str
    text: str
    context: tuple[str, ...]

    def __str__(self) -> str:
        shown = "".join(f"   | {line}\n" for line in self.context)
        return f"{self.kind}, {self.place}\n{shown}   {' '.join(self.text.split())}\n"


def _definition(tree: ast.Module, line: int) -> list[str]:
    """The names of the classes and functions around a line, outermost first, without bodies."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return [ast.unparse(_header(node)).splitlines()[0] for node in around]


def _header(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
    if isinstance(node, ast.ClassDef):
        return ast.ClassDef(node.name, node.bases, node.keywords, [ast.Pass()], [])
    return type(node)(node.name, node.args, [ast.Pass()], [], node.returns, lineno=node.lineno)


def _python_passages(name: str, source: str) -> list[Passage]:
    tree, lines = ast.parse(source), source.splitlines()
    result = []
    for kind, line, text in words.texts(source):
        if kind not in KINDS:
            continue
        context = _definition(tree, line)
        if kind == "comment":
            first = line - 1 + _comment_lines(lines[line - 1 :], "# ")
            context += lines[first : first + CODE_LINES_AFTER_COMMENT]
        elif kind == "error":
            context += lines[max(0, line - 1 - CODE_LINES_BEFORE_ERROR) : line]
        else:
            context += _assignment_before(tree, line)
        result.append(Passage(kind, f"{name}:{line}", text, tuple(context)))
    return result


def _assignment_before(tree: ast.Module, line: int) -> list[str]:
    """The assignment that ends on the line before `line`. The string at `line` documents it."""
    return [
        ast.unparse(node).splitlines()[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.end_lineno == line - 1
    ]


def _comment_lines(lines: list[str], mark: str) -> int:
    """The number of lines at the start that are comments."""
    return next((n for n, line in enumerate(lines) if not line.lstrip().startswith(mark)), 0)


def _cpp_passages(name: str, source: str) -> list[Passage]:
    lines = source.splitlines()
    result, at = [], 0
    while at < len(lines):
        count = _comment_lines(lines[at:], "//")
        if count and not _continues(lines, at):
            text = " ".join(line.strip().lstrip("/").strip() for line in lines[at : at + count])
            after = lines[at + count : at + count + CODE_LINES_AFTER_COMMENT]
            context = (*_cpp_enclosing(lines, at), *after)
            result.append(Passage("comment", f"{name}:{at + 1}", text, context))
        at += max(count, 1)
    return result


def _cpp_enclosing(lines: list[str], at: int) -> list[str]:
    """The first lines of the declarations and statements around a line, outermost first. They are
    found by indentation, which clang-format keeps consistent.
    """
    result: list[str] = []
    depth = _indentation(lines[at])
    for line in reversed(lines[:at]):
        opens = re.match(r"\s*[A-Za-z_]", line) and not line.rstrip().endswith(":")
        if opens and _indentation(line) < depth:
            result.insert(0, line)
            depth = _indentation(line)
    return result


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _continues(lines: list[str], at: int) -> bool:
    """True if the comment at a line continues one that stands after code."""
    before = lines[at - 1] if at else ""
    return "//" in before and not before.lstrip().startswith("//")


def _page_passages(name: str, source: str) -> list[Passage]:
    result: list[Passage] = []
    headings: list[str] = []
    fenced, before = False, ""
    for paragraph in source.split("\n\n"):
        code = fenced or paragraph.startswith("```")
        fenced ^= sum(line.startswith("```") for line in paragraph.splitlines()) % 2 == 1
        if code or paragraph.startswith("|"):
            before = paragraph
            continue
        if paragraph.startswith("#"):
            depth = len(paragraph) - len(paragraph.lstrip("#"))
            headings = [*headings[: depth - 1], paragraph.splitlines()[0]]
            before = paragraph
            continue
        for part in _list_items(paragraph):
            item = LIST_ITEM.match(part)
            # A list item is shown together with the list's introduction, and a paragraph that
            # continues after a code block together with its beginning.
            lead = () if part[0].isupper() else tuple(before.splitlines()[-3:])
            result.append(Passage("page", name, part, (*headings, *lead)))
            if not item:
                before = part
    return result


def _list_items(paragraph: str) -> list[str]:
    """The text before the first list item, if any, and each list item."""
    parts: list[str] = []
    for line in paragraph.splitlines():
        if parts and not LIST_ITEM.match(line):
            parts[-1] += f"\n{line}"
        else:
            parts.append(line)
    return parts


def passages(root: Path = words.ROOT) -> dict[str, list[Passage]]:
    """Every passage, by kind."""
    readers = [(path, _python_passages) for path in words.source_files(root, [".py"])]
    readers += [
        (path, _cpp_passages)
        for folder in ("ark", "backends")
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in CPP_ENDINGS and "build" not in path.relative_to(root).parts
    ]
    readers += [(path, _page_passages) for path in sorted((root / "docs").glob("*.md"))]
    by_kind: dict[str, list[Passage]] = {kind: [] for kind in KINDS}
    for path, read in readers:
        name = path.relative_to(root).as_posix()
        for passage in read(name, path.read_text(encoding="utf-8")):
            if len(passage.text.split()) >= MIN_WORDS:
                by_kind[passage.kind].append(passage)
    return by_kind


def draw(seed: int, root: Path = words.ROOT, under: tuple[str, ...] = ()) -> list[Passage]:
    """PASSAGES_PER_SEED passages, with the kinds in turn. under: the folders to draw from."""
    chosen = random.Random(seed)
    by_kind = passages(root)
    if under:
        starts = tuple(f"{folder}/" for folder in under)
        by_kind = {
            kind: [passage for passage in drawn if passage.place.startswith(starts)]
            for kind, drawn in by_kind.items()
        }
    kinds = [kind for kind in KINDS if by_kind[kind]]
    return [chosen.choice(by_kind[kinds[n % len(kinds)]]) for n in range(PASSAGES_PER_SEED)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--under", nargs="+", default=(), metavar="FOLDER")
    arguments = parser.parse_args()
    drawn = draw(arguments.seed, under=tuple(arguments.under))
    for number, passage in enumerate(drawn, 1):
        print(f"{number}. {passage}")


if __name__ == "__main__":
    main()
