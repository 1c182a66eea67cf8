"""Measures the host's time for a call of a torch module, by software layer:

    python -m bench.calls [NETWORK ...] [--place cpu|cuda] [--peers] [--lock FILE]

On a GPU a call returns before its kernel has ended, so 10 calls in a row are timed, starting when
the device is idle. On the CPU a call waits for its kernel, so launches are replaced by empty
functions. The columns are in microseconds, each the minimum of many readings:

    dynamo    torch.compile with a backend that returns existing results
    aot       the same backend behind AOTAutograd, which most backends use
    ark       torch.compile(backend="ark")
    part      the time inside ark's own code during `ark`, the 10% quantile; includes `launch`
    module    a call of the result of ark.from_torch; includes `launch`
    launch    the driver's launch call during both, measured like `part` (GPU)
    eager     --peers: torch.compile(backend="eager"), one launch an op (GPU)
    inductor  --peers: torch.compile(mode="reduce-overhead"), one captured graph (GPU)

Python's collection of cyclic garbage is off during the measurements. Several runs with the same
--lock file may run at once: they build their kernels at the same time but measure one after
another.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from ark_cpu.device import CpuDevice
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

import ark
from ark.cli.measure.networks import NETWORKS, network
from ark.cli.measure.peer import waiting
from ark.interop.torch import backend
from ark.interop.torch.program import PROGRAMS, Program

CALLS_PER_READING = 10  # calls in a row for one reading of the clock
CLOCK_READINGS = 100


class _Clock:
    """Records the times, in microseconds, of calls of wrapped functions."""

    def __init__(self) -> None:
        self.times: list[float] = []

    @property
    def tenth(self) -> float:
        """The 10% quantile of the times. Larger times are often caused by other programs on the
        machine.
        """
        return sorted(self.times)[len(self.times) // 10] if self.times else 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the function so that its calls are timed."""

        def timed(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = function(*given, **named)
            self.times.append((time.perf_counter() - start) * 1e6)
            return result

        return timed


class _Ended:
    """A launch that does nothing and has already ended."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        return True


@contextlib.contextmanager
def _alone(lock: Path | None) -> Iterator[None]:
    """A context manager that holds a lock file (none if `lock` is None), so that only one run at a
    time measures.
    """
    if lock is None:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def least(call: Callable[[], Any], place: str) -> float:
    """Microseconds of a call, without waiting for its result."""
    done = waiting(place != "cpu")
    for _ in range(CALLS_PER_READING):
        call()
    gc.disable()
    seconds = []
    for _ in range(CLOCK_READINGS):
        done()
        start = time.perf_counter()
        for _ in range(CALLS_PER_READING):
            call()
        seconds.append((time.perf_counter() - start) / CALLS_PER_READING)
    gc.enable()
    done()
    return min(seconds) * 1e6


def _ready(module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """A torch.compile backend that computes nothing and returns existing results of the right
    shapes.
    """
    (ends,) = next(n for n in module.graph.nodes if n.op == "output").args
    values = (e.meta.get("val", e.meta.get("example_value")) for e in ends)
    outputs = [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in values]
    return lambda *given: tuple(outputs)


def _boxed(module: torch.fx.GraphModule, examples: Sequence[Any]) -> Any:
    return make_boxed_func(_ready(module, examples))


def measured(name: str, place: str, peers: bool, lock: Path | None = None) -> dict[str, float]:
    """The columns of one network."""
    module, (example,) = network(name)
    module, example = module.to(place), example.to(place)
    nothing = aot_autograd(fw_compiler=_boxed, inference_compiler=_boxed)
    ways: dict[str, dict[str, Any]] = {
        "dynamo": {"backend": _ready},
        "aot": {"backend": nothing},
        "ark": {"backend": backend},
    }
    if peers:
        ways |= {"eager": {"backend": "eager"}, "inductor": {"mode": "reduce-overhead"}}
    figures = {}
    part, launch = _Clock(), _Clock()
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        for column, words in ways.items():
            torch._dynamo.reset()
            compiled = partial(torch.compile(module, **words), example)
            compiled()
            figures[column] = _measured(compiled, place, lock)
            if column == "ark":
                with mock.patch.object(Program, "run", part.around(Program.run)):
                    _measured(compiled, place, lock)
        kernel = ark.from_torch(module, (example,))
        kernel(example)
        figures["module"] = _measured(partial(kernel, example), place, lock)
        for program in PROGRAMS:
            if program._streamed is not None and program._streamed._run_once_more is not None:
                program._streamed._run_once_more = launch.around(program._streamed._run_once_more)  # type: ignore[assignment]
        _measured(partial(kernel, example), place, lock)
    return {**figures, "part": part.tenth, "launch": launch.tenth}


def _measured(call: Callable[[], Any], place: str, lock: Path | None) -> float:
    """Microseconds of a call, without its kernel. The call must have run before: on the CPU,
    launches are replaced by empty functions here, and a first call would wait for ever for its
    kernel to start.
    """
    nothing = mock.patch.object(CpuDevice, "launch", lambda *given: _Ended())
    with _alone(lock), nothing if place == "cpu" else contextlib.nullcontext():
        return least(call, place)


def main() -> None:
    """Prints a line of measured times for each network that the arguments name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NETWORK", help=", ".join(NETWORKS))
    parser.add_argument("--place", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--lock", type=Path, metavar="FILE", help="readings one run at a time")
    given = parser.parse_args()
    if given.peers and given.place == "cpu":
        parser.error("--peers is for a GPU: on the CPU their calls compute")
    warnings.simplefilter("ignore")
    ark.init(backend=given.place)
    columns = ["dynamo", "aot", "ark", "part", "module"]
    columns += ["launch"] if given.place != "cpu" else []
    columns += ["eager", "inductor"] if given.peers else []
    print("network   ", *(f"{c:>8}" for c in columns))
    for name in given.names or list(NETWORKS):
        figures = measured(name, given.place, given.peers, given.lock)
        print(f"{name:<10}", *(f"{figures[c]:8.1f}" for c in columns), flush=True)


if __name__ == "__main__":
    main()
