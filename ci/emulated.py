"""Runs ark's backend tests on emulated AMD devices, two runs at a time. Called by `nox`.

The first argument is a JSON list of runs as in ci/matrix.toml under [[emulated]]. A run is one
pytest process; its output is printed whole at the end. Further arguments are a command that runs at
the same time. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

# `nox` runs these files with all of the emulator's checks on, so they are not run again without
# checks.
CHECKED = ("tests/backend/test_faults.py", "tests/backend/test_programs.py")
# Files in which all tests belong to the slow session (tests/emulated.py) are not imported.
SLOW = 'pytestmark = pytest.mark.emulated("slow")\n'
ELSEWHERE = sorted(str(f) for f in Path("tests/backend").glob("test_*.py") if SLOW in f.read_text())
# The arguments of pytest for each value of `tests` in the entries of emulated devices in
# ci/matrix.toml. The longest run comes first.
TESTS: dict[str, tuple[str, ...]] = {
    "all": ("tests/backend",),
    "usual": ("tests/backend", *(f"--ignore={file}" for file in (*CHECKED, *ELSEWHERE))),
    "some": ("tests/backend/test_ops.py", "tests/backend/test_faults.py"),
    "checked": ("tests/backend/test_ops.py", *CHECKED),
    "synchronising": CHECKED,
}
SIDE_BY_SIDE = 2


def command(run: dict[str, Any]) -> list[str]:
    """The command that runs the tests of one entry."""
    # Each run has a separate pytest cache, which stores the run's failures.
    cache = f"cache_dir=.pytest_cache/{run['arch']}-{run['seed']}-{run['tests']}"
    words = TESTS[run["tests"]]
    return [sys.executable, "-m", "pytest", "-q", "-o", cache, "-k", "rocm", *words]


def environment(run: dict[str, Any]) -> dict[str, str]:
    """The environment of a run, which selects the emulated device of its tests."""
    return {
        **os.environ,
        "ARK_ROCM_DEVICE": f"emulated:{run['arch']}",
        "ARK_ROCM_EMULATOR_SEED": str(run["seed"]),
        "ARK_ROCM_EMULATOR_CHECKS": str(int(run["checks"])),
        "ARK_ROCM_EMULATOR_IMPLICIT_SYNC": "0",  # a test that frees memory under a kernel fails
        "ARK_REQUIRE": "rocm:1",
        # `nox` includes some of these tests, which tests/backend/conftest.py selects by
        # marks.
        "ARK_EMULATED_PART": "" if "session" in run else run["arch"],
    }


def one(run: dict[str, Any]) -> tuple[dict[str, Any], int, str, float]:
    began = time.monotonic()
    done = subprocess.run(
        command(run),
        env=environment(run),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return run, done.returncode, done.stdout, time.monotonic() - began


def main(runs: list[dict[str, Any]], other: list[str]) -> int:
    ordered = sorted(runs, key=lambda run: list(TESTS).index(run["tests"]))
    failed: list[object] = []
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        started = [pool.submit(one, run) for run in ordered]
        if other and subprocess.run(other, check=False).returncode:
            failed.append(other)
        for future in as_completed(started):
            run, code, output, seconds = future.result()
            print(
                f"\n--- {json.dumps(run)}: {seconds:.0f} s, exit code {code}\n{output}", flush=True
            )
            failed += [run] if code else []
    for run in failed:
        print(f"failed: {json.dumps(run)}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
