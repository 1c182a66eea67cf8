"""Compiles CUDA's task bodies with every NVRTC version in a folder, and prints a line for each
version.

`python ci/compilers.py FOLDER [--tests tests/codegen/test_cuda_bodies.py ...]`: FOLDER has one
folder for each version, which contains libnvrtc.so.* and libnvrtc-builtins.so.* (for example an
unpacked wheel nvidia-cuda-nvrtc). Each version runs in separate processes, into which its libraries
are loaded first. A version's line shows whether the models of ark.runtime.known compile, as one
program and in parts, and whether shared memory is aligned in the ELF file (ark_cuda.alignment). On
a GPU it also shows whether the models' results are correct. The line ends with the counts of passed
and failed tests in the named files. The exit code is 1 if a version fails. The last line is printed
even if the run is interrupted (`timeout -s INT 9m`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARCH = "sm_90a"  # if there is no GPU


def forced(folder: Path) -> dict[str, str]:
    """Environment variables with which a process uses the NVRTC in `folder`. Raises ValueError if
    the folder has no NVRTC.
    """
    candidates = sorted(folder.rglob("libnvrtc.so.*"))
    builtins = sorted(folder.rglob("libnvrtc-builtins.so.*"))
    if not candidates or not builtins:
        raise ValueError(f"{folder} lacks libnvrtc.so.* or libnvrtc-builtins.so.*")
    libraries = [str(path.resolve()) for path in (*builtins[:1], *candidates[:1])]
    path = ":".join([str(candidates[0].resolve().parent), os.environ.get("LD_LIBRARY_PATH", "")])
    return {**os.environ, "LD_PRELOAD": ":".join(libraries), "LD_LIBRARY_PATH": path.strip(":")}


def examine() -> dict[str, str]:
    """Checks the models of ark.runtime.known with the NVRTC of this process. Returns the results by
    name, as they are printed.
    """
    from ark_cuda import backend, machines
    from ark_cuda.compiler import NvrtcCompiler

    from ark.backend.codegen.writer import write
    from ark.backend.protocol import Target
    from ark.errors import BaseError
    from ark.frontend.model import Model, use_model
    from ark.lower.pipeline import plan
    from ark.plan.serialize import machine_of
    from ark.runtime import known, toolchain

    compiler = NvrtcCompiler()
    verdicts = {"nvrtc": compiler.key(Target(ARCH, 0)).split(f" {ARCH}")[0]}
    device = backend.open(0) if backend.probe().devices else None
    machine = device.machine if device else machines.MODELS["h200"]
    try:
        for build in known.MODELS:
            with use_model(Model()) as model:
                build(known.Known())
            planned = plan(model.graph, machine)
            source = write(planned, machine_of(planned), backend.dialect(machine.arch)).source
            compiler.compile(source, Target(machine.arch, machine_of(planned).threads))
    except BaseError as error:
        return {**verdicts, "compiled": str(error).splitlines()[0]}
    verdicts["compiled"] = "aligned"
    if device is None:
        return {**verdicts, "results": "no GPU"}
    try:
        return {**verdicts, "results": toolchain.examine(backend, device) or "right"}
    except BaseError as error:
        return {**verdicts, "results": str(error).splitlines()[0]}


def tested(paths: list[str], environment: dict[str, str]) -> str:
    """The last line of a pytest run of the given files."""
    words = [sys.executable, "-m", "pytest", "-q", "-k", "cuda", *paths]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    return " ".join([last.strip("= "), *failed])


def run(folder: Path, paths: list[str]) -> tuple[str, bool]:
    """Checks the NVRTC in a folder, in a separate process. Returns the line to print for it, and
    True if all requested checks passed.
    """
    environment, begin = forced(folder), time.perf_counter()
    words = [sys.executable, str(Path(__file__).resolve()), "--one"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    try:
        verdicts = json.loads(lines[-1])
    except (ValueError, IndexError):
        return f"crashed ({done.returncode}): {done.stderr.strip()[-300:]}", False
    good = verdicts["compiled"] == "aligned" and verdicts["results"] in ("right", "no GPU")
    text = "; ".join(f"{name}: {value}" for name, value in verdicts.items())
    if paths:
        counts = tested(paths, environment)
        text, good = f"{text}; tests: {counts}", good and not re.search("failed|error", counts)
    return f"{text} ({time.perf_counter() - begin:.0f} s)", good


def main(argv: list[str]) -> int:
    if argv == ["--one"]:
        print(json.dumps({"results": "not computed", **examine()}))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tests", nargs="*", default=[], metavar="PATH", help="for pytest")
    chosen = parser.parse_args(argv)
    folders = sorted(p for p in chosen.folder.iterdir() if p.is_dir() and p.name[:1].isdigit())
    if not folders:
        parser.error(f"no folder in {chosen.folder} is named as a version")
    verdicts: dict[str, bool] = {}
    try:
        for folder in folders:
            line, verdicts[folder.name] = run(folder, chosen.tests)
            print(f"{folder.name:10} {'ok  ' if verdicts[folder.name] else 'FAIL'} {line}")
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted")
    bad = [name for name, good in verdicts.items() if not good]
    print(f"{len(verdicts)} of {len(folders)} versions, {len(bad)} failed {' '.join(bad)}")
    return int(bool(bad) or len(verdicts) < len(folders))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
