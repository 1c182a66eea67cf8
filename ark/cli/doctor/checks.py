"""The checks of `ark doctor`. Each relies only on properties that earlier checks have tested."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ark.backend.devices import FedDevice, MemoryKind
from ark.cli.doctor.bench import BUDGET_S, Bench
from ark.errors import BaseError
from ark.runtime import toolchain

Verdict = Literal["pass", "fail", "note"]
ROUND_COUNT = 20
MESSAGE_WORDS = 4096  # words of data per message


@dataclass(frozen=True)
class Finding:
    """The result of one check. The verdict `note` reports a property that ark does not need in
    order to work.
    """

    check: str
    verdict: Verdict
    text: str


def expected(number: int, count: int) -> np.ndarray:
    """The words that the host sends in round `number`. checks.h computes them too, to compare."""
    return (np.arange(count, dtype=np.uint32) * 31 + number * 7919 + 1).astype(np.uint32)


def residency(bench: Bench) -> Finding:
    """Checks that all processors run at the same time: each waits for all others, several times."""
    words = bench.words(1)
    results = bench.finish(bench.start("meet", words=words.address, rounds=ROUND_COUNT))
    wanted = ROUND_COUNT * bench.processors
    if results[0] == wanted:
        return Finding(
            "residency", "pass", f"{bench.processors} processors met {ROUND_COUNT} times"
        )
    return Finding(
        "residency",
        "fail",
        f"{results[0]} of {wanted} arrivals within {BUDGET_S:.0f} s: not all blocks run at "
        "once, or a counter is not visible to all; end other programs on the device",
    )


def _message(bench: Bench, system: bool) -> Finding:
    name = "messages to peers" if system else "messages"
    pairs = bench.processors // 2
    if not pairs:
        return Finding(name, "note", "not applicable to one processor")
    kind: MemoryKind = "symmetric" if system else "device"
    words, data = bench.words(2 * pairs, kind), bench.alloc(4 * MESSAGE_WORDS * pairs, kind)
    results = bench.finish(
        bench.start("message", data.address, words.address, MESSAGE_WORDS, ROUND_COUNT, system)
    )
    if results[1]:
        return Finding(
            name,
            "fail",
            f"{results[1]} of {results[0] * MESSAGE_WORDS} words were stale after the counter "
            "had announced them",
        )
    if results[0] != pairs * ROUND_COUNT:
        return Finding(
            name, "fail", f"{results[0]} of {pairs * ROUND_COUNT} messages arrived in time"
        )
    return Finding(name, "pass", f"{results[0]} messages of {MESSAGE_WORDS} words, none stale")


def messages(bench: Bench) -> Finding:
    """Checks messages between processors: one processor writes data by plain stores and then
    increments a counter; another processor waits for the counter and must read the new data.
    """
    return _message(bench, system=False)


def peer_messages(bench: Bench) -> Finding:
    """The check `messages`, with the memory and the memory scope that peers use."""
    return _message(bench, system=True)


def packets(bench: Bench) -> Finding:
    """Checks 8-byte words that are read while they are overwritten: a value that is read is never a
    mixture of two values, and never older than a value that was read before.
    """
    pairs = bench.processors // 2
    if not pairs:
        return Finding("packets", "note", "not applicable to one processor")
    data = bench.alloc(8 * bench.machine.threads * pairs, "symmetric")
    rounds = 200
    results = bench.finish(bench.start("packets", data.address, rounds=rounds, system=True))
    readers = pairs * bench.machine.threads
    if results[1] or results[2]:
        return Finding(
            "packets", "fail", f"{results[1]} torn, {results[2]} older than a previous one"
        )
    if results[0] != readers:
        return Finding("packets", "fail", f"{results[0]} of {readers} readers saw the last packet")
    return Finding("packets", "pass", f"{readers} readers, {rounds} packets each, none torn")


def additions(bench: Bench) -> Finding:
    """Checks atomic additions: every thread adds to one counter, in the scope of the device and of
    the system.
    """
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
    """Checks that the host can send a word to a running kernel and receive an answer, and measures
    the time until the answer.
    """
    words = bench.words(1)
    launch = bench.start("host", bench.results.address, words.address, 0, ROUND_COUNT)
    times = []
    for number in range(1, ROUND_COUNT + 1):
        begin = time.perf_counter()
        if not bench.tell(number):
            bench.finish(launch)
            return Finding(
                "host words",
                "fail",
                f"word {number} was not answered within {BUDGET_S:.0f} s: a running kernel does "
                "not see mapped host memory, or the host does not see its answer",
            )
        times.append(time.perf_counter() - begin)
    bench.finish(launch)
    return Finding("host words", "pass", f"{np.median(times) * 1e6:.1f} us per round trip")


def copies(bench: Bench) -> Finding:
    """Checks that the host can copy inputs to the device while a kernel runs: the host copies and
    signals, and the kernel reads them.
    """
    device = bench.device
    kind: MemoryKind = device.fed if isinstance(device, FedDevice) else "device"
    words, data = bench.words(1), bench.alloc(4 * MESSAGE_WORDS, kind)
    launch = bench.start("host", data.address, words.address, MESSAGE_WORDS, ROUND_COUNT)
    for number in range(1, ROUND_COUNT + 1):
        bench.device.write(data.address, expected(number, MESSAGE_WORDS))
        if not bench.tell(number):
            bench.finish(launch)
            return Finding("copies", "fail", f"copy {number} under a running kernel did not end")
    results = bench.finish(launch)
    total = ROUND_COUNT * MESSAGE_WORDS * bench.processors
    if results[1]:
        return Finding(
            "copies",
            "fail",
            f"{results[1]} of {total} words that were copied under a running kernel were stale: "
            "a persistent launch does not see new inputs (launch with loop_mode=False)",
        )
    return Finding(
        "copies", "pass", f"{ROUND_COUNT} copies under a running kernel, {total} words seen"
    )


def clock(bench: Bench) -> Finding:
    """Checks that all processors have the same clock, and that it runs at the same rate as the
    host's clock.
    """
    rounds, lasts = 8, 0.05
    words, data = bench.words(2), bench.alloc(8 * rounds * bench.processors)
    launch = bench.start("clock", data.address, words.address, rounds=rounds, lasts_s=lasts)
    bench.finish(launch)
    times = bench.device.read(data.address, data.nbytes).view(np.uint64)
    times = times.reshape(bench.processors, rounds).astype(np.int64)
    if not times.all():
        return Finding("clock", "fail", "not all processors arrived")
    spread = int((times.max(0) - times.min(0)).min())
    elapsed = launch.elapsed_ms()
    text = (
        f"{spread / 1e3:.1f} us of skew over all processors; {lasts * 1e3:.0f} ms by the "
        f"kernel's clock took {elapsed:.1f} ms"
    )
    if (np.diff(times, axis=1) < 0).any():
        return Finding("clock", "fail", f"it runs backwards; {text}")
    honest = 0.9 * lasts * 1e3 <= elapsed <= 4 * lasts * 1e3
    return Finding("clock", "pass" if honest else "note", text)


def bandwidth(bench: Bench) -> Finding:
    """Measures the bandwidth of reads by all processors, 8 bytes per thread at a time, from more
    memory than a cache holds.
    """
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
    """Checks memory that two processes share: both add to one exported counter, and one of them
    reads what the other wrote.
    """
    rounds = 2
    words = bench.words(1, "symmetric")
    handle = bench.device.export(words)
    command = [sys.executable, "-m", "ark.cli.doctor.peer", bench.backend.name, handle.hex()]
    child = subprocess.Popen(
        [*command, str(rounds)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    bench.finish(bench.start("add", words=words.address, rounds=rounds, system=True))
    try:
        output, complaint = child.communicate(timeout=6 * BUDGET_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return Finding("peers", "fail", "the other process did not end")
    if child.returncode:
        last = complaint.strip().splitlines()[-1:] or ["it printed nothing"]
        return Finding("peers", "fail", f"another process cannot map exported memory: {last[0]}")
    wanted = rounds * bench.processors * bench.machine.threads + int(output)
    got = int(bench.device.read(words.address, 4).view(np.uint32)[0])
    if got != wanted:
        return Finding("peers", "fail", f"{got} of {wanted} additions of two processes arrived")
    return Finding("peers", "pass", f"{got} additions of two processes arrived")


def freeing(bench: Bench) -> Finding:
    """Checks that freeing memory while a kernel runs does not block the host until the kernel
    ends.
    """
    words, data = bench.words(2), bench.alloc(8 * bench.processors)
    memory = bench.device.alloc(1 << 20, "device")
    lasts = 0.5
    launch = bench.start("clock", data.address, words.address, rounds=1, lasts_s=lasts)
    begin = time.perf_counter()
    bench.device.free(memory)
    elapsed = time.perf_counter() - begin
    waited = launch.done() and elapsed > lasts / 2
    bench.finish(launch)
    if waited:
        text = f"freeing memory waits for running kernels ({elapsed * 1e3:.0f} ms)"
        return Finding("freeing", "fail", text)
    return Finding("freeing", "pass", f"memory freed under a kernel ({elapsed * 1e3:.1f} ms)")


def compiler(bench: Bench) -> Finding:
    """Checks the compiler with matmuls and attention that have known results. The check runs even
    if this compiler has passed it before.
    """
    compiler = toolchain.toolchain(bench.backend, bench.device)
    if compiler is None:
        return Finding(
            "compiler", "note", "no compiler that is installed separately from ark and the system"
        )
    begin = time.perf_counter()
    reason = toolchain.examine(bench.backend, bench.device)
    if reason:
        return Finding("compiler", "fail", toolchain.refusal(compiler, bench.device.arch, reason))
    elapsed = time.perf_counter() - begin
    return Finding(
        "compiler", "pass", f"{compiler.name}: known results are right ({elapsed:.1f} s)"
    )


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
    """Runs all checks. A check that raises an error of ark counts as failed, and the others still
    run.
    """
    findings = []
    for check in ALL:
        try:
            finding = check(bench)
        except BaseError as error:
            finding = Finding(check.__name__.replace("_", " "), "fail", str(error))
        shown(finding)
        findings.append(finding)
    return findings
