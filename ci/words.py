"""Checks the words of error messages, docstrings, comments and names against a list of patterns.

`python ci/words.py --check` fails where a file has more uses of a pattern than ci/words.json
records, and prints each use with what to write instead. `python ci/words.py` lowers the records to
what is there; it never raises one. `python ci/words.py --moved OLD NEW...` hands the records of a
file that was renamed or split on to its new files. Files without a record may have no use at all.
The lint session runs the check; tests/unit/test_ci_words.py too.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASELINE = ROOT / "ci/words.json"
FOLDERS = ("ark", "backends", "bench", "ci", "examples", "tests")
# Files that must contain the words themselves.
EXEMPT = ("ci/words.py", "tests/unit/test_ci_words.py")

# Calls whose arguments are messages for users, by the end of their names.
MESSAGE_CALLS = ("Error", "Warning", "fault", "refuse", "refusal", "warning", "warn", "fail")
PROSE = ("comment", "docstring", "error")
NAME_PARTS = "what|whoever|nobody|somebody|everybody|anybody|anywhere|midst"


@dataclass(frozen=True)
class Pattern:
    """Words that are to disappear. scopes: the kinds of text in which they count: `comment`,
    `docstring`, `error` (a message), `name` (that is assigned or defined), `constant` (a module's
    name for a number). hint: the replacement.
    """

    name: str
    regex: str
    scopes: tuple[str, ...]
    hint: str


PATTERNS = (
    Pattern("question", r"\?(?=\s|$)", ("comment", "docstring"), 'state it: "True where ..."'),
    Pattern("found-made", r"^(found|made)$", ("name",), "name what it holds: candidates, plan"),
    Pattern(
        "participle-name",
        r"^(said|told|both|still|came|gone|took|again)$",
        ("name",),
        "name what it holds: message, seconds, remaining",
    ),
    Pattern("riddle-name", rf"(^|_)({NAME_PARTS})(_|$)", ("name",), "name the condition itself"),
    Pattern(
        "bare-constant",
        r"^_?[A-Z]+$",
        ("constant",),
        "say what it bounds and its unit: MAX_SHORT_ROW_ELEMENTS",
    ),
    Pattern("whoever", r"\bwhoever\b", PROSE, "name the caller, the task or the thread"),
    Pattern("who", r"\bwhom?\b", PROSE, "name the caller, the task or the thread"),
    Pattern("what-is", r"\bwhat (is|are)\b", PROSE, "use a noun: the bytes, the operand"),
    Pattern(
        "person",
        r"\b(nobody|somebody|everybody|anybody)\b",
        PROSE,
        "name the subject, or use the passive: is not read",
    ),
    Pattern("midst", r"\bin the midst\b", PROSE, "is already running, within"),
    Pattern("leave-away", r"\bleav(e|es|ing)\b[^.]*\baway\b|\bleft away\b", PROSE, "omit"),
    Pattern("anywhere", r"\bbegins? anywhere\b", PROSE, "unaligned"),
    Pattern("mend", r"\bmend(s|ed|ing)?\b", PROSE, "fix"),
    Pattern("none-such", r"\bnone such\b", PROSE, "does not exist, is not supported"),
    Pattern("has-not", r"\b(has|have) ((it|them) )?not(?=[;:,.)]|$)", PROSE, "does not have"),
    Pattern("torn", r"\btorn apart\b", PROSE, "must be even, got {n}"),
    Pattern("is-no", r"\b(is|are) no\b", ("error",), "is not a ...: the reason"),
    Pattern("cut-so", r"\bcannot be \w+ so\b", ("error",), "k={k} is not divisible by {n}"),
    Pattern("no-such-name", r"\bno \w+( \w+)? is called\b", ("error",), "{name!r} does not exist"),
    Pattern(
        "asked-for",
        r"\b(was|were) (asked for|named)\b",
        ("error",),
        "name={value} is out of range; expected",
    ),
    Pattern("make-again", r"\bmake it again\b", ("error",), "plan again, create another one"),
    Pattern("is-there", r"\bthere is nothing\b|\bis there twice\b", ("error",), "is missing"),
    Pattern("by-itself", r"\bby themselves alone\b|\bon its own alone\b", PROSE, "only"),
    Pattern("behind-order", r"\bone behind the other\b|\bbehind each other\b", PROSE, "one after"),
    Pattern("and-none", r"\bfor what (is|are) none\b|\band none (is|are)\b", PROSE, "state it"),
    Pattern(
        "question-opening",
        r"^(is|are|does|do|may|has|have|can|was|were) (it|its|the|a|an|this|these|there|any)\b",
        ("docstring",),
        'state it: "True where ..."',
    ),
    Pattern(
        "renamed",
        r"^(own_first|lay_sides|take_rows_early|in_waves|round_rows|give_logits)$",
        ("name",),
        "the glossary's name",
    ),
    Pattern("not-built", r"\bnot built\b", ("error",), "is not supported"),
    Pattern("knows-nothing", r"\bknows nothing called\b", ("error",), "has no argument {name!r}"),
    Pattern("take-no", r"\btakes? no\b(?! more)", ("error",), "does not support"),
    Pattern("this-alone", r"\b(rank|host|stores) alone\b", ("error",), "this rank only"),
    Pattern("seen-as", r"\bcannot be seen\b", ("error",), "cannot be viewed as, reshaped to"),
    Pattern("so-many", r"\bso (many|much|few)\b", ("error",), "give the number"),
)
COMPILED = {p.name: (p, re.compile(p.regex, re.IGNORECASE)) for p in PATTERNS}
COMPILED["bare-constant"] = (COMPILED["bare-constant"][0], re.compile(r"^_?[A-Z]+$"))
Counts = dict[str, dict[str, int]]


@dataclass(frozen=True, order=True)
class Use:
    """A use of a pattern. excerpt: the words around it."""

    path: str
    line: int
    pattern: str
    excerpt: str

    def __str__(self) -> str:
        hint = COMPILED[self.pattern][0].hint
        return f"{self.path}:{self.line}: {self.pattern}: ...{self.excerpt}... (write: {hint})"


def _message(node: ast.expr) -> str:
    """The fixed text of a string expression, with {} for each value."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_message(v) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    if isinstance(node, ast.BinOp):
        return _message(node.left) + _message(node.right)
    if isinstance(node, ast.IfExp):
        return f"{_message(node.body)}\n{_message(node.orelse)}"
    return ""


def _called(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _number(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def texts(source: str) -> Iterator[tuple[str, int, str]]:
    """Scope, line and text of everything in a Python file that the patterns examine."""
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("# "):
            yield "comment", number, line.strip()
    tree = ast.parse(source)
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and _number(statement.value):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    yield "constant", statement.lineno, target.id
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if not isinstance(node, ast.Module):
                yield "name", node.lineno, node.name
            text = ast.get_docstring(node, clean=False)
            if text:
                yield "docstring", node.body[0].lineno, text
            yield from _descriptions(node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield "name", node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield "name", node.lineno, node.arg
        elif isinstance(node, ast.Call) and _called(node.func).endswith(MESSAGE_CALLS):
            for argument in node.args:
                yield "error", argument.lineno, _message(argument)


def _descriptions(
    node: ast.Module | ast.ClassDef | ast.FunctionDef,
) -> Iterator[tuple[str, int, str]]:
    """String statements after an assignment, which document the assigned name."""
    for before, statement in itertools.pairwise(node.body):
        value = statement.value if isinstance(statement, ast.Expr) else None
        described = isinstance(before, (ast.Assign, ast.AnnAssign))
        if described and isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield "docstring", statement.lineno, value.value


def uses(path: str, source: str) -> list[Use]:
    """All uses of all patterns in a file."""
    result = []
    for scope, line, text in texts(source):
        for pattern, regex in COMPILED.values():
            if scope not in pattern.scopes:
                continue
            for match in regex.finditer(text):
                above = text.count("\n", 0, match.start()) if scope == "docstring" else 0
                near = text[max(0, match.start() - 30) : match.end() + 30]
                result.append(Use(path, line + above, pattern.name, " ".join(near.split())))
    return sorted(result)


def python_files(root: Path = ROOT) -> list[Path]:
    """The Python files of the repository, sorted."""
    return sorted(
        path
        for folder in FOLDERS
        for path in (root / folder).rglob("*.py")
        if not {"build", "node_modules", ".venv"} & set(path.relative_to(root).parts)
    )


def all_uses(root: Path = ROOT) -> list[Use]:
    """All uses in the Python files of the repository, in the order of paths and lines."""
    named = [(path.relative_to(root).as_posix(), path) for path in python_files(root)]
    return [
        use
        for name, path in named
        if name not in EXEMPT
        for use in uses(name, path.read_text(encoding="utf-8"))
    ]


def count(present: list[Use]) -> Counts:
    """Uses by file and pattern."""
    counts: Counts = {}
    for use in present:
        of_file = counts.setdefault(use.path, {})
        of_file[use.pattern] = of_file.get(use.pattern, 0) + 1
    return counts


def exceeding(present: list[Use], recorded: Counts) -> list[str]:
    """A message for each file and pattern with more uses than recorded, followed by the uses."""
    messages = []
    for path, of_file in count(present).items():
        for pattern, number in sorted(of_file.items()):
            allowed = recorded.get(path, {}).get(pattern, 0)
            if number > allowed:
                messages.append(f"{path}: {number} uses of {pattern}, at most {allowed} allowed:")
                those = (u for u in present if (u.path, u.pattern) == (path, pattern))
                messages += [f"  {use}" for use in those]
    return messages


def lowered(present: Counts, recorded: Counts) -> Counts:
    """The records, none of them above the uses that are present; files without uses left out."""
    counts = {
        path: {
            pattern: min(number, present.get(path, {}).get(pattern, 0))
            for pattern, number in of_file.items()
        }
        for path, of_file in recorded.items()
    }
    kept = {path: {p: n for p, n in of_file.items() if n} for path, of_file in counts.items()}
    return {path: of_file for path, of_file in kept.items() if of_file}


def moved(present: Counts, recorded: Counts, old: str, new: list[str]) -> Counts:
    """The records after a file's were moved to new files, in their order, as far as they are
    needed.

    The sum over all files does not grow for any pattern.
    """
    result = {path: dict(of_file) for path, of_file in recorded.items()}
    left = dict(result.get(old, {}))
    for pattern, number in present.get(old, {}).items():
        left[pattern] = max(0, left.get(pattern, 0) - number)
    for path in new:
        for pattern, number in present.get(path, {}).items():
            missing = max(0, number - result.get(path, {}).get(pattern, 0))
            given = min(missing, left.get(pattern, 0))
            if given:
                of_file = result.setdefault(path, {})
                of_file[pattern] = of_file.get(pattern, 0) + given
                left[pattern] -= given
    return lowered(present, result)


def write(counts: Counts, path: Path = BASELINE) -> None:
    """Writes records, sorted."""
    path.write_text(json.dumps(counts, indent=1, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where uses were added")
    parser.add_argument("--moved", nargs="+", metavar="FILE", help="OLD NEW...: hand records on")
    arguments = parser.parse_args()
    if arguments.moved and len(arguments.moved) < 2:
        parser.error("--moved expects the old path and at least one new path")
    present = all_uses()
    if not BASELINE.exists():
        write(count(present))
        return 0
    recorded: Counts = json.loads(BASELINE.read_text())
    if arguments.moved:
        old, *new = arguments.moved
        write(moved(count(present), recorded, old, new))
        return 0
    messages = exceeding(present, recorded)
    if messages:
        print("\n".join(messages))
        print("Rewrite what was added; words of a moved file: python ci/words.py --moved OLD NEW")
    if not arguments.check:
        write(lowered(count(present), recorded))
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
