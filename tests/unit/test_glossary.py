"""docs/glossary.md: each term occurs once, in order, and names of code exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from ark.lower import registry
from ark.lower.engines import ENGINES
from ark.lower.passes import PASSES
from ark.machine.capability import Capability
from ark.plan import kind

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/glossary.md").read_text()
SYMBOL = re.compile(r"`((?:ark|backends)/[\w./]+):(\w+)`")


@cache
def _tables() -> dict[str, list[list[str]]]:
    """Returns, for each section of the glossary, the rows of its table without the header."""
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    tables = {}
    for section in sections:
        title, _, body = section.partition("\n")
        body = body.split("\nWords that had several")[0]
        lines = [line for line in body.splitlines() if line.startswith("|")]
        tables[title] = [[c.strip() for c in line.strip("|").split(" | ")] for line in lines[2:]]
    return tables


def _terms(title: str) -> list[str]:
    return [row[0].strip("`") for row in _tables()[title]]


@pytest.mark.parametrize("title", list(_tables()))
def test_glossary_terms_are_unique_and_alphabetical(title: str) -> None:
    terms = [term.lower() for term in _terms(title)]
    assert terms
    assert terms == sorted(set(terms))


def test_glossary_symbols_exist_in_their_files() -> None:
    symbols = SYMBOL.findall(TEXT)
    assert len(symbols) > 50
    missing = [
        f"{path}:{symbol}"
        for path, symbol in symbols
        if not re.search(rf"\b{symbol}\b", (ROOT / path).read_text())
    ]
    assert not missing, missing


def test_glossary_lists_all_passes() -> None:
    assert _terms("Passes") == sorted(p.name for p in PASSES)


def test_glossary_lists_all_channel_engines() -> None:
    assert _terms("Channel engines") == sorted(ENGINES)


def test_glossary_lists_all_capabilities() -> None:
    assert _terms("Capabilities") == sorted(c.value for c in Capability)


def test_glossary_gives_every_task_kind_a_name() -> None:
    kinds = {word for row in _tables()["Names of ops"] for word in re.findall(r"`(\w+)`", row[2])}
    # The kind `claimed` is not listed: it runs tiles of other kinds. Custom ops may have registered
    # further kinds.
    assert set(kind.names()) - kinds <= {"claimed"}


def _quoted(cell: str, pattern: str) -> set[str]:
    return set(re.findall(rf"`({pattern})`", cell))


def test_glossary_names_lowerings_and_device_files_of_ops_that_exist() -> None:
    lowering = "".join(p.read_text() for p in (ROOT / "ark/lower/ops").rglob("*.py"))
    folders = (ROOT / "ark/tasks", ROOT / "ark/backend/codegen/device")
    device = "".join(p.read_text() for folder in folders for p in folder.glob("*.h"))
    missing = []
    for row in _tables()["Names of ops"]:
        missing += [n for n in _quoted(row[1], r"_?lower_\w+") if f"def {n}(" not in lowering]
        files = _quoted(row[2], r"\w+\.py") | _quoted(row[3], r"\w+\.h")
        missing += [f for f in files if not any((folder / f).exists() for folder in folders)]
        functions = _quoted(row[3], r"ark_\w+\*?")
        missing += [f for f in functions if not re.search(rf"\b{f.replace('*', '')}", device)]
    assert not missing, missing


def test_ops_are_lowered_by_functions_of_their_name_or_family() -> None:
    rows = _tables()["Names of ops"]
    families = {n.lstrip("_") for row in rows for n in _quoted(row[1], r"_?lower_\w+")}
    assert registry.get("softmax").lower is not None  # this loads the table
    other = {
        name: op.lower.__name__
        for name, op in registry._OPS.items()
        if op.lower is not None
        and op.lower.__name__.lstrip("_") not in families | {f"lower_{name}", "lower_reshape"}
    }
    assert not other, other
