"""Two hosts on one machine for tests: network namespaces joined by a virtual cable.

Each host is a namespace with one end of the cable. ark treats processes in different namespaces as
having no shared memory (ark.runtime.hosts), and they reach each other by TCP only. The cable is the
kernel's own, or a relay's (tests/multi/relay.py), which delays and drops frames.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.multi.relay import Cable

ROOT = Path(__file__).parents[2]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


class Hosts:
    """Two hosts. names: of their network namespaces. addresses: their IP addresses."""

    def __init__(self, count: int, relayed: bool = False) -> None:
        tag = os.getpid() % 100000
        self.names = [f"ark{tag}-{i}" for i in range(count)]
        self.addresses = [f"10.77.{tag % 250}.{i + 1}" for i in range(count)]
        self.ends = [f"a{name[3:]}" for name in self.names]
        self._relayed = relayed
        self._relay: subprocess.Popen[str] | None = None

    def open(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        ends = self.ends
        if self._relayed:
            self._start_relay()
        else:
            _ip("link", "add", ends[0], "netns", self.names[0], "type", "veth",
                "peer", "name", ends[1], "netns", self.names[1])  # fmt: skip
        for name, end, address in zip(self.names, ends, self.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
        self._wait()

    def _start_relay(self) -> None:
        words = [word for pair in zip(self.names, self.ends, strict=True) for word in pair]
        self._relay = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/multi/relay.py"), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._relay.stdout is not None and self._relay.stderr is not None
        if self._relay.stdout.readline() != "open\n":
            raise OSError(f"TAP devices cannot be created: {self._relay.stderr.read()[-300:]}")

    def _wait(self) -> None:
        """Waits until the links at both ends of the cable are up. Before that, UCX finds no device
        that reaches the other end.
        """
        end = time.monotonic() + 20.0
        for name, own in zip(self.names, self.ends, strict=True):
            words = ["ip", "-n", name, "-o", "link", "show", own]
            while b"LOWER_UP" not in subprocess.check_output(words, timeout=20):
                if time.monotonic() > end:
                    raise OSError(f"the link {own} does not come up")
                time.sleep(0.02)

    def start(
        self, host: int, argv: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """Starts a Python process on a host."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], sys.executable, *argv],
            cwd=ROOT,
            env={**os.environ, "UCX_TLS": "tcp,self", "UCX_LOG_LEVEL": "fatal", **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def change(self, cable: Cable) -> tuple[int, int]:
        """Sets the properties of a relayed cable. Returns the numbers of frames received and lost
        so far.
        """
        assert self._relay is not None and self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write(json.dumps(dataclasses.asdict(cable)) + "\n")
        self._relay.stdin.flush()
        count, lost = self._relay.stdout.readline().split()
        return int(count), int(lost)

    def cut(self) -> None:
        """Disconnects the cable."""
        _ip("-n", self.names[0], "link", "set", self.ends[0], "down")

    def close(self) -> None:
        if self._relay is not None:
            self._relay.communicate(timeout=20)  # it ends when its input is closed
        for name in self.names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)


@contextlib.contextmanager
def two_hosts(relayed: bool = False) -> Iterator[Hosts]:
    """Yields two hosts. relayed: the cable is a relay's, see Hosts.change."""
    result = Hosts(2, relayed)
    try:
        result.open()
        yield result
    finally:
        result.close()


def why_not(relayed: bool = False) -> str:
    """Returns the reason why `two_hosts` cannot work on this machine, or ""."""
    if not shutil.which("ip"):
        return "needs the command ip"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    probe = Hosts(2, relayed)
    try:
        probe.open()
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces cannot be made here: {error}"
    finally:
        probe.close()
    return ""
