"""A cable between two network namespaces, whose frames this process delays or drops:

python tests/multi/relay.py NAMESPACE DEVICE NAMESPACE DEVICE

Each end is a TAP device, so the kernel's own TCP resends lost frames. Each line of JSON on standard
input sets the cable's properties (the fields of Cable). It is answered by the numbers of frames
received and lost so far. The devices end with this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import heapq
import json
import os
import random
import select
import struct
import sys
import time
from dataclasses import dataclass

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
FRAME_BYTES = 65536
QUEUE_FRAMES = 1000  # that wait in one direction; further ones are dropped


@dataclass(frozen=True)
class Cable:
    """The properties of a cable. delay_ms: the delay in each direction, plus or minus up to
    jitter_ms, so that frames may be reordered. lost: the fraction of frames that are dropped, 1 for
    a cut cable. mbit: the bandwidth in Mbit/s, 0 for no limit. seed: of the random losses and
    delays.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    lost: float = 0.0
    mbit: float = 0.0
    seed: int = 0


def tap(namespace: str, name: str) -> int:
    """Returns a TAP device in a namespace. Reading it gives the frames sent there."""
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    enter = ctypes.CDLL(None, use_errno=True).setns
    try:
        if enter(there, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"entering {namespace} failed")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI)
        fcntl.ioctl(device, TUNSETIFF, flags)
        return device
    finally:
        enter(own, CLONE_NEWNET)
        os.close(own)
        os.close(there)


class Direction:
    """The frames in flight from one end to the other, ordered by their time of arrival."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self.waiting: list[tuple[float, int, bytes]] = []
        self.count = self.lost = 0
        self.free = 0.0  # when the last frame has left

    def take(self, cable: Cable, chance: random.Random) -> None:
        """Reads the frames that the sending end has sent since the last call, and drops or delays
        each of them.
        """
        for _ in range(64):
            try:
                frame = os.read(self.source, FRAME_BYTES)
            except OSError:  # no more frames, or a device that is down
                return
            self.count += 1
            lost = chance.random() < cable.lost
            late = cable.delay_ms + cable.jitter_ms * (2.0 * chance.random() - 1.0)
            if lost or len(self.waiting) >= QUEUE_FRAMES:
                self.lost += 1
                continue
            self.free = max(self.free, time.monotonic())
            if cable.mbit:
                self.free += len(frame) * 8e-6 / cable.mbit
            arrival = self.free + max(0.0, late) * 1e-3
            heapq.heappush(self.waiting, (arrival, self.count, frame))

    def give(self, cable: Cable) -> None:
        """Passes on the frames that are due. Frames in flight when the cable is cut are dropped."""
        while self.waiting and self.waiting[0][0] <= time.monotonic():
            _, _, frame = heapq.heappop(self.waiting)
            if cable.lost < 1.0:
                # A device that is down or has a full queue loses the frame.
                with contextlib.suppress(OSError):
                    os.write(self.target, frame)


def main() -> None:
    ends = [tap(*sys.argv[1:3]), tap(*sys.argv[3:5])]
    directions = [Direction(*ends), Direction(*reversed(ends))]
    cable, chance = Cable(), random.Random(0)
    partial = b""
    print("open", flush=True)
    while True:
        due = [d.waiting[0][0] for d in directions if d.waiting]
        wait = max(0.0, min(due) - time.monotonic()) if due else None
        ready, _, _ = select.select([0, *ends], [], [], wait)
        if 0 in ready:
            more = os.read(0, 4096)
            if not more:
                return
            *lines, partial = (partial + more).split(b"\n")
            for line in lines:
                changed = dataclasses.replace(cable, **json.loads(line))
                if changed.seed != cable.seed:
                    chance.seed(changed.seed)
                cable = changed
                print(
                    *(sum(getattr(d, n) for d in directions) for n in ("count", "lost")), flush=True
                )
        for direction in directions:
            direction.take(cable, chance)
            direction.give(cable)


if __name__ == "__main__":
    main()
