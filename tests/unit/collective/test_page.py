"""The page of simulated runs: one self-contained file with their data, safe and deterministic, in
which links do not overlap.
"""

import base64
import json
import math
import re
import shutil
import subprocess
import zlib

import pytest

from ark.collective import classics
from ark.collective.bounds import least_us
from ark.collective.page import render_page
from ark.collective.page.data import carried, page_data
from ark.collective.page.layout import layout
from ark.collective.programs import Kind, check
from ark.collective.simulate import simulate
from ark.collective.taccl import synthesize_taccl
from ark.collective.topology import Link, Topology, load
from ark.errors import InvalidUsageError

RESULT_BYTES = 1 << 20


def runs_of(topology, collective="all_reduce", names=("ring", "two_shot")):
    result = []
    for name in names:
        program = classics.build(
            name, collective, len(topology.ranks), boxes=topology.equal_boxes(), pieces=2
        )
        check(program)
        result.append((program, simulate(program, topology, RESULT_BYTES)))
    return result


def embedded(html):
    data = json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', html)[1]
    )
    for run in data["runs"]:
        run["ops"], run["times"] = unpacked(run)
    return data


def unpacked(run):
    return json.loads(zlib.decompress(base64.b64decode(run["packed"])))


def test_page_needs_nothing_from_outside():
    topology = load("a100x2")
    html = render_page(topology, runs_of(topology), 12.5)
    outside = re.findall(r'(?:src|href)\s*=|@import|url\(|https?://[^"\s]*', html)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}
    for name in ("Load", "Flow", "Trees", "Timeline", "Algorithms"):
        assert name in html
    assert "/*DATA*/" not in html and "/*SCRIPT*/" not in html and "/*STYLE*/" not in html


def test_data_is_the_simulation():
    topology = load("a100x2")
    runs = runs_of(topology)
    data = embedded(render_page(topology, runs, 12.5))
    assert data["ranks"] == 16 and data["size"] == RESULT_BYTES and data["bound"] == 12.5
    assert len(data["nodes"]) == len(topology.nodes)
    assert len(data["links"]) == len(topology.capacities())
    for shown, (program, result) in zip(data["runs"], runs, strict=True):
        assert shown["time"] == pytest.approx(result.time_us, abs=1e-3)
        assert shown["bytes"] == [round(b) for b in result.link_bytes.values()]
        puts = [e for e in result.events if program.op(e.ref).kind is Kind.PUT]
        assert len(shown["times"]) == len(puts)
        tick = result.time_us / shown["ticks"]
        by_start = sorted(e.start_us for e in puts)
        assert [t[2] * tick for t in shown["times"]] == pytest.approx(by_start, abs=tick)
        for number, piece, start, length in shown["times"]:
            rank, peer, route, *_ = shown["ops"][number]
            names = [data["nodes"][i]["id"] for i in shown["routes"][route]]
            assert (names[0], names[-1]) == (topology.ranks[rank], topology.ranks[peer])
            assert 0 <= start <= start + length <= shown["ticks"] + 1 and piece in (0, 1)


def test_puts_list_the_data_that_they_carry():
    gather = classics.build("ring", "all_gather", 4)
    for ref, (chunk, source, _) in carried(gather).items():
        assert chunk == source == gather.op(ref).dst.start
    reduce = classics.build("two_shot", "all_reduce", 4)
    done = [reduced for _, _, reduced in carried(reduce).values()]
    assert done.count(True) == done.count(False) == 12
    assert carried(classics.build("adasum_halving", "all_reduce", 4))


def test_same_runs_give_the_same_bytes():
    topology = load("torus3x3")
    html = render_page(topology, runs_of(topology), None)
    assert html == render_page(topology, runs_of(topology), None)


def test_names_from_files_cannot_inject_html():
    evil = "</script><script>alert(1)</script><!--"
    links = (Link(evil, "b", 1, 0.0), Link("b", evil, 1, 0.0))
    topology = Topology(evil, (evil, "b"), (), links)
    html = render_page(topology, runs_of(topology, names=("ring",)))
    assert html.count("<script>") == 1 and html.count("</script>") == 2
    assert "<!--" not in html
    assert embedded(html)["topology"] == evil


def test_every_colour_has_a_light_and_a_dark_form():
    html = render_page(load("ring4"), runs_of(load("ring4")))
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    dark, _, rest = style.partition("@media (prefers-color-scheme: light) {")
    light = rest[: rest.index("}\n}")]
    used = set(re.findall(r"var\(--(\w+)\)", style)) | set(re.findall(r'colour\("(\w+)"\)', html))
    used |= {
        name for pair in re.findall(r'colour\(\w+ \? "(\w+)" : "(\w+)"\)', html) for name in pair
    }
    assert {"ground", "rank", "switchRim", "cursor"} <= used
    for theme in (dark, light):
        assert used <= set(re.findall(r"--(\w+):", theme))
    for script in re.findall(r"<script>(.*?)</script>", html, re.DOTALL):
        assert not re.findall(r"#[0-9a-f]{6}", script)


def test_runs_must_be_alike():
    topology = load("ring4")
    one = runs_of(topology)
    with pytest.raises(InvalidUsageError, match="0 kinds"):
        render_page(topology, [])
    with pytest.raises(InvalidUsageError, match="2 kinds"):
        render_page(topology, one + runs_of(topology, "all_gather", ("ring",)))


@pytest.mark.parametrize(
    "name",
    [
        *("ring8", "torus4x4", "hypercube4", "full6", "star7", "a100x2", "h100x4", "dgx2x2"),
        *("mi300xx2", "mi250x2", "dgx1vx2", "a100x3:fabric=rail", "h100x16", "ndv2x2"),
        "a100x4:fabric=leafspine,oversubscription=2",
    ],
)
def test_nodes_are_drawn_apart(name):
    topology = load(name)
    places = layout(topology)
    assert set(places) == set(topology.nodes)
    points = list(places.values())
    assert all(math.isfinite(v) for p in points for v in p)
    gap = min(math.dist(p, q) for i, p in enumerate(points) for q in points[:i])
    assert gap > 0.2


def test_grids_and_fat_trees_have_their_shape():
    mesh = layout(load("mesh3x4"))
    assert all(
        mesh[f"g{4 * row + column}"] == (column, row) for row in range(3) for column in range(4)
    )
    cube = layout(load("torus2x3x4"))
    assert len({cube[f"g{i}"] for i in range(24)}) == 24 and cube["g23"][0] > cube["g11"][0]
    assert cube["g1"][0] - cube["g0"][0] == 1 and cube["g4"][1] - cube["g0"][1] == 1
    links = [(f"g{i}", f"leaf{i // 2}") for i in range(8)]
    links += [(f"leaf{i}", f"agg{i // 2}") for i in range(4)] + [("agg0", "core"), ("agg1", "core")]
    switches = tuple(dict.fromkeys(b for _, b in links))
    two_way = tuple(Link(*ends, 1) for a, b in links for ends in ((a, b), (b, a)))
    fat = layout(Topology("fat", tuple(f"g{i}" for i in range(8)), switches, two_way))
    heights = [fat[name][1] for name in ("g5", "leaf2", "agg1", "core")]
    assert heights == sorted(heights, reverse=True) and len(set(heights)) == 4
    assert fat["leaf2"][0] == pytest.approx((fat["g4"][0] + fat["g5"][0]) / 2)
    assert fat["core"][0] == pytest.approx((fat["agg0"][0] + fat["agg1"][0]) / 2)


def test_page_of_128_ranks_is_small():
    topology = load("a100x16")
    runs = runs_of(topology, "all_gather", ("one_shot",))
    assert len(render_page(topology, runs, 12.5)) < 3e6 / 5


def test_big_runs_show_whole_trees_and_all_ranks(monkeypatch):
    monkeypatch.setattr("ark.collective.page.data.MOST_EVENTS", 100)
    topology = load("ring8")
    (run,) = page_data(topology, runs_of(topology, names=("ring",)), None)["runs"]
    assert (run["shown"], run["pieces"]) == (1, 2)
    ops, times = unpacked(run)
    assert {ops[number][0] for number, *_ in times} == set(range(8))
    assert sum(piece == 0 for _, piece, _, _ in times) == 2 * 7 * 8


@pytest.mark.skipif(shutil.which("node") is None, reason="node checks the scripts' syntax")
def test_scripts_parse(tmp_path):
    topology = load("ring4")
    html = render_page(topology, runs_of(topology))
    script = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)[-1]
    (tmp_path / "page.js").write_text(script)
    subprocess.run(["node", "--check", tmp_path / "page.js"], check=True)


def test_synthesised_program_with_routes_is_drawn():
    topology = load("dgx2x2")
    program = synthesize_taccl(topology, None, "all_gather", 20, size_bytes=RESULT_BYTES)
    check(program.program)
    result = simulate(program.program, topology, RESULT_BYTES)
    bound = least_us(topology, "all_gather", RESULT_BYTES)
    data = embedded(render_page(topology, [(program.program, result)], bound))
    assert data["runs"][0]["name"] == "taccl"
    assert max(len(route) for route in data["runs"][0]["routes"]) == 5


def test_every_picture_of_the_page_has_a_description() -> None:
    html = render_page(load("ring4"), runs_of(load("ring4")))
    pictures = re.findall(r"<(?:canvas|svg) [^>]*>", html)
    assert len(pictures) == 5
    unnamed = [tag for tag in pictures if 'id="links"' not in tag and "aria-label=" not in tag]
    assert not unnamed  # each link has its label at its nodes and in the tooltip
