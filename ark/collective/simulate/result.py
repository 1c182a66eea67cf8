"""The result of a simulation, which the command line prints and the page draws."""

from __future__ import annotations

from dataclasses import dataclass

from ark.collective.programs import OpRef


@dataclass(frozen=True)
class Event:
    """One operation of one piece, with the times of its start and its completion in microseconds.

    For a put, `left_us` is the time at which its last byte left the sender; `end_us` includes the
    latency.
    """

    ref: OpRef
    piece: int
    start_us: float
    left_us: float
    end_us: float
    route: tuple[str, ...]


@dataclass(frozen=True)
class SimulationResult:
    """The time of a program on a topology, and the load of every link.

    `link_bytes` and `link_busy` have an entry for every link of the topology, including idle ones.
    `link_busy` is the fraction of the time, 0 to 1, for which the link would be busy if it always
    used its full bandwidth.
    """

    program: str
    topology: str
    size_bytes: int
    pieces: int
    time_us: float
    events: tuple[Event, ...]
    link_bytes: dict[tuple[str, str], float]
    link_busy: dict[tuple[str, str], float]

    @property
    def algbw(self) -> float:
        """Algorithm bandwidth: data size over time, in GB/s (1e9 bytes a second)."""
        return self.size_bytes / self.time_us / 1e3 if self.time_us else float("inf")
