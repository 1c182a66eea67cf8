"""`python -m tests.fuzz`: runs targets, each in its own process, for a time or a number of cases.

A case is a finding if its process dies by a signal, raises, hangs or computes a wrong result. The
input is then written beside the report and the run continues with the next case. Plans run under
AddressSanitizer if the C++ compiler has it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

HANG_S = 120.0
EXECUTED = ("plan", "task_plan")  # targets that run under the sanitizer
_HARMLESS = ("accepted", "refused", "executed", "ended alike")  # the last two: accepted and run


def work(target: str, seed: int, first: int, cases: int, until: float, folder: Path) -> None:
    """Runs the cases from number `first` on and writes the current number, input and counts to
    files in `folder`.
    """
    from tests.fuzz import WrongResultError
    from tests.fuzz.execute import sanitize, sanitized
    from tests.fuzz.targets import TARGETS

    if sanitized():
        sanitize()
    counts: Counter[str] = Counter()
    done = first
    for number in range(first, cases):
        if time.time() > until:
            break
        (folder / "number").write_text(str(number))

        def keep(text: str) -> None:
            (folder / "current").write_text(text, errors="backslashreplace")

        try:
            accepted = TARGETS[target](random.Random(f"{seed}.{number}"), keep)
            counts["accepted" if accepted else "refused"] += 1
            if isinstance(accepted, str):
                counts[accepted] += 1
        except WrongResultError as error:
            _finding(folder, target, number, "wrong", str(error))
            counts["wrong"] += 1
        except Exception:
            _finding(folder, target, number, "traceback", traceback.format_exc())
            counts["traceback"] += 1
        done = number + 1
        (folder / "counts").write_text(json.dumps([done, counts]))


def _finding(folder: Path, target: str, number: int, kind: str, text: str) -> None:
    name = f"{target}.{number}.{kind}"
    (folder / f"{name}.txt").write_text(text, errors="backslashreplace")
    if (folder / "current").exists():
        (folder / "current").replace(folder / f"{name}.input")


def fuzz(target: str, seed: int, cases: int, seconds: float, folder: Path) -> Counter[str]:
    """Runs one target. Returns the number of cases by outcome."""
    folder.mkdir(parents=True, exist_ok=True)
    total: Counter[str] = Counter()
    first, until = 0, time.time() + seconds
    environment = {**os.environ, "ARK_CACHE_DIR": str(folder / "cache")}
    library = _sanitizer() if target in EXECUTED else ""
    if library:
        environment["LD_PRELOAD"] = library
        environment["ASAN_OPTIONS"] = "detect_leaks=0:abort_on_error=1"
    while first < cases and time.time() < until:
        for name in ("counts", "number", "current"):
            (folder / name).unlink(missing_ok=True)
        words = [sys.executable, "-m", "tests.fuzz", "--work", target, "--seed", str(seed)]
        words += ["--first", str(first), "--cases", str(cases), "--until", str(until)]
        words += ["--out", str(folder)]
        with open(folder / "log", "w") as log:
            child = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        ended = _watch(child, folder)
        done, counts = json.loads(_read(folder / "counts") or "[0, {}]")
        total.update(counts)
        if ended == "ended":
            break
        first = max(int(_read(folder / "number") or first) + 1, done)
        _finding(folder, target, first - 1, ended, _read(folder / "log")[-5000:])
        total[ended] += 1
    return total


def _watch(child: subprocess.Popen[bytes], folder: Path) -> str:
    """Waits for the child. Returns "ended", "signal" or "hang". It hangs if no case ends within
    HANG_S seconds; the first case may take five times as long, because it also imports and
    prepares.
    """
    last, since, most = "", time.monotonic(), 5 * HANG_S  # the first case also imports and prepares
    while child.poll() is None:
        time.sleep(0.2)
        now = _read(folder / "number")
        if now != last:
            most = HANG_S if last else most
            last, since = now, time.monotonic()
        elif time.monotonic() - since > most:
            child.kill()
            child.wait()
            return "hang"
    return "ended" if child.returncode == 0 else "signal"


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _sanitizer() -> str:
    """Returns the path of the C++ compiler's AddressSanitizer library, or "" if it has none."""
    try:
        done = subprocess.run(
            ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    path = done.stdout.strip()
    return path if os.path.isabs(path) else ""


def main() -> int:
    from tests.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--target", action="append", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=float, default=300.0, help="for all targets together")
    parser.add_argument("--cases", type=int, default=10**9, help="of each target at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.seed, args.first, args.cases, args.until, args.out)
        return 0
    chosen = args.target or list(TARGETS)
    bad = 0
    for target in chosen:
        counts = fuzz(target, args.seed, args.cases, args.seconds / len(chosen), args.out / target)
        print(target, json.dumps(counts), flush=True)
        bad += sum(n for kind, n in counts.items() if kind not in _HARMLESS)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
