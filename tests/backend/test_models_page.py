"""docs/models.md followed literally: its new decoder gives transformers' results."""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ark.cli import main
from ark.errors import ModelError
from ark.ir.dtype import fp32
from ark.models import registry
from ark.models.build import Shape, build
from ark.models.checkpoint import Checkpoint
from tests.cases import decoders
from tests.checkpoints import make_checkpoint
from tests.slow import slow

OWN = dict(registry.ARCHITECTURES)
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "new-decoder.md"


def test_page_has_every_architecture_with_its_file() -> None:
    table = re.findall(
        r"^\| `(\w+)` \|.*?\| `(\w+\.py)` \|", (DOCS / "models.md").read_text(), re.M
    )
    files = {
        name: f"{str(builder).split(':')[0].split('.')[-1]}.py" for name, builder in OWN.items()
    }
    assert dict(table) == files and len(table) == len(files)
    kinds = {case["kind"] for case in decoders.CASES.values()}
    tested = {registry.MODEL_TYPES[kind] for kind in kinds} | {"MistralForCausalLM"}
    assert tested | {"LlamaForCausalLM"} == set(files)  # test_generate.py tests Llama


def test_decoder_of_the_page_is_the_one_that_ark_has() -> None:
    section = PAGE.read_text().split("## Adding a decoder")[1]
    file, architecture, line = re.findall(r"```python\n(.*?)```", section, re.S)
    name, _, text = file.partition("\n")
    assert (PAGE.parents[1] / name.removeprefix("# ")).read_text() == text
    assert ast.literal_eval("{" + architecture + "}").items() <= OWN.items()
    assert ast.literal_eval("{" + line + "}").items() <= decoders.CASES.items()


@pytest.mark.parametrize(
    ("title", "name"), [("A decoder of your own", "Parallel"), ("A parameter of its own", "Scaled")]
)
def test_users_decoder_of_the_page_generates(
    title: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    section = PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, re.S)
    monkeypatch.setattr(registry, "ARCHITECTURES", dict(registry.ARCHITECTURES))
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(program, scope)
    assert registry.ARCHITECTURES[f"{name}ForCausalLM"] is scope[name]
    assert len(capsys.readouterr().out) > 8


def test_checkpoint_of_the_page_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    section = PAGE.read_text().split("## A checkpoint to try it with")[1].split("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, re.S)
    (command,) = re.findall(r"`ark (generate [^`]*)`", section)
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert main([*shlex.split(command), "--backend", "cpu"]) == 0
    assert len(capsys.readouterr().out) > 8


@slow
def test_package_of_the_page_is_found_by_commands(tmp_path: Path) -> None:
    """`ark` commands find the page's new decoder in an installed package that declares it by an
    entry point.
    """
    page = PAGE.read_text()
    (program,) = re.findall(r"## A decoder of your own.*?```python\n(.*?)```", page, re.S)
    classes, _, rest = program.partition("ark.models.register(")
    folder = rest.partition("\n\n")[2].partition("\nwith ")[0]
    (project,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    command = next(line for line in page.splitlines() if line.startswith("ark generate parallel"))
    package = tmp_path / "ark-parallel"
    package.mkdir()
    (package / "ark_parallel.py").write_text(classes)
    (package / "pyproject.toml").write_text(project)
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")
    run = functools.partial(subprocess.run, cwd=tmp_path, check=True, timeout=300)
    head = classes.partition("import ark")[0]
    run([sys.executable, "-c", head + folder])
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", "site"]
    run([sys.executable, "-m", "pip", "install", *options, "./ark-parallel"])
    paths = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    words = [sys.executable, "-m", *shlex.split(command), "--backend", "cpu"]
    done = run(words, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert len(done.stdout) > 8


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any]]:
    """Follows the page's steps for a new decoder. Returns the name and the fields of the test case
    that the page adds.
    """
    section = PAGE.read_text().split("## Adding a decoder")[1]
    file, architecture, line = re.findall(r"```python\n(.*?)```", section, re.S)
    name = re.match(r"# ark/models/(\w+)\.py\n", file)
    assert name is not None
    module = ModuleType(f"ark.models.{name[1]}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(file, f"{PAGE}:{name[1]}.py", "exec"), vars(module))
    for key, value in ast.literal_eval("{" + architecture + "}").items():
        monkeypatch.setitem(registry.ARCHITECTURES, key, value)
    ((case, fields),) = ast.literal_eval("{" + line + "}").items()
    return case, fields


@pytest.mark.emulated("slow")
def test_decoder_of_the_page_computes_transformers_tokens(
    backend: str,
    case: tuple[str, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(decoders.CASES, *case)
    decoders.check_tokens_and_logits_are_those_of_transformers(backend, case[0], tmp_path)


def test_decoder_of_the_page_is_refused_on_several_ranks(
    case: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    directory = make_checkpoint(tmp_path / case[0], **case[1])
    config = Checkpoint.open(directory).config
    with pytest.raises(ModelError, match="rmsnorm: the weight has shape"):
        build(Shape(config, fp32, 32, 4, 0, 2))
