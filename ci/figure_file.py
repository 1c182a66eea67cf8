"""The files of figures, ci/results/figures/ROW.json: their schema, and how a run changes them.
Called by ci/figures.py, which writes them, and by ci/generate.py, which makes tables of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ark.bench.results import Results, checked

FOLDER = Path(__file__).resolve().parent / "results/figures"


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All figures of a row. noisy: others used the machine meanwhile, so that only ratios of one
    run mean anything. runs: each figure, beside each peer, is in one of them.
    """

    row: str
    noisy: bool
    runs: list[Results]


def read_figures(path: Path, row: str) -> Figures:
    """A row's file; ValueError, naming it, if it is none."""
    try:
        made = msgspec.json.decode(path.read_bytes(), type=Figures)
        for run in made.runs:
            checked(run)
    except (msgspec.DecodeError, OSError, ValueError) as error:
        raise ValueError(f"{path.name} is no file of figures: {error}") from error
    if made.row != row:
        raise ValueError(f"{path.name} is about the row {made.row!r}, not {row!r}")
    keys = [(f.figure, f.peer) for run in made.runs for f in run.figures]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"{path.name} has {twice[0][0]} twice")
    return made


def write_figures(path: Path, made: Figures) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n"
    beside = path.with_suffix(".new")
    beside.write_bytes(text)
    beside.replace(path)


def merged(before: Figures, runs: Sequence[Results], noisy: bool, commit: str = "") -> Figures:
    """What was there, with the figures of new runs in the place of theirs. commit: of runs that say
    none.
    """
    now = {f.figure for run in runs for f in run.figures}
    made = []
    for run in before.runs:
        figures = [f for f in run.figures if f.figure not in now]
        if figures:
            made.append(run.holding(figures))
    for run in runs:
        made.append(msgspec.structs.replace(run, commit=run.commit or commit))
    return Figures(before.row, noisy, made)
