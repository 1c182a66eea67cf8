"""Sketches: a sketch restricts the routes among which TACCL searches.

The fields are those of Shah et al., "TACCL: Guiding Collective Algorithm Synthesis using
Communication Sketches" (NSDI 2023), so sketches written for TACCL can be read. `default_sketch`
makes one from the topology only. `ark.collective.taccl.logical` turns a sketch into logical links.

    nnodes              boxes; ranks are divided among these equally, in order
    intranode_sketch    strategy "none": the direct links inside a box. "switch": the ranks of each
                        list in `switches` reach each other; switch_hyperedge_strategy, one per
                        list, selects among optimal routes those with the fewest ("uc-min") or the
                        most ("uc-max") connections. "relay": `intranode_conn` {"i": [j, ...]}, the
                        permitted sends
    internode_sketch    strategy "relay": `internode_conn` {"i": [j, ...]}, local ranks i that send
                        to local ranks j of other boxes, or "direct-map" (i to i), or
                        "fully-connected". `gpus_to_sender_rev_map` {"i": [g, ...]}: data of local
                        rank g leave its box through i; `chunk_to_relay_map` [r1, r2] is another
                        form of it, i = (g // r1) * r1 + r2. `beta_split` {"i": n}: rank i has
                        1/n of its network bandwidth. enforce_ordering: on links between boxes,
                        chunks go in the order of their numbers
    symmetry_offsets    [[o, g], ...]: the routes stay the same when ranks move by o within every
                        group of g
    hyperparameters     input_chunkup: chunks that every rank's share is cut into; input_size: bytes
                        or "1K", "32M", "1G"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from ark.errors import ModelError
from ark.ir.json_reader import Closed, read

Connections = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Sketch:
    """A sketch. The module's docstring describes the fields.

    Connections are stored as tuples of (local sender, local receivers).
    """

    nnodes: int = 1
    intranode: str = "none"
    switches: tuple[tuple[int, ...], ...] = ()
    hyperedges: tuple[str, ...] = ()
    intranode_conn: Connections = ()
    internode_conn: Connections | str = "direct-map"
    senders: Connections = ()
    relay_map: tuple[int, int] | None = None
    beta_split: tuple[tuple[int, int], ...] = ()
    enforce_ordering: bool = False
    symmetry_offsets: tuple[tuple[int, int], ...] = ()
    input_chunkup: int = 1
    input_size: int | None = None
    sender_of: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        table = {g: sender for sender, group in self.senders for g in group}
        object.__setattr__(self, "sender_of", table)

    def leaves_through(self, local: int, sender: int) -> bool:
        """True if data of the rank with local number `local` may leave its box (machine) through
        the rank with local number `sender`.
        """
        if self.relay_map is not None:
            step, offset = self.relay_map
            return sender == local // step * step + offset
        return not self.senders or self.sender_of.get(local) == sender

    @classmethod
    def from_json(cls, source: str | Mapping[str, Any]) -> Sketch:
        """Reads a sketch from JSON text or a parsed object. Raises ModelError with the fault."""
        return _sketch(read(source, _File, "the sketch"))


_Ranks = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
_Digits = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")]
_Table = dict[_Digits, _Ranks]
_Number = Annotated[int, msgspec.Meta(ge=1)]


class _Intra(Closed, frozen=True):
    strategy: Literal["none", "switch", "relay"] = "none"
    switches: tuple[_Ranks, ...] = ()
    switch_hyperedge_strategy: tuple[Literal["uc-min", "uc-max"], ...] = ()
    intranode_conn: _Table = msgspec.field(default_factory=dict)


class _Inter(Closed, frozen=True):
    strategy: Literal["relay"] = "relay"
    internode_conn: _Table | Literal["direct-map", "fully-connected"] = "direct-map"
    gpus_to_sender_rev_map: _Table = msgspec.field(default_factory=dict)
    chunk_to_relay_map: tuple[_Number, Annotated[int, msgspec.Meta(ge=0)]] | None = None
    beta_split: dict[_Digits, _Number] = msgspec.field(default_factory=dict)
    enforce_ordering: bool = False


class _Hyper(Closed, frozen=True):
    input_chunkup: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    input_size: int | str | None = None


class _File(Closed, frozen=True):
    nnodes: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    intranode_sketch: _Intra = _Intra()
    internode_sketch: _Inter = _Inter()
    symmetry_offsets: tuple[tuple[_Number, _Number], ...] = ()
    hyperparameters: _Hyper = _Hyper()


def _connections(table: dict[str, _Ranks]) -> Connections:
    return tuple(sorted((int(rank), peers) for rank, peers in table.items()))


def _sketch(file: _File) -> Sketch:
    intra, inter, hyper = file.intranode_sketch, file.internode_sketch, file.hyperparameters
    if any(offset >= group for offset, group in file.symmetry_offsets):
        raise ModelError("The sketch's symmetry_offsets must be pairs with 0 < offset < group.")
    hyperedges = intra.switch_hyperedge_strategy
    if hyperedges and len(hyperedges) != len(intra.switches):
        raise ModelError("The sketch's switch_hyperedge_strategy must have one entry per switch.")
    conn = inter.internode_conn
    return Sketch(
        nnodes=file.nnodes,
        intranode=intra.strategy,
        switches=intra.switches,
        hyperedges=hyperedges,
        intranode_conn=_connections(intra.intranode_conn),
        internode_conn=conn if isinstance(conn, str) else _connections(conn),
        senders=_connections(inter.gpus_to_sender_rev_map),
        relay_map=inter.chunk_to_relay_map,
        beta_split=tuple(sorted((int(rank), n) for rank, n in inter.beta_split.items())),
        enforce_ordering=inter.enforce_ordering,
        symmetry_offsets=file.symmetry_offsets,
        input_chunkup=hyper.input_chunkup,
        input_size=None if hyper.input_size is None else parse_size(hyper.input_size),
    )


def parse_size(size: int | str) -> int:
    """Returns a number of bytes, given as a number or as text such as "64K", "32M", "1G" (powers of
    1024).
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"(\d{1,15})([KMG]?)B?", size) if isinstance(size, str) else None
    if match is None or int(match[1]) == 0:
        raise ModelError(f'The size {size!r:.40} is not valid; write bytes, or "1K", "32M".')
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]
