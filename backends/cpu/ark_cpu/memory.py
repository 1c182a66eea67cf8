"""The physical memory of this machine and the amount that a process may still allocate. Called by
probe and device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
# For versions 2 and 1 of the cgroup interface: the files of a control group that contain its memory
# limit and its memory use.
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def memory_bytes() -> int:
    """Physical memory in bytes; 0 if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0


def available_bytes() -> int:
    """The bytes that can be allocated now without swapping and without being killed, as far as the
    system reports them.
    """
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
    """The folders of the control groups that may limit this process's memory, with the root
    last.
    """
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
        # The path is that of this process's control group. In a container it may be the path on the
        # host, of which only the root is visible.
        yield from (g for g in (own, *own.parents) if g == base or base in g.parents)


def _left(group: Path) -> int:
    """The bytes that a group may still allocate. Its page cache counts as free, since it can be
    reclaimed. A large number if there is no limit.
    """
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
