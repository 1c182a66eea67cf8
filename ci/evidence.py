"""Runs a row's tests on the row's machine and writes down what happened, for ci/coverage.md.

`python ci/evidence.py cuda-h100` (or `nox -s cuda-h100`) runs the tests of that row of
ci/matrix.toml and writes ci/results/cuda-h100.json: the devices, the versions of drivers and
packages, the date, and the counts of pytest's own report. A run in which a test failed, or none ran
on a device of the row, writes nothing. ci/generate.py reads the files back through the same schema.

A machine that is lent for minutes runs a row in parts, each with pytest's own options: `--reports
FOLDER` keeps each part's report there, and the result counts all reports of the same source. A run
that is interrupted (`timeout -s INT 9m python ci/evidence.py ...`) says what it has seen so far.

A suite that others wrote (onnx's node tests) has a runner of its own, which hands its counts to
`write_suite`; such files are in ci/results/suites.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any
from xml.etree import ElementTree

import msgspec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "ci/results"
SUITES = RESULTS / "suites"
# Whose versions decide what a run shows.
PACKAGES = (
    "cuda-bindings",
    "cuda-core",
    "cuda-python",
    "hip-python",
    "ml_dtypes",
    "numpy",
    "nvidia-cuda-nvrtc",
    "nvidia-nvjitlink",
    "pytest",
    "torch",
    "transformers",
    "ziglang",
)

Count = Annotated[int, msgspec.Meta(ge=0)]
Word = Annotated[str, msgspec.Meta(pattern=r"^[\w .,:;()+/@~#-]{1,120}$")]
Date = Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d{2}-\d{2}$")]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}$")]


class Counts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Outcomes of tests, as pytest counts them."""

    passed: Count
    failed: Count
    skipped: Count


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run. source: the hash of ark's own source. on_device: tests passed on the row's backend.
    versions: what the backend's probe says of drivers and compilers. files: counts by test file.
    """

    row: Word
    backend: Word
    arch: Word
    date: Date
    source: Digest
    system: Word
    python: Word
    devices: Annotated[list[Word], msgspec.Meta(min_length=1)]
    versions: dict[Word, Word]
    packages: dict[Word, Word]
    on_device: Annotated[int, msgspec.Meta(ge=1)]
    total: Counts
    files: dict[Word, Counts]


class SuiteCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What came of a suite's tests. refused: by name, as nothing that ark has; refused_otherwise:
    with another error for people.
    """

    passed: Count
    refused: Count
    refused_otherwise: Count
    wrong: Count
    crashed: Count


class SuiteResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of a suite. tests: how many it has. selection: which of them were run."""

    suite: Word
    version: Word
    backend: Word
    device: Word
    emulated: bool
    date: Date
    source: Digest
    system: Word
    python: Word
    packages: dict[Word, Word]
    tests: Annotated[int, msgspec.Meta(ge=1)]
    selection: Word
    counts: SuiteCounts


def read_suite(path: Path) -> SuiteResult:
    """A suite's result file; ValueError, naming the file, if it is none or does not add up."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=SuiteResult)
    except (msgspec.DecodeError, OSError) as error:
        raise ValueError(f"{path.name} is no suite's result file: {error}") from error
    done = sum(msgspec.structs.astuple(found.counts))
    if not 0 < done <= found.tests or (found.selection == "all") != (done == found.tests):
        raise ValueError(f"{path.name}: the counts do not add up; run the suite again")
    if found.counts.crashed:
        raise ValueError(f"{path.name}: {found.counts.crashed} tests crashed; that is no evidence")
    return found


def write_suite(
    path: Path, suite: str, backend: str, tests: int, selection: str, counts: SuiteCounts
) -> None:
    """Writes what came of a run on a backend, the suite being the package of that name."""
    from ark.backend import registry
    from ark.runtime.cache import code_digest

    probe = registry.probe(backend)
    made = SuiteResult(
        suite=f"{suite}: backend node tests",
        version=metadata.version(suite),
        backend=backend,
        device=_word(f"{probe.devices[0].name} ({probe.devices[0].arch})"),
        emulated="emulat" in " ".join([*probe.notes, probe.devices[0].name]).lower(),
        date=datetime.date.today().isoformat(),
        source=code_digest()[:16],
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        packages=installed(),
        tests=tests,
        selection=selection,
        counts=counts,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n")
    try:
        read_suite(path)
    except ValueError:
        path.unlink()
        raise


def read(path: Path) -> Result:
    """A result file; ValueError, naming the file, if it is none or does not add up."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Result)
    except (msgspec.DecodeError, OSError) as error:
        raise ValueError(f"{path.name} is no result file: {error}; run ci/evidence.py") from error
    if add(found.files.values()) != found.total or found.on_device > found.total.passed:
        raise ValueError(f"{path.name}: the counts do not add up; run ci/evidence.py again")
    if found.total.failed:
        raise ValueError(f"{path.name}: {found.total.failed} tests failed; that is no evidence")
    return found


def add(counts: Any) -> Counts:
    """The sum of counts."""
    listed = list(counts)
    return Counts(*(sum(getattr(c, f) for c in listed) for f in Counts.__struct_fields__))


def count(reports: Sequence[Path], backend: str) -> tuple[dict[str, Counts], int]:
    """Counts by file from JUnit reports, and how many tests passed on `backend`. A test that is in
    several counts as in the last one.

    Such a test says so in its parameters or its file's name.
    """
    files: dict[str, Counts] = {}
    on_device = 0
    cases = {
        (case.get("classname", ""), case.get("name", "")): case
        for report in reports
        for case in ElementTree.parse(report).getroot().iter("testcase")
    }
    for case in cases.values():
        words = case.get("classname", "").split(".")
        name = "/".join(w for w in words if not w.startswith("Test")) or "unknown"
        failed = case.find("failure") is not None or case.find("error") is not None
        skipped = not failed and case.find("skipped") is not None
        passed = not failed and not skipped
        one = Counts(int(passed), int(failed), int(skipped))
        files[name] = add((files.get(name, Counts(0, 0, 0)), one))
        parameters = case.get("name", "").partition("[")[2].rstrip("]").split("-")
        on_device += passed and (backend in parameters or f"_{backend}_" in words[-1])
    return files, on_device


def _canonical(package: str | None) -> str:
    return (package or "").lower().replace("_", "-")


def _word(text: object) -> str:
    """What a driver or package says of itself, as far as a result file may hold it."""
    return re.sub(r"[^\w .,:;()+/@~#-]", "-", str(text))[:120] or "unknown"


def tree_digest(*folders: str) -> str:
    """A hash of the source files in ark/, backends/ and further folders of the tree."""
    found = hashlib.sha256()
    for folder in ("ark", "backends", *folders):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".h", ".c", ".cpp"):
                found.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return found.hexdigest()[:16]


def installed() -> dict[str, str]:
    installed = {_canonical(d.metadata["Name"]): d.version for d in metadata.distributions()}
    return {p: _word(installed[_canonical(p)]) for p in PACKAGES if _canonical(p) in installed}


def describe(row: dict[str, Any], reports: Sequence[Path]) -> Result:
    """What the runs with these reports show; ValueError if they show nothing."""
    from ark.backend import registry
    from ark.runtime.cache import code_digest

    probe = registry.probe(row["backend"])
    devices = [
        d
        for d in probe.devices
        if row["arch"] in ("native", d.arch) and row.get("device", "") in d.name
    ]
    if not devices:
        seen = ", ".join(f"{d.name} ({d.arch})" for d in probe.devices) or probe.reason
        raise ValueError(f"row {row['name']} is about {row['machine']}; this machine has: {seen}")
    if "emulat" in " ".join([*probe.notes, *(d.name for d in devices)]).lower():
        raise ValueError("the devices are emulated; a result file speaks of real ones")
    files, on_device = count(reports, row["backend"])
    total = add(files.values())
    if total.failed or not on_device:
        raise ValueError(f"{total.failed} tests failed, {on_device} passed on {row['backend']}")
    return Result(
        row=row["name"],
        backend=row["backend"],
        arch=row["arch"],
        date=datetime.date.today().isoformat(),
        source=code_digest()[:16],
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        devices=[_word(d.name) for d in devices],
        versions={_word(k): _word(v) for k, v in sorted(probe.versions.items())},
        packages=installed(),
        on_device=on_device,
        total=total,
        files={_word(k): v for k, v in sorted(files.items())},
    )


def _reports(folder: Path) -> list[Path]:
    """The reports there of ark's present source, and the next one, which is to be written."""
    from ark.runtime.cache import code_digest

    own = folder / code_digest()[:16]
    own.mkdir(parents=True, exist_ok=True)
    found = sorted(own.glob("*.xml"))
    return [*found, own / f"{len(found):03}.xml"]


def _run(row: dict[str, Any], report: Path, rest: list[str]) -> int:
    """Runs the row's tests; pytest's exit code, also after an interrupt, which pytest gets too."""
    environment = {**os.environ, "ARK_REQUIRE": row["require"], **row.get("environment", {})}
    words = [sys.executable, "-m", "pytest", *row["tests"], f"--junitxml={report}", *rest]
    with subprocess.Popen(words, cwd=ROOT, env=environment) as running:
        try:
            return running.wait()
        except KeyboardInterrupt:
            return running.wait() or 2


def _summary(report: Path, code: int) -> str:
    """What a run that ended with such a code has seen."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    names = "".join(f"\n  {c.get('classname')}::{c.get('name')}" for c in bad)
    return f"pytest ended with {code}, after {len(cases)} tests; {len(bad)} failed{names}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("row", help="a row of ci/matrix.toml")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the folder for the file")
    parser.add_argument(
        "--reports", type=Path, help="a folder that keeps the reports of a row that runs in parts"
    )
    known, rest = parser.parse_known_args(argv)
    rows = tomllib.loads((ROOT / "ci/matrix.toml").read_text())["row"]
    row = next((r for r in rows if r["name"] == known.row), None)
    if row is None:
        parser.error(f"no row {known.row!r}; there are {', '.join(r['name'] for r in rows)}")
    with tempfile.TemporaryDirectory(prefix="ark-evidence-") as folder:
        reports = _reports(known.reports or Path(folder))
        code = _run(row, reports[-1], rest)
        try:
            if code:
                raise ValueError(_summary(reports[-1], code))
            made = describe(row, reports)
            checked = msgspec.json.decode(msgspec.json.encode(made), type=Result)
        except (ValueError, OSError, ElementTree.ParseError) as error:
            if known.reports:  # the same part may be run again
                reports[-1].unlink(missing_ok=True)
            print(f"no result is written: {error}", file=sys.stderr)
            return code or 1
    known.output.mkdir(parents=True, exist_ok=True)
    path = known.output / f"{row['name']}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(checked), indent=2) + b"\n")
    print(f"wrote {path}; `python ci/generate.py` takes it into ci/coverage.md")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
