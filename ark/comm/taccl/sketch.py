"""Sketches: what a person tells the synthesiser about the routes worth searching.

The fields are those of Shah et al., "TACCL: Guiding Collective Algorithm Synthesis using
Communication Sketches" (NSDI 2023), so sketches written for it can be read. `default_sketch` makes
one from the topology alone. `ark.comm.taccl.logical` turns a sketch into logical links.

    nnodes              boxes; ranks are dealt to them in order, equally many each
    intranode_sketch    strategy "none": the direct links inside a box. "switch": the ranks of each
                        list in `switches` reach each other; switch_hyperedge_strategy, one a list,
                        "uc-min" or "uc-max", wants few or many connections among the optimal ones.
                        "relay": `intranode_conn` {"i": [j, ...]}, who may send to whom
    internode_sketch    strategy "relay": `internode_conn` {"i": [j, ...]}, local ranks i that send
                        to local ranks j of other boxes, or "direct-map" (i to i), or
                        "fully-connected". `gpus_to_sender_rev_map` {"i": [g, ...]}: data of local
                        rank g leave its box through i; `chunk_to_relay_map` [r1, r2] says the
                        same by the rule i = (g // r1) * r1 + r2. `beta_split` {"i": n}: rank i has
                        1/n of its network bandwidth. enforce_ordering: on links between boxes,
                        chunks go in the order of their numbers
    symmetry_offsets    [[o, g], ...]: the routes stay the same when ranks move by o within every
                        group of g
    hyperparameters     input_chunkup: chunks that every rank's share is cut into; input_size: bytes
                        or "1K", "32M", "1G"
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ark.errors import ModelError

Connections = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Sketch:
    """A sketch; the module's docstring says what the fields mean.

    Connections are tuples of (local sender, local receivers).
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
        """Whether data of local rank `local` may leave its box through local rank `sender`."""
        if self.relay_map is not None:
            step, offset = self.relay_map
            return sender == local // step * step + offset
        return not self.senders or self.sender_of.get(local) == sender

    @classmethod
    def load(cls, path: str) -> Sketch:
        """Reads a sketch file; ModelError if it cannot be read or is no sketch."""
        try:
            with open(path, encoding="utf-8") as file:
                return cls.from_json(file.read())
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"The sketch {path} cannot be read: {error}.") from error

    @classmethod
    def from_json(cls, source: str | Mapping[str, Any]) -> Sketch:
        """Reads a sketch from JSON text or the object it holds; ModelError names what is wrong."""
        if isinstance(source, str):
            try:
                source = json.loads(source)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ModelError(f"The sketch is not valid JSON: {error}.") from error
        return _parse(_Fields(source, "the sketch"))


class _Fields:
    """A JSON object whose fields are taken one by one; what is left over is an error."""

    def __init__(self, raw: Any, where: str) -> None:
        if not isinstance(raw, Mapping):
            raise ModelError(f"{where[0].upper()}{where[1:]} must be an object, not {raw!r:.40}.")
        self.raw, self.where = dict(raw), where

    def fail(self, key: str, wanted: str, value: Any) -> ModelError:
        return ModelError(f'In {self.where} "{key}" must be {wanted}, not {value!r:.60}.')

    def whole(self, key: str, default: int, most: int) -> int:
        value = self.raw.pop(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise self.fail(key, f"a whole number from 1 to {most}", value)
        return value

    def word(self, key: str, choices: tuple[str, ...], default: str) -> str:
        value = self.raw.pop(key, default)
        if value not in choices:
            raise self.fail(key, f"one of {', '.join(choices)}", value)
        return value

    def lists(self, key: str) -> tuple[tuple[int, ...], ...]:
        value = self.raw.pop(key, [])
        if not isinstance(value, list) or not all(_are_ranks(row) for row in value):
            raise self.fail(key, "a list of lists of rank numbers", value)
        return tuple(tuple(row) for row in value)

    def table(self, key: str) -> Connections:
        value = self.raw.pop(key, {})
        good = isinstance(value, Mapping) and all(
            _is_rank(k) and _are_ranks(v) for k, v in value.items()
        )
        if not good:
            raise self.fail(key, 'an object {"rank": [rank, ...]}', value)
        return tuple(sorted((int(k), tuple(v)) for k, v in value.items()))

    def end(self) -> None:
        if self.raw:
            raise ModelError(f'In {self.where} there is an unknown field "{min(self.raw)}".')


def _is_rank(key: Any) -> bool:
    return isinstance(key, str) and re.fullmatch(r"[0-9]{1,9}", key) is not None


def _are_ranks(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in value
    )


def _parse(top: _Fields) -> Sketch:
    nnodes = top.whole("nnodes", 1, 1 << 16)
    intra = _Fields(top.raw.pop("intranode_sketch", {}), "the sketch's intranode_sketch")
    inter = _Fields(top.raw.pop("internode_sketch", {}), "the sketch's internode_sketch")
    hyper = _Fields(top.raw.pop("hyperparameters", {}), "the sketch's hyperparameters")
    offsets = top.lists("symmetry_offsets")
    if any(len(pair) != 2 or not 0 < pair[0] < pair[1] for pair in offsets):
        raise top.fail("symmetry_offsets", "pairs [offset, group] with 0 < offset < group", offsets)
    top.end()
    intranode = intra.word("strategy", ("none", "switch", "relay"), "none")
    switches = intra.lists("switches")
    hyperedges = intra.raw.pop("switch_hyperedge_strategy", [])
    if not isinstance(hyperedges, list) or any(h not in ("uc-min", "uc-max") for h in hyperedges):
        raise intra.fail("switch_hyperedge_strategy", "a list of uc-min or uc-max", hyperedges)
    if hyperedges and len(hyperedges) != len(switches):
        raise intra.fail("switch_hyperedge_strategy", "as long as switches", hyperedges)
    intranode_conn = intra.table("intranode_conn")
    intra.end()
    inter.word("strategy", ("relay",), "relay")
    conn: Connections | str = "direct-map"
    if isinstance(inter.raw.get("internode_conn"), str):
        conn = inter.word("internode_conn", ("direct-map", "fully-connected"), "direct-map")
    elif "internode_conn" in inter.raw:
        conn = inter.table("internode_conn")
    senders = inter.table("gpus_to_sender_rev_map")
    relay = inter.raw.pop("chunk_to_relay_map", None)
    if relay is not None and not (_are_ranks(relay) and len(relay) == 2 and relay[0] > 0):
        raise inter.fail("chunk_to_relay_map", "a pair [r1, r2] with r1 above 0", relay)
    split = inter.raw.pop("beta_split", {})
    good_split = isinstance(split, Mapping) and all(
        _is_rank(k) and isinstance(v, int) and v > 0 for k, v in split.items()
    )
    if not good_split:
        raise inter.fail("beta_split", 'an object {"rank": n} with n above 0', split)
    ordering = inter.raw.pop("enforce_ordering", False)
    if not isinstance(ordering, bool):
        raise inter.fail("enforce_ordering", "true or false", ordering)
    inter.end()
    chunkup = hyper.whole("input_chunkup", 1, 1024)
    size = hyper.raw.pop("input_size", None)
    hyper.end()
    return Sketch(
        nnodes=nnodes,
        intranode=intranode,
        switches=switches,
        hyperedges=tuple(hyperedges),
        intranode_conn=intranode_conn,
        internode_conn=conn,
        senders=senders,
        relay_map=None if relay is None else (relay[0], relay[1]),
        beta_split=tuple(sorted((int(k), v) for k, v in split.items())),
        enforce_ordering=ordering,
        symmetry_offsets=tuple((o, g) for o, g in offsets),
        input_chunkup=chunkup,
        input_size=None if size is None else parse_size(size),
    )


def parse_size(size: int | str) -> int:
    """Bytes from a number or a text such as "64K", "32M", "1G" (powers of 1024)."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"(\d{1,15})([KMG]?)B?", size) if isinstance(size, str) else None
    if match is None or int(match[1]) == 0:
        raise ModelError(f'The size {size!r:.40} is not understood; write bytes, or "1K", "32M".')
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]
