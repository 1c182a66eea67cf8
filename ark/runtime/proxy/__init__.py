"""The proxy: a native thread of the host that serves a device's FIFO (proxy.h says how).

It is compiled once for each kind of device, with the host's C++ compiler; an executor holds one.
Without a compiler everything but the engines `dma` and `nic` works.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache
from importlib import resources
from typing import Any
from weakref import finalize

import numpy as np

from ark.backend import native
from ark.backend.devices import Copies, Device, Memory, ProxiedDevice
from ark.codegen import layout
from ark.errors import SystemError
from ark.runtime.extension import library

FILES = ("calls.cpp", "proxy.h", "driver_copies.h", "ucx.h")
REMEDY = "or leave the engines `dma` and `nic` out"


@cache
def has_ucx(command: tuple[str, ...]) -> bool:
    """Can the compiler make programs with UCX (its headers and libucp)?"""
    text = "#include <ucp/api/ucp.h>\nint main() { ucp_get_version_string(); }\n"
    try:
        native.shared_library(command, {"ucx.cpp": text}, ("-fPIC", "-lucp", "-lucs"), "a probe")
    except SystemError:
        return False
    return True


_building = threading.Lock()


# The functions of calls.cpp: what they return and, behind the proxy, take.
_NETWORK = (c_uint64, c_uint64, *(POINTER(c_void_p), POINTER(c_size_t)) * 2)
_CONNECT = (c_int, *(c_char_p, c_size_t) * 2)
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "delete": (None, ()),
    "allow": (None, (c_uint64, c_uint64, c_int, c_uint64)),
    "start": (c_int, ()),
    "stop": (None, ()),
    "wake": (None, ()),
    "served": (c_uint32, ()),
    "rests": (c_uint64, ()),
    "error": (c_char_p, ()),
}
NETWORK_CALLS = {"network": (c_int, _NETWORK), "connect": (c_int, _CONNECT)}


def _library(header: str) -> ctypes.CDLL:
    """The compiled functions with a vendor's copies.h; SystemError with what is missing."""
    with _building:  # ranks may be threads
        return _built(header)


@cache
def _built(header: str) -> ctypes.CDLL:
    command = native.find_compiler()
    if command is None:
        raise SystemError(
            "the proxy needs a C++ compiler (looked for $CXX, c++, g++, clang++ and the ziglang "
            f"package): `pip install 'ark-gpu[cpu]'`, {REMEDY}"
        )
    folder = resources.files("ark.runtime.proxy")
    files = {name: folder.joinpath(name).read_text() for name in FILES}
    files["copies.h"] = header
    reached = has_ucx(command)
    network = ("-DARK_UCX", "-lucp", "-lucs") if reached else ()
    # UCX would write on standard output, which is the user's; its errors are raised here.
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    try:
        made = library(command, files, ("-pthread", *network, "-ldl"), "the proxy")
    except SystemError as error:
        raise SystemError(f"{error}; {REMEDY}") from error
    made.proxy_failure.restype = c_char_p
    made.proxy_new.restype = c_void_p
    made.proxy_new.argtypes = (c_uint64, c_uint32, c_uint64, c_char_p, c_int)
    for name, (result, taken) in {**CALLS, **(NETWORK_CALLS if reached else {})}.items():
        function = getattr(made, f"proxy_{name}")
        function.restype, function.argtypes = result, (c_void_p, *taken)
    return made


class Proxy:
    """The proxy of one executor, and its FIFO. Close it before what it copies is freed."""

    def __init__(self, device: Device, abort: int) -> None:
        """abort: host address of the word that makes the kernel leave. SystemError if it cannot."""
        if not isinstance(device, ProxiedDevice):
            raise SystemError(
                f"the device {device.arch} has no copies that a proxy could start; plan with "
                "another engine than `dma`"
            )
        copies: Copies = device.copies()
        self._library = _library(copies.header)
        self._device = device
        self._places: list[np.ndarray] = []
        self.fifo: Memory = device.alloc(layout.dtype("ArkFifo").itemsize, "host")
        assert self.fifo.host is not None
        address = self.fifo.host.ctypes.data
        library = os.fsencode(copies.library)
        self._handle = self._library.proxy_new(
            address, layout.FIFO_SLOTS, abort, library, copies.index
        )
        if not self._handle:
            device.free(self.fifo)
            raise SystemError(f"the proxy cannot be made: {self._failure()}")
        # Not at the end of the process: its thread ends with that.
        finalize(self, self._library.proxy_delete, self._handle).atexit = False

    def _call(self, name: str, *words: Any) -> Any:
        return getattr(self._library, f"proxy_{name}")(self._handle, *words)

    def _failure(self) -> str:
        """Why this thread's last call failed."""
        return str(self._library.proxy_failure().decode(errors="replace"))

    def allow(self, address: int, nbytes: int) -> None:
        """Memory that triggers may name: all else makes the launch fail."""
        self._call("allow", address, nbytes, -1, 0)

    def network(self, memory: Memory) -> dict[str, Any]:
        """Registers memory for peers on other hosts: what they need to reach it, as JSON."""
        if not hasattr(self._library, "proxy_network"):
            raise SystemError(
                "ranks on other hosts are reached by UCX, whose headers and libraries were not "
                "found; install them (`apt install libucx-dev`) on every host"
            )
        texts = [(c_void_p(), c_size_t()) for _ in ("address", "key")]
        places = (byref(word) for text in texts for word in text)
        if not self._call("network", memory.address, memory.nbytes, *places):
            raise SystemError(f"{self._failure()}; `ucx_info -d` lists what UCX can use here")
        address, key = (ctypes.string_at(at.value or 0, size.value).hex() for at, size in texts)
        return {
            "address": address,
            "key": key,
            "begin": memory.address,
            "nbytes": memory.nbytes,
        }

    def connect(self, rank: int, peer: dict[str, Any] | None) -> Memory:
        """Reaches a peer's memory: addresses that stand for it, which only the proxy may use."""
        if peer is None:
            raise SystemError(f"rank {rank} is on another host and offers no way to its memory")
        nbytes = int(peer["nbytes"])
        place = mmap.mmap(-1, nbytes, prot=mmap.PROT_READ)  # taken, so that nothing else lies there
        view = np.frombuffer(place, np.uint8)
        self._places.append(view)
        address = int(view.ctypes.data)
        there, key = bytes.fromhex(peer["address"]), bytes.fromhex(peer["key"])
        if not self._call("connect", rank, there, len(there), key, len(key)):
            raise SystemError(
                f"rank {rank} cannot be reached: {self._failure()}; `ucx_info -d` lists the "
                "transports of each host, of which UCX_TLS and UCX_NET_DEVICES must leave both one "
                "in common; UCX_LOG_LEVEL=error says more"
            )
        self._call("allow", address, nbytes, rank, int(peer["begin"]))
        return Memory(address, nbytes, "symmetric", None, owned=False)

    def drain(self, count: int, timeout_s: float) -> None:
        """Waits until so many triggers have been served, or it has failed, or the time is up."""
        end = time.monotonic() + timeout_s
        while self.served() != count and not self.error() and time.monotonic() < end:
            self._call("wake")
            time.sleep(1e-4)

    def restart(self) -> None:
        """Begins anew with an empty FIFO; nothing may be running on the device."""
        self._call("stop")
        assert self.fifo.host is not None
        self.fifo.host[:] = 0
        if not self._call("start"):
            raise SystemError(
                f"the system refused to start the proxy's thread ({self._failure()}); raise the "
                "limit on processes and threads (`ulimit -u`)"
            )

    def wake(self) -> None:
        """A launch begins: looks at once, and often."""
        self._call("wake")

    def error(self) -> str:
        """What stopped it, if anything did."""
        return str(self._call("error").decode(errors="replace"))

    def served(self) -> int:
        """Triggers served since it began."""
        return int(self._call("served"))

    def rests(self) -> int:
        """How often it slept because there was nothing to do."""
        return int(self._call("rests"))

    def close(self) -> None:
        self._call("stop")
        self._device.free(self.fifo)
