"""Every public function has an example in its docstring that runs on the CPU and prints the output
shown. Also checks that docstrings follow one style.
"""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
import torch

import ark
import ark.interop
import ark.interop.torch
import ark.models
import ark.parallel
from ark.models import registry

ROOT = Path(__file__).resolve().parents[4]
PACKAGES = (ark, ark.ops, ark.comm, ark.distributed, ark.interop, ark.interop.torch, ark.models)
PACKAGES += (ark.optim, ark.parallel)
NAMED = [(f"{p.__name__}.{name}", getattr(p, name)) for p in PACKAGES for name in p.__all__]
# The first name of each object: ark.relu, but not also ark.ops.relu.
PUBLIC = dict({id(value): (name, value) for name, value in NAMED[::-1]}.values())
FUNCTIONS = sorted(name for name, value in PUBLIC.items() if inspect.isfunction(value))
PAGE = ROOT / "docs/reference/api.md"
ENTRIES = re.findall(r"^::: (\S+)", PAGE.read_text(), re.M)
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    ark.init(backend="cpu", rank=0, world_size=1)
    yield
    ark.init(rank=0, world_size=1)


def entry(name: str) -> object:
    """Returns what an entry of the page names."""
    module, _, own = name.rpartition(".")
    return getattr(resolve_name(module), own)


@pytest.mark.parametrize("name", sorted({*FUNCTIONS, *ENTRIES}))
def test_example_of_a_function_or_class_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(registry, "ARCHITECTURES", dict(registry.ARCHITECTURES))
    space = {"ark": ark, "np": np, "torch": torch}
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=FLAGS)
    text = inspect.getdoc(entry(name)) or ""
    case = parser.get_doctest(text, space, name, None, 0)
    assert case.examples, f"{name} has no example"
    assert "\nExamples:\n" in text, "the site shows the section `Examples:` as code, no other"
    printed: list[str] = []
    runner.run(case, out=printed.append)
    assert runner.failures == 0, "".join(printed)


def test_example_with_another_output_fails() -> None:
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=FLAGS)
    case = parser.get_doctest(
        ">>> ark.relu(torch.tensor([-1.0])).eval()\ntensor([1.])\n",
        {"ark": ark, "torch": torch},
        "wrong",
        None,
        0,
    )
    runner.run(case, out=lambda text: None)
    assert runner.failures == 1


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_begins_with_a_summary_of_one_line(name: str) -> None:
    summary, *rest = (inspect.getdoc(PUBLIC[name]) or "").splitlines()
    assert summary.endswith((".", "?")) and (not rest or not rest[0])


def unnamed(function: object) -> set[str]:
    """Returns the errors that a function's own code raises but its docstring does not name. A
    docstring may describe an error by a superclass or as an error.
    """
    raised = re.findall(r"^ *raise (\w+Error)\(", inspect.getsource(function), re.M)
    text = inspect.getdoc(function) or ""
    return set() if re.search(r"[Ee]rrors?\b|[Rr]efuse|[Rr]aise", text) else set(raised)


def test_docstring_names_the_errors_that_the_function_raises() -> None:
    raising = {name: unnamed(PUBLIC[name]) for name in FUNCTIONS}
    assert not {name: errors for name, errors in raising.items() if errors}


def test_error_without_a_word_is_reported() -> None:
    def silent() -> None:
        """Does something."""
        raise ValueError("no")

    assert unnamed(silent) == {"ValueError"}


def test_every_public_method_has_a_docstring() -> None:
    missing = [
        f"{name}.{member}"
        for name, value in PUBLIC.items()
        if inspect.isclass(value)
        for member, own in vars(value).items()
        if member[0] != "_" and callable(getattr(own, "__func__", getattr(own, "fget", own)))
        if not inspect.getdoc(getattr(value, member))
    ]
    assert not missing
