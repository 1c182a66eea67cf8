"""Two hosts on one machine: network namespaces joined by a virtual cable, as tests need them.

Each host is a namespace with one end of the cable; processes in different ones do not share memory
as far as ark is concerned (ark.runtime.hosts), and reach each other by TCP alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


class Hosts:
    """names: the namespaces; addresses: theirs."""

    def __init__(self, count: int) -> None:
        tag = os.getpid() % 100000
        self.names = [f"ark{tag}-{i}" for i in range(count)]
        self.addresses = [f"10.77.{tag % 250}.{i + 1}" for i in range(count)]

    def open(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        ends = [f"a{name[3:]}" for name in self.names]
        _ip("link", "add", ends[0], "netns", self.names[0], "type", "veth",
            "peer", "name", ends[1], "netns", self.names[1])  # fmt: skip
        for name, end, address in zip(self.names, ends, self.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
        self.ends = ends
        self._wait()

    def _wait(self) -> None:
        """Until both ends have a carrier: before, UCX finds no device that reaches the other."""
        end = time.monotonic() + 20.0
        for name, own in zip(self.names, self.ends, strict=True):
            words = ["ip", "-n", name, "-o", "link", "show", own]
            while b"state UP" not in subprocess.check_output(words, timeout=20):
                if time.monotonic() > end:
                    raise OSError(f"the link {own} does not come up")
                time.sleep(0.02)

    def start(
        self, host: int, argv: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """A Python process on a host."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], sys.executable, *argv],
            cwd=ROOT,
            env={**os.environ, "UCX_TLS": "tcp,self", "UCX_LOG_LEVEL": "fatal", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def delay(self, milliseconds: float, lost: float = 0.0) -> None:
        """Makes the cable slow, and lose so many percent of what is sent."""
        for name, end in zip(self.names, self.ends, strict=True):
            words = ["netem", "delay", f"{milliseconds}ms", "loss", f"{lost}%"]
            command = ["tc", "-n", name, "qdisc", "replace", "dev", end, "root", *words]
            subprocess.run(command, check=True, capture_output=True, timeout=20)

    def cut(self) -> None:
        """Pulls the cable."""
        _ip("-n", self.names[0], "link", "set", self.ends[0], "down")

    def close(self) -> None:
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    made = Hosts(2)
    try:
        made.open()
        yield made
    finally:
        made.close()


def why_not() -> str:
    """What keeps this machine from having such hosts; empty if nothing does."""
    if not shutil.which("ip"):
        return "needs the command ip"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    probe = Hosts(2)
    try:
        probe.open()
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces cannot be made here: {error}"
    finally:
        probe.close()
    return ""
