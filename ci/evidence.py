"""Runs the tests of a row of ci/matrix.toml on the machine that the row names and writes the
outcome, for ci/coverage.md.

`python ci/evidence.py cuda-h100` (or `nox -s cuda-h100`) runs the tests of that row of
ci/matrix.toml and writes ci/results/cuda-h100.json: the devices, the versions of drivers and
packages, the date, and the counts of pytest's own report. If a test failed, or no test ran on such
a device, no file is written. ci/generate.py reads the files back through the same schema.

`--label nvrtc-13.5` names an additional run of a row, with other versions of packages. Its result
is written to ROW+LABEL.json, beside ROW.json.

If a machine is available only for minutes at a time, a row can be run in parts, which are selected
by pytest's options. `--reports FOLDER` keeps each part's report in FOLDER, and the result counts
all reports of the same source. An interrupted run (`timeout -s INT 9m python ci/evidence.py ...`)
reports the outcome so far.

A suite of another project (onnx's node tests) has its own runner, which passes its counts to
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
# Packages whose versions affect a run's outcome.
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
    """Counts of test outcomes, as pytest reports them."""

    passed: Count
    failed: Count
    skipped: Count


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The results of one run of the tests. source: the hash of ark's source. on_device: the number
    of tests that passed on the backend of the table's row. versions: versions of drivers and
    compilers, from the backend's probe. files: the counts of each test file.
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
    """Counts of the outcomes of a suite's tests. refused: ended with an error that names an
    unsupported operator, type or opset. refused_otherwise: ended with another error message of ark.
    """

    passed: Count
    refused: Count
    refused_otherwise: Count
    wrong: Count
    crashed: Count


class SuiteResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of a suite. tests: their number. selection: a description of the tests that were
    run.
    """

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
    """Reads the result file of a suite; raises ValueError with the file name if it is not valid."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=SuiteResult)
    except (msgspec.DecodeError, OSError) as error:
        raise ValueError(f"{path.name} is not a suite's result file: {error}") from error
    done = sum(msgspec.structs.astuple(result.counts))
    if not 0 < done <= result.tests or (result.selection == "all") != (done == result.tests):
        raise ValueError(f"{path.name}: the counts do not add up; run the suite again")
    if result.counts.crashed:
        raise ValueError(
            f"{path.name}: {result.counts.crashed} tests crashed; fix them and run the suite again"
        )
    return result


def write_suite(
    path: Path, suite: str, backend: str, tests: int, selection: str, counts: SuiteCounts
) -> None:
    """Writes the outcome of a run on a backend; the suite is the package of that name."""
    from ark.backend import registry
    from ark.runtime.cache import code_digest

    probe = registry.probe(backend)
    result = SuiteResult(
        suite=f"{suite}: backend node tests",
        version=metadata.version(suite),
        backend=backend,
        device=_word(f"{probe.devices[0].name} ({probe.devices[0].arch})"),
        emulated=probe.emulated,
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
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    try:
        read_suite(path)
    except ValueError:
        path.unlink()
        raise


def read(path: Path) -> Result:
    """Reads the result file of a row; raises ValueError with the file name if it is not valid."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=Result)
    except (msgspec.DecodeError, OSError) as error:
        raise ValueError(
            f"{path.name} is not a result file: {error}; run ci/evidence.py"
        ) from error
    if add(result.files.values()) != result.total or result.on_device > result.total.passed:
        raise ValueError(f"{path.name}: the counts do not add up; run ci/evidence.py again")
    if result.total.failed:
        raise ValueError(
            f"{path.name}: {result.total.failed} tests failed; fix them and run this row again"
        )
    return result


def add(counts: Any) -> Counts:
    """Adds up counts, outcome by outcome."""
    listed = list(counts)
    return Counts(*(sum(getattr(c, f) for c in listed) for f in Counts.__struct_fields__))


def count(reports: Sequence[Path], backend: str) -> tuple[dict[str, Counts], int]:
    """Counts by file from JUnit reports, and the number of tests passed on `backend`. A test in
    several reports counts as in the last one.

    A test's backend is in its parameters or its file's name.
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
    """The version text of a driver or package, shortened for a result file."""
    return re.sub(r"[^\w .,:;()+/@~#-]", "-", str(text))[:120] or "unknown"


def tree_digest(*folders: str) -> str:
    """A hash of the source files in ark/, backends/ and the given folders of the repository."""
    digest = hashlib.sha256()
    for folder in ("ark", "backends", *folders):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".h", ".c", ".cpp"):
                digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def installed() -> dict[str, str]:
    installed = {_canonical(d.metadata["Name"]): d.version for d in metadata.distributions()}
    return {p: _word(installed[_canonical(p)]) for p in PACKAGES if _canonical(p) in installed}


def describe(row: dict[str, Any], reports: Sequence[Path]) -> Result:
    """The content of the row's result file, from pytest's reports of its runs. Raises ValueError if
    no test passed on the row's device.
    """
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
        raise ValueError(f"row {row['name']} needs {row['machine']}; this machine has: {seen}")
    if probe.emulated:
        raise ValueError("the devices are emulated; result files are for real devices only")
    files, on_device = count(reports, row["backend"])
    total = add(files.values())
    if total.failed or not on_device:
        raise ValueError(
            f"{total.failed} tests failed and {on_device} passed on {row['backend']}; expected no "
            "failure and at least one pass"
        )
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
    """The pytest reports in a folder that belong to ark's present source, followed by the path for
    the next report.
    """
    from ark.runtime.cache import code_digest

    own = folder / code_digest()[:16]
    own.mkdir(parents=True, exist_ok=True)
    reports = sorted(own.glob("*.xml"))
    return [*reports, own / f"{len(reports):03}.xml"]


def _run(row: dict[str, Any], report: Path, rest: list[str]) -> int:
    """Runs the row's tests and returns pytest's exit code. After an interrupt, which pytest
    receives too, waits until pytest has ended.
    """
    environment = {**os.environ, "ARK_REQUIRE": row["require"], **row.get("environment", {})}
    words = [sys.executable, "-m", "pytest", *row["tests"], f"--junitxml={report}", *rest]
    with subprocess.Popen(words, cwd=ROOT, env=environment) as running:
        try:
            return running.wait()
        except KeyboardInterrupt:
            return running.wait() or 2


def _summary(report: Path, code: int) -> str:
    """The outcome of a pytest run as a line of text, from its report and its exit code, with the
    failed tests.
    """
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    names = "".join(f"\n  {c.get('classname')}::{c.get('name')}" for c in bad)
    return f"pytest ended with {code}, after {len(cases)} tests; {len(bad)} failed{names}"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("row", help="a row of ci/matrix.toml")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the folder for the file")
    parser.add_argument(
        "--label", default="", help="the name of a further run of the row, with other packages"
    )
    parser.add_argument(
        "--reports", type=Path, help="a folder that keeps the reports of a row that runs in parts"
    )
    known, rest = parser.parse_known_args(argv)
    if not re.fullmatch(r"[\w.-]*", known.label):
        parser.error(f"a label has letters, digits, '.', '_' and '-' only, not {known.label!r}")
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
            result = describe(row, reports)
            checked = msgspec.json.decode(msgspec.json.encode(result), type=Result)
        except (ValueError, OSError, ElementTree.ParseError) as error:
            if known.reports:  # the same part may be run again
                reports[-1].unlink(missing_ok=True)
            print(f"no result is written: {error}", file=sys.stderr)
            return code or 1
    known.output.mkdir(parents=True, exist_ok=True)
    path = known.output / f"{row['name']}{'+' if known.label else ''}{known.label}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(checked), indent=2) + b"\n")
    print(f"wrote {path}; `python ci/generate.py` takes it into ci/coverage.md")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
