"""The format in which every `ark bench ... --json` writes its results. A schema checks it whenever
it is read. Called by ark.cli.common, ark.cli.bench and the other benches of the command line, and
by ci/figures.py.
"""

from __future__ import annotations

import datetime
import math
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ark._version import __version__
from ark.backend.protocol import Probe
from ark.machine import Machine
from ark.runtime.cache import code_digest

# Packages whose versions affect the times of the frameworks that ark is compared with; the
# backend's probe reports further ones.
PACKAGES = ("ml_dtypes", "numpy", "torch", "torchvision", "transformers", "onnxruntime")

Word = Annotated[str, Meta(max_length=200)]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][\w .,:;()+/@~#*\[\]=-]{0,159}$")]
Time = Annotated[float, Meta(gt=0, le=1e12)]  # us
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
Date = Annotated[str, Meta(pattern=r"^\d{4}-\d{2}-\d{2}$")]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$")]
Commit = Annotated[str, Meta(pattern=r"^([0-9a-f]{7,40}(-changed)?)?$")]


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine on which a bench ran. name: the name that the device reports. processors: the
    number of processors that the kernel used. devices: the number of devices, which is one or the
    number of ranks.
    """

    name: Word
    arch: Word
    backend: Word
    processors: Count
    devices: Count = 1


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of one measured case. figure: the case's name. us: ark's time in microseconds;
    absent if `error` has a reason. peer: the name of the library that took peer_us for the same
    computation. ratio: peer_us / us, above 1 if ark is faster. detail: further values of the bench,
    by name.
    """

    figure: Name
    us: Time | None = None
    peer: Word = ""
    peer_us: Time | None = None
    ratio: Time | None = None
    error: Annotated[str, Meta(max_length=2000)] = ""
    detail: dict[str, Any] = {}


class Results(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of a bench. commit: the commit of ark's checkout, empty if there is none. source: the
    hash of ark's Python source. command: the words of the command line.
    """

    machine: Place
    versions: dict[Word, Word]
    commit: Commit
    source: Digest
    date: Date
    command: Annotated[str, Meta(max_length=2000)]
    figures: list[Figure]

    def holding(self, figures: Iterable[Figure]) -> Results:
        """Returns the same run with these figures, after a check of the result."""
        return checked(msgspec.structs.replace(self, figures=list(figures)))


def figure(
    name: str,
    seconds: float | None,
    peer: str = "",
    peer_seconds: float | None = None,
    error: str = "",
    detail: Mapping[str, Any] | None = None,
) -> Figure:
    """A Figure, the result of one measured case. Times are given in seconds, the unit of the
    benches; the ratio is computed from them.
    """
    us = seconds * 1e6 if seconds else None
    peer_us = peer_seconds * 1e6 if peer_seconds else None
    ratio = peer_us / us if us and peer_us else None
    return Figure(name, us, peer if peer_us else "", peer_us, ratio, error, _plain(detail or {}))


def _plain(value: Any) -> Any:
    """The value as JSON can hold it; numbers that are not finite become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def results(
    probe: Probe,
    index: int,
    machine: Machine,
    words: Sequence[str],
    figures: Sequence[Figure],
    *,
    devices: int = 1,
    name: str = "",
) -> Results:
    """The results of a run of `ark words...`. name: replaces the device's own name."""
    device = name or probe.devices[index].name
    place = Place(device, machine.arch, machine.backend, machine.processors, devices)
    return results_at(place, words, figures, probe.versions)


def results_at(
    place: Place,
    words: Sequence[str],
    figures: Sequence[Figure],
    more_versions: Mapping[str, object] | None = None,
) -> Results:
    """The results of a run of `ark words...` on the machine `place`. more_versions: versions of
    drivers and other software.
    """
    return checked(
        Results(
            place,
            {**versions(), **{k: str(v) for k, v in sorted((more_versions or {}).items())}},
            commit(),
            code_digest()[:16],
            datetime.date.today().isoformat(),
            " ".join(["ark", *_without_file(words)])[:2000],
            list(figures),
        )
    )


def _without_file(words: Sequence[str]) -> list[str]:
    """The words of a command line without `--json FILE`, which does not affect the measurement."""
    places = [i for i, word in enumerate(words) if word == "--json"]
    return [w for i, w in enumerate(words) if i not in places and i - 1 not in places]


def checked(run: Results) -> Results:
    """Checks a run against the schema, and that each ratio equals the quotient of its times.
    Returns the run. Raises ValueError if a check fails.
    """
    try:
        decoded = msgspec.json.decode(msgspec.json.encode(run), type=Results)
    except msgspec.ValidationError as error:
        raise ValueError(f"not a file of results: {error}") from error
    for row in decoded.figures:
        if (row.us is None) == (not row.error):
            raise ValueError(f"{row.figure}: expected a time or an error")
        if (row.peer_us is None) != (not row.peer):
            raise ValueError(f"{row.figure}: expected a peer's name and its time, or neither")
        if row.us and row.peer_us and not _near(row.ratio, row.peer_us / row.us):
            raise ValueError(f"{row.figure}: the ratio {row.ratio} does not equal peer_us / us")
    return decoded


def _near(ratio: float | None, expected: float) -> bool:
    return ratio is not None and abs(ratio - expected) <= 1e-6 * expected


def encode(run: Results) -> str:
    """The results as JSON text."""
    return msgspec.json.format(msgspec.json.encode(run), indent=1).decode() + "\n"


def read(path: Path) -> Results:
    """Reads a file that `ark bench ... --json FILE` wrote. Raises ValueError with its name if it is
    not such a file.
    """
    try:
        return checked(msgspec.json.decode(path.read_bytes(), type=Results))
    except (msgspec.DecodeError, OSError, ValueError) as error:
        raise ValueError(f"{path.name}: {error}") from error


def versions() -> dict[str, str]:
    """Versions of ark, Python and the packages that matter, if installed."""
    versions_of = {"ark": __version__, "Python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions_of[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions_of


def commit() -> str:
    """The commit of ark's checkout, with `-changed` if files differ; empty without a checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return ""
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        return head + ("-changed" if _git(root, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(root: Path, *words: str) -> str:
    command = ["git", "-C", str(root), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()
