"""Determines which ranks share a host, so that they can map each other's memory. Called by
ark.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

NAME = "ARK_HOST"


def here() -> str:
    """An identifier shared by processes that can share memory: the machine's boot and the
    namespaces of processes and networks, or the value of ARK_HOST.
    """
    named = os.environ.get(NAME)
    if named:
        return named
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
    except OSError:
        return os.uname().nodename
    return f"{boot} {spaces}"


def numbered(names: Iterable[str]) -> tuple[int, ...]:
    """A number for each rank, equal for ranks on one host. names: `here` of each rank."""
    listed = list(names)
    known = list(dict.fromkeys(listed))
    return tuple(known.index(name) for name in listed)
