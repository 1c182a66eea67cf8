"""The proxy: a native thread on the host that executes the copy requests of a running kernel. The
kernel writes requests (triggers) to a FIFO (see proxy.h).

The proxy is compiled with the host's C++ compiler, once for each kind of device. Each executor has
its own proxy.

The proxy needs pybind11 and a compiler. Without them, only the transfer engines in PROXIED of
ark.lower.engines are unavailable.
"""

from __future__ import annotations

import hashlib
import importlib.util
import mmap
import os
import threading
import time
from functools import cache
from importlib import resources
from types import ModuleType
from typing import Any

import numpy as np

from ark.backend import native
from ark.backend.codegen import layout
from ark.backend.devices import Copies, Device, Memory, ProxiedDevice
from ark.errors import SystemError
from ark.lower.engines import COPIED, PROXIED
from ark.runtime.extension import extension, module_object

MODULE = ("module.cpp", "bound.h")
FILES = ("bound.cpp", "bound.h", "proxy.h", "driver_copies.h", "ucx.h")
REMEDY = f"or plan without the engines {' and '.join(PROXIED)}"


@cache
def has_ucx(command: tuple[str, ...]) -> bool:
    """True if the compiler can build programs with UCX (its headers and libucp)."""
    text = "#include <ucp/api/ucp.h>\nint main() { ucp_get_version_string(); }\n"
    try:
        native.compiled(command, {"ucx.cpp": text}, ("-fPIC", "-lucp", "-lucs"), "a probe")
    except SystemError:
        return False
    return True


_building = threading.Lock()


def _module(header: str) -> ModuleType:
    """The compiled module. header: the vendor's copies.h, with which it is compiled. Raises
    SystemError that names a missing component.
    """
    with _building:  # ranks may be threads of one process
        return _built(header)


@cache
def _built(header: str) -> ModuleType:
    if importlib.util.find_spec("pybind11") is None:
        raise SystemError(
            f"the proxy needs pybind11, which is not installed: `pip install pybind11`, {REMEDY}"
        )
    command = native.find_compiler()
    if command is None:
        raise SystemError(
            "the proxy needs a C++ compiler (looked for $CXX, c++, g++, clang++ and the ziglang "
            f"package): `pip install 'ark-gpu[cpu]'`, {REMEDY}"
        )
    import pybind11

    folder = resources.files("ark.runtime.proxy")
    texts = {name: folder.joinpath(name).read_text() for name in {*MODULE, *FILES}}
    network = ("-DARK_UCX", "-lucp", "-lucs") if has_ucx(command) else ()
    # Python loads a module of one name only once per process. So the module for each vendor has its
    # own name.
    name = f"ark_proxy_{hashlib.sha256(header.encode()).hexdigest()[:12]}"
    options = ("-pthread", f"-DARK_MODULE={name}", *network, "-ldl")
    # UCX must not write to standard output, which may carry results; its errors are raised as
    # exceptions.
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    try:
        binding = module_object(
            command,
            {file: texts[file] for file in MODULE},
            ("-O1", f"-I{pybind11.get_include()}"),
            "the proxy's module",
            (pybind11.__version__,),
        )
        files = {**{file: texts[file] for file in FILES}, "copies.h": header}
        return extension(name, command, files, options, "the proxy", binding)
    except SystemError as error:
        raise SystemError(f"{error}; {REMEDY}") from error


class Proxy:
    """The proxy of one executor, and its FIFO. It must be closed before the memory that it copies
    is freed.
    """

    def __init__(self, device: Device, abort: int) -> None:
        """abort: the host address of the word that makes the kernel leave. Raises SystemError if
        the proxy cannot be started.
        """
        if not isinstance(device, ProxiedDevice):
            raise SystemError(
                f"devices of {device.arch} do not let the host start copies; plan with another "
                f"engine than {' and '.join(COPIED)}"
            )
        copies: Copies = device.copies()
        module = _module(copies.header)
        self._device = device
        self._places: list[np.ndarray] = []
        self.fifo: Memory = device.alloc(layout.dtype("ArkFifo").itemsize, "host")
        assert self.fifo.host is not None
        address = self.fifo.host.ctypes.data
        try:
            self._proxy: Any = module.Proxy(
                address, layout.FIFO_SLOTS, abort, copies.library, copies.index
            )
        except RuntimeError as error:
            device.free(self.fifo)
            raise SystemError(f"the proxy cannot be started: {error}") from error

    def allow(self, address: int, nbytes: int) -> None:
        """Registers memory that requests may name. A request with any other address makes the
        launch fail.
        """
        self._proxy.allow(address, nbytes, -1, 0)

    def network(self, memory: Memory) -> dict[str, Any]:
        """Registers memory for peers on other hosts. Returns, as a JSON object, the data that they
        need to access it.
        """
        if not self._proxy.has_network():
            raise SystemError(
                "ranks on other hosts need UCX, whose headers and libraries were not found; "
                "install them (`apt install libucx-dev`) on every host"
            )
        try:
            address, key = self._proxy.network(memory.address, memory.nbytes)
        except RuntimeError as error:
            raise SystemError(f"{error}; `ucx_info -d` lists what UCX can use here") from error
        return {
            "address": address.hex(),
            "key": key.hex(),
            "begin": memory.address,
            "nbytes": memory.nbytes,
        }

    def connect(self, rank: int, peer: dict[str, Any] | None) -> Memory:
        """Connects to a peer's memory. Returns a range of addresses that represents this memory;
        only the proxy may use them.
        """
        if peer is None:
            raise SystemError(
                f"rank {rank} is on another host and did not register its memory with UCX; "
                "install UCX on every host"
            )
        nbytes = int(peer["nbytes"])
        place = mmap.mmap(
            -1, nbytes, prot=mmap.PROT_READ
        )  # a reservation, so that no other memory gets these addresses
        view = np.frombuffer(place, np.uint8)
        self._places.append(view)
        address = int(view.ctypes.data)
        try:
            there = (bytes.fromhex(peer["address"]), bytes.fromhex(peer["key"]))
            self._proxy.connect(rank, *there)
        except RuntimeError as error:
            raise SystemError(
                f"rank {rank} cannot be reached: {error}; `ucx_info -d` lists the transports of "
                "each host, UCX_TLS and UCX_NET_DEVICES must allow one that both have; "
                "UCX_LOG_LEVEL=error prints details"
            ) from error
        self._proxy.allow(address, nbytes, rank, int(peer["begin"]))
        return Memory(address, nbytes, "symmetric", None, owned=False)

    def drain(self, count: int, timeout_s: float) -> None:
        """Returns when the proxy has served `count` requests, when it has failed, or when the time
        is up.
        """
        end = time.monotonic() + timeout_s
        while self.served() != count and not self.error() and time.monotonic() < end:
            self._proxy.wake()
            time.sleep(1e-4)

    def restart(self) -> None:
        """Starts again with an empty FIFO. Nothing may run on the device."""
        self._proxy.stop()
        assert self.fifo.host is not None
        self.fifo.host[:] = 0
        try:
            self._proxy.start()
        except RuntimeError as error:
            raise SystemError(
                f"the system refused to start the proxy's thread ({error}); raise the limit on "
                "processes and threads (`ulimit -u`)"
            ) from error

    def wake(self) -> None:
        """Tells the proxy that a launch follows, so that it polls for requests at once and
        frequently.
        """
        self._proxy.wake()

    def error(self) -> str:
        """The error that stopped the proxy; empty if there is none."""
        return str(self._proxy.error())

    def served(self) -> int:
        """The number of requests that the proxy has served since it started."""
        return int(self._proxy.served())

    def rests(self) -> int:
        """How often the proxy slept because there were no requests."""
        return int(self._proxy.rests())

    def close(self) -> None:
        self._proxy.stop()
        self._device.free(self.fifo)
