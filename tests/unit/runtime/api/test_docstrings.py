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
import ark.models
from ark.models import registry

ROOT = Path(__file__).resolve().parents[4]
LATER = ("from_onnx", "from_torch", "inference_model", "training_model", "parallelize")
FUNCTIONS = sorted(
    name
    for name in {*ark.__all__, *ark.ops.__all__, *LATER}
    if inspect.isfunction(getattr(ark, name))
)
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


@pytest.mark.parametrize("name", sorted({*(f"ark.{name}" for name in FUNCTIONS), *ENTRIES}))
def test_the_example_of_a_function_or_class_runs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_an_example_with_another_output_fails() -> None:
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
def test_a_docstring_begins_with_a_summary_of_one_line(name: str) -> None:
    summary, *rest = (inspect.getdoc(getattr(ark, name)) or "").splitlines()
    assert summary.endswith((".", "?")) and (not rest or not rest[0])
