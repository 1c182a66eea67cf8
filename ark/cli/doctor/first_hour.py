"""`ark doctor --first-hour`: runs the first steps on a kind of device that ark has not run on
before.

Each step is a command in a separate process with a time limit, so that a crash or a hang does not
affect the other steps. All outputs are written to one archive. Called by ark.cli.doctor.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ark._version import __version__
from ark.backend.protocol import Probe
from ark.errors import SystemError

LIMIT_S = 600.0  # the time limit of a step
PROMPT = ("--prompt", "The king said to his servants,", "--max-new-tokens", "24")
GREEDY = ("--temperature", "0", "--context", "64")
MODEL = Path("examples/noah")  # in ark's repository

Outcome = Literal["pass", "fail", "left out"]


@dataclass(frozen=True)
class Step:
    """One step of `ark doctor --first-hour`: a command and its outcome. text: the command's output,
    or the reason why it was not run.
    """

    name: str
    command: str
    outcome: Outcome
    text: str
    seconds: float = 0.0
    output: str = ""
    errors: str = ""


@dataclass(frozen=True)
class Hour:
    """The parameters of `ark doctor --first-hour`, which all its steps use. model: a directory with
    a checkpoint, or None. emulated: True if the device is emulated, so that times would say nothing
    about hardware.
    """

    backend: str
    device: int
    devices: int
    model: Path | None
    emulated: bool


def find_model(given: str | None) -> Path | None:
    """The checkpoint to decode with: the given one, otherwise the example in ark's repository if
    that exists here, otherwise None.
    """
    if given is not None:
        return Path(given)
    return MODEL if (MODEL / "config.json").is_file() else None


def run_ark(words: Sequence[str], limit_s: float = LIMIT_S) -> Step:
    """Runs the command `ark` with these words. The step is named after the first word."""
    command = "ark " + " ".join(f'"{w}"' if " " in w else w for w in words)
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ark", *words],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as late:
        streams = [(t or b"").decode(errors="replace") for t in (late.stdout, late.stderr)]
        text = f"did not end within {limit_s:.0f} s"
        return Step(words[0], command, "fail", text, time.monotonic() - begin, *streams)
    seconds = time.monotonic() - begin
    text = "" if done.returncode == 0 else f"ended with code {done.returncode}"
    if done.returncode and done.stderr.strip():
        text += f": {done.stderr.strip().splitlines()[0]}"
    outcome: Outcome = "fail" if done.returncode else "pass"
    return Step(words[0], command, outcome, text, seconds, done.stdout, done.stderr)


def _named(step: Step, name: str, text: str | None = None, outcome: Outcome | None = None) -> Step:
    fields = {**asdict(step), "name": name}
    if text is not None:
        fields["text"] = text
    if outcome is not None:
        fields["outcome"] = outcome
    return Step(**fields)


def _doctor(hour: Hour) -> Step:
    """Runs all checks of `ark doctor`. The step's text names the checks that failed."""
    device = ("--device", str(hour.device))
    step = run_ark(("doctor", "--backend", hour.backend, *device, "--json"))
    try:
        checks = json.loads(step.output)["checks"]
        failed = [f"{c['check']}: {c['text']}" for c in checks if c["verdict"] == "fail"]
        if failed:
            return _named(step, "doctor", "; ".join(failed))
        passed = sum(c["verdict"] == "pass" for c in checks)
        return _named(step, "doctor", f"{passed} of {len(checks)} checks passed, none failed")
    except (ValueError, KeyError, TypeError):
        return step


def _tokens(step: Step) -> list[int] | None:
    try:
        tokens = json.loads(step.output)["tokens"]
    except (ValueError, KeyError, TypeError):
        return None
    return tokens if step.outcome == "pass" and isinstance(tokens, list) else None


def _decode(hour: Hour) -> Iterator[Step]:
    """Runs and yields steps that decode on the CPU, on the device and on two ranks, and compare the
    tokens.
    """
    if hour.model is None:
        missing = f"there is no checkpoint at {MODEL}; give one with --model DIR"
        yield Step("decode", "", "left out", missing)
        return
    words = ("generate", str(hour.model), *PROMPT, *GREEDY, "--json")
    wanted = run_ark((*words, "--backend", "cpu"))
    expected = _tokens(wanted)
    yield _named(wanted, "decode on the CPU")
    many = (("decode", ("--device", str(hour.device))), ("decode, 2 ranks", ("--ranks", "2")))
    for name, extra in many:
        if extra[0] == "--ranks" and hour.devices < 2:
            yield Step(name, "", "left out", "it needs two devices")
            continue
        step = run_ark((*words, "--backend", hour.backend, *extra))
        got = _tokens(step)
        if got is None or expected is None:
            yield _named(step, name, outcome="fail" if got is None else None)
        elif got == expected:
            yield _named(step, name, f"{len(got)} tokens, the CPU's")
        else:
            yield _named(step, name, f"{got}, but the CPU's tokens are {expected}", "fail")


def _figures(hour: Hour) -> Step:
    """Measures the microseconds per token of a decoder. Omitted on emulated devices."""
    if hour.model is None or hour.emulated:
        reason = "no checkpoint" if hour.model is None else "an emulated device has no speed"
        return Step("bench decode", "", "left out", reason)
    sizes = ("--tokens", "64", "--repeats", "3")
    step = run_ark(
        ("bench", "decode", "--config", str(hour.model), "--backend", hour.backend, *sizes)
    )
    return _named(step, "bench decode")


def steps(hour: Hour) -> Iterator[Step]:
    """Runs all steps in order, and yields each step when it has ended."""
    yield _named(run_ark(("info", "--json", "--require", f"{hour.backend}:1")), "info")
    yield _doctor(hour)
    yield from _decode(hour)
    yield _figures(hour)


def verdict(done: Sequence[Step], hour: Hour) -> tuple[bool, str, str]:
    """Returns True if nothing failed, the verdict in words, and what to do next."""
    page = f"docs/first-hour-{hour.backend}.md"
    failed = [step for step in done if step.outcome == "fail"]
    if failed:
        first = failed[0]
        return (
            False,
            f"{', '.join(s.name for s in failed)} failed",
            f"look for {first.name!r} in {page}, mend it, and run this again; or send the archive. "
            f"By itself: {first.command}",
        )
    where = "on emulated devices, which proves nothing about hardware" if hour.emulated else "here"
    left = [step.name for step in done if step.outcome == "left out"]
    text = f"everything that ran passed {where}"
    if left:
        text += f"; left out: {', '.join(left)}"
    return (
        True,
        text,
        f"in ark's repository run ARK_REQUIRE={hour.backend}:1 python ci/evidence.py ROW with the "
        f"row of ci/matrix.toml ({page})",
    )


def write_archive(path: Path, done: Sequence[Step], hour: Hour, probe: Probe, words: str) -> None:
    """Writes all outputs and a report as a zip file. Raises SystemError if it cannot be written."""
    report = {
        "ark": __version__,
        "backend": hour.backend,
        "emulated": hour.emulated,
        "devices": [asdict(info) for info in probe.devices],
        "versions": probe.versions,
        "notes": list(probe.notes),
        "verdict": words,
        "steps": [
            {k: v for k, v in asdict(step).items() if k not in ("output", "errors")}
            for step in done
        ],
    }
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("report.json", json.dumps(report, indent=2))
            for number, step in enumerate(done):
                stem = f"{number}-{step.name.replace(' ', '-').replace(',', '')}"
                if step.output:
                    archive.writestr(f"{stem}.out", step.output)
                if step.errors:
                    archive.writestr(f"{stem}.err", step.errors)
    except OSError as error:
        raise SystemError(f"{path} cannot be written: {error}; choose another --bundle") from error


def run(hour: Hour, probe: Probe, archive: Path, show: Callable[[str], None]) -> int:
    """Runs all steps, shows one line for each and writes the archive. Returns the command's exit
    code. The archive is written after each step, so that it exists even if the machine stops.
    """
    done: list[Step] = []
    write_archive(archive, done, hour, probe, "no step has ended")
    for step in steps(hour):
        taken = f" ({step.seconds:.0f} s)" if step.command else ""
        show(f"{step.outcome:8}  {step.name:18} {step.text}{taken}".rstrip())
        done.append(step)
        write_archive(archive, done, hour, probe, f"not all steps have ended: {len(done)} have")
    good, words, following = verdict(done, hour)
    write_archive(archive, done, hour, probe, words)
    show(f"verdict: {words}")
    show(f"send: {archive} (outputs and versions; it names folders of this machine)")
    show(f"next: {following}")
    return 0 if good else 1
