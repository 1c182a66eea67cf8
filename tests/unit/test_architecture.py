"""Rules of the architecture, beside those about imports that import-linter checks (the contracts
are in pyproject.toml).
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import iter_modules

import pytest

from ark.backend import registry
from ark.backend.codegen import layout
from ark.backend.codegen.body import Body
from ark.plan import kind as kinds

ROOT = Path(__file__).resolve().parents[2]
ARK = sorted((ROOT / "ark").rglob("*.py")) + sorted((ROOT / "ark").rglob("*.h"))
VENDOR_WORDS = re.compile(r"\b(nvidia|amd|cuda|rocm|hip|nvrtc|hiprtc|cubin|hsaco)\b", re.IGNORECASE)
# Files that may contain a vendor's name: the programs that benches compare with, and the probing of
# links. Code for torch uses torch's terms, in which `cuda` also means other vendors.
MAY_NAME = {
    "ark/interop/torch/products.py",  # torch's own switches have such names
    "ark/cli/measure/peer.py",
    "ark/cli/measure/comm_peer.py",
    "ark/collective/topology/detect.py",
    "ark/collective/topology/boxes.py",
    "ark/distributed/arrays.py",
    "ark/distributed/torch.py",
    "ark/interop/torch/program.py",
}
BACKENDS = {"cpu": "ark_cpu", "cuda": "ark_cuda", "rocm": "ark_rocm"}
SHARED_ROOMS = {
    "__init__.py",
    "probe.py",
    "machines.py",
    "dialect.py",
    "prelude.h",
    "entry.h",
    "compiler.py",
    "device.py",
}


def test_ark_names_no_vendor() -> None:
    names = {p: str(p.relative_to(ROOT)) for p in ARK}
    named = {name: set(VENDOR_WORDS.findall(path.read_text())) for path, name in names.items()}
    assert not {name: words for name, words in named.items() if words and name not in MAY_NAME}


def test_attributes_of_nodes_are_read_by_name() -> None:
    """Attributes of a node are read by its `read` as the op's struct. With a misspelt key, a
    dictionary would silently give a default.
    """
    by_key = re.compile(r"""attrs(\["\w+"\]|\.get\("\w+")""")
    sources = [p for p in ARK if p.suffix == ".py"]
    by_key_in = {str(p.relative_to(ROOT)) for p in sources if by_key.search(p.read_text())}
    assert not by_key_in


def test_core_imports_neither_synthesis_nor_emulator() -> None:
    """Planning and running a model import neither the synthesis of collectives nor the emulator,
    until these are used.
    """
    program = (
        "import sys, ark.models.generate, ark.cli.measure.decode, ark.cli.plan, ark.cli.generate\n"
        "from ark.backend import registry\n"
        "[registry.get(name) for name in registry.names()]\n"
        "rooms = ('ark.comm', 'ark.collective', 'ark.parallel', 'ark_rocm_emulator')\n"
        "programs = ('ark.collective.programs', 'ark.collective')\n"
        "loaded = (m for m in sys.modules if m.startswith(rooms))\n"
        "print([m for m in loaded if not m.startswith(programs[0]) and m != programs[1]])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_device_abi_page_names_all_used_functions() -> None:
    def names(*texts: str) -> set[str]:
        return {n for text in texts for n in re.findall(r"\b(?:ark|ARK)_\w+", text)}

    archs = {"cpu": "host", "cuda": "sm_90a", "rocm": "gfx942"}
    assert archs.keys() == BACKENDS.keys()
    offered = names(*(registry.get(v).dialect(arch).prelude for v, arch in archs.items()))
    used = names(
        *(path.read_text() for path in ARK if path.suffix == ".h" or "tasks" in path.parts)
    )
    page = names((ROOT / "docs/device-abi.md").read_text())
    assert not (used & offered) - page


@pytest.mark.parametrize("vendor", sorted(BACKENDS))
def test_backends_have_the_same_files(vendor: str) -> None:
    folder = ROOT / "backends" / vendor / BACKENDS[vendor]
    missing = SHARED_ROOMS - {p.name for p in folder.iterdir()}
    assert not missing, f"{folder.name} lacks {sorted(missing)}"


def test_device_code_stores_control_words_as_others_read_them() -> None:
    """Device code stores control words only by atomic functions, because other processors read them
    concurrently.
    """
    words = "|".join(name for name, *_ in layout.STRUCTS["ArkControl"])
    stored = re.compile(rf"control\w*\(?[\w().]*\)*->(?:{words})\b(?:\[[^]]*\])?\s*[-+|&]?=[^=]")
    folders = ("ark", "backends/cuda", "backends/rocm")
    headers = [p for folder in folders for p in sorted((ROOT / folder).rglob("*.h"))]
    plain = [f"{p.name}: {m.group(0)}" for p in headers for m in stored.finditer(p.read_text())]
    assert headers and not plain


@pytest.mark.parametrize(
    ("folder", "most"),
    [("ark", 400), ("backends", 400), ("bench", 400), ("ci", 400), ("tests", 500)],
)
def test_files_are_short(folder: str, most: int) -> None:
    lengths = {p: len(p.read_text().splitlines()) for p in (ROOT / folder).rglob("*.py")}
    assert lengths
    assert not {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > most}


IMPORTERS = sorted(
    path
    for folder in ("bench", "ci", "examples", "tests")
    for path in (ROOT / folder).rglob("*.py")
)


def _test_modules_imported_by(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    # Programs that tests run in another process are texts, whose imports count too.
    quoted = re.findall(r"^ *(?:from|import) ([\w.]*\btest_\w+)", text, re.MULTILINE)
    names = {alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names}
    names |= set(quoted)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] != "onnx":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
            names.add(node.module or "")
    parts = {name: name.split(".") for name in names}
    return {
        name
        for name, words in parts.items()
        if any(
            w.startswith("test_") and _is_test_file(path, words[: i + 1])
            for i, w in enumerate(words)
        )
    }


def _is_test_file(importer: Path, words: list[str]) -> bool:
    """True if the dotted name is a test file, relative to the root, to the importer, or to the
    emulator's tests, which others import by path.
    """
    return any(
        (root.joinpath(*words)).with_suffix(".py").exists()
        for root in (ROOT, ROOT / "tests/rocm_emulator", importer.parent)
    )


def test_no_file_imports_from_a_test_file() -> None:
    """Shared cases are in tests/cases, so that a test file can be changed independently."""
    imported = {str(path.relative_to(ROOT)): _test_modules_imported_by(path) for path in IMPORTERS}
    assert not {name: modules for name, modules in imported.items() if modules}


def test_unit_test_is_in_the_folder_of_its_module() -> None:
    """tests/unit/x/test_y.py tests ark/x/y.py, or its name is not the name of any module."""
    rooms: dict[str, set[Path]] = {}
    for path in (ROOT / "ark").rglob("*.py"):
        module = path.parent if path.stem == "__init__" else path
        if module == ROOT / "ark":
            continue
        rooms.setdefault(module.stem, set()).add(module.parent.relative_to(ROOT / "ark"))
        if module.is_dir():
            rooms[module.stem].add(module.relative_to(ROOT / "ark"))
    unit = ROOT / "tests/unit"
    elsewhere = {
        str(path.relative_to(unit)): sorted(map(str, rooms[subject]))
        for path in unit.glob("*/**/test_*.py")
        if (subject := path.stem.removeprefix("test_")) in rooms
        and path.parent.relative_to(unit) not in rooms[subject]
    }
    assert not elsewhere


# Numbers from 1024 on that the planner may contain, because they are not bytes, work or sizes of a
# machine.
PLANNER_NUMBERS = {
    "ark/lower/choose.py": {1024},  # bytes of shared memory of a linear layer's body
    "ark/lower/depthwise_tiles.py": {1 << 16},  # pixels of an image, for the planner's own time
    "ark/lower/ops/norms.py": {1024},  # elements of rows that one task takes
    "ark/lower/ops/reductions.py": {16384},  # elements of a row that several tasks share
    # A number that should be in the machine's description instead: the amount of work from which
    # distributing it to another processor is faster.
    "ark/lower/ops/windows.py": {1 << 13},
    "ark/lower/rewrite/fuse_attention.py": {1 << 12},  # heads that are counted in a graph
    "ark/lower/rewrite/fuse_regions.py": {1024, 2048},  # elements that a body's thread holds
    "ark/lower/rewrite/masks.py": {1 << 24, -6e4},  # elements to examine; a masked value
    "ark/lower/tiling.py": {1 << 28, 1 << 30},  # source counts in 32 bits
}
UNITS = {1e3, 1e6}  # from GB and T operations per second to those per microsecond
PLANNER = sorted((ROOT / "ark/lower").rglob("*.py"))


def _numbers(tree: ast.AST) -> Iterator[float]:
    """Yields the literal numbers, and shifts of literals by literals."""
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(ast.Constant(int(base)), ast.LShift(), ast.Constant(int(by))):
                yield base << by
            case ast.Constant(int(value) | float(value)) if not isinstance(value, bool):
                yield value


@pytest.mark.parametrize("path", PLANNER, ids=lambda p: str(p.relative_to(ROOT)))
def test_planner_holds_no_machines_numbers(path: Path) -> None:
    """The planner's source contains no numbers of a machine: sizes in bytes, amounts of work and
    times are in Machine.costs, pairs of rows and columns in its tiles.
    """
    name, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
    large = {n for n in _numbers(tree) if abs(n) >= 1024} - UNITS
    assert large <= {abs(n) for n in PLANNER_NUMBERS.get(name, set())}, f"{name} holds {large}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple):
            sizes = [e.value for e in node.elts if isinstance(e, ast.Constant)]
            tile = len(sizes) == 2 and all(type(s) is int and s >= 16 for s in sizes)
            assert not tile, f"{name} holds a tile of {sizes}"


@pytest.mark.parametrize("vendor", ["cuda", "rocm"])
def test_vendors_bodies_are_listed_once_and_beside_their_device_code(vendor: str) -> None:
    """Each body (device function with its conditions) is one class in the vendor's folder `tasks`,
    whose package lists it.
    """
    package = importlib.import_module(f"ark_{vendor}.tasks")
    modules = (
        importlib.import_module(f"{package.__name__}.{m.name}")
        for m in iter_modules(package.__path__)
    )
    classes = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type)
        and value is not Body
        and issubclass(value, Body)
        and "source" in vars(value)
    }
    listed = [type(body) for body in package.BODIES]
    assert classes <= set(listed) and len(set(listed)) == len(listed)
    assert all(body.__module__.startswith(f"{package.__name__}.") for body in listed)
    arch = registry.get(vendor).archs()[0]
    assert registry.get(vendor).dialect(arch).bodies == package.BODIES
    assert {body.kind for body in package.BODIES} <= set(kinds.names())
