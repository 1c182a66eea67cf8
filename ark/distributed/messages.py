"""Sends and receives of torch.distributed on the backend "ark".

On the CPU, sends and receives run on threads of their own. Messages without a tag are sent from
rank to rank in order (`Group.send`); if a receive accepts any rank, `Arrivals` determines the
sender. A message with a tag is announced to its receiver over the bootstrap (sockets between the
processes) and sent in a separate sequence of messages. `TagMatcher` assigns the messages of this
sequence to receives. On a GPU sends and receives are queued on the caller's stream in order; the
sender must be named, and tags are not supported.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ark.distributed.arrivals import Arrivals
from ark.distributed.group import Group
from ark.distributed.matching import Message, TagMatcher
from ark.distributed.work import ArkWork, ReceiveWork
from ark.errors import InvalidUsageError, UnsupportedError
from ark.frontend.foreign import dense
from ark.runtime.bootstrap import Bootstrap

TAGGED = "tagged"  # the name of the separate sequence of messages with a tag
TAG_AND_SIZE = struct.Struct("<qQ")


class Messages:
    """A process group's sends and receives. Tensors are dense or strided, on one device each."""

    def __init__(self, job: Bootstrap, timeout_s: float) -> None:
        self._job, self._timeout_s = job, timeout_s
        self._arrivals = Arrivals(job)
        self._matcher: TagMatcher | None = None
        self._beside: dict[tuple[str, int], ThreadPoolExecutor] = {}

    def send(self, group: Group, tensor: torch.Tensor, peer: int, tag: int) -> ArkWork:
        whole = dense(tensor)
        if tensor.device.type != "cpu":
            _only_plain(peer, tag)
            group.send(whole, peer)
            return ArkWork([tensor])
        data = whole.detach().reshape(-1).view(torch.uint8) if tag else whole

        def tell_and_send() -> None:
            if tag:
                self._job.post(peer, TAGGED, TAG_AND_SIZE.pack(tag, data.numel()))
                group.send(data, peer, TAGGED)
            else:
                self._arrivals.send(peer)
                group.send(data, peer)

        way = f"send {TAGGED}" if tag else "send"
        return ArkWork([tensor], self._aside(way, peer, tell_and_send))

    def receive(self, group: Group, tensor: torch.Tensor, peer: int | None, tag: int) -> ArkWork:
        """Receives a message from `peer`; None accepts any rank."""
        if tensor.device.type != "cpu":
            _only_plain(peer, tag)
            assert peer is not None
            _receive(group, tensor, peer)
            return ArkWork([tensor])
        work = ReceiveWork([tensor], self._job, self._timeout_s)
        if tag:

            def take(source: int, content: torch.Tensor) -> None:
                work.set_source(source)
                _fill(tensor, content, source, tag)

            work.began(self._tagged(group).receive(peer, tag, take))
            return work

        def begin(source: int) -> None:
            work.set_source(source)
            work.began(self._aside("recv", source, lambda: _receive(group, tensor, source)))

        self._arrivals.receive(peer, begin)
        return work

    def close(self) -> None:
        """Waits for sends and receives in progress."""
        self._arrivals.close()
        for worker in self._beside.values():
            worker.shutdown(wait=True)
        if self._matcher is not None:
            self._matcher.close()

    def _tagged(self, group: Group) -> TagMatcher:
        if self._matcher is None:
            others = [rank for rank in range(group.world_size) if rank != group.rank]

            def next_message() -> Message:
                source, body = self._job.collect_any(others, TAGGED, self._timeout_s)
                tag, nbytes = TAG_AND_SIZE.unpack(body)
                content = torch.empty(nbytes, dtype=torch.uint8)
                group.recv(content, source, TAGGED)
                return Message(source, tag, content)

            self._matcher = TagMatcher(next_message, f"ark-{TAGGED}")
        return self._matcher

    def _aside(self, way: str, peer: int, task: Callable[[], None]) -> Future[None]:
        """Runs the task on a thread that serves one sequence of messages (`way`) with one peer,
        after the thread's earlier tasks, so that the messages of a pair arrive in order.
        """
        key = (way, peer)
        if key not in self._beside:
            self._beside[key] = ThreadPoolExecutor(1, thread_name_prefix=f"ark-{way}-{peer}")
        return self._beside[key].submit(task)


def _only_plain(peer: int | None, tag: int) -> None:
    if peer is None:
        raise UnsupportedError("a receive on a GPU must name its source; pass src")
    if tag:
        raise UnsupportedError(
            "tags are not supported on a GPU, where sends and receives match in order; omit the tag"
        )


def _receive(group: Group, tensor: torch.Tensor, peer: int) -> None:
    whole = dense(tensor)
    group.recv(whole, peer)
    if whole is not tensor:
        tensor.copy_(whole)


def _fill(tensor: torch.Tensor, content: torch.Tensor, source: int, tag: int) -> None:
    if content.numel() != tensor.nbytes:
        raise InvalidUsageError(
            f"rank {source} sent {content.numel()} bytes with the tag {tag}, but the receiving "
            f"tensor has {tensor.nbytes}; both must be equal"
        )
    with torch.no_grad():
        tensor.copy_(content.view(tensor.dtype).view(tensor.shape))
