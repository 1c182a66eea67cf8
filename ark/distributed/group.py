"""A group of ranks and its collectives on memory that the caller owns.

Each collective is a plan of one op (ark.distributed.calls), which is compiled when a size is first
used and then cached. All ranks must call the same collectives in the same order with equal types
and sizes, which ark.distributed.communicator checks; only the sender and the receiver call send and
recv. On a CPU, a call returns when all ranks have made it; on a GPU it is queued on the caller's
stream.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.collective.programs import Collective, CollectiveProgram
from ark.distributed import programs
from ark.distributed.arrays import Array, wrap
from ark.distributed.board import fingerprint
from ark.distributed.calls import Call, Key, check_size, moved
from ark.distributed.communicator import Communicator, Talk
from ark.distributed.registered import Registered
from ark.errors import BaseError, InvalidUsageError
from ark.ir.values import whole
from ark.lower.engines import AUTO
from ark.runtime import tuned_collectives as tuned
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.executor import BUDGET_S
from ark.runtime.hosts import numbered

REDUCTIONS = ("sum", "product", "min", "max", "mean")
MAX_LOADED_CALLS = 64  # loaded collectives of a group, and loaded messages of each pair


class Group:
    """Ranks that call collectives together. A context manager; `close` frees everything.

    ranks: the job's ranks, which the group does not close. budget_s: how many seconds a rank waits
    for another rank to begin or to finish a call. The time in which other ranks plan or compile the
    call does not count.
    """

    def __init__(
        self, ranks: Bootstrap, backend: Backend, device: Device, budget_s: float = BUDGET_S
    ) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self._job = ranks
        self._backend, self._device = backend, device
        self.budget_s = budget_s
        self._talk = Talk(ranks, f"{backend.name} arrays", budget_s)
        self._all_ranks = self._talk.communicator("all", range(ranks.world_size))
        self._calls: defaultdict[Communicator, OrderedDict[str, Call]] = defaultdict(OrderedDict)
        self._tuned: tuned.Table | None = None
        self._programs: dict[str, CollectiveProgram] = {}  # by the content of their files
        self._registered = Registered()

    # The collectives. Their arrays are contiguous NumPy arrays, or torch tensors on the group's
    # device. called: the public function's name for errors, if it differs from the method's.
    def all_reduce(
        self, input: Any, op: str = "sum", out: Any = None, *, called: str = "all_reduce"
    ) -> Any:
        """Reduces `input` over all ranks to the same bits on each. out: may be `input`.

        op: sum, product, min, max, or mean (of floats). Floats below 32 bits are reduced in fp32
        and rounded once. Shape, type and `op` agree on all ranks. Returns `out`, or a new array.
        """
        x = wrap(input)
        y = x.like(out, x.shape)
        self._run(Collective.ALL_REDUCE, x, y, called, reduction=_reduction(op))
        return y.given

    def all_gather(self, input: Any, out: Any = None, *, called: str = "all_gather") -> Any:
        """The ranks' arrays, concatenated along the first dimension: [n, ...] becomes [world_size *
        n, ...].
        """
        x = wrap(input)
        first, *others = x.shape or (1,)
        y = x.like(out, (first * self.world_size, *others))
        self._run(Collective.ALL_GATHER, x, y, called)
        return y.given

    def reduce_scatter(self, input: Any, op: str = "sum", out: Any = None) -> Any:
        """Reduces `input` over all ranks; returns this rank's equal part of the first dimension."""
        x = wrap(input)
        y = x.like(out, self._dealt("reduce_scatter", x))
        self._run(Collective.REDUCE_SCATTER, x, y, "reduce_scatter", reduction=_reduction(op))
        return y.given

    def all_to_all(self, input: Any, out: Any = None) -> Any:
        """Exchanges equal parts of the first dimension: part s goes to rank s."""
        x = wrap(input)
        self._dealt("all_to_all", x)
        y = x.like(out, x.shape)
        self._run(Collective.ALL_TO_ALL, x, y, "all_to_all")
        return y.given

    def all_to_all_v(
        self, input: Any, send: Sequence[int], receive: Sequence[int], out: Any = None
    ) -> Any:
        """Like all_to_all, with parts of unequal length.

        send[s]: the number of rows (along the first dimension) for rank s; the rows are in rank
        order. receive[s]: the number of rows from rank s. Raises InvalidUsageError on all ranks if
        a rank sends another number of rows than its peer receives.
        """
        x = wrap(input)
        first, *others = x.shape or (1,)
        send, receive = _lengths("send", send), _lengths("receive", receive)
        if len(send) != self.world_size or len(receive) != self.world_size:
            raise InvalidUsageError(
                f"all_to_all_v: {len(send)} and {len(receive)} lengths were given for "
                f"{self.world_size} ranks; give one for each"
            )
        if sum(send) != first:
            raise InvalidUsageError(
                f"all_to_all_v: send sums to {sum(send)} rows, but the input has {first}; both "
                "must be equal"
            )
        y = x.like(out, (sum(receive), *others))
        width = self._width(f"all_to_all_v of {x.element}{list(others)}", x, send, receive)
        if width == 0:
            return y.given
        packed = wrap(x.blank((self.world_size * width, *others)))
        at = 0
        for peer, rows in enumerate(send):
            packed.rows(peer * width, rows).copy_from(x.rows(at, rows))
            at += rows
        moved = wrap(x.blank(packed.shape))
        self._run(Collective.ALL_TO_ALL, packed, moved, "all_to_all_v")
        at = 0
        for peer, rows in enumerate(receive):
            y.rows(at, rows).copy_from(moved.rows(peer * width, rows))
            at += rows
        return y.given

    def broadcast(
        self, input: Any, root: int = 0, out: Any = None, *, called: str = "broadcast"
    ) -> Any:
        """The array of rank `root`, on all ranks. Other ranks' input gives shape and type only."""
        x = wrap(input)
        root = self._peer("broadcast", root)
        y = x.like(out, x.shape)
        self._run(Collective.BROADCAST, x, y, called, root=root)
        return y.given

    def run_program(
        self, program: str | os.PathLike[str] | CollectiveProgram, input: Any, out: Any = None
    ) -> Any:
        """Runs the collective of a program on this rank's array.

        program: a program or the path of its file (MSCCL++ execution plan, MSCCL XML, ark's JSON);
        the same on all ranks. input, out: as for the collective that the program computes. The
        kernel is compiled at the first call with a size, and cached. Raises InvalidUsageError if
        the program is for another number of ranks.
        """
        if not isinstance(program, CollectiveProgram):
            program = programs.load(program, self._programs)
        programs.check_ranks(program, self.world_size)
        x = wrap(input)
        y = x.like(out, programs.result_shape(program, x.shape, self.world_size))
        if self.world_size == 1:
            if x.elements:
                y.copy_from(x)
            return y.given
        text = x.called("run_program", f"program={programs.title(program)}")
        key = Key(program.collective.value, x.element, x.itemsize, x.elements, program.reduction)
        if program.reduction is None:  # without reduction, data move as bytes
            key = moved(program.collective, x, 1 if program.permutes else self.world_size, None)
        key = dataclasses.replace(key, root=program.root, algorithm=program)
        self._execute(self._all_ranks, text, text, key, x, y)
        return y.given

    def register(self, array: Any) -> Any:
        """Registers an array and returns it. Later calls read and write it, or parts of it, in
        place. array: contiguous, on the group's device, 16-byte aligned; alive until `unregister`.
        """
        self._registered.add(array, self._device)
        return array

    def unregister(self, array: Any) -> None:
        """Ends an array's registration. Call it after queued calls with the array have ended."""
        self._registered.remove(array)

    def send(self, input: Any, peer: int, way: str = "") -> None:
        """Sends to the rank `peer`, which must receive the same number of elements of the same
        type. Messages arrive in the order of the calls.

        way: names a sequence of messages; different sequences do not wait for each other.
        """
        x = wrap(input)
        peer = self._peer("send", peer)
        self._pair(self.rank, peer, way, x, None)

    def recv(self, out: Any, peer: int, way: str = "") -> Any:
        """Receives into `out` a message that the rank `peer` sends. way: as for `send`."""
        y = wrap(out)
        y.check_writable()
        peer = self._peer("recv", peer)
        self._pair(peer, self.rank, way, y, y)
        return y.given

    def barrier(self, called: str = "barrier()") -> None:
        """Returns when every rank has called it. called: the barrier's name in errors."""
        if self.world_size > 1:
            comm = self._all_ranks
            comm.make(called, fingerprint(called), True, lambda: self._arrive(comm))

    # Execution.

    def _width(self, called: str, x: Array, send: list[int], receive: list[int]) -> int:
        """The longest part of an all_to_all_v, from the lengths that the ranks exchange."""
        world = self.world_size
        own = wrap(x.numbers([*send, *receive]))
        table = wrap(x.numbers([0] * (2 * world * world)))
        self._run(Collective.ALL_GATHER, own, table, called)
        rows = np.array(table.listed(), np.int64).reshape(world, 2, world)
        sent, received = rows[:, 0], rows[:, 1].T
        for source, target in np.argwhere(sent != received).tolist():
            raise InvalidUsageError(
                f"all_to_all_v: rank {source} sends {sent[source, target]} rows to rank {target}, "
                f"which receives {received[source, target]}; both lengths must be the same"
            )
        return int(sent.max())

    def _dealt(self, called: str, x: Array) -> tuple[int, ...]:
        first, *others = x.shape or (1,)
        if first % self.world_size:
            raise InvalidUsageError(
                f"{called}: the first dimension of {list(x.shape)} is not divisible by "
                f"{self.world_size} ranks"
            )
        return (first // self.world_size, *others)

    def _peer(self, called: str, rank: int) -> int:
        rank = whole(f"{called}: the rank", rank)
        if not 0 <= rank < self.world_size:
            raise InvalidUsageError(
                f"{called}: rank {rank} is out of range; there are {self.world_size} ranks, "
                "numbered from 0"
            )
        return rank

    def _run(
        self,
        collective: Collective,
        x: Array,
        y: Array,
        called: str,
        reduction: str | None = None,
        root: int | None = None,
    ) -> None:
        if self.world_size == 1:
            if x.elements:
                y.copy_from(x)
            return
        if reduction == "mean" and "int" in x.element:
            raise InvalidUsageError(
                f"a mean of {x.element} is not supported, because the sum of all ranks may "
                "overflow the type; convert the array to a floating-point type, or reduce by "
                "sum and divide"
            )
        options = [f"op={reduction!r}"] if reduction is not None else []
        options += [f"root={root}"] if root is not None else []
        text = x.called(called, *options)
        if reduction is not None:
            key = Key(collective.value, x.element, x.itemsize, x.elements, reduction, root)
        else:
            parts = self.world_size if collective is Collective.ALL_TO_ALL else 1
            key = moved(collective, x, parts, root)
        self._execute(self._all_ranks, text, text, key, x, y)

    def _pair(self, source: int, target: int, way: str, x: Array, y: Array | None) -> None:
        if source == target:
            raise InvalidUsageError(f"rank {source} sends to itself; copy the array instead")
        comm = self._talk.communicator(f"{source} to {target} {way}", (source, target))
        peer = f"peer={target if y is None else source}"
        text = x.called("send" if y is None else "recv", peer)
        key = moved(Collective.BROADCAST, x, 1, 0)
        self._execute(comm, text, x.called("message"), key, x if y is None else None, y)

    def _execute(
        self, comm: Communicator, text: str, same: str, key: Key, x: Array | None, y: Array | None
    ) -> None:
        """Runs a call. text: the call in errors. same: a text that is equal for matching calls."""
        some = x or y
        assert some is not None
        stream = some.stream()

        def run() -> None:
            if some.elements == 0:
                return
            call = self._call(comm, same, key)
            source, target = self._registered.addresses(x, y)
            call.bind(source, target)
            if x is not None and source is None:
                x.write_to(call.view(x, call.source))
            call.run(stream)
            if y is not None and target is None:
                y.read_from(call.view(y, call.target))
            elif y is not None:
                y.changed()

        comm.make(text, fingerprint(same), stream is None, run)

    def _call(self, comm: Communicator, same: str, key: Key) -> Call:
        """The loaded plan for `key`, which is created if necessary. If more than MAX_LOADED_CALLS
        are loaded, the least recently used one is dropped; this is the same one on all ranks.
        """
        calls = self._calls[comm]
        if same in calls and not comm.fresh:
            calls.move_to_end(same)
            return calls[same]
        check_size(key, comm.world_size)
        hosts = self._arrive(comm)
        if same in calls:
            calls.move_to_end(same)
            return calls[same]
        if len(calls) >= MAX_LOADED_CALLS:
            calls.popitem(last=False)[1].close(collective=True)
        free = comm is self._all_ranks and key.algorithm == AUTO
        chosen = self._chosen(key) if free else key
        ranks = (comm, comm.rank, comm.world_size)
        call = Call(chosen, *ranks, self._backend, self._device, self.budget_s, hosts)
        calls[same] = call
        return call

    def _arrive(self, comm: Communicator) -> Sequence[int]:
        """Synchronises the communicator's ranks; returns the host number of each. After an error,
        calls that all ranks have loaded are restarted, and calls that only some ranks have loaded
        are dropped.
        """
        calls, fresh = self._calls[comm], comm.fresh
        machine = self._device.machine
        mine = tuned.KEPT.encoded(machine, tuned.KEPT.load(machine)) if self.rank == 0 else b""
        arrivals = comm.arrive(list(calls), mine)
        if self._tuned is None and comm is self._all_ranks:
            self._tuned = tuned.KEPT.decoded(arrivals[0].more, "rank 0")
        if fresh:
            everywhere = set.intersection(*(set(each.kept) for each in arrivals))
            for name in [name for name in calls if name not in everywhere]:
                calls.pop(name).close(collective=False)
            for name in [name for name in arrivals[0].kept if name in everywhere]:
                calls.move_to_end(name)
                calls[name].restart()
        return numbered(each.host for each in arrivals)

    def _chosen(self, key: Key) -> Key:
        """The key with the algorithm and engine that `ark tune` found fastest, if it was run."""
        assert self._tuned is not None
        nbytes = max(key.nbytes, key.out_bytes(self.world_size))
        measured = tuned.pick(self._tuned, key.collective, self.world_size, nbytes)
        if measured is None:
            return key
        return dataclasses.replace(key, algorithm=measured.algorithm, engine=measured.engine)

    def close(self, collective: bool = True) -> None:
        """Frees the calls' memory. collective: all ranks close the group, and none has failed."""
        for comm in self._talk.communicators():
            calls = self._calls.pop(comm, OrderedDict())
            ok = collective and comm is self._all_ranks and self._job.failure() is None
            ok = ok and not comm.fresh and comm.meet()
            while calls:
                _, call = calls.popitem(last=False)
                with contextlib.suppress(BaseError):
                    call.close(collective=ok)
            comm.close()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(collective=kind is None)


def _lengths(name: str, given: Sequence[int]) -> list[int]:
    """The number of rows of each part. Raises InvalidUsageError if the numbers are not valid."""
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise InvalidUsageError(
            f"all_to_all_v: {name} is {given!r:.60}; expected a number of rows for each rank"
        )
    lengths = [whole(f"all_to_all_v: {name}", rows) for rows in given]
    if any(rows < 0 for rows in lengths):
        raise InvalidUsageError(f"all_to_all_v: {name}={lengths} has a negative number of rows")
    return lengths


def _reduction(op: str) -> str:
    if op not in REDUCTIONS:
        raise InvalidUsageError(
            f"the reduction {op!r} does not exist; use one of {', '.join(REDUCTIONS)}"
        )
    return op
