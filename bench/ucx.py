"""Puts by the proxy over UCX between two network namespaces on TCP, beside ucx_perftest over the
same cable in the same run: `python bench/ucx.py [--bytes 1024]`. Needs root, UCX, ucx_perftest.

Two figures, each by the least and by the median of many short rounds that alternate between the two
programs (on a busy machine, the least is of a round in which both sides had a core of their own):
- many: a put when as many as the FIFO holds are under way; ucx_perftest's ucp_put_bw.
- one: from the trigger to the word that the put is in the peer's memory, a way there and back;
  twice ucp_put_lat, which is one way. A put of ucx_perftest's is not asked whether it has arrived.
And what a put costs both sides' processors together when many are under way, all threads, which
depends less on what else runs. Triggers are written and waited for in C, as a kernel does.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from ark.backend import native, registry
from ark.codegen import layout
from ark.runtime.proxy import Proxy
from tests.multi.hosts import Hosts, two_hosts, why_not

ROUNDS, ONES, WARM = 25, 300, 100
LONG, MANY = 60, 60_000  # rounds, and puts of ucx_perftest's, for the processors' time
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
"""


class Pusher:
    """The device's half of a proxy's FIFO, for puts from one memory to another."""

    def __init__(self, proxy: Proxy, source: int, target: int, nbytes: int) -> None:
        command = native.find_compiler()
        assert command is not None
        text = KERNEL.format(slots=layout.FIFO_SLOTS)
        options = ("-O2", "-shared", "-fPIC")
        made, _ = native.shared_library(command, {"push.cpp": text}, options, "the kernel's half")
        with tempfile.NamedTemporaryFile(suffix=".so") as file:
            file.write(made)
            file.flush()
            self._push = ctypes.CDLL(file.name).push
        words = [ctypes.c_uint32] * 2, [ctypes.c_uint64] * 2
        self._push.argtypes = [ctypes.c_void_p, *words[0], *words[1], ctypes.c_uint32]
        self._push.restype = ctypes.c_double
        self._proxy, self._places, self._at = proxy, (source, target, nbytes), 0

    def __call__(self, count: int) -> float:
        """Microseconds for so many puts, together."""
        self._proxy.wake()
        us = float(self._push(self._proxy.fifo.address, self._at, count, *self._places))
        if us < 0:
            raise SystemExit(self._proxy.error() or "puts were not served")
        self._at += count
        return us


def end_of_cable(nbytes: int) -> None:
    """One side, told by lines of JSON: its own way to its memory first, then the peer's; then what
    to measure. The passive side ends when its input does.
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
            print(time.process_time() * 1e6, flush=True)
        elif line.strip() == "many":
            push(WARM)
            print(push(layout.FIFO_SLOTS) / layout.FIFO_SLOTS, flush=True)
        elif line.strip() == "one":
            push(WARM)
            print(float(np.median([push(1) for _ in range(ONES)])), flush=True)
    proxy.close()
    device.close()


def perftest(hosts: Hosts, test: str, nbytes: int, count: int) -> tuple[float, float]:
    """Microseconds a put of ucx_perftest's, and of both sides' processors for all of the run."""
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
    return numbers[-5], spent  # overall microseconds; bandwidths and rates follow


def measure(nbytes: int) -> tuple[dict[str, list[float]], tuple[float, float]]:
    """Microseconds by ark and by ucx_perftest, those of each round; and of processors a put."""
    with two_hosts() as hosts:
        words = [str(Path(__file__).resolve()), "--end", "--bytes", str(nbytes)]
        sides = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, *words],
                env={**os.environ, **ENVIRONMENT}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True,
            )
            for name in hosts.names
        ]  # fmt: skip
        try:
            ways = [side.stdout.readline() for side in sides]  # type: ignore[union-attr]
            for side, way in zip(sides, reversed(ways), strict=True):
                tell(side, way)

            def ask(what: str, side: int = 0) -> float:
                tell(sides[side], what + "\n")
                return float(sides[side].stdout.readline())  # type: ignore[union-attr]

            found: dict[str, list[float]] = {}
            for _ in range(ROUNDS):
                for name, test, count in (
                    ("many", "ucp_put_bw", layout.FIFO_SLOTS),
                    ("one", "ucp_put_lat", ONES),
                ):
                    found.setdefault(name, []).append(ask(name))
                    found.setdefault(test, []).append(perftest(hosts, test, nbytes, count)[0])
            before = ask("processor", 0) + ask("processor", 1)
            for _ in range(LONG):
                ask("many")
            ours = ask("processor", 0) + ask("processor", 1) - before
            several = [perftest(hosts, "ucp_put_bw", nbytes, n)[1] for n in (1000, 1000 + MANY)]
        finally:
            for side in sides:
                side.stdin.close()  # type: ignore[union-attr]
                side.wait(30)
    puts = LONG * (layout.FIFO_SLOTS + WARM)
    return found, (ours / puts, (several[1] - several[0]) / MANY)


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
    us, processors = measure(args.bytes)
    print(f"{args.bytes} bytes, two namespaces, TCP")
    for which in (min, np.median):
        found = {name: float(which(values)) for name, values in us.items()}
        many, both = found["ucp_put_bw"], 2 * found["ucp_put_lat"]
        print(f"{which.__name__} of {ROUNDS} rounds, us")
        print(f"many: a put {found['many']:.2f}; ucp_put_bw {many:.2f}; {found['many'] / many:.2f}")
        print(f"one: {found['one']:.1f}; twice ucp_put_lat {both:.1f}; {found['one'] / both:.2f}")
    ours, theirs = processors
    print(f"us of processors a put, both sides: {ours:.2f}; ucp_put_bw {theirs:.2f}")


if __name__ == "__main__":
    main()
