"""Writes tests/long.txt, the list of long tests (tests/long.py), by measured durations.

`python ci/durations.py` runs and measures the default and the long tests, with three workers.
`python ci/durations.py REPORT.xml ...` reads reports of pytest (--junitxml) instead. The test
functions with the longest cases become long tests, until the remaining tests take MAX_DEFAULT_SHARE
of the measured time. Run it on an idle machine with an empty cache of ark, as CI does.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests/long.txt"
# The share of the time of all tests that the default part may take.
MAX_DEFAULT_SHARE = 0.25
RUN = ("-n", "3", "--dist", "worksteal", "-q", "--part", "all")


def functions(reports: Iterable[Path]) -> dict[str, list[float]]:
    """The seconds of each case, by the test function, as `tests/.../test_file.py::test_name`."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            if case.find("skipped") is not None:
                continue
            name = f"{_module(case, report)}::{case.get('name', '').partition('[')[0]}"
            seconds[name].append(float(case.get("time", "0")))
    return dict(seconds)


def _module(case: ElementTree.Element, report: Path) -> str:
    """The test file of a report's test case, and its class if it has one, in the notation of a
    pytest node ID.
    """
    words = case.get("classname", "").split(".")
    for count in range(len(words), 0, -1):
        file = Path(*words[:count]).with_suffix(".py")
        if (ROOT / file).is_file():
            return "::".join((file.as_posix(), *words[count:]))
    raise ValueError(f"{report} has a test of {'.'.join(words)}, which does not exist")


def longest(seconds: dict[str, list[float]], share: float) -> list[str]:
    """The functions with the longest cases. Without them, the tests take at most the given share of
    the time.
    """
    left = sum(map(sum, seconds.values()))
    limit = share * left
    result = []
    for name in sorted(seconds, key=lambda name: -sum(seconds[name]) / len(seconds[name])):
        if left <= limit:
            break
        result.append(name)
        left -= sum(seconds[name])
    return sorted(result)


def main(reports: list[Path]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if not reports:
            reports = [Path(folder, "all.xml")]
            words = ("pytest", *RUN, f"--junitxml={reports[0]}")
            subprocess.run([sys.executable, "-m", *words], cwd=ROOT, check=False)
        measured = functions(reports)
    LIST.write_text("".join(f"{name}\n" for name in longest(measured, MAX_DEFAULT_SHARE)))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
