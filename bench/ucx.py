"""Puts by the proxy over UCX between two network namespaces on TCP, beside ucx_perftest over the
same cable in the same run: `python bench/ucx.py [--bytes 1024]`. Needs root, UCX, ucx_perftest.

Two figures, each by the least and by the median of many short rounds that alternate between the two
programs (on a busy machine, the least is of a round in which both sides had a core of their own):
- many: a put when as many as the FIFO holds are under way; ucx_perftest's ucp_put_bw.
- one: from the trigger to the word that the put is in the peer's memory, a way there and back;
  twice ucp_put_lat, which is one way. A put of ucx_perftest's is not asked whether it has arrived.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from ark.backend import registry
from ark.codegen import layout
from ark.runtime.proxy import Proxy
from tests.multi.hosts import Hosts, two_hosts, why_not

ROUNDS, ONES, WARM = 15, 100, 100
ENVIRONMENT = {"UCX_TLS": "tcp,self", "UCX_LOG_LEVEL": "fatal"}


def end_of_cable(nbytes: int) -> None:
    """One side, told by lines of JSON: its own way to its memory first, then the peer's; then how
    often to measure. The passive side ends when its input does.
    """
    device = registry.get("cpu").open(0)
    abort, memory = device.alloc(4, "host"), device.alloc(1 << 20, "symmetric")
    proxy = Proxy(device, abort.address)
    print(json.dumps(proxy.network(memory)), flush=True)
    there = proxy.connect(1, json.loads(sys.stdin.readline()))
    proxy.allow(memory.address, memory.nbytes)
    proxy.restart()
    pushed = 0
    for line in sys.stdin:
        pushed = push(proxy, pushed, WARM, memory.address, there.address, nbytes)
        if line.strip() == "many":
            begin = time.perf_counter()
            pushed = push(proxy, pushed, layout.FIFO_SLOTS, memory.address, there.address, nbytes)
            print((time.perf_counter() - begin) / layout.FIFO_SLOTS, flush=True)
        elif line.strip() == "one":
            taken = []
            for _ in range(ONES):
                begin = time.perf_counter()
                pushed = push(proxy, pushed, 1, memory.address, there.address, nbytes)
                taken.append(time.perf_counter() - begin)
            print(float(np.median(taken)), flush=True)
    proxy.close()
    device.close()


def push(proxy: Proxy, at: int, count: int, source: int, target: int, nbytes: int) -> int:
    """Writes so many triggers, waits until they are served, and returns the next one's place."""
    assert proxy.fifo.host is not None
    slots = proxy.fifo.host.view(layout.dtype("ArkFifo"))["words"][0].reshape(-1, 4)
    places = np.arange(at, at + count)
    rows = np.empty((count, 4), np.uint32)
    rows[:, 0], rows[:, 1] = source & 0xFFFFFFFF, target & 0xFFFFFFFF
    rows[:, 2] = source >> 32 | (target >> 32) << 16
    rows[:, 3] = nbytes | (places // layout.FIFO_SLOTS & 1 ^ 1) << 31
    slots[places % layout.FIFO_SLOTS] = rows
    proxy.wake()
    done = proxy.fifo.host.view(np.uint32)
    while int(done[0]) != at + count:
        if proxy.error():
            raise SystemExit(proxy.error())
        time.sleep(2e-4 if count > 1 else 0)  # on few cores the proxy needs this one
    return at + count


def perftest(hosts: Hosts, test: str, nbytes: int) -> float:
    """Seconds a put of ucx_perftest's."""
    port = ["-p", "13399"]
    server = subprocess.Popen(
        ["ip", "netns", "exec", hosts.names[1], "ucx_perftest", *port],
        env={**os.environ, **ENVIRONMENT}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    time.sleep(0.5)
    words = [
        "-t",
        test,
        "-s",
        str(nbytes),
        "-n",
        str(layout.FIFO_SLOTS if test == "ucp_put_bw" else ONES),
        "-w",
        str(WARM),
        "-f",
        *port,
    ]
    client = subprocess.run(
        ["ip", "netns", "exec", hosts.names[0], "ucx_perftest", hosts.addresses[1], *words],
        env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        server.kill()
    lines = [line.split() for line in client.stdout.splitlines() if line.strip()]
    if client.returncode or not lines:
        raise SystemExit(f"ucx_perftest failed: {client.stdout}{client.stderr}")
    numbers = [float(word) for word in lines[-1] if word.replace(".", "").isdigit()]
    return numbers[-5] * 1e-6  # overall microseconds; bandwidths and rates follow


def measure(nbytes: int) -> dict[str, list[float]]:
    """Microseconds by ark and by ucx_perftest, those of each round."""
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

            def ask(what: str) -> float:
                tell(sides[0], what + "\n")
                return float(sides[0].stdout.readline())  # type: ignore[union-attr]

            found: dict[str, list[float]] = {}
            for _ in range(ROUNDS):
                found.setdefault("many", []).append(ask("many"))
                found.setdefault("ucp_put_bw", []).append(perftest(hosts, "ucp_put_bw", nbytes))
                found.setdefault("one", []).append(ask("one"))
                found.setdefault("ucp_put_lat", []).append(perftest(hosts, "ucp_put_lat", nbytes))
        finally:
            for side in sides:
                side.stdin.close()  # type: ignore[union-attr]
                side.wait(30)
    return {name: [value * 1e6 for value in values] for name, values in found.items()}


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
    found = measure(args.bytes)
    print(f"{args.bytes} bytes, two namespaces, TCP")
    for which in (min, np.median):
        us = {name: float(which(values)) for name, values in found.items()}
        many, one = us["many"] / us["ucp_put_bw"], us["one"] / (2 * us["ucp_put_lat"])
        print(f"{which.__name__} of {ROUNDS} rounds")
        print(f"many: {us['many']:.2f} us a put; ucp_put_bw {us['ucp_put_bw']:.2f}; {many:.2f}")
        print(f"one: {us['one']:.1f} us; twice ucp_put_lat {2 * us['ucp_put_lat']:.1f}; {one:.2f}")


if __name__ == "__main__":
    main()
