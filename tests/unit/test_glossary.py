"""docs/glossary.md: each term once, in order, and names of code that exist."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from ark.lower.engines import ENGINES
from ark.lower.passes import PASSES
from ark.machine.capability import Capability
from ark.plan import kind

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/glossary.md").read_text()
SYMBOL = re.compile(r"`((?:ark|backends)/[\w./]+):(\w+)`")


@cache
def _tables() -> dict[str, list[list[str]]]:
    """The rows of each section's table, without its head."""
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    tables = {}
    for section in sections:
        title, _, body = section.partition("\n")
        body = body.split("\nWords with several meanings")[0]
        lines = [line for line in body.splitlines() if line.startswith("|")]
        tables[title] = [[c.strip() for c in line.strip("|").split(" | ")] for line in lines[2:]]
    return tables


def _terms(title: str) -> list[str]:
    return [row[0].strip("`") for row in _tables()[title]]


@pytest.mark.parametrize("title", list(_tables()))
def test_glossary_terms_stand_once_in_alphabetical_order(title: str) -> None:
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
    # `claimed` runs tiles of other kinds; custom ops register kinds of their own.
    assert set(kind.names()) - kinds <= {"claimed"}
