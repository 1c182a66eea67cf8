"""Determines which ranks share a host, so that they can map each other's memory. Called by
ark.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

NAME = "ARK_HOST"


def here() -> str:
    """Returns a text that is equal in all processes that can share memory. It consists of the
    machine's boot id and its process and network namespaces; ARK_HOST replaces it.
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
