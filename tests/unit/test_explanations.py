"""Pictures of the explanatory pages: they are shown on their pages, and agree with code and
traces.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

from tests.cases.ci import load

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"way": "loop-kernel", "iteration": "iterations", "packets": "dependences"}
PAGES |= {"verifier": "verifier"}


def test_each_picture_is_on_its_page_with_alternative_text() -> None:
    files = load("explanations").pictures()
    assert sorted(path.stem for path in files) == sorted(PAGES)
    for path, text in files.items():
        page = (ROOT / f"docs/{PAGES[path.stem]}.md").read_text()
        (words,) = re.findall(rf"!\[([^\]]+)\]\(pictures/{path.stem}\.svg\)", page)
        assert len(words) > 40
        root = ElementTree.fromstring(text)
        assert root.attrib["role"] == "img" and len(root.attrib["aria-label"]) > 40


def test_boxes_and_lines_are_inside_of_the_picture() -> None:
    for path, text in load("explanations").pictures().items():
        width, height = map(float, re.findall(r'viewBox="0 0 (\d+) (\d+)" role', text)[0])
        for box in re.findall(r'<rect x="(\d+)" y="(\d+)" width="(\d+)" height="(\d+)"', text):
            x, y, wide, high = map(float, box)
            assert x + wide <= width and y + high <= height, path
        for x, y, words in re.findall(r'<text x="(\d+)" y="(\d+)" class="\w*">(.*?)<', text):
            assert float(x) + 7.2 * len(words) * ("mid" not in text) <= width, words
            assert float(y) < height, words


def test_ops_of_a_layer_are_those_of_the_measured_token() -> None:
    explanations = load("explanations")
    spans = json.loads((ROOT / "docs/pictures/token.json").read_text())["spans"]
    ops = [op.removeprefix("decode.layers.1.") for op, *_ in sorted(spans, key=lambda s: s[3])]
    layer = dict.fromkeys(op for op in ops if not op.startswith("decode.") and "merge" not in op)
    assert list(layer) == [name for name, _ in explanations.LAYER]


def test_verifiers_message_is_that_of_its_picture() -> None:
    source = (ROOT / "ark/plan/verify/order.py").read_text()
    assert "its waits deadlock: {count} tasks never start, the first is" in source
    assert "its waits deadlock: 4 tasks never start" in load("explanations").verifier().svg()
