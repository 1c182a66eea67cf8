"""Records which decoder tests pass on a backend, for the table in docs/reference/decoders.md.

`python ci/decoders.py BACKEND [ARGUMENTS]` runs the tests that compare ark's decoders with those of
transformers on a backend; ARGUMENTS are pytest's. It writes the table's cells, pairs of
architecture and format, whose tests passed to ci/results/decoders/BACKEND.json. ci/generate.py
generates the page from these files. `--keep` adds the cells to those of an earlier file. `--cells
FILE` runs no tests: it reads a file that another test run wrote because ARK_DECODER_CELLS=FILE was
set.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import msgspec

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "ci/results/decoders"
TESTS = tuple(
    f"tests/backend/test_{name}.py"
    for name in (
        "decoders",
        "quantized",
        "quantized_experts",
        "quantized_formats",
        "gguf",
        "cache_codes",
        "perplexity",
    )
)
BACKENDS = ("cpu", "rocm", "cuda")
NOT_RUN = "not run"

Word = Annotated[str, msgspec.Meta(pattern=r"^[\w .,:;()+/-]{1,120}$")]


class Cells(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The results of a backend. how: "on a device" or "emulated". cells: the (architecture, format)
    pairs that passed.
    """

    backend: Word
    how: Literal["executed", "emulated"]
    date: Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    cells: list[tuple[Word, Word]]


def read(backend: str) -> Cells | None:
    """Reads a backend's file; None if it does not exist."""
    path = RESULTS / f"{backend}.json"
    return msgspec.json.decode(path.read_bytes(), type=Cells) if path.exists() else None


def table() -> str:
    """The Markdown text of docs/reference/decoders.md."""
    runs = {backend: run for backend in BACKENDS if (run := read(backend))}
    rows = sorted({tuple(cell) for run in runs.values() for cell in run.cells})
    lines = [
        "# Decoders by format and backend",
        "",
        "This page is for those who ask whether a model in a format was run. It lists each pair of",
        "an architecture and a format that a test has compared with transformers, or with the",
        "format's own package; `python ci/decoders.py BACKEND` runs these tests and",
        "`python ci/generate.py` writes this page. Emulated: the backend's own machine code on the",
        f"emulator. {NOT_RUN.capitalize()}: in no run that is recorded.",
        "",
        *(f"- `{name}`: {run.how}, {run.date}." for name, run in runs.items()),
        "",
        f"| Architecture | Weights | {' | '.join(BACKENDS)} |",
        f"|---|---|{'---|' * len(BACKENDS)}",
    ]
    for row in rows:
        states = (runs[b].how if b in runs and row in runs[b].cells else NOT_RUN for b in BACKENDS)
        lines.append(f"| `{row[0]}` | {row[1]} | {' | '.join(states)} |")
    return "\n".join(lines) + "\n"


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("backend", choices=BACKENDS)
    parser.add_argument("--keep", action="store_true", help="add to the earlier cells")
    parser.add_argument("--cells", type=Path, help="the cells of a run that has ended")
    args, others = parser.parse_known_args(words)
    backend = args.backend
    earlier = read(backend) if args.keep else None
    status, lines = 0, []
    if args.cells:
        lines = args.cells.read_text(encoding="utf-8").splitlines()
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cells"
            environment = {**os.environ, "ARK_DECODER_CELLS": str(path)}
            command = [sys.executable, "-m", "pytest", "-q", *(others or TESTS)]
            status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    passed = {tuple(line.split("\t")[1:]) for line in lines if line.startswith(f"{backend}\t")}
    passed |= set(earlier.cells) if earlier else set()
    if not passed:
        print(f"no test passed on {backend}; nothing is written", file=sys.stderr)
        return status or 1
    device = os.environ.get(f"ARK_{backend.upper()}_DEVICE", "")
    how = "emulated" if device.startswith("emulated") else "executed"
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    cells = {"backend": backend, "how": how, "date": today, "cells": sorted(passed)}
    RESULTS.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(msgspec.convert(cells, Cells)))
    (RESULTS / f"{backend}.json").write_bytes(text + b"\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
