"""Writes the folder of an exported model: C sources, weights and build files. Called by `ark
export`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import safetensors.numpy

from ark.backend.codegen.body import BoxMap
from ark.backend.codegen.writer import write as emit
from ark.backend.protocol import Backend, ExportBackend, SourceBackend, Target
from ark.cli.export import cmake
from ark.cli.export.description import (
    Decoder,
    Image,
    check,
    declarations,
    describe,
    image_source,
    named,
    numbered,
    stored,
    text,
)
from ark.cli.export.network import Network
from ark.errors import InvalidUsageError, SystemError, UnsupportedError
from ark.ir.dtype import by_name
from ark.ir.packed import to_memory
from ark.machine import Machine
from ark.models.build import Shape
from ark.models.checkpoint import Checkpoint
from ark.models.load import weights
from ark.ops.tokens import MAX_STOPS
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.runtime.admission import admit

Files = dict[str, "str | bytes"]
_IDENTIFIER = re.compile(r"[a-z][a-z0-9_]{0,62}")
# Names of files that every exported folder has. A model cannot have one of these names.
_TAKEN = frozenset(
    ("ark", "decoder", "device", "driver", "generate", "layout", "model", "safetensors")
)


def identifier(name: str, wanted: str | None) -> str:
    """A model's name as a C identifier: `wanted`, or one derived from the name of a file or
    folder.
    """
    if wanted is None:
        derived = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:50]
        free = _IDENTIFIER.fullmatch(derived) and derived not in _TAKEN
        return derived if free else f"exported_{derived}".rstrip("_")
    if not _IDENTIFIER.fullmatch(wanted) or wanted in _TAKEN:
        raise InvalidUsageError(
            f"the name {wanted!r} is not valid; it must begin with a-z, consist of at most 63 "
            f"of a-z, 0-9 and _, and not be one of {', '.join(sorted(_TAKEN))}"
        )
    return wanted


def exporting(backend: Backend) -> ExportBackend:
    """Returns the backend if its models can be exported; raises UnsupportedError otherwise."""
    if not isinstance(backend, ExportBackend):
        raise UnsupportedError(
            f"the backend {backend.name!r} cannot run exported models; export for another one "
            "(--backend cpu)"
        )
    return backend


def decoder_of(checkpoint: Checkpoint, shape: Shape) -> Decoder:
    """The properties of a decoder (context length, chunk, stop tokens, ...) that the token loop in
    C needs.
    """
    stops = checkpoint.config.eos_token_ids
    if len(stops) > MAX_STOPS:
        raise InvalidUsageError(
            f"the checkpoint has {len(stops)} end tokens; at most {MAX_STOPS} are supported"
        )
    vocabulary = checkpoint.config.vocab_size
    begins = bool(shape.chunk) and shape.begins
    return Decoder(shape.context, shape.chunk, vocabulary, begins, tuple(stops))


def files(
    plan: Plan,
    chosen: Backend,
    arch: str,
    name: str,
    checkpoint: Checkpoint | None = None,
    shape: Shape | None = None,
    network: Network | None = None,
) -> Files:
    """All files by name. checkpoint, shape: those of a decoder; its weights and token loop are
    added to the files. network: the planned network; its weights and a program that runs it once
    are added.

    arch: the architecture in the compiler's spelling. Raises UnsupportedError if the plan or the
    backend cannot be exported.
    """
    backend = exporting(chosen)
    machine = machine_of(plan)
    if machine.backend != backend.name:
        raise UnsupportedError(
            f"the plan was made for {machine.name} of {machine.backend!r}, not for "
            f"{backend.name!r}; plan again with a machine model of that backend"
        )
    check(plan)
    if not plan.verified:
        admit([plan])
    decoder = decoder_of(checkpoint, shape) if checkpoint and shape else None
    program = "generate" if decoder else "run" if network else ""
    folder = resources.files("ark.cli.export").joinpath("c")
    wanted = ["ark.h", "ark.c", "device.h", "model.h", "safetensors.c", "decoder.c"]
    sources: Files = {file: folder.joinpath(file).read_text() for file in wanted}
    sources["layout.h"] = declarations()
    sources[f"{name}.h"] = _header(name)
    sources["device.c"] = backend.export_source()
    if isinstance(backend, SourceBackend):
        sources |= _with_source(plan, machine, backend, arch, name, decoder, program)
    else:
        sources |= _with_image(plan, machine, backend, arch, name, decoder, program)
    if program:
        source = folder.joinpath(f"{program}.c").read_text().replace("exported.h", f"{name}.h")
        sources[f"{program}.c"] = source.replace("EXPORTED_MODEL", f"{name}_model")
    if checkpoint and shape:
        sources[f"{name}.safetensors"] = _weights(weights(checkpoint, shape, plan), plan)
    if network:
        for word, names in (("INPUTS", network.inputs), ("OUTPUTS", network.outputs)):
            listed = "".join(f"{text(n)}, " for n in names)
            sources["run.c"] = str(sources["run.c"]).replace(f"EXPORTED_{word} ", listed)
        sources[f"{name}.safetensors"] = _weights(network.weights.items(), plan)
    return sources


def _with_source(
    plan: Plan,
    machine: Machine,
    backend: SourceBackend,
    arch: str,
    name: str,
    decoder: Decoder | None,
    program: str,
) -> Files:
    """The files for a loop kernel that is C++ source, which the target's compiler compiles. They
    include a library that is compiled here.
    """
    emitted = emit(plan, machine, backend.dialect(machine.arch))
    # The loop's name contains the model's, so that several models can be in one program.
    source = replace(emitted.source, text=f"#define ark_loop {name}_loop\n{emitted.source.text}")
    binary = backend.compiler().compile(source, Target(machine.arch, machine.threads))
    return {
        f"{name}.c": describe(plan, emitted.opcode, name, decoder),
        f"{name}_loop.cpp": source.text,
        f"lib{name}_loop{binary.suffix}": binary.data,
        "CMakeLists.txt": cmake.of_source(
            name, arch, backend.source_flags(), binary.suffix, program
        ),
    }


def _with_image(
    plan: Plan,
    machine: Machine,
    backend: ExportBackend,
    arch: str,
    name: str,
    decoder: Decoder | None,
    program: str,
) -> Files:
    """The files for a loop kernel that is the device's machine code, stored in a C array."""
    if arch not in ("native", machine.arch):
        raise UnsupportedError(
            f"the plan was made for {machine.name}, which is {machine.arch}, not {arch}; name a "
            "machine model of that architecture (--machine)"
        )
    dialect, compiler = backend.dialect(machine.arch), backend.compiler()
    images: list[Image] = []
    binaries: Files = {}
    opcode = [-1] * len(plan.ops)
    maps: list[tuple[BoxMap, ...]] = [()] * len(plan.ops)
    for number, phases in enumerate(plan.kernels):
        own = machine_of(plan, phases[0])
        emitted = emit(plan, own, dialect, phases)
        for op, code in enumerate(emitted.opcode):
            if code >= 0:
                opcode[op], maps[op] = code, emitted.maps[code] if emitted.maps else ()
        binary = compiler.compile(emitted.source, Target(own.arch, own.threads))
        images.append(Image(binary.data, own.threads, emitted.scratch_bytes + own.ring_bytes))
        binaries[f"{numbered(f'{name}_loop', number)}{binary.suffix}"] = binary.data
    made_for = f"loading the kernel, which is for {machine.arch}"
    return {
        f"{name}.c": describe(plan, opcode, name, decoder, images, maps, made_for),
        f"{name}_image.c": image_source(images, name),
        "driver.h": resources.files("ark.cli.export").joinpath("c/driver.h").read_text(),
        "CMakeLists.txt": cmake.of_image(name, program),
        **binaries,
    }


def _weights(parameters: Iterable[tuple[str, np.ndarray]], plan: Plan) -> bytes:
    """A safetensors file with the plan's parameters in their memory layout."""
    tensors = {t.name: t for t in named(plan)}
    arrays: dict[str, np.ndarray] = {}
    for name, array in parameters:
        code, extents, _ = stored(tensors[name])
        data = to_memory(array, by_name(tensors[name].dtype))
        arrays[name] = (data.view(np.uint8) if code == "U8" else data).reshape(extents)
    return safetensors.numpy.save(arrays)


def _header(name: str) -> str:
    guard = f"ARK_EXPORTED_{name.upper()}_H"
    return (
        f"// An exported model; ark.h says what can be done with it.\n#ifndef {guard}\n"
        f'#define {guard}\n#include "ark.h"\n#ifdef __cplusplus\nextern "C" {{\n#endif\n'
        f"extern const ark_model {name}_model;\n#ifdef __cplusplus\n}}\n#endif\n#endif\n"
    )


def save(contents: Mapping[str, str | bytes], folder: Path) -> None:
    """Writes the files. If one cannot be written, removes all of them and raises SystemError."""
    begun: list[Path] = []
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in contents.items():
            data = content.encode() if isinstance(content, str) else content
            begun.append(folder / file)
            begun[-1].write_bytes(data)
    except OSError as error:
        for path in begun:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            for path in new:
                path.rmdir()
        raise SystemError(f"{folder} cannot be written: {error}; choose another place") from error
