"""`ark topo` from the command line: its output, exit codes and one-sentence errors."""

import json
import os
import subprocess
import sys

import pytest

from ark.cli import main
from ark.collective import topology
from ark.collective.programs import check, from_json


def run(capsys, *words):
    code = main(["topo", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_optimal_as_json(capsys):
    code, out, _ = run(capsys, "optimal", "a100x2", "--json")
    value = json.loads(out)
    assert code == 0
    assert list(value) == ["inv_x", "k", "algbw", "cut"]
    assert (value["inv_x"], value["k"]) == ("3/65", 13)
    assert value["algbw"] == pytest.approx(16 * 65 / 3)
    assert len([node for node in value["cut"] if node.startswith("g")]) == 15


def test_optimal_of_a_file_with_fixed_k(capsys, tmp_path):
    _, text, _ = run(capsys, "show", "h100x4", "--json")
    path = tmp_path / "fabric.json"
    path.write_text(text)
    code, out, _ = run(capsys, "optimal", str(path), "--k", "1", "--json")
    assert code == 0
    assert (json.loads(out)["inv_x"], json.loads(out)["k"]) == ("14/225", 1)


def test_optimal_of_thousands_of_ranks(capsys):
    _, out, _ = run(capsys, "optimal", "a100x128", "--json")
    assert json.loads(out)["inv_x"] == "127/25"


def test_this_machine_by_its_own_command(capsys, monkeypatch):
    """`ark topo detect` prints what `ark topo show detect` does."""
    actual = topology.named("h100x2")
    monkeypatch.setattr("ark.collective.topology.names.detect", lambda: actual)
    code, shown, _ = run(capsys, "show", "detect")
    assert code == 0 and "16 ranks" in shown
    assert run(capsys, "detect") == (0, shown, "")
    assert topology.from_json(run(capsys, "detect", "--json")[1]) == actual


def test_tables(capsys):
    assert "3 switches" in run(capsys, "show", "a100x2")[1]
    assert "(optimal)" in run(capsys, "optimal", "ring8")[1]
    assert "1/200" in run(capsys, "optimal", "a100x2", "--root", "3")[1]


def test_synthesized_programs_are_read_back(capsys, tmp_path):
    path = tmp_path / "program.json"
    code, out, _ = run(
        capsys,
        *("synthesize", "ring4", "--collective", "all_reduce"),
        *("--format", "json", "--out", str(path)),
    )
    assert code == 0
    assert "checked" in out
    assert check(from_json(path.read_text())).steps == 4
    code, out, _ = run(capsys, "simulate", "ring4", "--program", str(path), "--size", "64K")
    assert code == 0
    assert "of the optimum" in out


def test_options_that_contradict_a_programs_file_are_refused(capsys, tmp_path):
    path = str(tmp_path / "program.json")
    words = ("--collective", "reduce", "--root", "2", "--reduction", "max")
    assert run(capsys, "synthesize", "ring4", *words, "--format", "json", "--out", path)[0] == 0
    simulate = ("simulate", "ring4", "--program", path)
    assert run(capsys, *simulate, *words)[1] == run(capsys, *simulate)[1] != ""
    for option, other, says in (
        ("--reduction", "sum", "--reduction says 'sum', but the program"),
        ("--root", "1", "has 2; leave --root out"),
        ("--collective", "broadcast", "has 'reduce'"),
        ("--collective", "all_gather", "has 'reduce'"),  # the default value, given explicitly
        ("--algorithm", "forestcoll", "--algorithm is for synthesizing"),
        ("--pieces", "3", "has 1"),
        ("--k", "1", "--k is for synthesizing a program"),
        ("--window", "2", "--window is for synthesizing"),
    ):
        code, out, err = run(capsys, *simulate, option, other)
        assert (code, out) == (2, "") and says in " ".join(err.split())


def test_formats(capsys):
    assert run(capsys, "synthesize", "star4")[1].startswith("program forestcoll k=1 all_gather")
    assert run(capsys, "synthesize", "star4", "--format", "xml")[1].startswith("<algo")


@pytest.mark.parametrize("command", ["synthesize", "simulate", "compare"])
def test_collectives_without_a_sum_refuse_a_reduction(capsys, command):
    code, _, err = run(capsys, command, "ring4", "--reduction", "max")
    assert code != 0 and "all_gather does not reduce; omit the reduction max" in err


def test_unknown_algorithm_lists_all(capsys):
    code, _, err = run(capsys, "synthesize", "ring4", "--algorithm", "nosuch")
    assert code != 0 and all(each in err for each in ("forestcoll", "taccl", "flow", "ring"))


def test_targets(capsys, tmp_path):
    path = tmp_path / "plan.json"
    assert run(capsys, "synthesize", "ring4", "--target", "msccl++", "--out", str(path))[0] == 0
    assert "gpus" in json.loads(path.read_text())
    assert "ring4" in run(capsys, "simulate", "ring4", "--program", str(path))[1]
    assert run(capsys, "synthesize", "ring4", "--target", "msccl")[1].startswith("<algo")
    code, _, err = run(capsys, "synthesize", "ring4", "--target", "msccl++", "--format", "xml")
    assert code != 0 and "msccl++ reads json" in err


def test_compare_lists_every_algorithm(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "compare", "dgx1v", "--size", "1M", "--time-limit", "5")
    assert code == 0
    for name in ("forestcoll", "taccl", "ring", "bidirectional_ring", "one_shot"):
        assert f"{name} " in out
    page = (tmp_path / "ark-topo.html").read_text()
    assert page.startswith("<!")
    assert "dgx1v" in page


def test_compare_reports_too_large_networks(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "ark.cli.topo._MAX_COMPARED_OPERATIONS", 100
    )  # operations of all programs in sum
    code, out, _ = run(capsys, "compare", "ring8", "--size", "1M", "--time-limit", "5")
    out = " ".join(out.split())
    assert code == 0
    assert "forestcoll k=1 " in out and "recursive_doubling " in out  # of 64 and 32 operations
    assert "taccl is left out: taccl puts at least 56 chunks" in out
    assert "one_shot is left out: one_shot needs more operations for all_gather over 8" in out
    monkeypatch.setattr("ark.cli.topo._MAX_COMPARED_OPERATIONS", 0)
    code, _, err = run(capsys, "compare", "ring8", "--size", "1M")
    assert code == 2 and "no algorithm supports all_gather" in err


@pytest.mark.parametrize(
    "words, says",
    [
        (("optimal", "nosuch"), "nor the name of a topology"),
        (("optimal", "ring8", "--k", "0"), "k is 0"),
        (("optimal", "ring8", "--root", "8"), "the ranks 0 to 7"),
        (("optimal", "missing.json"), "cannot be read"),
        (("show", "ring8:speed=1"), "'speed' is not an option"),
        (("simulate", "ring8", "--size", "lots"), "lots"),
        (("simulate", "ring8", "--collective", "all_shuffle"), "all_shuffle"),
        (("simulate", "ring8", "--program", "missing.json"), "cannot be read"),
        (("synthesize", "ring8", "--out", "no/such/folder"), "cannot be written"),
        (("synthesize", "ring8", "--algorithm", "magic"), "magic"),
        (("compare", "ring6", "--collective", "all_reduce", "--reduction", "adasum"), "adasum"),
        (("synthesize", "ring8", "--algorithm", "taccl", "--sketch", "no.json"), "no.json"),
    ],
)
def test_errors_are_one_paragraph_and_exit_code_2(capsys, words, says):
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert err.startswith("ark: ")
    assert says in " ".join(err.split())
    assert "Traceback" not in err


def test_page_that_cannot_be_written(capsys):
    code, _, err = run(capsys, "simulate", "ring4", "--html", "no/such/page.html")
    assert code == 2
    assert "cannot be written" in err


def test_same_command_prints_the_same_bytes():
    words = [sys.executable, "-m", "ark", "topo", "synthesize", "a100x2:nics=4", "--k", "2"]
    texts = {
        subprocess.run(words, capture_output=True, check=True, env={**os.environ, **seed}).stdout
        for seed in ({"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2"})
    }
    assert len(texts) == 1


def test_help_lists_the_names():
    done = subprocess.run(
        [sys.executable, "-m", "ark", "topo", "--help"], capture_output=True, text=True, check=True
    )
    for word in ("a100", "mi300x", "ringN", "compare", "oversubscription"):
        assert word in done.stdout
