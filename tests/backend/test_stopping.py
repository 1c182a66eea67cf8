"""A working kernel ends when it is stopped, and no memory is freed while it still runs.

A failure is a crash (a signal), a wait for all requested iterations (the test's time limit), or
lost text.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ark.backend import registry
from ark.errors import InvalidUsageError
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from ark.runtime import watchdog
from tests.checkpoints import make_endless

pytestmark = pytest.mark.emulated("slow")

LONG_CONTEXT = 60_000
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True, scope="module")
def _interrupts_arrive() -> Iterator[None]:
    """Sets Python's own handler of SIGINT during the test: a shell starts background processes with
    SIGINT ignored, and child processes would inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a small model with a long context and no end token."""
    return make_endless(tmp_path_factory.mktemp("endless"), LONG_CONTEXT)


def command(backend: str, directory: Path, *extra: str) -> list[str]:
    words = ["generate", str(directory), "--prompt", "The fox", "--backend", backend]
    words += ["--context", str(LONG_CONTEXT), "--max-new-tokens", str(LONG_CONTEXT), *extra]
    return [sys.executable, "-m", "ark", *words]


def begin(argv: list[str], **extra: Any) -> subprocess.Popen[str]:
    """Starts a process that is killed when this one ends; if it stayed on the GPU, it would disturb
    later tests.
    """
    tied = [sys.executable, "-S", "-E", watchdog.__file__, str(os.getpid()), *argv]
    return subprocess.Popen(
        tied, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, **extra
    )


def script(text: str, backend: str) -> subprocess.CompletedProcess[str]:
    head = f"import ark, numpy as np\nark.init(backend={backend!r})\n"
    return subprocess.run(
        [sys.executable, "-c", head + text], capture_output=True, text=True, timeout=120, cwd=ROOT
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_generation_and_keeps_the_text(
    backend: str, endless: Path, number: int, code: int
) -> None:
    process = begin(command(backend, endless))
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(number)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert (first + rest).endswith("\n") and "Traceback" not in err


MOMENTS = ("importlib.resources", "numpy", "ark.plan", "ark.cli", "argparse", "ark.cli.doctor")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("way", ["module", "script"])
def test_interrupt_while_the_command_still_loads(tmp_path: Path, way: str, moment: str) -> None:
    """A command that gets SIGINT while it imports a module ends without a traceback. moment: the
    module.
    """
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {moment!r} and 'ark' in sys.modules:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    paths = [str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    script = Path(sysconfig.get_path("scripts"), "ark")
    argv = ["-m", "ark"] if way == "module" else [str(script)]
    done = subprocess.run(
        [sys.executable, *argv, "doctor", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_interrupt_keeps_the_tokens_of_json(backend: str, endless: Path) -> None:
    process = begin(
        interrupting("generate, 'read_tokens'", "ark.models", command(backend, endless, "--json"))
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    row = json.loads(out)
    assert 0 < len(row["tokens"]) < LONG_CONTEXT // 2, len(row["tokens"])


def interrupting(expression: str, module: str, argv: list[str]) -> list[str]:
    """Returns a command that receives SIGINT half a second after its first call of `expression`."""
    text = (
        "import os, signal, sys, threading\n"
        f"from {module} import {expression.split(',', maxsplit=1)[0]}\n"
        f"place = ({expression})\n"
        "real = getattr(*place)\n"
        "def watched(*args, **kw):\n"
        "    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    setattr(*place, real)\n"
        "    return real(*args, **kw)\n"
        "setattr(*place, watched)\n"
        "from ark.cli import main\n"
        f"sys.exit(main({argv[3:]!r}))\n"
    )
    return [sys.executable, "-c", text]


def test_reader_that_has_enough(backend: str, endless: Path) -> None:
    process = begin(command(backend, endless))
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(30)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 141, err
    assert "Traceback" not in err


def test_interrupt_ends_the_benchmark(backend: str, endless: Path) -> None:
    registry.with_kernels(registry.get(backend))  # the benchmark times these kernels
    argv = [sys.executable, "-m", "ark", "bench", "decode", "--config", str(endless)]
    argv += ["--backend", backend, "--context", "16", "--tokens", "40000", "--repeats", "100"]
    process = begin(interrupting("Run, 'wait'", "ark.runtime.run", argv))
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err


def test_exception_beside_a_running_kernel(backend: str) -> None:
    done = script(
        "x = ark.tensor([64, 64])\n"
        "y = ark.add(x, 1.0, output=x)\n"
        "with ark.Runtime() as runtime:\n"
        "    runtime.launch()\n"
        "    runtime.run(10**9, non_blocking=True)\n"
        "    raise KeyError('mine')\n",
        backend,
    )
    assert done.returncode == 1 and done.stderr.rstrip().endswith("KeyError: 'mine'"), done.stderr


@pytest.mark.parametrize("loop_mode", [True, False])
def test_process_may_end_beside_a_running_kernel(backend: str, loop_mode: bool) -> None:
    done = script(
        "x = ark.tensor([64, 64])\n"
        "y = ark.add(x, 1.0, output=x)\n"
        "runtime = ark.Runtime()\n"
        f"runtime.launch(loop_mode={loop_mode})\n"
        "runtime.run(10**9, non_blocking=True)\n"
        "print('end', flush=True)\n",
        backend,
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_interrupt_ends_a_run(backend: str) -> None:
    done = script(
        "import signal, threading, os, time\n"
        "x = ark.tensor([64, 64])\n"
        "y = ark.add(x, 1.0, output=x)\n"
        "runtime = ark.Runtime()\n"
        "runtime.launch()\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try:\n"
        "    runtime.run(10**9)\n"
        "except KeyboardInterrupt:\n"
        "    print(runtime.running(), runtime.launched())\n"
        "runtime.launch()\n"
        "runtime.run(2)\n"
        "runtime.stop()\n"
        "print('ran again')\n",
        backend,
    )
    assert (done.returncode, done.stdout) == (0, "False False\nran again\n"), done.stderr


@pytest.fixture
def generator(backend: str, endless: Path) -> Any:
    chosen, _ = registry.choose(backend)
    device = chosen.open(0)
    with Generator(Checkpoint.open(endless), chosen, device, context=LONG_CONTEXT) as opened:
        yield opened
    device.close()


def test_closed_stream_stops_the_device(generator: Generator) -> None:
    for token in generator.stream([7, 8, 9], LONG_CONTEXT, stop_tokens=()):
        first = token
        break
    run = generator.executor.latest
    assert run is not None and not run.running()
    assert 0 < run.iterations_done < LONG_CONTEXT // 2
    assert next(iter(generator.stream([7, 8, 9], 1, stop_tokens=()))) == first


def test_one_stream_at_a_time(generator: Generator) -> None:
    first = generator.stream([7, 8, 9], 8, stop_tokens=())
    drawn = [next(first)]
    second = generator.stream([1, 2], 8, stop_tokens=())
    with pytest.raises(InvalidUsageError, match="is already streaming"):
        next(second)
    drawn += list(first)
    assert drawn == list(generator.stream([7, 8, 9], 8, stop_tokens=()))


def test_one_launch_at_a_time(generator: Generator) -> None:
    stream = generator.stream([7, 8, 9], LONG_CONTEXT, stop_tokens=())
    next(stream)
    with pytest.raises(InvalidUsageError, match="still running"):
        generator.executor.start(1)
    stream.close()


def test_closing_the_generator_stops_its_stream(backend: str, endless: Path) -> None:
    chosen, _ = registry.choose(backend)
    device = chosen.open(0)
    with Generator(Checkpoint.open(endless), chosen, device, context=LONG_CONTEXT) as opened:
        stream = opened.stream([7, 8, 9], LONG_CONTEXT, stop_tokens=())
        next(stream)
        run = opened.executor.latest
        assert run is not None
    assert not run.running() and run.iterations_done < LONG_CONTEXT // 2
    with pytest.raises(InvalidUsageError, match="closed while this stream was open"):
        next(stream)
    device.close()
    stream.close()
