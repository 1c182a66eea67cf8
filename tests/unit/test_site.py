"""The site's navigation contains every page, and its hook removes links that lead out of docs/."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import yaml

import ark
import ark.interop.torch
import ark.models
import ark.parallel

ROOT = Path(__file__).resolve().parents[2]


def test_navigation_has_every_page_but_the_diaries() -> None:
    sections = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert [next(iter(s)) for s in sections] == [
        *("Start", "How-to", "Reference", "Explanation", "Results", "History")
    ]
    named = [page for section in sections for pages in section.values() for page in pages]
    docs = ROOT / "docs"
    pages = {str(p.relative_to(docs)) for p in docs.rglob("*.md")}
    assert sorted(named) == sorted(p for p in pages if not p.startswith("history/"))


def test_lint_session_builds_the_site_strictly() -> None:
    lint = next(
        node
        for node in ast.parse((ROOT / "noxfile.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "lint"
    )
    assert "session.run('mkdocs', 'build', '--strict'" in ast.unparse(lint)
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text())["strict"]


def test_page_of_the_interface_has_every_public_name() -> None:
    page = (ROOT / "docs/reference/api.md").read_text()
    shown = set(re.findall(r"^::: [\w.]+\.(\w+)$", page, re.M))
    ops = {n for n in ark.ops.__all__ if not inspect.isclass(getattr(ark, n))}
    packages = (ark, ark.comm, ark.distributed, ark.interop, ark.interop.torch, ark.models)
    packages += (ark.optim, ark.parallel)
    # Public names that a page documents under their class's name, such as ark.comm.channel under
    # Channel, count as shown.
    shown |= {"channel"} if "Channel" in shown else set()
    public = {n for p in packages for n in p.__all__ if callable(getattr(p, n))}
    assert public | {"LLM", "SamplingParams", "StructuredOutputsParams"} <= shown | ops


def test_links_out_of_docs_become_their_text() -> None:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "ci/site_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def shown(text: str, at: str) -> str:
        result: str = module.on_page_markdown(
            text, SimpleNamespace(file=SimpleNamespace(src_uri=at))
        )
        return result

    assert shown("[a](../ci/coverage.md)", "x.md") == "a"
    assert shown("[a](../x.md#y), [b](https://a.b)", "history/y.md") == (
        "[a](../x.md#y), [b](https://a.b)"
    )
    assert shown("[a](#y)", "x.md") == "[a](#y)"


def test_every_command_is_on_its_page() -> None:
    from ark.cli import COMMANDS

    page = (ROOT / "docs/reference/commands.md").read_text()
    assert re.findall(r"^## ark (\w+)$", page, re.M) == list(COMMANDS)
