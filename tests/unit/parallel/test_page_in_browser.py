"""The page of a plan in headless Chromium, in both themes: it draws everything without errors."""

from __future__ import annotations

import html
import re
from pathlib import Path

import numpy as np
import pytest

from ark.backend import registry
from ark.ir.dtype import by_name
from ark.models.build import whole_pass
from ark.models.config import builtin_config
from ark.parallel.page import render_page
from ark.parallel.plans.predict import predict
from ark.parallel.plans.prediction import Prediction, Target, Work
from ark.parallel.plans.splits import Splits
from tests.cases.page_in_browser import CHROMIUM, THEMES, browse, read_png

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    splits = Splits(whole_pass(builtin_config("llama-3.2-1b"), by_name("bf16"), 512))
    target = Target(registry.machine("h100"), 450.0, 50.0, 8)
    return predict(splits, (2, 4), ("1f1b", "megatron"), target, Work(True, 8))


@pytest.mark.parametrize("theme", THEMES)
def test_page_draws(prediction: Prediction, theme: str, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    page.write_text(render_page(prediction, "a model"))
    shown = browse(page, theme, "--dump-dom")
    assert not re.findall(r"CONSOLE.*", shown.stderr)
    assert '<h1 id="title">a model</h1>' in shown.stdout
    block = re.search(r'<svg id="block".*?</svg>', shown.stdout, re.DOTALL)
    numbered = next(b for b in prediction.blocks if b.block.numbered)
    assert block and block[0].count("<rect") >= len(numbered.block.nodes)
    assert "all reduce" in block[0] and "NaN" not in shown.stdout


def ask(page: Path, text: str, script: str, *extra: str) -> str:
    """Returns the result of a script that runs on a page after it was drawn."""
    element = (
        f"<script>document.body.dataset.told = String((() => {{ {script} }})());</script></body>"
    )
    page.write_text(text.replace("</body>", element))
    shown = browse(page, "light", "--dump-dom", *extra)
    assert not re.findall(r"CONSOLE.*", shown.stderr)
    return html.unescape(re.findall(r'data-told="(.*?)"', shown.stdout)[0])


PRESS = 'document.getElementById("grid").dispatchEvent(new KeyboardEvent("keydown", {key: "KEY"}));'
CHOSEN = 'return document.getElementById("blockTitle").textContent;'


def test_layers_are_chosen_by_keys_and_buttons(prediction: Prediction, tmp_path: Path) -> None:
    page, text = tmp_path / "plan.html", render_page(prediction, "a model")
    names = [block.block.name for block in prediction.blocks]
    first = ask(page, text, PRESS.replace("KEY", "Home") + CHOSEN)
    last = ask(page, text, PRESS.replace("KEY", "End") + CHOSEN)
    second = ask(
        page,
        text,
        PRESS.replace("KEY", "Home")
        + 'document.getElementById("layerNext").click();'
        + 'return document.getElementById("grid").getAttribute("aria-label");',
    )
    assert first != last and len(names) > 2
    assert second.startswith("Layers across, ranks down; layer 2 of ")


def test_page_fits_a_phone_and_describes_its_canvases(
    prediction: Prediction, tmp_path: Path
) -> None:
    page, text = tmp_path / "plan.html", render_page(prediction, "a model")
    width, needed, unnamed, layer = ask(
        page,
        text,
        "const unnamed = [...document.querySelectorAll('canvas')].filter("
        "c => !c.getAttribute('aria-label')).length;"
        "const grid = document.getElementById('grid').getBoundingClientRect().width;"
        "return [innerWidth, document.documentElement.scrollWidth, unnamed,"
        " (grid - LEFT - BARS) / DATA.blocks.length];",
        "--window-size=500,900",
    ).split(",")
    assert float(needed) <= float(width) and unnamed == "0" and float(layer) >= 12


def test_error_in_the_script_is_detected(prediction: Prediction, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    page.write_text(render_page(prediction, "a model").replace('"use strict";', "nobody();", 1))
    assert re.findall(r"CONSOLE.*nobody", browse(page, "light", "--dump-dom").stderr)


def test_themes_are_dark_and_light(prediction: Prediction, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    page.write_text(render_page(prediction, "a model"))
    brightness = {}
    for theme in THEMES:
        picture = tmp_path / f"{theme}.png"
        browse(page, theme, f"--screenshot={picture}", "--window-size=400,300")
        pixels = read_png(picture.read_bytes())
        brightness[theme] = pixels[-5, -5, :3].mean()
        assert len(np.unique(pixels[::7, ::7].reshape(-1, pixels.shape[2]), axis=0)) > 20
    assert brightness["dark"] < 60 and brightness["light"] > 200
