"""The checks, in the order in which what they ask for builds up."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ark.backend.devices import FedDevice, MemoryKind
from ark.doctor.bench import BUDGET_S, Bench
from ark.errors import BaseError
from ark.runtime import toolchain

Verdict = Literal["pass", "fail", "note"]
ROUNDS = 20
WORDS = 4096  # of data that a message is about


@dataclass(frozen=True)
class Finding:
    """One verdict. `note` says how a device is where ark works either way."""

    check: str
    verdict: Verdict
    text: str


def expected(number: int, count: int) -> np.ndarray:
    """The words of round `number`, as checks.h has them."""
    return (np.arange(count, dtype=np.uint32) * 31 + number * 7919 + 1).astype(np.uint32)


def residency(bench: Bench) -> Finding:
    """Every processor runs at once: each waits for all, again and again."""
    words = bench.words(1)
    found = bench.finish(bench.start("meet", words=words.address, rounds=ROUNDS))
    wanted = ROUNDS * bench.processors
    if found[0] == wanted:
        return Finding("residency", "pass", f"{bench.processors} processors met {ROUNDS} times")
    return Finding(
        "residency",
        "fail",
        f"{found[0]} of {wanted} arrivals within {BUDGET_S:.0f} s: not all blocks run at once, or "
        "a counter is not seen; is another program on the device?",
    )


def _message(bench: Bench, system: bool) -> Finding:
    name = "messages to peers" if system else "messages"
    pairs = bench.processors // 2
    if not pairs:
        return Finding(name, "note", "one processor has nobody to send to")
    kind: MemoryKind = "symmetric" if system else "device"
    words, data = bench.words(2 * pairs, kind), bench.alloc(4 * WORDS * pairs, kind)
    found = bench.finish(bench.start("message", data.address, words.address, WORDS, ROUNDS, system))
    if found[1]:
        return Finding(
            name,
            "fail",
            f"{found[1]} of {found[0] * WORDS} words were old after the counter that promised them",
        )
    if found[0] != pairs * ROUNDS:
        return Finding(name, "fail", f"{found[0]} of {pairs * ROUNDS} messages came in time")
    return Finding(name, "pass", f"{found[0]} messages of {WORDS} words, none old")


def messages(bench: Bench) -> Finding:
    """Plain stores, then a counter; another processor waits for it and reads."""
    return _message(bench, system=False)


def peer_messages(bench: Bench) -> Finding:
    """The same in the memory and the scope that peers use."""
    return _message(bench, system=True)


def packets(bench: Bench) -> Finding:
    """8 bytes that are read while they are overwritten: never torn, never older than before."""
    pairs = bench.processors // 2
    if not pairs:
        return Finding("packets", "note", "one processor has nobody to send to")
    data = bench.alloc(8 * bench.machine.threads * pairs, "symmetric")
    rounds = 200
    found = bench.finish(bench.start("packets", data.address, rounds=rounds, system=True))
    readers = pairs * bench.machine.threads
    if found[1] or found[2]:
        return Finding("packets", "fail", f"{found[1]} torn, {found[2]} older than one before")
    if found[0] != readers:
        return Finding("packets", "fail", f"{found[0]} of {readers} readers saw the last packet")
    return Finding("packets", "pass", f"{readers} readers, {rounds} packets each, none torn")


def additions(bench: Bench) -> Finding:
    """Every thread adds to one counter, in the device's scope and in the system's."""
    rounds = 2
    wanted = rounds * bench.processors * bench.machine.threads
    for system in (False, True):
        words = bench.words(1, "symmetric" if system else "device")
        bench.finish(bench.start("add", words=words.address, rounds=rounds, system=system))
        got = int(bench.device.read(words.address, 4).view(np.uint32)[0])
        if got != wanted:
            scope = "system" if system else "device"
            return Finding("additions", "fail", f"{got} of {wanted} arrived in {scope} scope")
    return Finding("additions", "pass", f"{wanted} of {wanted} arrived, in either scope")


def host_words(bench: Bench) -> Finding:
    """The host tells a running kernel, and hears from it; the round trip is the host's."""
    words = bench.words(1)
    launch = bench.start("host", bench.results.address, words.address, 0, ROUNDS)
    times = []
    for number in range(1, ROUNDS + 1):
        begin = time.perf_counter()
        if not bench.tell(number):
            bench.finish(launch)
            return Finding(
                "host words",
                "fail",
                f"word {number} was not answered within {BUDGET_S:.0f} s: mapped host memory is "
                "not seen by a running kernel, or its answer not by the host",
            )
        times.append(time.perf_counter() - begin)
    bench.finish(launch)
    return Finding("host words", "pass", f"{np.median(times) * 1e6:.1f} us there and back")


def copies(bench: Bench) -> Finding:
    """The host copies inputs under a running kernel, tells it, and the kernel reads them."""
    device = bench.device
    kind: MemoryKind = device.fed if isinstance(device, FedDevice) else "device"
    words, data = bench.words(1), bench.alloc(4 * WORDS, kind)
    launch = bench.start("host", data.address, words.address, WORDS, ROUNDS)
    for number in range(1, ROUNDS + 1):
        bench.device.write(data.address, expected(number, WORDS))
        if not bench.tell(number):
            bench.finish(launch)
            return Finding("copies", "fail", f"copy {number} under a running kernel did not end")
    found = bench.finish(launch)
    total = ROUNDS * WORDS * bench.processors
    if found[1]:
        return Finding(
            "copies",
            "fail",
            f"{found[1]} of {total} words that were copied under a running kernel were old: inputs "
            "of a persistent launch do not arrive (launch with loop_mode=False)",
        )
    return Finding("copies", "pass", f"{ROUNDS} copies under a running kernel, {total} words seen")


def clock(bench: Bench) -> Finding:
    """One clock for all processors, at the rate of the host's."""
    rounds, lasts = 8, 0.05
    words, data = bench.words(2), bench.alloc(8 * rounds * bench.processors)
    launch = bench.start("clock", data.address, words.address, rounds=rounds, lasts_s=lasts)
    bench.finish(launch)
    times = bench.device.read(data.address, data.nbytes).view(np.uint64)
    times = times.reshape(bench.processors, rounds).astype(np.int64)
    if not times.all():
        return Finding("clock", "fail", "not all processors met")
    spread = int((times.max(0) - times.min(0)).min())
    elapsed = launch.elapsed_ms()
    text = (
        f"{spread / 1e3:.1f} us apart over all processors; {lasts * 1e3:.0f} ms by the kernel's "
        f"clock lasted {elapsed:.1f} ms"
    )
    if (np.diff(times, axis=1) < 0).any():
        return Finding("clock", "fail", f"it runs backwards; {text}")
    honest = 0.9 * lasts * 1e3 <= elapsed <= 4 * lasts * 1e3
    return Finding("clock", "pass" if honest else "note", text)


def bandwidth(bench: Bench) -> Finding:
    """Reads by all processors, 8 bytes a thread at a time, of more memory than a cache holds."""
    noise = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    nbytes, most = len(noise), 1 << 30
    while True:
        data = bench.device.alloc(nbytes, "device")
        try:
            for begin in range(0, nbytes, len(noise)):
                bench.device.write(data.address + begin, noise)
            elapsed = []
            for _ in range(3):
                launch = bench.start("read", data.address, count=nbytes // 4)
                bench.finish(launch)
                elapsed.append(launch.elapsed_ms())
        finally:
            bench.device.free(data)
        best = max(min(elapsed), 1e-6)
        if best > 10.0 or nbytes >= most or 4 * nbytes > bench.device.free_bytes():
            rate = nbytes / best / 1e6
            return Finding("bandwidth", "note", f"{rate:.1f} GB/s over {nbytes >> 20} MiB")
        nbytes *= 4


def peers(bench: Bench) -> Finding:
    """Two processes add to one exported counter and one of them reads what the other wrote."""
    rounds = 2
    words = bench.words(1, "symmetric")
    handle = bench.device.export(words)
    command = [sys.executable, "-m", "ark.doctor.peer", bench.backend.name, handle.hex()]
    child = subprocess.Popen(
        [*command, str(rounds)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    bench.finish(bench.start("add", words=words.address, rounds=rounds, system=True))
    try:
        said, complaint = child.communicate(timeout=6 * BUDGET_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return Finding("peers", "fail", "the other process did not end")
    if child.returncode:
        last = complaint.strip().splitlines()[-1:] or ["it said nothing"]
        return Finding("peers", "fail", f"another process cannot map exported memory: {last[0]}")
    wanted = rounds * bench.processors * bench.machine.threads + int(said)
    got = int(bench.device.read(words.address, 4).view(np.uint32)[0])
    if got != wanted:
        return Finding("peers", "fail", f"{got} of {wanted} additions of two processes arrived")
    return Finding("peers", "pass", f"{got} additions of two processes arrived")


def freeing(bench: Bench) -> Finding:
    """Letting memory go under a running kernel does not keep the host until that has ended."""
    words, data = bench.words(2), bench.alloc(8 * bench.processors)
    memory = bench.device.alloc(1 << 20, "device")
    lasts = 0.5
    launch = bench.start("clock", data.address, words.address, rounds=1, lasts_s=lasts)
    begin = time.perf_counter()
    bench.device.free(memory)
    took = time.perf_counter() - begin
    waited = launch.done() and took > lasts / 2
    bench.finish(launch)
    if waited:
        found = f"letting memory go waits for running kernels ({took * 1e3:.0f} ms)"
        return Finding("freeing", "fail", found)
    return Finding("freeing", "pass", f"memory let go of under a kernel ({took * 1e3:.1f} ms)")


def compiler(bench: Bench) -> Finding:
    """Products and attentions with known results, whatever an earlier check of them said."""
    found = toolchain.toolchain(bench.backend, bench.device)
    if found is None:
        return Finding("compiler", "note", "none that is installed apart from ark and the system")
    begin = time.perf_counter()
    reason = toolchain.examine(bench.backend, bench.device)
    if reason:
        return Finding("compiler", "fail", toolchain.refusal(found, bench.device.arch, reason))
    took = time.perf_counter() - begin
    return Finding("compiler", "pass", f"{found.name}: known results are right ({took:.1f} s)")


ALL: tuple[Callable[[Bench], Finding], ...] = (
    residency,
    messages,
    peer_messages,
    packets,
    additions,
    host_words,
    copies,
    clock,
    peers,
    freeing,
    bandwidth,
    compiler,
)


def examine(bench: Bench, shown: Callable[[Finding], None]) -> list[Finding]:
    """All checks; one that ends in an error of ark's is a failure, and the others go on."""
    found = []
    for check in ALL:
        try:
            finding = check(bench)
        except BaseError as error:
            finding = Finding(check.__name__.replace("_", " "), "fail", str(error))
        shown(finding)
        found.append(finding)
    return found
