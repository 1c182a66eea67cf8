"""The modules that `import ark` loads, and the names that load others on first use."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ark

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]

STUB = ast.parse((Path(ark.__file__).with_suffix(".pyi")).read_text())
MOST_MODULES = 20  # the package, its errors and log, and the aliases of ARK's names


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


LOADED = "sorted(m for m in sys.modules if m.partition('.')[0] in ('ark', 'numpy'))"


def test_importing_ark_loads_few_modules() -> None:
    loaded = run(f"import sys, ark; print(*{LOADED})").split()
    assert "ark.errors" in loaded and len(loaded) <= MOST_MODULES, loaded


def test_op_loads_no_executor_and_no_gradients() -> None:
    code = f"import sys, ark; ark.relu(ark.tensor([4])); print(*{LOADED})"
    loaded = run(code).split()
    assert "ark.ops.elementwise" in loaded
    late = (
        "ark.runtime",
        "ark.ops.gradients",
        "ark.models",
        "ark.interop",
        "ark.serving",
    )
    assert [m for m in loaded if m.startswith(late)] == []


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("from ark.plan import kind", "kind.get('matmul')"),
        ("from ark.plan import kind", "assert 'matmul' in kind.names()"),
        ("from ark.lower import registry", "registry.get('softmax')"),
        ("from ark.frontend.tensor import Tensor", "import numpy; Tensor.__add__"),
        ("from ark.runtime.toolchain import examiners", "assert list(examiners.filled())"),
        ("import torch, ark", "assert ark.Tensor.from_torch(torch.ones(3)).shape() == [3]"),
        ("import ark", "assert ark.planner.Planner is ark.Planner and callable(ark.init)"),
        ("import ark.tensor, ark", "assert callable(ark.tensor) and ark.init.__doc__"),
        ("from ark.planner import Planner, Plan", "import ark; assert Plan is ark.Plan"),
        ("import ark", "assert 'relu' in dir(ark) and 'Runtime' in dir(ark)"),
        ("import ark", "assert not hasattr(ark, 'get') and not hasattr(ark, 'no_such_name')"),
        ("import ark", "assert (ark.copy(3.0) * 2).eval().tolist() == [6]"),
    ],
)
def test_first_use_loads_its_module(first: str, then: str) -> None:
    run(f"{first}\n{then}")


def test_stub_has_the_names_that_the_package_has() -> None:
    imported = {
        (alias.asname or alias.name): (node.module, alias.name)
        for node in STUB.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname is not None  # in a stub only these names are exported
    }
    for name, (module, attribute) in imported.items():
        there = getattr(ark, name)
        assert there is getattr(sys.modules[str(module)], attribute), name
    declared = {ast.unparse(n.target) for n in STUB.body if isinstance(n, ast.AnnAssign)}
    typed = {*imported, *declared, *ark.ops.__all__, "error", "version"}
    assert set(ark.__all__) <= typed
    assert {*ark._MODULES, *ark._ERRORS} <= typed


WATCHED = """
import builtins, importlib, sys
LEVELS, seen, climbing = {levels!r}, [], []

def look(importer, name):
    places = [LEVELS.get(".".join(m.split(".")[:2])) for m in (importer, name)]
    if None not in places:
        seen.append(name)
        if places[1] < places[0]:
            climbing.append((importer, name))

def statement(name, globals=None, *args, **kwargs):
    look((globals or {{}}).get("__name__", ""), name)
    return real[0](name, globals, *args, **kwargs)

def call(name, package=None):
    look(sys._getframe(1).f_globals.get("__name__", ""), name)
    return real[1](name, package)

real = builtins.__import__, importlib.import_module
builtins.__import__, importlib.import_module = statement, call
{program}
print(len(seen), climbing)
"""
PROGRAM = """
import ark
x = ark.tensor([4, 8])
y = ark.softmax(ark.linear(x, ark.parameter([8, 8]))) + 1
with ark.Runtime() as runtime:
    runtime.launch()
    runtime.run()
    y.to_numpy()
"""
CLIMBING = """
exec("import ark.ops.base", {"__name__": "ark.plan.kind"})
exec("import importlib; importlib.import_module('ark.runtime.run')", {"__name__": "ark.ir.late"})
"""


def climbing(program: str) -> tuple[int, str]:
    """Runs a program and returns how many imports between layers it made, and which of them import
    a module of a higher layer than their own.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (layers,) = (c["layers"] for c in contracts if c["type"] == "layers")
    levels = {
        f"ark.{name}": place for place, line in enumerate(layers) for name in line.split(" | ")
    }
    count, _, names = run(WATCHED.format(levels=levels, program=program)).strip().partition(" ")
    return int(count), names


def test_no_module_imports_one_of_a_higher_layer_while_a_program_runs() -> None:
    count, names = climbing(PROGRAM)
    assert count > 400 and names == "[]"


def test_import_of_a_higher_layer_is_seen() -> None:
    assert climbing(CLIMBING)[1] == (
        "[('ark.plan.kind', 'ark.ops.base'), ('ark.ir.late', 'ark.runtime.run')]"
    )


def test_threads_that_ask_a_table_at_once_all_find_it_full() -> None:
    code = """
import threading
from ark.plan import kind
errors = []
def ask():
    try:
        kind.get("pool")
    except Exception as error:
        errors.append(error)
threads = [threading.Thread(target=ask) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not errors, errors
"""
    run(code)
