"""Checks the words of error messages, docstrings, comments and names against a list of patterns. Of
device code, whose names ark does not parse, it checks comments and the names that were replaced.

`python ci/words.py` prints each use of a pattern with what to write instead, and fails if there is
one. The lint session runs it.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEVICE_SUFFIXES = (".h", ".hip", ".cpp", ".cu", ".c", ".js")
FOLDERS = ("ark", "backends", "bench", "ci", "examples", "tests")
# Files that are not checked, because they list the refused words.
EXEMPT = ("ci/words.py", "tests/unit/test_ci_words.py")

# Calls whose arguments are messages for users: the ends of the names of the called functions.
MESSAGE_CALLS = (
    *("Error", "Warning", "fault", "refuse", "refusal", "warning", "warn", "fail"),
    "need",  # a check of ark.plan.params
)
PROSE = ("comment", "docstring", "error")
BOUNDS = "MAX|MIN|MOST|LEAST|FEWEST|WIDEST|LONGEST|FEW|MANY|LONG|SHORT|LARGE|HUGE|SMALL"
# Words that do not say what a constant bounds.
BOUNDED = (
    "HELD|EACH|ALONE|BEYOND|AHEAD|TOP|WAITING|STAGED|JOINED|STALLED|TOGETHER|GROWTH|FEW|PACKED"
)
NAME_PARTS = "what|whoever|nobody|somebody|everybody|anybody|anywhere|midst"


@dataclass(frozen=True)
class Pattern:
    """Words that must not be used. scopes: the kinds of text in which they count: `comment`,
    `docstring`, `error` (a message), `name` (that is assigned or defined), `constant` and
    `constants` (a module's names for numbers), `token` (a name in device code). hint: the
    replacement.
    """

    name: str
    regex: str
    scopes: tuple[str, ...]
    hint: str


PATTERNS = (
    Pattern("question", r"\?(?=\s|$)", ("comment", "docstring"), 'state it: "True where ..."'),
    Pattern("found-made", r"^_?(found|made)$", ("name",), "name what it holds: candidates, plan"),
    Pattern(
        "participle-name",
        r"^_?(said|told|both|still|came|gone|took|again)$",
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
    Pattern(
        "together",
        r"^_?together$",
        ("name",),
        "lockstep, collective, joint, concurrent, or a count of what",
    ),
    Pattern(
        "vague-bound",
        rf"^_?({BOUNDS})(_({BOUNDED}))?$",
        ("constant", "constants"),
        "say what it bounds and its unit: MAX_HELD_REGISTERS",
    ),
    Pattern(
        "article-name",
        r"^test_(a|an|the)_",
        ("name",),
        "begin with the unit: test_<unit>_<condition>_<result>",
    ),
    Pattern("pack", r"^_?packs?$", ("name",), "vector (of one access), packed (weights)"),
    Pattern("line", r"(^|_)LINE$", ("constant", "constants"), "BOX_ROW_BYTES, CACHE_LINE_BYTES"),
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
        r"^_?(own_first|lay_sides|take_rows_early|in_waves|round_rows|give_logits|lower_rows)$",
        ("name", "token"),
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
for _name in ("bare-constant", "vague-bound", "line"):  # capitals only
    COMPILED[_name] = (COMPILED[_name][0], re.compile(COMPILED[_name][0].regex))


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
    """True for an expression of literal numbers, such as 1 << 20."""
    if isinstance(node, ast.BinOp):
        return _number(node.left) and _number(node.right)
    if isinstance(node, ast.UnaryOp):
        return _number(node.operand)
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _constants(statement: ast.stmt) -> Iterator[tuple[str, int, str]]:
    """Yields the names of a module's numbers: as `constant`, or as `constants` if one statement
    assigns several, such as the sizes of a shape.
    """
    if not isinstance(statement, ast.Assign):
        return
    for target in statement.targets:
        if isinstance(target, ast.Name) and _number(statement.value):
            yield "constant", statement.lineno, target.id
        elif isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
            for name, value in zip(target.elts, statement.value.elts, strict=False):
                if isinstance(name, ast.Name) and _number(value):
                    yield "constants", statement.lineno, name.id


def texts(source: str) -> Iterator[tuple[str, int, str]]:
    """Yields all texts of a Python file that the patterns examine, as (scope, line, text). Comments
    on consecutive lines are one text.
    """
    comment: list[str] = []
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.lstrip().startswith("# "):
            comment.append(line.strip()[2:] if comment else line.strip())
        elif comment:
            yield "comment", number - len(comment), " ".join(comment)
            comment = []
    tree = ast.parse(source)
    for statement in tree.body:
        yield from _constants(statement)
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
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield "name", node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield "name", node.lineno, node.arg
        elif isinstance(node, ast.Call) and _called(node.func).endswith(MESSAGE_CALLS):
            for argument in node.args:
                yield "error", argument.lineno, _message(argument)


def device_texts(source: str) -> Iterator[tuple[str, int, str]]:
    """Yields the comments (those on consecutive lines as one text) and the names of a source file
    in C++ or JavaScript.
    """
    comment: list[str] = []
    for number, line in enumerate([*source.splitlines(), ""], 1):
        code, mark, text = line.partition("//")
        if mark and not code.strip():
            comment.append(text.strip())
            continue
        if comment:
            yield "comment", number - len(comment), " ".join(comment)
            comment = []
        if mark and not code.endswith(":"):  # not a URL
            yield "comment", number, text.strip()
        for name in re.findall(r"[A-Za-z_]\w*", code):
            yield "token", number, name


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
    read = device_texts if path.endswith(DEVICE_SUFFIXES) else texts
    for scope, line, text in read(source):
        for pattern, regex in COMPILED.values():
            if scope not in pattern.scopes:
                continue
            for match in regex.finditer(text):
                above = text.count("\n", 0, match.start()) if scope == "docstring" else 0
                near = text[max(0, match.start() - 30) : match.end() + 30]
                result.append(Use(path, line + above, pattern.name, " ".join(near.split())))
    return sorted(result)


def source_files(
    root: Path = ROOT, suffixes: Sequence[str] = (".py", *DEVICE_SUFFIXES)
) -> list[Path]:
    """The source files of the repository that are checked, sorted by path."""
    return sorted(
        path
        for folder in FOLDERS
        for path in (root / folder).rglob("*")
        if path.suffix in suffixes
        and not {"build", "node_modules", ".venv"} & set(path.relative_to(root).parts)
    )


def all_uses(root: Path = ROOT) -> list[Use]:
    """All uses in the source files of the repository, in the order of paths and lines."""
    named = [(path.relative_to(root).as_posix(), path) for path in source_files(root)]
    return [
        use
        for name, path in named
        if name not in EXEMPT
        for use in uses(name, path.read_text(encoding="utf-8"))
    ]


def main() -> int:
    present = all_uses()
    for use in present:
        print(use)
    return 1 if present else 0


if __name__ == "__main__":
    sys.exit(main())
