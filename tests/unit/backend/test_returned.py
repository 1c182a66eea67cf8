"""Memory whose release is deferred until no kernel runs."""

from __future__ import annotations

from ark.backend.devices import Memory
from ark.backend.returned import Returned


def memory(address: int) -> Memory:
    return Memory(address, 16, "device")


def test_memory_is_freed_in_order_once_no_kernel_runs() -> None:
    freed: list[int] = []
    running = [True]
    returned = Returned(lambda m: freed.append(m.address), lambda: running[0])
    returned.add(memory(1))
    returned.add(memory(2))
    returned.settle()
    assert freed == []
    running[0] = False
    returned.add(memory(3))
    assert freed == [1, 2, 3]
    returned.settle()
    assert freed == [1, 2, 3]


def test_allocation_that_fails_otherwise_waits() -> None:
    freed: list[int] = []
    returned = Returned(lambda m: freed.append(m.address), lambda: True)
    assert not returned.force()
    returned.add(memory(1))
    assert returned.force() and freed == [1]
    assert not returned.force()
