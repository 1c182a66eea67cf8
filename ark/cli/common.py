"""Functions that several commands share: choice of a backend, display of progress, and reading and
writing of files.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from ark.backend import registry
from ark.backend.protocol import Backend, Probe
from ark.cli.measure.results import Results, encode
from ark.errors import InvalidUsageError, PlanError, SystemError
from ark.machine import Machine
from ark.plan.serialize import from_json, machine_of
from ark.plan.types import Plan
from ark.runtime.admission import memory_shortage
from ark.runtime.rank_info import RankInfo

MAX_TEXT_BYTES = 1 << 28  # largest file that is read; a device such as /dev/zero has no end

# Lines of errors are wrapped on a terminal only, so that programs that read them get whole lines.
errors = Console(stderr=True, markup=False, soft_wrap=not sys.stderr.isatty())

WHOLE_COLUMNS = 1000  # width of output that is not a terminal, so that rows are not wrapped


def output(highlight: bool = True) -> Console:
    """The console that writes tables to standard output."""
    console = Console(markup=False, highlight=highlight)
    if not console.is_terminal:
        console.width = WHOLE_COLUMNS
    return console


Result = TypeVar("Result")


def from_script(build: Callable[[str, Machine], Result], path: str, machine: Machine) -> Result:
    """Calls `build` for a Python script and returns the result. What the script prints goes to
    standard error, because standard output is for the command's own result. If the script raises an
    error, its traceback is printed.
    """
    from ark.runtime.planner import ScriptError

    try:
        with contextlib.redirect_stdout(sys.stderr):
            return build(path, machine)
    except ScriptError as error:
        assert error.__cause__ is not None
        traceback.print_exception(error.__cause__)
        raise


def tell_backend(given: str | None, backend: Backend, probe: Probe) -> None:
    """If no accelerator was found, prints the device on which a command runs. Also prints the
    probe's notes. given: the backend's name from the command line, or None.
    """
    if given is None and backend.name == registry.FALLBACK:
        errors.print(f"no accelerator found; running on {probe.devices[0].name}", style="dim")
    for note in probe.notes:
        errors.print(note, style="yellow")


def visible(text: str) -> str:
    """The text with control characters escaped. A terminal would execute control characters in a
    model's text.
    """
    return "".join(
        c if c.isprintable() or c in "\n\t" or ord(c) > 0xA0 else ascii(c)[1:-1] for c in text
    )


def to_be_started(ranks: int, rank_info: RankInfo) -> bool:
    """True if this process must start N ranks for `--ranks N`; False if this process is itself one
    of these ranks. Raises InvalidUsageError if N contradicts the launcher that started this
    process.
    """
    if ranks not in (1, rank_info.world_size) and rank_info.world_size > 1:
        raise InvalidUsageError(
            f"--ranks {ranks} contradicts the launcher, which started {rank_info.world_size}; "
            "omit --ranks under a launcher"
        )
    return ranks > rank_info.world_size


def device_index(asked: int | None, rank_info: RankInfo, devices: int) -> int:
    """The index of the device to open: `asked`, or if it is None, an index from the rank's number
    on this host.
    """
    return rank_info.local_rank % devices if asked is None else asked


def check_device(index: int, backend: str, devices: int) -> None:
    """Raises InvalidUsageError unless the backend has a device of this index."""
    if not 0 <= index < devices:
        raise InvalidUsageError(f"device {index} does not exist; {backend} has {devices}")


def share(machine: Machine, backend: str, ranks: int, devices: int) -> Machine:
    """The machine model for each rank. If there are fewer devices than ranks, each rank gets a part
    of the host's processors. Accelerators cannot be shared in this way; for them SystemError is
    raised.
    """
    if ranks <= devices:
        return machine
    if backend != registry.FALLBACK:
        raise SystemError(
            f"{ranks} ranks need {ranks} devices of {backend!r}, but {devices} were found; every "
            "rank's kernel must be resident at the same time, so ranks cannot share a device"
        )
    return machine.with_processors(max(1, machine.processors // ranks))


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Shows a progress bar on standard error, and removes it at the end. Nothing is shown if
    `quiet` is True or standard error is not a terminal.
    """
    if quiet or not errors.is_terminal:
        yield lambda stage, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=errors, transient=True) as bars:
        shown: dict[str, object] = {}

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in shown:
                for other in shown.values():
                    bars.update(other, visible=False)  # type: ignore[arg-type]
                # If the total is unknown (0), the bar shows activity without a length.
                shown[stage] = bars.add_task(stage, total=total or None)
            bars.update(shown[stage], completed=done, total=total or None)  # type: ignore[arg-type]

        yield tell


def write_file(path: str, data: str | bytes) -> None:
    """Writes a file completely or not at all. Raises SystemError if it cannot be written.

    If the path is an existing device, or a pipe with a reader, the data is written into it and it
    is never replaced.
    """
    target = Path(path)
    content = data.encode() if isinstance(data, str) else data
    temporary = None
    try:
        if target.exists() and not target.is_file():
            _write_to_device(target, content)
            return
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as out:
            out.write(content)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        reason = error.strerror or error
        raise SystemError(f"{path} cannot be written: {reason}; choose another place") from error


def write_results(path: str | None, results: Results, done: bool = True) -> None:
    """Writes the results of a bench in the format of ark.cli.measure.results. path: a file, - for
    standard output, or None for no output. done: False if the results are not complete yet; they
    are then written only if `path` is a file.
    """
    if path == "-" and done:
        sys.stdout.write(encode(results))
    elif path and path != "-":
        write_file(path, encode(results))


def _write_to_device(target: Path, content: bytes) -> None:
    try:
        # The target may be a named pipe. Without O_NONBLOCK, opening it would block until a process
        # reads it.
        handle = os.open(target, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO and target.is_fifo():
            raise OSError("it is a pipe without a reader") from None
        raise
    os.set_blocking(handle, True)
    with os.fdopen(handle, "wb") as out:
        out.write(content)


def memory_verdict(plans: Sequence[Plan]) -> int:
    """Returns a command's exit status: 1 if a plan needs more memory than its machine has,
    otherwise 0. Prints the missing memory on standard error.
    """
    for plan in plans:
        machine = machine_of(plan)
        shortage = memory_shortage(plan, machine.memory_bytes, f"{machine.name} has only")
        if shortage:
            errors.print(f"ark: {shortage}", style="red", soft_wrap=True)
            return 1
    return 0


def read_plan(path: str) -> Plan:
    """Reads a plan from a file. Raises PlanError with the file's name if it is not a plan. The plan
    is not verified here.
    """
    text = read_file(path, "a plan")
    try:
        return from_json(text)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def read_file(path: str, role: str) -> str:
    """Reads a text file. Raises InvalidUsageError if it cannot be read, or is a named pipe, because
    such a pipe may never have a writer. Pipes of a shell, in /dev and /proc, are read. role: the
    file's purpose in errors.
    """
    try:
        if Path(path).is_fifo() and not path.startswith(("/dev/", "/proc/")):
            raise OSError("it is a pipe")
        with open(path, encoding="utf-8") as source:
            text = source.read(MAX_TEXT_BYTES + 1)
        if len(text) > MAX_TEXT_BYTES:
            raise OSError(f"it has more than {MAX_TEXT_BYTES} characters")
        return text
    except (OSError, ValueError) as error:
        raise InvalidUsageError(f"{path} cannot be read as {role}: {error}") from error
