"""The proxy: a native thread of the host that serves a device's FIFO (proxy.h says how).

It is compiled once for each kind of device, with the host's C++ compiler; an executor holds one.

It needs pybind11 and a compiler; without them everything but the engines `dma` and `nic` works.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
import tempfile
import threading
from functools import cache
from importlib import resources
from importlib.machinery import ExtensionFileLoader
from types import ModuleType
from typing import Any

from ark._version import __version__
from ark.backend import native
from ark.backend.protocol import Copies, Device, Memory, ProxiedDevice
from ark.codegen import layout
from ark.errors import SystemError
from ark.runtime import cache as kept

FILES = ("module.cpp", "proxy.h")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-w")
REMEDY = "or leave the engines `dma` and `nic` out"


_building = threading.Lock()


def _module(header: str) -> ModuleType:
    """The compiled module with a vendor's copies.h; SystemError with what is missing."""
    with _building:  # ranks may be threads
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
    files = {name: folder.joinpath(name).read_text() for name in FILES}
    files["copies.h"] = header
    includes = (pybind11.get_include(), sysconfig.get_paths()["include"])
    options = (*FLAGS, *(f"-I{path}" for path in includes), "-ldl")
    key = kept.key(
        "proxy", __version__, sys.version, pybind11.__version__, native.version(command),
        *command, *options, *files.values(),
    )  # fmt: skip
    data = kept.load(kept.PROGRAMS, key)
    if data is None:
        data, _ = native.shared_library(command, files, options, "the proxy")
        kept.store(kept.PROGRAMS, key, data)
    return _loaded(data)


def _loaded(data: bytes) -> ModuleType:
    """The bytes of a Python extension as a module. The file stays open as long as the process."""
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create("ark-proxy")
        path = f"/proc/self/fd/{handle}"
    else:
        handle, path = tempfile.mkstemp(prefix="ark-proxy", suffix=".so")
    with os.fdopen(os.dup(handle), "wb") as out:
        out.write(data)
    loader = ExtensionFileLoader("ark_proxy", path)
    spec = importlib.util.spec_from_loader("ark_proxy", loader, origin=path)
    assert spec is not None
    try:
        made = importlib.util.module_from_spec(spec)
        loader.exec_module(made)
    except ImportError as error:
        raise SystemError(f"the compiled proxy cannot be loaded: {error}; {REMEDY}") from error
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
        module = _module(copies.header)
        self._device = device
        self.fifo: Memory = device.alloc(layout.dtype("ArkFifo").itemsize, "host")
        assert self.fifo.host is not None
        address = self.fifo.host.ctypes.data
        try:
            self._proxy: Any = module.Proxy(
                address, layout.FIFO_SLOTS, abort, copies.library, copies.index
            )
        except RuntimeError as error:
            device.free(self.fifo)
            raise SystemError(f"the proxy cannot be made: {error}") from error

    def allow(self, address: int, nbytes: int) -> None:
        """Memory that triggers may name: all else makes the launch fail."""
        self._proxy.allow(address, nbytes, -1, 0)

    def restart(self) -> None:
        """Begins anew with an empty FIFO; nothing may be running on the device."""
        self._proxy.stop()
        assert self.fifo.host is not None
        self.fifo.host[:] = 0
        self._proxy.start()

    def wake(self) -> None:
        """A launch begins: looks at once, and often."""
        self._proxy.wake()

    def error(self) -> str:
        """What stopped it, if anything did."""
        return str(self._proxy.error())

    def served(self) -> int:
        """Triggers served since it began."""
        return int(self._proxy.served())

    def rests(self) -> int:
        """How often it slept because there was nothing to do."""
        return int(self._proxy.rests())

    def close(self) -> None:
        self._proxy.stop()
        self._device.free(self.fifo)
