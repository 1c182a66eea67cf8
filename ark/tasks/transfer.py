"""The task kind `transfer`: a copy by a copy engine or the network. The task requests the copy from
the host's proxy, which also reaches ranks on other hosts, or through a queue that the device writes
itself (device/transfer.h). Emitted by lowerings for the engines that the proxy serves.

operands: source, target, both of one dense dimension and one type.

coord: the first element and the element after the last. The task ends when the bytes have arrived.
    So its memory accesses are those of a task that copies the bytes itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.backend.codegen import device_text
from ark.ir.dtype import by_name
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import Places, count, is_dense, need
from ark.tasks import text

MAX_TRIGGER_BYTES = (1 << 31) - 1  # the most bytes of one request


class Transfer(TaskKind):
    name = "transfer"
    headers = (device_text("proxy.h"), device_text("transfer.h"))

    def check(self, sig: Signature) -> None:
        super().check(sig)
        count(sig, 2)
        source, target = sig.operands
        need(
            len(source.shape) == 1 and is_dense(source) and is_dense(target),
            f"operands have shapes {list(source.shape)} and {list(target.shape)}, expected one "
            "dense dimension",
        )
        need(
            (source.dtype, source.shape) == (target.dtype, target.shape),
            f"the source is {source.dtype}{list(source.shape)}, the target "
            f"{target.dtype}{list(target.shape)}",
        )
        need(
            by_name(source.dtype).per_item == 1,
            f"{source.dtype} is not supported: several elements share a byte",
        )
        need(
            source.itemsize * source.shape[0] <= MAX_TRIGGER_BYTES,
            f"a transfer moves at most {MAX_TRIGGER_BYTES} bytes",
        )

    def places(self, sig: Signature) -> Places:
        return Places((range(0, sig.operands[0].shape[0]),), span=True)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        begin, end = coord
        return [Access(0, (begin,), (end,)), Access(1, (begin,), (end,), write=True)]

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        size = sig.operands[0].itemsize
        body = (
            f"  const ark_u64 first = static_cast<ark_u64>(t.coord[0]) * {size}u;\n"
            f"  const ark_u32 many = static_cast<ark_u32>(t.coord[1] - t.coord[0]) * {size}u;\n"
            f"  ark_transfer(c, {text.address(sig, 0)} + first, {text.address(sig, 1)} + first, "
            "many);\n"
        )
        return text.function(name, body)


register(Transfer())
