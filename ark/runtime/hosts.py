"""Which ranks share a host, so that they can map each other's memory. Called by ark.distributed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

NAME = "ARK_HOST"


def here() -> str:
    """What processes that can share memory have in common: the boot of a machine, and the
    namespaces of processes and networks; or what ARK_HOST says.
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
    """A number for each rank, equal on one host. names: what `here` says on each."""
    said = list(names)
    known = list(dict.fromkeys(said))
    return tuple(known.index(name) for name in said)
