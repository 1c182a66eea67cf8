"""The README: its commands and programs run, and its tables agree with the result files."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import re
import shlex
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from markdown_it import MarkdownIt

import ark
from ark.cli import main
from ark.models.registry import MODEL_TYPES
from tests.cases.ci import generate, load
from tests.pages import python_blocks

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "README.md").read_text()
BLOCKS = {kind: re.findall(rf"```{kind}\n(.*?)```", PAGE, re.S) for kind in ("bash", "python")}


def section(title: str, page: str = PAGE) -> str:
    """Returns the text under a heading, up to the next heading of its level or above."""
    level = re.search(rf"^(#+) {re.escape(title)}$", page, re.M)
    assert level is not None, title
    return re.split(rf"^#{{1,{len(level[1])}}} ", page[level.end() :], flags=re.M)[0]


def rows(text: str) -> list[list[str]]:
    """Returns the cells of the tables' lines, without headers."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for line, row in zip(lines, cells, strict=True) if f"{line}\n|---" not in text]


def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_first_command_streams_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, command = BLOCKS["bash"][0].replace("\\\n", "").strip().split(" && ")
    program, *words = shlex.split(command)
    assert program == ".venv/bin/ark"
    monkeypatch.chdir(ROOT)
    assert main([*words, "--backend", "cpu", "--max-new-tokens", "8"]) == 0
    assert len(capsys.readouterr().out.split()) > 3


def test_continuous_integration_is_the_command_for_tests() -> None:
    steps = [line for line in (ROOT / ".ci/run").read_text().splitlines() if "venv" in line]
    command = re.search(r"^All tests, no GPU needed: `(.+)`$", PAGE, re.M)
    assert command is not None
    assert command[1].split(" && ") == [s.replace(" --quiet", "") for s in steps]


def test_three_lines_of_python_give_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    exec(BLOCKS["python"][0].replace('"examples/noah"', '"examples/noah", backend="cpu"'), {})
    assert len(capsys.readouterr().out.split()) > 5


def test_table_of_devices_equals_the_result_files() -> None:
    order = ["executed", "emulated", "compiled"]
    proven: dict[str, int] = {}
    for row in generate.rows():
        if row["backend"] != "mesh":
            device = re.sub(r"^\d x |NVIDIA |AMD | CPU|, NVLink", "", row["machine"])
            at = order.index(row["proof"])
            proven[device] = min(at, proven.get(device, at))
    shown = {
        device: order.index(proof or "executed")
        for _, cell, *_ in rows(section("What runs where"))
        for part in cell.split("; ")
        for proof, devices in re.findall(r"^(?:only (\w+): )?(.*)$", part)
        for device in devices.split(", ")
    }
    assert shown == proven


def test_counts_of_decoders_are_those_of_the_runs() -> None:
    page = (ROOT / "docs/reference/decoders.md").read_text()
    proven: dict[str, set[str]] = {}
    quantised: set[str] = set()
    for architecture, weights, *proofs in rows(page):
        for vendor, proof in zip(("CPU", "AMD", "NVIDIA"), proofs, strict=True):
            if proof == ("emulated" if vendor == "AMD" else "executed"):
                proven.setdefault(vendor, set()).add(architecture)
                if re.match(r"\w+: ", weights):
                    quantised.add(vendor)
    table = {vendor: cell for vendor, _, cell, *_ in rows(section("What runs where"))}
    assert quantised == set(table) == set(proven)
    for vendor, cell in table.items():
        assert re.sub(r"\[(.*)\]\(.*", r"\1", cell) == f"{len(proven[vendor])}, also quantised"


def test_named_models_are_supported() -> None:
    named = re.search(r"checkpoints of (.*) and \[others\]", PAGE)
    assert named is not None
    for name in named[1].lower().replace("-", "_").split(", "):
        assert [model for model in MODEL_TYPES if model.startswith(name)], name


def test_each_number_stands_in_the_section_that_it_links_to() -> None:
    entries = re.findall(
        r"^- \[[^\]]+\]\(([^)#]+)#([^)]+)\):\s(.*(?:\n  .*)*)", section("Numbers"), re.M
    )
    assert len(entries) == 6
    for path, anchor, figures in entries:
        page = (ROOT / path).read_text()
        titles = re.findall(r"^#+ (.*)$", page, re.M)
        slugs = {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-"): t for t in titles}
        text = section(slugs[anchor], page)
        numbers = re.findall(r"(?<![\w.,])[\d.,]*\d", figures)
        assert len(numbers) > 1
        for number in numbers:
            assert re.search(rf"(?<![\d.]){number}(?![\d])", text), (number, figures)


def test_picture_is_of_two_traces_of_a_token() -> None:
    picture = load("picture")
    data = json.loads(picture.DATA.read_text())
    spans, kernels = data["spans"], data["kernels"]
    lanes = [sorted(row[3:] for row in spans if row[2] == p) for p in range(4)]
    for lane in [*lanes, sorted(row[1:] for row in kernels)]:  # one task or kernel after another
        assert len(lane) > 40
        assert all(a[1] <= b[0] + 0.01 for a, b in itertools.pairwise(lane))
    text = picture.PICTURE.read_text()
    for end, count in ((max(r[4] for r in spans), ""), (max(r[2] for r in kernels), len(kernels))):
        assert f"{end:.0f} us" in text and str(count) in text
    backgrounds = 1 + len(lanes) + 1
    assert text.count("<rect") == len(spans) + len(kernels) + backgrounds + len(picture.COLOURS)
    assert 'role="img"' in text and "aria-label=" in text


def test_first_screen_has_sentences_picture_and_commands() -> None:
    head = PAGE.split("```")[0]
    assert "](docs/pictures/token.svg)" in head
    intro = head.split("# ark\n")[1].split("![")[0]
    assert intro.count(". ") + intro.count(".\n") == 3
    assert len(BLOCKS["bash"]) == len(BLOCKS["python"]) == 1
    assert PAGE.index("```python") < PAGE.index("\n## ")


def test_page_is_a_screen_and_a_half() -> None:
    """The height in px as GitHub shows the page: 830 px of text on a screen of 790, in a font of
    113 characters a line.
    """

    def lines(text: str) -> int:
        return math.ceil(len(re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", text)) / 113)

    box = re.search(r'viewBox="0 0 (\d+) (\d+)"', load("picture").PICTURE.read_text())
    assert box is not None
    height = 48.0  # above and below the page
    tokens = MarkdownIt("commonmark").enable("table").parse(PAGE)
    for before, token in itertools.pairwise(tokens):
        if token.type == "fence":
            height += 48 + 19.7 * token.content.count("\n")
        elif token.type in ("table_open", "bullet_list_open"):
            height += 16
        elif token.type == "tr_open":
            height += 37
        elif before.type == "heading_open":
            height += 67 if before.tag == "h1" else 62
        elif token.type == "inline" and token.content.startswith("!["):
            height += 830 * int(box[2]) / int(box[1]) + 22
        elif before.type == "paragraph_open":
            height += 24 * lines(token.content) + (4 if before.hidden else 16)
    assert height <= 1.5 * 790


def test_package_index_gets_a_page_without_dead_links() -> None:
    shown = hook().readme(PAGE)
    assert "](docs/" in PAGE
    assert not [to for to in re.findall(r"\]\(([^)]+)\)", shown) if "://" not in to]
    html = MarkdownIt("commonmark").enable("table").render(shown)
    assert "<img" not in html and "kernels of torch.compile" in html
    assert html.count("<table>") == 1 and html.count("<h1>") == 1
    assert "[" not in re.sub(r"<pre>.*?</pre>|<code>.*?</code>", "", html, flags=re.S)


def test_package_has_urls_where_the_repository_has_an_address() -> None:
    build = hook()
    workflow = {"GITHUB_SERVER_URL": "https://forge.example", "GITHUB_REPOSITORY": "we/ark"}
    place = build.address(workflow)
    assert place == "https://forge.example/we/ark" and build.address({}) == ""
    assert set(build.urls(place)) == {"Homepage", "Documentation", "Changelog", "Issues"}
    assert build.urls("") == {}
    shown = build.readme(PAGE, place)
    assert f"]({place}/raw/main/docs/pictures/token.svg)" in shown
    paths = re.findall(rf"\]\({place}/(?:raw|blob)/main/([^)#]+)", shown)
    assert len(paths) > 12 and all((ROOT / path).exists() for path in paths)
    assert not [to for to in re.findall(r"\]\(([^)]+)\)", shown) if "://" not in to]


def test_programs_of_the_page_for_beginners_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for block in python_blocks("start.md"):
        exec(block, names)
    rows = names["rows"]
    assert isinstance(rows, np.ndarray)
    x = torch.arange(32, dtype=torch.float32).reshape(4, 8)
    np.testing.assert_allclose(rows, torch.softmax(x, -1).numpy(), rtol=1e-5)
    assert capsys.readouterr().out.count("tensor(") == 1
    ark.init()
