"""The torch.distributed backend "ark": importing this module registers it.

    import ark.distributed.torch
    torch.distributed.init_process_group("ark")

Calls on CPU tensors return when the result is complete; calls on GPU tensors are queued on the
current stream. Sends and receives run on other threads, in order for each peer.
"""

# torch declares several overloads of each method. This class overrides only the overload that
# torch's own functions call, so mypy's checks of overrides are disabled.
#
# mypy: disable-error-code="override,assignment"
from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ark.backend import registry
from ark.distributed.group import Group
from ark.distributed.messages import Messages
from ark.distributed.work import ArkWork
from ark.errors import InvalidUsageError, UnsupportedError
from ark.frontend.foreign import dense
from ark.runtime.bootstrap import Bootstrap

NAME = "ark"
_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
}


class ProcessGroupArk(dist.ProcessGroup):
    """torch's process group, implemented by ark's collectives. It has one Bootstrap, and one Group
    for each type of device.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._rank, self._size = rank, size
        self._timeout_s = timeout.total_seconds()
        self._job = _join(store, rank, size, self._timeout_s)
        self._groups: dict[str, Group] = {}
        self._devices: list[Any] = []
        self._messages = Messages(self._job, self._timeout_s)

    def getBackendName(self) -> str:  # noqa: N802 (the name in torch)
        return NAME

    def name(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """The group's name in torch, which torch reads when the group is destroyed."""
        return self._name

    def _group(self, tensor: torch.Tensor) -> Group:
        """The group for the tensor's type of device, created on first use."""
        kind = tensor.device.type
        if tensor.layout != torch.strided or kind not in ("cpu", "cuda"):
            raise InvalidUsageError(
                f"the backend ark takes dense tensors on the CPU or a GPU, got {tensor.layout} "
                f"on {tensor.device}; call to_dense() or to(device) first"
            )
        if kind not in self._groups:
            if kind == "cpu":
                backend, index = registry.get(registry.FALLBACK), 0
            else:
                backend, _ = registry.choose(None)
                index = tensor.device.index
                index = torch.cuda.current_device() if index is None else index
            device = backend.open(index)
            self._devices.append(device)
            self._groups[kind] = Group(self._job, backend, device, self._timeout_s)
        return self._groups[kind]

    # Collectives.

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> ArkWork:
        op = _op(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        for tensor in tensors:
            group, whole = self._group(tensor), dense(tensor)
            group.all_reduce(whole, op, out=whole)
            _store(tensor, whole)
        return ArkWork(list(tensors))

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> ArkWork:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> ArkWork:
        for tensor in tensors:
            group, whole = self._group(tensor), dense(tensor)
            group.broadcast(whole, opts.rootRank, out=whole)
            _store(tensor, whole)
        return ArkWork(list(tensors))

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> ArkWork:
        for tensor in tensors:
            reduced = self._group(tensor).all_reduce(
                dense(tensor), _op(opts.reduceOp), called=f"reduce to rank {opts.rootRank}"
            )
            if opts.rootRank == self._rank:
                tensor.copy_(reduced)
        return ArkWork(list(tensors))

    def allgather(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> ArkWork:
        for parts, tensor in zip(outputs, inputs, strict=True):
            if [p.numel() for p in parts] != [tensor.numel()] * self._size:
                raise InvalidUsageError(
                    f"all_gather got {len(parts)} output tensors of {[p.numel() for p in parts]} "
                    f"elements; expected {self._size} of {tensor.numel()} elements each"
                )
            gathered = self._group(tensor).all_gather(dense(tensor).reshape(-1))
            for part, piece in zip(parts, gathered.chunk(self._size), strict=True):
                part.copy_(piece.view(part.shape))
        return ArkWork(list(outputs))

    def allgather_coalesced(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,
    ) -> ArkWork:
        """outputs[r]: the tensors of rank r, one per input."""
        return self.allgather([list(parts) for parts in zip(*outputs, strict=True)], inputs, opts)

    def _allgather_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> ArkWork:
        whole = dense(output)
        flat = dense(input).reshape(-1)
        self._group(input).all_gather(flat, out=whole.view(-1))
        _store(output, whole)
        return ArkWork([output])

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> ArkWork:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, tensor)
        return ArkWork(list(outputs))

    def reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[Sequence[torch.Tensor]],
        opts: Any,
    ) -> ArkWork:
        for output, parts in zip(outputs, inputs, strict=True):
            packed = torch.cat([part.reshape(-1) for part in parts])
            reduced = self._group(output).reduce_scatter(packed, _op(opts.reduceOp))
            output.copy_(reduced.view(output.shape))
        return ArkWork(list(outputs))

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> ArkWork:
        flat = dense(input).reshape(-1)
        reduced = self._group(input).reduce_scatter(flat, _op(opts.reduceOp))
        output.copy_(reduced.view(output.shape))
        return ArkWork([output])

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any
    ) -> ArkWork:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, tensor, opts)
        return ArkWork(list(outputs))

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> ArkWork:
        group = self._group(input)
        if not output_splits and not input_splits:
            exchanged = group.all_to_all(dense(input))
        else:
            send = list(input_splits) or [input.shape[0] // self._size] * self._size
            receive = list(output_splits) or [output.shape[0] // self._size] * self._size
            exchanged = group.all_to_all_v(dense(input), send, receive)
        output.copy_(exchanged.view(output.shape))
        return ArkWork([output])

    def alltoall(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> ArkWork:
        packed = torch.cat([part.reshape(-1) for part in inputs])
        send, receive = ([part.numel() for part in parts] for parts in (inputs, outputs))
        exchanged = self._group(packed).all_to_all_v(packed, send, receive)
        for output, piece in zip(outputs, exchanged.split(receive), strict=True):
            output.copy_(piece.view(output.shape))
        return ArkWork(list(outputs))

    # Newer releases of torch call these methods by other names, which are added here.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def gather(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        opts: Any,
    ) -> ArkWork:
        (tensor,) = inputs
        gathered = self._group(tensor).all_gather(
            dense(tensor).reshape(-1), called=f"gather to rank {opts.rootRank}"
        )
        if opts.rootRank == self._rank:
            for part, piece in zip(outputs[0], gathered.chunk(self._size), strict=True):
                part.copy_(piece.view(part.shape))
        return ArkWork(list(outputs))

    def scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[Sequence[torch.Tensor]],
        opts: Any,
    ) -> ArkWork:
        (output,) = outputs
        packed = output.new_empty((self._size * output.numel(),))
        if opts.rootRank == self._rank:
            torch.cat([part.reshape(-1) for part in inputs[0]], out=packed)
        received = self._group(output).broadcast(packed, opts.rootRank, called="scatter")
        output.copy_(received.chunk(self._size)[self._rank].view(output.shape))
        return ArkWork(list(outputs))

    def barrier(self, opts: Any = None) -> ArkWork:
        if torch.cuda.is_available() and any(kind != "cpu" for kind in self._groups):
            torch.cuda.synchronize()
        if self._size > 1:
            self._group(torch.empty(0)).barrier()
        return ArkWork([])

    # Point to point.

    def send(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> ArkWork:
        (tensor,) = tensors
        return self._messages.send(self._group(tensor), tensor, peer, tag)

    def recv(self, tensors: Sequence[torch.Tensor], peer: int, tag: int) -> ArkWork:
        (tensor,) = tensors
        return self._messages.receive(self._group(tensor), tensor, peer, tag)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int) -> ArkWork:
        (tensor,) = tensors
        return self._messages.receive(self._group(tensor), tensor, None, tag)

    # Shutdown.

    def shutdown(self) -> None:
        """Frees everything; all ranks call it (torch.distributed.destroy_process_group does)."""
        self._messages.close()
        for group in self._groups.values():
            group.close()
        for device in self._devices:
            device.close()
        self._groups, self._devices = {}, []
        self._job.close()

    def abort(self) -> None:
        self._job.abort("torch.distributed was told to abort")


def _op(op: Any) -> str:
    for known, name in _OPS.items():
        if op == known:
            return name
    raise UnsupportedError(f"the backend ark reduces by {', '.join(_OPS.values())}, not by {op}")


def _store(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Copies a dense result to the caller's strided tensor. Does nothing if the result is the
    tensor itself.
    """
    if whole is not tensor:
        tensor.copy_(whole)


def _join(store: Any, rank: int, size: int, timeout_s: float) -> Bootstrap:
    """Connects the ranks of a torch process group. Rank 0 publishes its address in torch's store,
    which all ranks share.
    """
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if size == 1:
        return Bootstrap.connect(0, 1, address, 0)
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        store.set("ark", f"{address} {port} {secrets.token_hex(16)}")
    fields = store.get("ark").decode().split(" ")
    if len(fields) != 3 or not fields[1].isdigit():
        raise InvalidUsageError(
            f"torch's store holds {fields} under ark's key, where rank 0's address was "
            "expected; use another key in your program"
        )
    return Bootstrap.connect(
        rank, size, fields[0], int(fields[1]), min(timeout_s, 600.0), job=fields[2], ports=8
    )


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> ProcessGroupArk:
    return ProcessGroupArk(store, rank, size, timeout)


if not hasattr(dist.Backend, NAME.upper()):
    dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])
