"""How much memory a process on this machine has and may still take. Called by probe and device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
# (limit, in use) of a control group, by the version of the interface
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def memory_bytes() -> int:
    """Physical memory, 0 if the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def available_bytes() -> int:
    """Memory that may be allocated now without swapping or being killed, as far as is known."""
    return min(_machine(), *(_left(group) for group in groups()))


def _machine() -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return memory_bytes()


def groups(root: Path = CGROUPS, of: Path = Path("/proc/self/cgroup")) -> Iterator[Path]:
    """The folders of the control groups that may limit this process's memory, the root last."""
    try:
        lines = of.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        own = base / path.strip("/")
        # In a container the path may be the host's, of which only the root is to be seen.
        yield from (g for g in (own, *own.parents) if g == base or base in g.parents)


def _left(group: Path) -> int:
    """What a group may still take; its page cache can be given back. No limit: a large number."""
    for limit, used in _FILES:
        try:
            most, now = ((group / name).read_text().strip() for name in (limit, used))
            if most == "max":
                continue
            words = (line.split() for line in (group / "memory.stat").read_text().splitlines())
            held = {name: int(value) for name, value in words}
            cached = held.get("file", held.get("cache", 0))
            return max(0, int(most) - int(now) + cached)
        except (OSError, ValueError):
            continue
    return 1 << 62
