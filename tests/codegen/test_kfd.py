"""AMD's queues through the Linux driver's interface: compared with the kernel's own header, and run
with a simulated driver that refuses calls. The real driver was not tested, because no AMD GPU is
available.
"""

from __future__ import annotations

import ctypes
import errno
import subprocess
from pathlib import Path

import pytest
from ark_rocm import kfd

from ark.backend import native
from ark.errors import SystemError

HEADER = Path("/usr/include/linux/kfd_ioctl.h")
NAMES = {
    kfd.CREATE_QUEUE: "AMDKFD_IOC_CREATE_QUEUE",
    kfd.DESTROY_QUEUE: "AMDKFD_IOC_DESTROY_QUEUE",
    kfd.ALLOC: "AMDKFD_IOC_ALLOC_MEMORY_OF_GPU",
    kfd.FREE: "AMDKFD_IOC_FREE_MEMORY_OF_GPU",
    kfd.MAP: "AMDKFD_IOC_MAP_MEMORY_TO_GPU",
    kfd.UNMAP: "AMDKFD_IOC_UNMAP_MEMORY_FROM_GPU",
}
FLAGS = {
    "KFD_IOC_ALLOC_MEM_FLAGS_GTT": kfd.GTT,
    "KFD_IOC_ALLOC_MEM_FLAGS_DOORBELL": kfd.DOORBELL,
    "KFD_IOC_ALLOC_MEM_FLAGS_WRITABLE": kfd.WRITABLE,
    "KFD_IOC_ALLOC_MEM_FLAGS_EXECUTABLE": kfd.EXECUTABLE,
    "KFD_IOC_ALLOC_MEM_FLAGS_NO_SUBSTITUTE": kfd.NO_SUBSTITUTE,
    "KFD_IOC_ALLOC_MEM_FLAGS_COHERENT": kfd.COHERENT,
    "KFD_IOC_ALLOC_MEM_FLAGS_UNCACHED": kfd.UNCACHED,
    "KFD_IOC_QUEUE_TYPE_SDMA_XGMI": kfd.QUEUE_TYPES[0],
    "KFD_IOC_QUEUE_TYPE_SDMA": kfd.QUEUE_TYPES[1],
}


def test_calls_are_those_of_the_kernels_header(tmp_path: Path) -> None:
    compiler = native.find_compiler()
    if not HEADER.exists():
        pytest.skip(f"{HEADER} (Debian's linux-libc-dev) is not installed")
    if compiler is None:
        pytest.skip("no C++ compiler is installed")
    lines = []
    for kind, name in NAMES.items():
        lines.append(f"static_assert({name} == {kfd.request(kind)}u);")
        lines.append(f"static_assert(sizeof({kind.__name__}) == {ctypes.sizeof(kind)});")
        end = 0
        for member, ctype in kind._fields_:
            at, size = getattr(kind, member).offset, ctypes.sizeof(ctype)
            lines.append(f"static_assert(offsetof({kind.__name__}, {member}) == {at});")
            lines.append(f"static_assert(sizeof({kind.__name__}::{member}) == {size});")
            assert at == end, f"{kind.__name__}.{member}: padding that the header may name"
            end = at + size
        assert end == ctypes.sizeof(kind)
    lines += [f"static_assert({name} == {value}u);" for name, value in FLAGS.items()]
    source = tmp_path / "calls.cpp"
    source.write_text("#include <cstddef>\n#include <linux/kfd_ioctl.h>\n" + "\n".join(lines))
    # kfd_ioctl.h includes drm/drm.h, which needs not be installed. This replacement includes the
    # two headers of which kfd_ioctl.h uses definitions.
    (tmp_path / "drm").mkdir()
    (tmp_path / "drm" / "drm.h").write_text("#include <linux/types.h>\n#include <linux/ioctl.h>\n")
    done = subprocess.run(
        [
            *compiler,
            "-std=c++17",
            "-Wno-narrowing",
            "-idirafter",
            str(tmp_path),
            "-fsyntax-only",
            str(source),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


class Driver:
    """A simulated kernel driver that counts allocations and frees. refuses: the calls that it lets
    fail.
    """

    def __init__(self, *refuses: int) -> None:
        self.refuses, self.held, self.mapped, self.queues = refuses, {}, set(), set()
        self.types: list[int] = []

    def __call__(self, number: int, data: ctypes.Structure) -> None:
        kind = next(k for k in NAMES if kfd.request(k) == number)
        if kind is kfd.CREATE_QUEUE:
            self.types.append(data.queue_type)
            if data.queue_type in self.refuses:
                raise OSError(errno.ENOMEM, "the simulated driver has no queue left")
            flags = {a: f for a, _, f in self.held.values()}
            assert flags[data.ring_base_address] & kfd.GTT
            assert flags[data.write_pointer_address & -kfd.PAGE_BYTES] & kfd.UNCACHED
            data.queue_id, data.doorbell_offset = 5, (1 << 62) + 24
            self.queues.add(5)
        elif kind is kfd.DESTROY_QUEUE:
            self.queues.remove(data.queue_id)
        elif kind is kfd.ALLOC:
            data.handle = 100 + len(self.held)
            self.held[data.handle] = data.va_addr, data.size, data.flags
        elif kind is kfd.FREE:
            assert data.handle not in self.mapped
            del self.held[data.handle]
        else:
            gpu = ctypes.c_uint32.from_address(data.device_ids_array_ptr).value
            assert (gpu, data.n_devices) == (77, 1)
            (self.mapped.add if kind is kfd.MAP else self.mapped.remove)(data.handle)


def test_queue_is_made_and_given_back() -> None:
    driver = Driver()
    queue = kfd.KfdQueue.create(driver, 77, 1 << 16)
    address = {flags & kfd.DOORBELL: a for a, _, flags in driver.held.values()}[kfd.DOORBELL]
    assert queue.doorbell == address + 24
    assert sorted(size for _, size, _ in driver.held.values()) == [4096, 8192, 1 << 16]
    assert driver.types == [3] and driver.queues == {5}
    queue.destroy()
    queue.destroy()
    assert not driver.held and not driver.mapped and not driver.queues


def test_other_engines_are_asked_for_and_a_refusal_leaves_nothing() -> None:
    driver = Driver(3)
    kfd.KfdQueue.create(driver, 77, 4096).destroy()
    assert driver.types == [3, 1]
    driver = Driver(3, 1)
    with pytest.raises(OSError, match="the simulated driver has no queue left"):
        kfd.KfdQueue.create(driver, 77, 4096)
    assert not driver.held and not driver.mapped


def _node(folder: Path, number: int, gpu: int, location: int) -> None:
    node = folder / str(number)
    node.mkdir()
    (node / "gpu_id").write_text(f"{gpu}\n")
    (node / "properties").write_text(f"cpu_cores_count 0\nlocation_id {location}\ndomain 0\n")


def test_drivers_number_of_a_gpu_is_found_by_its_place(tmp_path: Path) -> None:
    _node(tmp_path, 0, 0, 0)  # a CPU
    _node(tmp_path, 1, 4711, 0x2900)
    _node(tmp_path, 2, 4712, 0x2A08)
    assert kfd.gpu_id((0, 0x29, 0), tmp_path) == 4711
    assert kfd.gpu_id((0, 0x2A, 1), tmp_path) == 4712
    with pytest.raises(SystemError, match=r"0000:2b:00 in .*, found 0"):
        kfd.gpu_id((0, 0x2B, 0), tmp_path)
    _node(tmp_path, 3, 4713, 0x2A08)  # partitions of one GPU
    with pytest.raises(SystemError, match="found 2"):
        kfd.gpu_id((0, 0x2A, 1), tmp_path)
