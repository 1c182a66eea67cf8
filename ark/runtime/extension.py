"""Compiles ark's own Python extensions with the host's compiler when they are first needed, and
stores them in the cache. Called by the proxy, by ark.interop.torch and by backends.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from importlib.machinery import ExtensionFileLoader
from types import ModuleType

from ark import log
from ark._version import __version__
from ark.backend import native
from ark.errors import SystemError
from ark.runtime import cache

FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w")


def extension(
    name: str,
    command: tuple[str, ...],
    files: Mapping[str, str],
    options: Sequence[str],
    subject: str,
    *objects: bytes,
) -> ModuleType:
    """The extension module `name`. It is built from C++ texts (the first is compiled, the others
    are headers) and from compiled objects. subject: the module's name in errors. Raises SystemError
    if it cannot be built.
    """
    return _loaded(name, _compiled(command, files, options, subject, (), objects), subject)


def module_object(
    command: tuple[str, ...],
    files: Mapping[str, str],
    options: Sequence[str],
    subject: str,
    header_versions: Sequence[str],
) -> bytes:
    """Compiles an object file, in the same way as `extension`, so that several modules can be
    linked with it. Returns its bytes. header_versions: the versions of the packages whose headers
    the file includes, except Python's.
    """
    return _compiled(command, files, ("-c", *options), subject, header_versions, ())


def _compiled(
    command: tuple[str, ...],
    files: Mapping[str, str],
    options: Sequence[str],
    subject: str,
    header_versions: Sequence[str],
    objects: Sequence[bytes],
) -> bytes:
    """The compiled module as bytes. They are read from the cache if it has them; otherwise the
    compiler is run.
    """
    words = (*FLAGS, f"-I{sysconfig.get_paths()['include']}", *options)
    key = cache.key(
        subject, __version__, sys.version, *header_versions, native.version(command),
        *command, *words, *files.values(), *(hashlib.sha256(o).hexdigest() for o in objects),
    )  # fmt: skip
    data = cache.load(cache.PROGRAMS, key)
    if data is None:
        data, _ = native.compiled(command, files, words, subject, objects)
        cache.store(cache.PROGRAMS, key, data)
    return data


def optional(name: str, package: str, file: str, subject: str, without: str) -> ModuleType | None:
    """The module `name`, compiled from a C++ file of a package. None if it cannot be built; the
    caller then uses a slower implementation. subject: the module's name in the log. without: the
    effect of its absence, for the log.
    """
    try:
        command = native.find_compiler()
        if command is None:
            log.info(f"there is no C++ compiler; {without}")
            return None
        text = resources.files(package).joinpath(file).read_text()
        return extension(name, command, {file: text}, (), subject)
    except SystemError as error:
        log.info(f"{without}: {error}")
        return None


def _loaded(name: str, data: bytes, subject: str) -> ModuleType:
    """Loads the bytes of a Python extension as a module. The temporary file stays open until the
    process ends.
    """
    if hasattr(os, "memfd_create"):
        handle = os.memfd_create(name)
        path = f"/proc/self/fd/{handle}"
    else:
        handle, path = tempfile.mkstemp(prefix=name, suffix=".so")
    with os.fdopen(os.dup(handle), "wb") as out:
        out.write(data)
    loader = ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_loader(name, loader, origin=path)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise SystemError(f"the compiled module of {subject} cannot be loaded: {error}") from error
    return module
