"""The files of figures, ci/results/figures/ROW.json: their schema, and how a run changes them.
Called by ci/figures.py, which writes them, and by ci/generate.py, which makes tables of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from ark.cli.measure.results import Results, checked

FOLDER = Path(__file__).resolve().parent / "results/figures"


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All figures of a row. noisy: other programs used the machine at the same time, so that only
    ratios within one run are meaningful. runs: no two have the same figure with the same peer.
    """

    row: str
    noisy: bool
    runs: list[Results]


def read_figures(path: Path, row: str) -> Figures:
    """Reads a row's file of figures; raises ValueError with its name if it is not valid."""
    try:
        figures = msgspec.json.decode(path.read_bytes(), type=Figures)
        for run in figures.runs:
            checked(run)
    except (msgspec.DecodeError, OSError, ValueError) as error:
        raise ValueError(f"{path.name} is not a file of figures: {error}") from error
    if figures.row != row:
        raise ValueError(f"{path.name} has figures of the row {figures.row!r}, expected {row!r}")
    keys = [(f.figure, f.peer) for run in figures.runs for f in run.figures]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"{path.name} has {twice[0][0]} twice")
    return figures


def write_figures(path: Path, figures: Figures) -> None:
    """Writes a row's file of figures completely or, on an error, not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n"
    beside = path.with_suffix(".new")
    beside.write_bytes(text)
    beside.replace(path)


def merged(before: Figures, runs: Sequence[Results], noisy: bool, commit: str = "") -> Figures:
    """All figures: those of the new runs, and earlier ones that the new runs did not measure.
    commit: replaces the commit in the new runs if given. It is needed for runs in a copy of the
    repository, where the commit is missing or wrong.
    """
    now = {f.figure for run in runs for f in run.figures}
    runs_kept = []
    for run in before.runs:
        figures = [f for f in run.figures if f.figure not in now]
        if figures:
            runs_kept.append(run.holding(figures))
    for run in runs:
        runs_kept.append(msgspec.structs.replace(run, commit=commit or run.commit))
    return Figures(before.row, noisy, runs_kept)
