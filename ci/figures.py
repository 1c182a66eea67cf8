"""Measures the standard set of figures on a machine, a row of ci/matrix.toml, and writes them as
data.

`python ci/figures.py cuda-h200` runs the benches of ci/figure_pieces.py, each in its own process,
and writes ci/results/figures/cuda-h200.json, from which ci/generate.py makes the tables of
docs/performance.md. It prints the figures that are more than 3% worse than in the previous file. It
stops after --budget seconds; the results so far are kept in the folder --work, and the next run
continues from there if ark's source is the same. Figures that were not measured again keep their
earlier values. A figure that is worse is measured a second time, and the faster time counts. The
exit code is 1 if a figure is missing or worse. On one GPU, as many benches run side by side as
--workers gives: they plan and compile at the same time, and use the GPU in turns. --sweep measures
`ark bench ops "sweep-*"` and `ark bench fidelity` instead of the standard set.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent))
from evidence import installed, tree_digest
from figure_compare import fastest, taken_out, worse
from figure_file import FOLDER, Figures, merged, read_figures, write_figures
from figure_pieces import Piece, devices_of, pieces, sweep

from ark.cli.measure.results import Figure, Results, read

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = {"cpu": "ark_cpu", "cuda": "ark_cuda", "rocm": "ark_rocm", "mesh": "ark_mesh"}
CUT = "no end in"
MIN_PIECE_SECONDS = 15.0  # seconds that must be left for another piece to begin
CORES_OF_LANE = 4  # cores that a compilation uses
MAX_LANES = 4


def say(text: str) -> None:
    """Prints a line without buffering, so that it is not lost if the run is interrupted."""
    print(text, flush=True)


@contextmanager
def environment(row: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Environment variables with which `python -m ark` runs from the source tree, whether ark is
    installed or not.
    """
    with tempfile.TemporaryDirectory(prefix="ark-figures-") as folder:
        about = Path(folder, "ark_gpu-0.dist-info")
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ark-gpu\nVersion: 0\n")
        names = "".join(f"{name} = {package}\n" for name, package in BACKENDS.items())
        (about / "entry_points.txt").write_text(f"[ark.backends]\n{names}")
        paths = [ROOT, *sorted((ROOT / "backends").iterdir()), folder]
        listed = [*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        more = {"PYTHONPATH": os.pathsep.join(listed), "PYTHONUNBUFFERED": "1"}
        yield {**os.environ, **row.get("environment", {}), **more}


@dataclass
class Run:
    """The state of one call of this script for a row. runs: all measurements, including those of a
    run that this one resumes. failed: for each failed figure, how its process ended. workers: the
    number of benches that run side by side.
    """

    row: dict[str, Any]
    before: Figures
    work: Path
    ends: float
    runs: list[Results]
    failed: dict[str, str] = field(default_factory=dict)
    workers: int = 1
    stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def done(self) -> set[str]:
        return {f.figure for run in tuple(self.runs) for f in run.figures}

    def missing(self, piece: Piece) -> list[str]:
        """The figures of a piece that have been neither measured nor failed so far, as prefixes of
        their names.
        """
        done = self.done
        left = (f for f in piece.figures if f not in self.failed)
        return [f for f in left if not any(_is(name, f) for name in done)]

    def left(self) -> float:
        """The seconds that remain of --budget."""
        return 0.0 if self.stop.is_set() else self.ends - time.monotonic()

    def keep(self, run: Results) -> None:
        """Adds figures, and stores the state so that a later run can continue."""
        with self._lock:
            self.runs.append(run)
            write_figures(self.work, Figures(self.row["name"], self.before.noisy, self.runs))


def _is(name: str, begins: str) -> bool:
    """True if the name `name` belongs to the figure `begins`. The two are equal, except that the
    name of a collective's figure continues with its algorithm.
    """
    goes_on = begins.startswith("comm/") and name.startswith(f"{begins}-")
    return name == begins or goes_on


def measure(run: Run, piece: Piece, variables: dict[str, str]) -> None:
    """Runs a piece until it has all figures or its time is over."""
    began = time.monotonic()
    while missing := run.missing(piece):
        seconds = min(began + piece.seconds * run.workers - time.monotonic(), run.left())
        if seconds < MIN_PIECE_SECONDS:
            say(f"  {piece.name}: {len(missing)} figures are missing after its time limit")
            return
        how = call(run, piece, missing, seconds, variables)
        remaining = run.missing(piece)
        cut = how.startswith(CUT) and len(remaining) < len(missing)
        if remaining and not cut and run.left() >= MIN_PIECE_SECONDS:
            # If several figures are missing, the first of them ended the process; the others may
            # still be measured.
            for name in remaining[:1] if piece.names else remaining:
                run.failed[name] = how or "the bench gave another figure"


def call(
    run: Run, piece: Piece, missing: Sequence[str], seconds: float, variables: dict[str, str]
) -> str:
    """Runs a piece for missing figures and stores the results. Returns a description of the
    failure, or an empty string.
    """
    listed = zip(piece.names, piece.figures, strict=True) if piece.names else ()
    names = [name for name, begins in listed if begins in missing]
    peers = known_peers(run.before, run.runs) if piece.kept else {}
    with tempfile.TemporaryDirectory(prefix="ark-figures-") as folder:
        file = Path(folder, "results.json")
        words = [sys.executable, "-m", "ark", "bench", *piece.words, *names, "--json", str(file)]
        words += ["--backend", run.row["backend"]]
        if piece.peer and not all(f in peers for f in missing):
            words += ["--vs", piece.peer]
        else:
            words += piece.alone
        if run.workers > 1:
            words += ["--turn", str(run.work.with_suffix(".turn"))]
        how = ended(words, seconds, variables, run.stop)
        if not file.is_file():
            return how or "it wrote no figures"
        try:
            results = read(file)
        except ValueError as error:
            return how or str(error)
    # A bench may also measure figures that belong to another piece or have been measured before.
    own = [f for f in results.figures if any(_is(f.figure, begins) for begins in missing)]
    if own and (piece.names or not how):  # with an exit code, one figure may be wrong
        versions = {**installed(), **results.versions}
        run.keep(beside(msgspec.structs.replace(results.holding(own), versions=versions), peers))
    return how


def ended(
    words: Sequence[str], seconds: float, variables: dict[str, str], stop: threading.Event
) -> str:
    """Runs a command and its children for at most the given number of seconds, or until `stop` is
    set. Returns a description of the failure, or an empty string.
    """
    process = subprocess.Popen(
        words, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, start_new_session=True
    )
    ends = time.monotonic() + seconds
    try:
        while not stop.is_set() and (left := ends - time.monotonic()) > 0:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(min(left, 1.0))
                return f"exit code {code}" if code else ""
        return f"{CUT} {seconds:.0f} s"
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)


def measure_all(run: Run, asked: Sequence[Piece], variables: dict[str, str]) -> None:
    """Measures the pieces in order, `run.workers` of them side by side."""
    numbered = iter(enumerate(asked, 1))
    lock = threading.Lock()

    def worker(_: int) -> None:
        while True:
            with lock:
                number, piece = next(numbered, (0, None))
            if piece is None:
                return
            if not run.missing(piece):
                continue
            if run.left() < MIN_PIECE_SECONDS:
                say(f"the budget is spent before {piece.name}")
                return
            say(f"[{number}/{len(asked)}] {piece.name}, {run.left():.0f} s left")
            measure(run, piece, variables)

    with ThreadPoolExecutor(run.workers) as pool:
        try:
            list(pool.map(worker, range(run.workers)))
        except BaseException:
            run.stop.set()  # the benches end, and their figures so far are kept
            raise


def measure_again(run: Run, asked: Sequence[Piece], noisy: bool, variables: dict[str, str]) -> None:
    """Measures the figures that are worse than before a second time, and keeps the faster time of
    each: a shared machine is sometimes slow for seconds.
    """
    names = {f.figure for f, _ in worse(run.before, run.runs, noisy)}
    if not names or run.left() < MIN_PIECE_SECONDS:
        return
    say(f"{len(names)} figures are worse than before and are measured again")
    run.runs, first = taken_out(run.runs, names)
    measure_all(run, asked, variables)
    run.runs, second = taken_out(run.runs, names)
    run.runs += fastest(first, second)
    for figure in names & run.done:
        run.failed.pop(figure, None)


def workers_of(row: Mapping[str, Any]) -> int:
    """The number of benches that run side by side. It is one for rows that measure the CPU or
    several GPUs.
    """
    if row["backend"] == "cpu" or devices_of(dict(row)) > 1:
        return 1
    return max(1, min(MAX_LANES, (os.cpu_count() or 1) // CORES_OF_LANE))


def known_peers(before: Figures, runs: Iterable[Results]) -> dict[str, tuple[Figure, Results]]:
    """The figures that have a peer's time, by name. Each is returned with the run that measured it,
    or the last one of several.
    """
    return {
        f.figure: (f, run)
        for run in (*before.runs, *runs)
        for f in run.figures
        if f.peer_us and "peer_of" not in f.detail
    }


def beside(results: Results, peers: Mapping[str, tuple[Figure, Results]]) -> Results:
    """The results, in which missing times of peers are replaced by earlier ones, measured on the
    same machine with the same version of torch.
    """
    figures = []
    for row in results.figures:
        old, run = peers.get(row.figure, (None, None))
        same = run and run.machine == results.machine
        same = same and run.versions.get("torch") == results.versions.get("torch")
        if same and old and row.us and not row.peer_us:
            ratio = old.peer_us / row.us
            detail = {**row.detail, "peer_of": run.date}
            row = msgspec.structs.replace(
                row, peer=old.peer, peer_us=old.peer_us, ratio=ratio, detail=detail
            )
        figures.append(row)
    return results.holding(figures)


def report(run: Run, asked: Sequence[Piece], noisy: bool) -> int:
    """Prints the number of figures, their mean ratio to peers by kind, and the figures that failed,
    are missing or became worse; returns 1 if there are any of these, otherwise 0.
    """
    rows = [row for results in run.runs for row in results.figures]
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row.ratio:
            groups.setdefault(row.figure.split("/")[0], []).append(row.ratio)
    say(f"\n{run.row['name']}: {len(run.done)} figures")
    for kind, ratios in groups.items():
        mean, count = statistics.geometric_mean(ratios), len(ratios)
        say(f"  {kind}: {count} beside peers, ratio {mean:.2f} (geometric mean), {min(ratios):.2f}")
    failed = {**run.failed, **{f.figure: f.error for f in rows if f.error}}
    for name, how in failed.items():
        say(f"  failed   {name}: {how.splitlines()[0][:150]}")
    missing = [f for piece in asked for f in run.missing(piece)]
    for name in missing:
        say(f"  missing  {name}")
    slow = worse(run.before, run.runs, noisy)
    for row, was in slow:
        ratios = f", ratio {was.ratio:.2f} to {row.ratio:.2f}" if was.ratio and row.ratio else ""
        say(f"  worse    {row.figure}: {was.us:.1f} us to {row.us:.1f}{ratios}")
    say(f"  {len(slow)} worse by 3%, {len(failed)} failed, {len(missing)} missing")
    return int(bool(slow or failed or missing))


def resumed(path: Path, row: str) -> list[Results]:
    """The measurements of an interrupted run of the same source."""
    stamp, source = path.with_suffix(".source"), tree_digest()
    if path.is_file() and stamp.is_file() and stamp.read_text() == source:
        try:
            return read_figures(path, row).runs
        except ValueError as error:
            say(f"the earlier measurements are not used: {error}")
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(source)
    return []


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("row", help="a row of ci/matrix.toml")
    parser.add_argument("--budget", type=float, default=480, help="seconds (480)")
    parser.add_argument("--output", type=Path, default=FOLDER, help="the folder for ROW.json")
    parser.add_argument("--work", type=Path, default=ROOT / "build/figures")
    parser.add_argument("--only", nargs="+", help="pieces, by how their names begin")
    parser.add_argument(
        "--sweep", action="store_true", help="the sweep of ops and fidelity, not the set"
    )
    parser.add_argument("--workers", type=int, help="benches side by side (of one GPU: up to 4)")
    parser.add_argument("--again", action="store_true", help="measure everything anew")
    parser.add_argument("--noisy", action="store_true", help="others use the machine meanwhile")
    parser.add_argument("--tiny", action="store_true", help="few figures, to try a CPU's run")
    parser.add_argument("--commit", default="", help="of a tree without its repository")
    args = parser.parse_args(argv)
    rows = tomllib.loads((ROOT / "ci/matrix.toml").read_text())["row"]
    row = next((r for r in rows if r["name"] == args.row), None)
    if row is None:
        parser.error(f"no row {args.row!r}; there are {', '.join(r['name'] for r in rows)}")
    kept = FOLDER / f"{args.row}.json"
    before = read_figures(kept, args.row) if kept.is_file() else Figures(args.row, args.noisy, [])
    noisy = args.noisy or before.noisy
    work = args.work / f"{args.row}.json"
    if args.again:
        work.unlink(missing_ok=True)
    ends = time.monotonic() + args.budget
    workers = args.workers or workers_of(row)
    run = Run(row, before, work, ends, resumed(work, args.row), workers=workers)
    asked = [
        p
        for p in (sweep() if args.sweep else pieces(row, args.tiny))
        if not args.only or any(p.name.startswith(word) for word in args.only)
    ]
    if run.runs:
        say(f"{len(run.done)} figures of a run that was cut are kept")
    with environment(row) as variables:
        measure_all(run, asked, variables)
        measure_again(run, asked, noisy, variables)
    code = report(run, asked, noisy)
    figures = merged(before, run.runs, noisy, args.commit)
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / f"{args.row}.json"
    write_figures(path, figures)
    say(f"wrote {path}; `python ci/generate.py` makes the tables of docs/performance.md from it")
    if not any(run.missing(piece) for piece in asked):
        work.unlink(missing_ok=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
