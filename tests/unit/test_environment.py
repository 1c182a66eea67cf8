"""docs/environment.md names every environment variable that ark and its backends read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = re.compile(r"[A-Z]+(_\w+)*")
OPTION = re.compile(r"^_OPTIONS = \((.*)\)$", re.M)


def _called(call: ast.Attribute) -> str:
    """Returns the name of the object whose method is called, or `os.getenv` for a call of that
    function.
    """
    whole = ast.unparse(call)
    return whole if whole == "os.getenv" else ast.unparse(call.value)


def read_by(text: str) -> set[str]:
    """Returns the variables that a module reads: keys of the environment, and constants with such a
    name.
    """
    tree = ast.parse(text)
    values = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    # A constant with a variable's name, by which other modules read the variable.
    names = {v for v in values.values() if re.fullmatch(r"ARK_[A-Z_]*[A-Z]", str(v))}
    for node in ast.walk(tree):
        keys: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if re.search(r"\benv(iron)?$|^os.getenv$", _called(node.func)):
                keys = node.args[:1]
        elif isinstance(node, ast.Subscript):
            if re.search(r"\benv(iron)?$", ast.unparse(node.value)):
                keys = [node.slice]
        elif isinstance(node, ast.Constant) and "environ" in text:
            written = str(node.value)
            if re.fullmatch(r"ARK_[A-Z_]*[A-Z]", written):
                names.add(written)
        for key in keys:
            value = values.get(key.id) if isinstance(key, ast.Name) else getattr(key, "value", 0)
            if isinstance(value, str) and VARIABLE.fullmatch(value):
                names.add(value)
            if isinstance(key, ast.JoinedStr) and isinstance(key.values[0], ast.Constant):
                start = str(key.values[0].value)
                for options in OPTION.findall(text):  # one name for each option
                    names |= {start + name.upper() for name in ast.literal_eval(f"({options})")}
    return names


def test_page_has_every_variable_that_is_read() -> None:
    page = (ROOT / "docs/environment.md").read_text()
    sources = [p for folder in ("ark", "backends") for p in (ROOT / folder).rglob("*.py")]
    read = {name: path for path in sources for name in read_by(path.read_text())}
    for path in (ROOT / "backends").rglob("*.cpp"):
        read |= dict.fromkeys(re.findall(r'getenv\("(\w+)"\)', path.read_text()), path)
    ranks = (ROOT / "ark/runtime/rank_info.py").read_text()
    tables = re.findall(r"^_(?:LAUNCHERS|JOB_IDS) = .*?^[)}]$", ranks, re.M | re.S)
    assert len(tables) == 2
    names = re.findall(r'"([A-Z]+\w*_\w+|RANK)"', "".join(tables))
    read |= dict.fromkeys(names, ROOT / "ark/runtime/rank_info.py")
    assert len(read) > 40
    missing = {n: str(p.relative_to(ROOT)) for n, p in read.items() if f"`{n}`" not in page}
    assert not missing
    known = set(re.findall(r"`([A-Z]+\w*_\w+)`", page)) - {
        "ARK_UCX",
        "ARK_REQUIRE",
        "ARK_SLOW_TESTS",
    }
    assert not known - {*read}, "variables that nothing reads"


def test_each_way_to_read_a_variable_is_seen() -> None:
    text = (
        'import os\nN = "ARK_A"\n_OPTIONS = ("seed", "checks")\n'
        'os.environ.get(N); os.environ["ARK_B"]; os.getenv("CXX"); env.get("X_Y")\n'
        '[os.environ.get(f"ARK_C_{n.upper()}") for n in _OPTIONS]\n'
    )
    assert read_by(text) == {"ARK_A", "ARK_B", "CXX", "X_Y", "ARK_C_SEED", "ARK_C_CHECKS"}
