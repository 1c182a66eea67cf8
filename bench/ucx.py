"""Times puts by the proxy over UCX between two network namespaces on TCP, and ucx_perftest over the
same connection in the same run: `python bench/ucx.py [--bytes 1024]`. Needs root, UCX and
ucx_perftest.

There are two times, each given as the minimum and the median of many short rounds that alternate
between the two programs. (On a busy machine, the minimum is from a round in which both sides had a
core each.) `many` is the time per put while as many puts are in flight as the FIFO holds. It is
compared with ucp_put_bw of ucx_perftest. `one` is the time of a round trip, from the trigger to the
report that the put has arrived in the peer's memory. It is compared with twice ucp_put_lat, which
measures one direction without such a report.

Two more figures depend less on other work of the machine: the CPU time per put with many puts in
flight, and the TCP segments per put, for one put alone and for many in flight. Both are sums over
the two sides. ark's CPU time excludes the thread that stands for a kernel: it writes triggers and
waits, in C. The proxy is woken once for a series of triggers, as by a launch.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from ark.backend import native, registry
from ark.backend.codegen import layout
from ark.runtime.proxy import Proxy
from tests.multi.hosts import Hosts, two_hosts, why_not

ROUNDS, ONES, WARM = 25, 300, 100
CPU_TIME_ROUNDS, CPU_TIME_PUTS = 60, 60_000  # rounds of ark and puts of ucx_perftest, for CPU times
ENVIRONMENT = {"UCX_TLS": "tcp,self", "UCX_LOG_LEVEL": "fatal"}


KERNEL = """
#include <sched.h>
#include <stdint.h>
#include <time.h>
struct Trigger {{ uint32_t source, target, high, size; }};
// Writes triggers for places from `at` on, waits until they are served; microseconds, or -1.
extern "C" double push(uint32_t* fifo, uint32_t at, uint32_t count, uint64_t source,
                       uint64_t target, uint32_t size) {{
  Trigger* slots = reinterpret_cast<Trigger*>(fifo + 16);
  timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  end = begin;
  for (uint32_t i = at; i != at + count; ++i) {{
    Trigger& slot = slots[i % {slots}u];
    slot.source = static_cast<uint32_t>(source);
    slot.target = static_cast<uint32_t>(target);
    slot.high = static_cast<uint32_t>(source >> 32) | static_cast<uint32_t>(target >> 32) << 16;
    __atomic_store_n(&slot.size, size | (i / {slots}u & 1u ^ 1u) << 31, __ATOMIC_RELEASE);
  }}
  const timespec nap = {{0, 50000}};
  while (__atomic_load_n(fifo, __ATOMIC_ACQUIRE) != at + count) {{
    if (count > 1) {{
      nanosleep(&nap, nullptr);  // on few cores the proxy needs this one
    }} else {{
      sched_yield();
    }}
    clock_gettime(CLOCK_MONOTONIC, &end);
    if (end.tv_sec - begin.tv_sec > 20) return -1.0;
  }}
  clock_gettime(CLOCK_MONOTONIC, &end);
  return (end.tv_sec - begin.tv_sec) * 1e6 + (end.tv_nsec - begin.tv_nsec) * 1e-3;
}}
// The same one by one; the microseconds of each, the last of them -1 if it was not served.
extern "C" uint32_t push_alone(uint32_t* fifo, uint32_t at, uint32_t count, uint64_t source,
                               uint64_t target, uint32_t size, double* us) {{
  for (uint32_t i = 0; i < count; ++i) {{
    us[i] = push(fifo, at + i, 1, source, target, size);
    if (us[i] < 0) return i + 1;
  }}
  return count;
}}
"""


class Pusher:
    """Fills a proxy's FIFO as a device would, with requests for puts of `nbytes` bytes from
    `source` to `target`.
    """

    def __init__(self, proxy: Proxy, source: int, target: int, nbytes: int) -> None:
        command = native.find_compiler()
        assert command is not None
        text = KERNEL.format(slots=layout.FIFO_SLOTS)
        options = ("-O2", "-shared", "-fPIC")
        binary, _ = native.compiled(command, {"push.cpp": text}, options, "the kernel's half")
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(binary)
            file.flush()
            library = ctypes.CDLL(file.name)
        words = [ctypes.c_uint32] * 2, [ctypes.c_uint64] * 2
        given = [ctypes.c_void_p, *words[0], *words[1], ctypes.c_uint32]
        self._push, self._push_alone = library.push, library.push_alone
        self._push.argtypes, self._push.restype = given, ctypes.c_double
        self._push_alone.argtypes = [*given, ctypes.POINTER(ctypes.c_double)]
        self._push_alone.restype = ctypes.c_uint32
        self._proxy, self._places, self._at = proxy, (source, target, nbytes), 0

    def __call__(self, count: int) -> float:
        """Microseconds of `count` puts that are in flight at the same time."""
        self._proxy.wake()
        us = float(self._push(self._proxy.fifo.address, self._at, count, *self._places))
        self._check(us)
        self._at += count
        return us

    def alone(self, count: int) -> float:
        """The median of the microseconds of `count` puts, each of which begins when the preceding
        one has ended.
        """
        self._proxy.wake()
        us = (ctypes.c_double * count)()
        done = self._push_alone(self._proxy.fifo.address, self._at, count, *self._places, us)
        self._check(us[done - 1])
        self._at += count
        return float(np.median(us))

    def _check(self, us: float) -> None:
        if us < 0:
            raise SystemExit(self._proxy.error() or "puts were not served")


def end_of_cable(nbytes: int) -> None:
    """Runs one of the two connected processes, which communicates by lines of JSON. It prints how
    to connect to its memory and reads the same of the other process. Then it runs the measurements
    that it reads from its input, until the input ends. The passive process reads no measurements.
    """
    device = registry.get("cpu").open(0)
    abort, memory = device.alloc(4, "host"), device.alloc(1 << 20, "symmetric")
    proxy = Proxy(device, abort.address)
    print(json.dumps(proxy.network(memory)), flush=True)
    there = proxy.connect(1, json.loads(sys.stdin.readline()))
    proxy.allow(memory.address, memory.nbytes)
    push = Pusher(proxy, memory.address, there.address, nbytes)
    proxy.restart()
    for line in sys.stdin:
        if line.strip() == "processor":
            print((time.process_time() - time.thread_time()) * 1e6, flush=True)
        elif line.strip() == "many":
            push(WARM)
            print(push(layout.FIFO_SLOTS) / layout.FIFO_SLOTS, flush=True)
        elif line.strip() == "one":
            push(WARM)
            print(push.alone(ONES), flush=True)
    proxy.close()
    device.close()


def perftest(hosts: Hosts, test: str, nbytes: int, count: int) -> tuple[float, float]:
    """Microseconds per put of ucx_perftest, and CPU time of client and server for the whole run."""
    port = ["-p", "13399"]

    def start(host: int, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["ip", "netns", "exec", hosts.names[host], "ucx_perftest", *words, *port],
            env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True,
        )  # fmt: skip

    server = start(1)
    listens = ["ip", "netns", "exec", hosts.names[1], "ss", "-Hltn", "sport = :13399"]
    for _ in range(200):
        if subprocess.run(listens, capture_output=True, check=True).stdout:
            break
        time.sleep(0.01)
    words = ["-t", test, "-s", str(nbytes), "-n", str(count), "-w", str(WARM), "-f"]
    client = start(0, hosts.addresses[1], *words)

    def stop() -> None:
        client.kill()
        server.kill()

    timer = threading.Timer(120, stop)
    timer.start()
    assert client.stdout is not None and server.stdout is not None
    lines = [line.split() for line in client.stdout if line.strip()]
    spent = 0.0
    for side in (client, server):
        _, status, used = os.wait4(side.pid, 0)
        side.returncode = os.waitstatus_to_exitcode(status)
        side.stdout.close()  # type: ignore[union-attr]
        spent += (used.ru_utime + used.ru_stime) * 1e6
    timer.cancel()
    if client.returncode or not lines:
        raise SystemExit(f"ucx_perftest failed: {lines}")
    numbers = [float(word) for word in lines[-1] if word.replace(".", "").isdigit()]
    return numbers[-5], spent  # overall microseconds; bandwidths and rates come after it


@contextlib.contextmanager
def both_ends(
    hosts: Hosts, nbytes: int
) -> Iterator[tuple[Callable[..., float], Callable[[], int]]]:
    """Starts two connected processes. Yields two functions. The first asks one of the processes (by
    default the first) for a measurement. The second returns the number of TCP segments that were
    sent in both directions.
    """
    words = [str(Path(__file__).resolve()), "--end", "--bytes", str(nbytes)]
    sides = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, *words],
            env={**os.environ, **ENVIRONMENT}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True,
        )
        for name in hosts.names
    ]  # fmt: skip

    def ask(request: str, side: int = 0) -> float:
        tell(sides[side], request + "\n")
        return float(sides[side].stdout.readline())  # type: ignore[union-attr]

    def segments() -> int:
        sent = 0
        for side in sides:
            text = Path(f"/proc/{side.pid}/net/snmp").read_text()
            names, values = (r.split() for r in text.splitlines() if r.startswith("Tcp:"))
            sent += int(dict(zip(names, values, strict=True))["OutSegs"])
        return sent

    try:
        ways = [side.stdout.readline() for side in sides]  # type: ignore[union-attr]
        for side, way in zip(sides, reversed(ways), strict=True):
            tell(side, way)
        yield ask, segments
    finally:
        for side in sides:
            side.stdin.close()  # type: ignore[union-attr]
            side.wait(30)


@dataclass
class Measurements:
    """us: microseconds of each round, by measurement of ark or ucx_perftest. processors: CPU
    microseconds per put, of ark and of ucx_perftest. segments: TCP segments per put, by
    measurement.
    """

    us: dict[str, list[float]]
    processors: tuple[float, float]
    segments: dict[str, float]


def measure(nbytes: int) -> Measurements:
    puts = {"many": layout.FIFO_SLOTS + WARM, "one": ONES + WARM}
    us: dict[str, list[float]] = {}
    segments: dict[str, float] = {}
    with two_hosts() as hosts:
        with both_ends(hosts, nbytes) as (ask, sent):
            for _ in range(ROUNDS):
                for name, test, count in (
                    ("many", "ucp_put_bw", layout.FIFO_SLOTS),
                    ("one", "ucp_put_lat", ONES),
                ):
                    before = sent()
                    us.setdefault(name, []).append(ask(name))
                    segments[name] = (sent() - before) / puts[name]
                    us.setdefault(test, []).append(perftest(hosts, test, nbytes, count)[0])
            before = ask("processor", 0) + ask("processor", 1)
            for _ in range(CPU_TIME_ROUNDS):
                ask("many")
            ours = ask("processor", 0) + ask("processor", 1) - before
        several = [
            perftest(hosts, "ucp_put_bw", nbytes, n)[1] for n in (1000, 1000 + CPU_TIME_PUTS)
        ]
    processors = ours / (CPU_TIME_ROUNDS * puts["many"]), (several[1] - several[0]) / CPU_TIME_PUTS
    return Measurements(us, processors, segments)


def tell(side: subprocess.Popen[str], line: str) -> None:
    assert side.stdin is not None
    side.stdin.write(line)
    side.stdin.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1024)
    parser.add_argument("--end", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.end:
        end_of_cable(args.bytes)
        return
    if why_not():
        raise SystemExit(why_not())
    seen = measure(args.bytes)
    print(f"{args.bytes} bytes, two namespaces, TCP")
    for which in (min, np.median):
        us = {name: float(which(values)) for name, values in seen.us.items()}
        many, twice = us["ucp_put_bw"], 2 * us["ucp_put_lat"]
        print(f"{which.__name__} of {ROUNDS} rounds, us")
        print(f"many: a put {us['many']:.2f}; ucp_put_bw {many:.2f}; {us['many'] / many:.2f}")
        print(f"one: {us['one']:.1f}; twice ucp_put_lat {twice:.1f}; {us['one'] / twice:.2f}")
    ours, theirs = seen.processors
    print(f"us of processors a put, both sides: {ours:.2f}; ucp_put_bw {theirs:.2f}")
    print("TCP segments a put: " + "; ".join(f"{n} {v:.2f}" for n, v in seen.segments.items()))


if __name__ == "__main__":
    main()
