"""The page of 128 ranks in headless Chromium, in both themes: small, drawn completely, without
errors. The slow session draws it; `nox` draws smaller pages (tests/unit/parallel).
"""

import re

import numpy as np
import pytest

from ark.collective.bounds import least_us
from ark.collective.page import render_page
from ark.collective.simulate import simulate
from ark.collective.synthesis import synthesize
from ark.collective.topology import load
from tests.cases.page_in_browser import CHROMIUM, THEMES, browse, read_png, width_on_a_phone
from tests.slow import slow

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
RESULT_BYTES = 1 << 28


@pytest.fixture(scope="module")
def page():
    topology = load("a100x16")
    programs = [
        synthesize(topology, "all_gather", name, k=1 if name == "forestcoll" else None)
        for name in ("forestcoll", "hierarchical")
    ]
    runs = [(program, simulate(program, topology, RESULT_BYTES)) for program in programs]
    return render_page(topology, runs, least_us(topology, "all_gather", RESULT_BYTES))


def test_page_is_small(page):
    assert len(page.encode()) < 3e6


def test_page_fits_a_phone_and_names_its_controls(tmp_path):
    topology = load("ring2")
    program = synthesize(topology, "all_gather", "ring")
    page, file = (
        render_page(topology, [(program, simulate(program, topology, RESULT_BYTES))]),
        tmp_path,
    )
    (file / "page.html").write_text(page, encoding="utf-8")
    assert width_on_a_phone(file / "page.html") <= 390
    parts = re.findall(r"<(canvas|button)([^>]*)>([^<]*)", page)
    assert len(parts) > 8
    assert all("aria-label=" in attributes or text.strip() for _, attributes, text in parts)


KEYS = """<script>addEventListener("load", () => setTimeout(async () => {
  const press = (place, key, shiftKey) => document.getElementById(place).dispatchEvent(
    new KeyboardEvent("keydown", { key, shiftKey, bubbles: true, cancelable: true }));
  const clock = () => document.getElementById("clock").textContent.split(" of ")[0];
  const reported = [clock()];
  press("timeline", "ArrowRight", false);
  reported.push(clock());
  press("timeline", "ArrowLeft", false);
  reported.push(clock());
  document.getElementById("zoomIn").click();
  const from = Timeline.from;
  press("timeline", "ArrowRight", true);
  reported.push(Timeline.from > from);
  const rows = document.querySelectorAll("#compare .row");
  rows[1].click();
  await new Promise((done) => setTimeout(done, 200));
  const chosen = document.activeElement;
  reported.push(chosen.getAttribute("aria-pressed"), chosen.textContent.includes("one shot"));
  document.title = reported.join("; ");
}, 300));</script>"""


def test_time_and_algorithm_are_chosen_by_keys(tmp_path):
    topology = load("ring2")
    programs = [synthesize(topology, "all_gather", name) for name in ("ring", "one_shot")]
    runs = [(program, simulate(program, topology, RESULT_BYTES)) for program in programs]
    (tmp_path / "page.html").write_text(render_page(topology, runs) + KEYS, encoding="utf-8")
    shown = browse(tmp_path / "page.html", "light", "--dump-dom")
    assert not re.findall(r"CONSOLE.*", shown.stderr)
    reported = re.findall(r"<title>(.*?)</title>", shown.stdout)[0].split("; ")
    begin, later, back, *others = reported
    assert begin == back and begin != later and others == ["true", "true", "true"]


@slow
@pytest.mark.parametrize("theme", THEMES)
def test_page_draws(page, theme, tmp_path):
    file, picture = tmp_path / "page.html", tmp_path / "page.png"
    file.write_text(page, encoding="utf-8")
    shown = browse(file, theme, "--dump-dom", f"--screenshot={picture}")
    assert not re.findall(r"CONSOLE.*", shown.stderr)
    drawn = re.sub(r"<script.*?</script>", "", shown.stdout, flags=re.DOTALL)
    assert "128 ranks" in drawn and "NaN" not in drawn
    for name in ("forestcoll k=1", "hierarchical"):
        assert name in drawn, name
    pixels = read_png(picture.read_bytes())
    corner = pixels[-5, -5, :3].mean()
    assert corner < 60 if theme == "dark" else corner > 200
    assert len(np.unique(pixels[::7, ::7].reshape(-1, pixels.shape[2]), axis=0)) > 50
