"""Tables of results: no word and no number is broken in 80 columns, and rows are whole without a
terminal.
"""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from ark.cli import bench_comm, bench_torch, tune_comm
from ark.cli.common import output
from ark.cli.measure.comm import CommFigures
from ark.cli.measure.comm_overlap import OverlapFigures
from ark.cli.measure.modules import ModuleFigures
from ark.cli.tables import FigureTable
from ark.runtime.tuned_collectives import Entry

ROOT = Path(__file__).resolve().parents[3]
HEADS = ["collective", "algorithm", "us", "peer us", "peer / ark"]
ROWS = [["all_reduce", "recursive_doubling", "1.25", "10", "8"], ["broadcast", "ring", "1234567.5"]]


def printed(columns: int, heads: list[str], rows: list[list[str]], names: int = 2) -> list[str]:
    console = Console(width=columns, record=True, file=io.StringIO())
    table = FigureTable("a title", heads, names)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_table_that_fits_has_a_line_for_each_row() -> None:
    lines = printed(80, HEADS, ROWS)
    assert lines[0] == "a title"
    assert any(re.findall(r"[\w./]+", line) == [*ROWS[0]] for line in lines)
    assert len(lines) == 4 + 1 + len(ROWS)


def test_narrow_table_has_names_above_figures() -> None:
    assert printed(40, HEADS, ROWS) == [
        "a title",
        "collective, algorithm",
        "         us  peer us  peer / ark",
        "all_reduce, recursive_doubling",
        "       1.25       10           8",
        "broadcast, ring",
        "  1234567.5",
    ]


def test_figures_that_do_not_fit_into_a_line_take_several() -> None:
    assert printed(22, HEADS, ROWS)[2:4] == ["         us  peer us", "  peer / ark"]


COMM = CommFigures(
    *("reduce_scatter", 1 << 30, 1 << 28, "float8_e4m3", "graph", "recursive_doubling", "threads"),
    *(8, 0.123456, 1234.56, 2345.67, 0, 1.23456, 0.23456),
)
OVERLAP = OverlapFigures(
    *("reduce_scatter", "16384x16384x16384", "bf16", "threads", 8),
    *(0.123456, 0.234567, 0.345678, 0.456789, 0.5, 0),
)
MODULE = ModuleFigures(
    *("stable-diffusion-autoencoder-1x256", 1.23456, 2.34567, 3.45678, 4.56789, 1e-5),
    **{"kernels": 12, "eager": 5.67891, "peer": 6.78912, "peer_latency": 7.89123},
)
ENTRY = Entry(nbytes=1 << 30, algorithm="recursive_doubling", engine="packet", us=1e6, usual_us=2e6)
SHOWN = {
    "comm": (lambda: bench_comm.show("NVIDIA H200", (), [COMM], "nccl"), "123456.00 1234.56"),
    "overlap": (
        lambda: output().print(bench_comm.overlap_table("NVIDIA H200", [OVERLAP])),
        "123456.00 234567.00 345678.00 456789.00 50% 0",
    ),
    "torch": (
        lambda: bench_torch.show("NVIDIA H200", "inductor", [MODULE]),
        "1234560.0 2345670.0 3456780.0 4567890.0 12 1.0e-05 5678910.0 6789120.0 7891230.0 5.50",
    ),
    "tune": (
        lambda: tune_comm.show("H200", {"reduce_scatter.float8_e4m3.8": [ENTRY]}),
        "1000000.0 2000000.0 2.00",
    ),
}


@pytest.mark.parametrize("command", SHOWN)
def test_long_names_and_large_figures_are_whole_in_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("COLUMNS", "80")
    show, figures = SHOWN[command]
    show()
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out
    assert figures in " ".join(out.split())


def test_only_one_module_makes_tables() -> None:
    files = sorted((ROOT / "ark/cli").rglob("*.py"))
    makers = [path.name for path in files if re.search(r"\bTable\(", path.read_text())]
    assert makers == ["tables.py"]
