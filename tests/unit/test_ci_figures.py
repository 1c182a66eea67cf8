"""ci/figures.py measures a row's standard set of figures. Interrupted runs continue, and slower
figures are reported.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ark.cli.measure.results import Figure, Place, Results
from tests.cases.ci import generate, load
from tests.slow import slow

figure_file, figure_pieces, figures, page = (
    load(name) for name in ("figure_file", "figure_pieces", "figures", "performance_page")
)
ROWS = {row["name"]: row for row in generate.rows()}
PLACE = Place("NVIDIA H100", "sm_90a", "cuda", 132)


def row(name: str, us: float | None = 10.0, peer_us: float | None = 20.0, **more: Any) -> Figure:
    ratio = peer_us / us if us and peer_us else None
    return Figure(name, us, "torch" if ratio else "", peer_us if ratio else None, ratio, **more)


def results(*rows: Figure, place: Place = PLACE, torch: str = "2.11.0") -> Results:
    head = ({"torch": torch}, "abcdef0", "0123456789abcdef", "2026-01-31", "ark bench ops")
    return Results(place, *head, list(rows))


def a_run(tmp_path: Path, *before: Results, seconds: float = 100.0) -> Any:
    old = figure_file.Figures("cuda-h100", False, list(before))
    ends = time.monotonic() + seconds
    return figures.Run(ROWS["cuda-h100"], old, tmp_path / "work.json", ends, [])


def test_new_figures_take_the_place_of_old_ones(tmp_path: Path) -> None:
    before = figure_file.Figures("cpu", True, [results(row("a"), row("b")), results(row("c"))])
    result = figure_file.merged(before, [results(row("b", 5.0), row("c", 6.0))], True)
    assert [[f.figure for f in r.figures] for r in result.runs] == [["a"], ["b", "c"]]
    path = tmp_path / "cpu.json"
    figure_file.write_figures(path, result)
    assert figure_file.read_figures(path, "cpu") == result


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row": "cuda-h100"}, "expected 'cpu'"),
        ({"noisy": "no"}, "noisy"),
        ({"runs": [{}]}, "runs"),
        ({"note": "fast"}, "note"),
    ],
)
def test_invalid_file_of_figures_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps({"row": "cpu", "noisy": False, "runs": [], **change}))
    with pytest.raises(ValueError, match=message):
        figure_file.read_figures(path, "cpu")


def test_duplicate_figure_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    twice = figure_file.Figures("cpu", False, [results(row("a")), results(row("a", 11.0))])
    figure_file.write_figures(path, twice)
    with pytest.raises(ValueError, match="a twice"):
        figure_file.read_figures(path, "cpu")


def test_figures_worse_by_three_percent_are_reported() -> None:
    old = figure_file.Figures("cuda-h100", False, [results(row("a"), row("b"), row("c"))])
    now = [results(row("a", 10.2), row("b", 10.4, 30.0), row("d", 99.0))]
    assert [f.figure for f, _ in figures.worse(old, now, noisy=False)] == ["b"]
    # On a machine that others use, only the ratio to torch's time counts: that of the figure b is
    # better, that of a is within 3%.
    assert figures.worse(old, now, noisy=True) == []
    slow_ratio = [results(row("a", 5.0, 9.0))]
    assert [f.figure for f, _ in figures.worse(old, slow_ratio, noisy=True)] == ["a"]
    elsewhere = msgspec.structs.replace(PLACE, name="NVIDIA H200")
    assert figures.worse(old, [results(row("a", 99.0), place=elsewhere)], noisy=False) == []


def test_of_requests_only_medians_are_compared_and_with_a_larger_limit() -> None:
    names = ("serve/a-p50", "serve/b-p50", "serve/a-p99")
    old = figure_file.Figures("cuda-h100", False, [results(*(row(n, peer_us=None) for n in names))])
    times = zip(names, (11.9, 12.1, 99.0), strict=True)
    now = [results(*(row(n, us, None) for n, us in times))]
    assert [f.figure for f, _ in figures.worse(old, now, noisy=False)] == ["serve/b-p50"]


def test_worse_figures_are_measured_again_and_the_faster_time_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path, results(*(row(name) for name in "abcd")))
    pieces = [figure_pieces.Piece("ops", ("ops",), tuple("abcd"), "torch", 50.0, tuple("abcd"))]
    measured = [
        results(row("a", 10.0), row("b", 11.0), row("c", 12.0), row("d", 13.0)),
        results(row("b", 9.0), row("c", 14.0)),  # the bench of d fails
    ]
    asked: list[list[str]] = []

    def call(run: Any, piece: Any, missing: list[str], *_: Any) -> str:
        asked.append(missing)
        if measured:
            run.keep(measured.pop(0))
        return ""

    monkeypatch.setattr(figures, "call", call)
    figures.measure_all(run, pieces, {})
    figures.measure_again(run, pieces, False, {})
    assert asked[:2] == [list("abcd"), list("bcd")]
    times = {f.figure: f.us for r in run.runs for f in r.figures}
    assert times == {"a": 10.0, "b": 9.0, "c": 12.0, "d": 13.0} and not run.failed
    assert [f.figure for f, _ in figures.worse(run.before, run.runs, False)] == ["c", "d"]


def test_bench_that_is_run_again_keeps_its_other_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a bench runs again because one of its figures became worse, the times of its other figures
    stay those of its first run. (A bench of a server measures all of its figures in each run.)
    """
    run = a_run(tmp_path, results(row("serve/a-p50"), row("serve/b-p50")))
    piece = figure_pieces.Piece("serve", ("serve",), ("serve/a-p50", "serve/b-p50"), "", 50.0)
    times = [(10.0, 15.0), (11.0, 12.0)]

    def bench(words: list[str], *_: Any) -> str:
        a, b = times.pop(0)
        given = results(row("serve/a-p50", a), row("serve/b-p50", b))
        path = Path(words[words.index("--json") + 1])
        path.write_bytes(msgspec.json.encode(given))
        return ""

    monkeypatch.setattr(figures, "ended", bench)
    figures.measure_all(run, [piece], {})
    figures.measure_again(run, [piece], False, {})
    assert {f.figure: f.us for r in run.runs for f in r.figures} == {
        "serve/a-p50": 10.0,
        "serve/b-p50": 12.0,
    }
    figures.write_figures(tmp_path / "out.json", figures.merged(run.before, run.runs, False))
    assert figure_file.read_figures(tmp_path / "out.json", "cuda-h100").row == "cuda-h100"


def test_peer_s_time_is_kept_by_versions() -> None:
    old = figure_file.Figures("cuda-h100", False, [results(row("torch/bert"))])
    peers = figures.known_peers(old, [])
    (kept,) = figures.beside(results(row("torch/bert", 5.0, None)), peers).figures
    assert (kept.peer_us, kept.ratio) == (20.0, 4.0) and kept.detail["peer_of"] == "2026-01-31"
    (other,) = figures.beside(results(row("torch/bert", 5.0, None), torch="2.12.0"), peers).figures
    assert other.peer_us is None
    # A peer's time that was itself carried over may not be carried over by another run.
    assert not figures.known_peers(figure_file.Figures("x", False, [results(kept)]), [])


def test_decoder_is_checked_where_the_peer_s_time_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = figure_pieces.pieces(ROWS["cuda-h100"], False)
    (piece,) = (p for p in pieces if p.figures == ("decode/llama-3.2-1b-at-512",))
    asked: list[list[str]] = []

    def bench(words: list[str], *_: Any) -> str:
        asked.append(words)
        return "no device"

    monkeypatch.setattr(figures, "ended", bench)
    for before in ((), (results(row(piece.figures[0])),)):
        figures.measure(a_run(tmp_path, *before), piece, {})
    first, second = asked
    assert first[-2:] == ["--vs", "torch"] and "--check" not in first
    assert "--check" in second and "--vs" not in second


def test_pieces_run_side_by_side_and_use_the_device_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path)
    run.workers = 2
    meeting = threading.Barrier(2, timeout=20)
    pieces = [figure_pieces.Piece(n, ("ops",), (f"ops/{n}",), "", 60, (n,)) for n in "abcd"]

    def bench(words: list[str], *_: Any) -> str:
        meeting.wait()  # the other piece runs meanwhile
        assert words[words.index("--turn") + 1] == str(run.work.with_suffix(".turn"))
        file = Path(words[words.index("--json") + 1])
        file.write_bytes(msgspec.json.encode(results(row(f"ops/{words[4]}"))))
        return ""

    monkeypatch.setattr(figures, "ended", lambda words, *more: bench(words[1:], *more))
    figures.measure_all(run, pieces, {})
    assert run.done == {f"ops/{n}" for n in "abcd"}


def test_first_of_two_turns_ends_before_the_second(tmp_path: Path) -> None:
    file, log = str(tmp_path / "turn"), tmp_path / "log"
    text = (
        "import sys, time\nfrom ark.cli.measure.turn import Turn\nfile, log = sys.argv[1:]\n"
        "def say(word):\n    open(log, 'a').write(word + ' ')\n"
        "for _ in range(3):\n"
        "    with Turn(file):\n        say('begin')\n        time.sleep(0.2)\n        say('end')\n"
    )
    words = [sys.executable, "-c", text, file, str(log)]
    for process in [subprocess.Popen(words) for _ in range(2)]:
        assert process.wait(120) == 0
    assert log.read_text().split() == ["begin", "end"] * 6


def test_interrupt_ends_the_benches_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ended = a_run(tmp_path), figures.ended
    piece = figure_pieces.Piece("ops", ("ops",), ("ops/a",), "", 60, ("a",))
    sleeps = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(figures, "ended", lambda words, *more: ended(sleeps, *more))
    threading.Timer(0.5, run.stop.set).start()
    begin = time.monotonic()
    figures.measure_all(run, [piece, piece], {})
    assert time.monotonic() - begin < 20 and run.missing(piece) == ["ops/a"] and not run.failed


def test_sweep_is_a_set_of_its_own() -> None:
    names = [f for piece in figure_pieces.sweep() for f in piece.figures]
    assert len(set(names)) == len(names) > 300
    assert all(n.startswith(("ops/sweep-", "fidelity/")) for n in names)
    for row in ROWS.values():
        begins = [f for piece in figure_pieces.pieces(row, False) for f in piece.figures]
        assert not set(begins) & set(names)


def test_one_gpu_has_workers_by_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, workers in ((2, 1), (8, 2), (16, 4), (128, 4)):
        monkeypatch.setattr(figures.os, "cpu_count", lambda n=cores: n)
        assert figures.workers_of(ROWS["cuda-h200"]) == workers
        assert figures.workers_of(ROWS["cuda-h200-x2"]) == figures.workers_of(ROWS["cpu"]) == 1


def test_set_of_every_row_names_figures_once() -> None:
    for name, matrix_row in ROWS.items():
        for tiny in (False, True) if name == "cpu" else (False,):
            begins = [f for piece in figure_pieces.pieces(matrix_row, tiny) for f in piece.figures]
            assert len(set(begins)) == len(begins) > 3, name
    one = [p.name for p in figure_pieces.pieces(ROWS["cuda-h100"], False)]
    assert sum(n.startswith("model ") for n in one) == 6 and "LSTM" in one


def test_figure_that_ends_its_process_does_not_keep_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a bench process dies while it measures `b`, the figures that it wrote before are kept, `b`
    is reported as failed, and the bench continues after it.
    """
    run, asked = a_run(tmp_path), []
    piece = figure_pieces.Piece("ops", ("ops",), ("ops/a", "ops/b", "ops/c"), "", 90, tuple("abc"))

    def bench(words: list[str], *_: Any) -> str:
        names, file = words[5 : words.index("--json")], Path(words[words.index("--json") + 1])
        asked.append(names)
        done = names[: names.index("b")] if "b" in names else names
        file.write_bytes(msgspec.json.encode(results(*(row(f"ops/{n}") for n in done))))
        return "exit code -11" if "b" in names else ""

    monkeypatch.setattr(figures, "ended", bench)
    figures.measure(run, piece, {})
    assert asked == [["a", "b", "c"], ["c"]]
    assert run.done == {"ops/a", "ops/c"} and run.failed == {"ops/b": "exit code -11"}
    assert figures.report(run, [piece], noisy=False) == 1


def test_piece_whose_time_is_over_has_missing_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figure that was being measured when the time ran out is missing, not failed."""
    run = a_run(tmp_path)
    piece = figure_pieces.Piece("ops", ("ops",), ("ops/a", "ops/b"), "", 20, ("a", "b"))

    def bench(words: list[str], *_: Any) -> str:
        file = Path(words[words.index("--json") + 1])
        file.write_bytes(msgspec.json.encode(results(row("ops/a"))))
        monkeypatch.setattr(figures, "MIN_PIECE_SECONDS", 1e9)
        return f"{figures.CUT} 20 s"

    monkeypatch.setattr(figures, "ended", bench)
    figures.measure(run, piece, {})
    assert run.missing(piece) == ["ops/b"] and not run.failed


def test_run_that_was_cut_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path)
    assert figures.resumed(run.work, "cuda-h100") == []
    run.keep(results(row("ops/a")))
    assert figures.resumed(run.work, "cuda-h100") == run.runs
    monkeypatch.setattr(figures, "tree_digest", lambda: "another source")
    assert figures.resumed(run.work, "cuda-h100") == []


def test_command_and_its_children_end_in_time(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(6); open({str(mark)!r}, 'w')"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    stop = threading.Event()
    assert "no end" in figures.ended([sys.executable, "-c", parent], 1.0, {}, stop)
    wrong = [sys.executable, "-c", "raise SystemExit(3)"]
    assert figures.ended(wrong, 60, {}, stop) == "exit code 3"
    assert figures.ended([sys.executable, "-c", ""], 60, {}, stop) == ""
    time.sleep(6)
    assert not mark.exists()


@slow
def test_figures_of_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measuring a CPU's figures writes a file that can be read back and prints a table. A second
    run measures nothing.
    """
    pytest.importorskip("torch")
    words = ["cpu", "--tiny", "--noisy", "--only", "ops", "decode", "all_reduce"]
    words += ["--output", str(tmp_path), "--work", str(tmp_path / "work")]
    figures.main(words)
    result = figure_file.read_figures(tmp_path / "cpu.json", "cpu")
    names = {f.figure.split("/")[0] for r in result.runs for f in r.figures}
    assert result.noisy and {"ops", "decode", "comm"} <= names
    errors = capsys.readouterr().out
    assert "0 failed, 0 missing" in errors and "[1/3] ops" in errors


def test_page_has_a_row_for_each_figure_and_no_other(tmp_path: Path) -> None:
    h100 = results(
        row("ops/add"), row("torch/bert", None, error="a | b"), row("ops/sub", 5.0, None)
    )
    figure_file.write_figures(
        tmp_path / "cuda-h100.json", figure_file.Figures("cuda-h100", True, [h100])
    )
    text = page.page(list(ROWS.values()), tmp_path)
    assert "| add | 10 | torch | 20 | 2.00 |\n| sub | 5 | | | |\n" in text
    assert "| bert | failed: a / b | | | |" in text and "abcdef0" in text
    assert page.NOISY in text and text.count("\n## ") == 1
    # A file of another machine, or without a row, is refused.
    elsewhere = results(row("ops/add"), place=Place("NVIDIA H200", "sm_90a", "cuda", 132))
    figure_file.write_figures(
        tmp_path / "cuda-h100.json", figure_file.Figures("cuda-h100", False, [elsewhere])
    )
    with pytest.raises(ValueError, match="has a run on NVIDIA H200"):
        page.page(list(ROWS.values()), tmp_path)
    (tmp_path / "cuda-h100.json").rename(tmp_path / "cuda-x.json")
    with pytest.raises(ValueError, match=r"not in ci/matrix\.toml"):
        page.page(list(ROWS.values()), tmp_path)


def test_slow_figure_needs_a_reason_and_others_have_none(tmp_path: Path) -> None:
    folder, reasons = tmp_path / "figures", tmp_path / "reasons.toml"
    folder.mkdir()
    h100 = results(row("ops/add", 10.0, 8.9), row("ops/sub", 10.0, 9.0), row("ops/mul", 10.0, None))
    figure_file.write_figures(
        folder / "cuda-h100.json", figure_file.Figures("cuda-h100", False, [h100])
    )
    with pytest.raises(ValueError, match="lacks a reason for cuda-h100: ops/add;"):
        page.page(list(ROWS.values()), folder)
    reasons.write_text('[cuda-h100]\n"ops/add" = "it waits"\n')
    listed = "\nFigures with a ratio below 0.9, and the reasons:\n\n- add: it waits\n"
    assert listed in page.page(list(ROWS.values()), folder)
    reasons.write_text('[cuda-h100]\n"ops/add" = "it waits"\n"ops/sub" = "it waits too"\n')
    with pytest.raises(ValueError, match="need not have a reason for cuda-h100: ops/sub;"):
        page.page(list(ROWS.values()), folder)
    products = results(row("ops/sweep-mul-1", 10.0, 5.0), row("ops/sweep-mul-2", 10.0, 6.0))
    file = figure_file.Figures("cuda-h100", False, [h100, products])
    figure_file.write_figures(folder / "cuda-h100.json", file)
    known = '[cuda-h100]\n"ops/add" = "it waits"\n"ops/sweep-mul-*" = "short"\n'
    reasons.write_text(known)
    text = page.page(list(ROWS.values()), folder)
    assert "\n- add: it waits\n" in text and "sweep-mul-1" not in text
    assert "[sweep of 2 common ops](reference/sweep.md): ratio 0.55 (geometric mean), 2 b" in text
    apart = page.sweep_page(list(ROWS.values()), folder)
    assert "| sweep-mul-1 | 10 | torch | 5 | 0.50 |\n" in apart and "| add |" not in apart
    assert "\n- sweep-mul-1, sweep-mul-2: short\n" in apart
    reasons.write_text(known + '"ops/sweep-div-*" = "short"\n')
    with pytest.raises(ValueError, match=r"need not have a reason for cuda-h100: ops/sweep-div-"):
        page.page(list(ROWS.values()), folder)
    reasons.write_text("[cuda-h100]\n'ops/add' = 3\n")
    with pytest.raises(ValueError, match="is not a file of reasons"):
        page.page(list(ROWS.values()), folder)


def test_predictions_have_a_table_and_need_no_reason(tmp_path: Path) -> None:
    rows = [row("fidelity/add", 10.0, 8.0), row("fidelity/sub", 10.0, 11.0)]
    file = figure_file.Figures("cuda-h100", False, [results(*rows)])
    figure_file.write_figures(tmp_path / "cuda-h100.json", file)
    text = page.page(list(ROWS.values()), tmp_path)
    assert "| add | 8 | 10 | -20% |\n| sub | 11 | 10 | +10% |\n" in text
    assert "2 programs: mean error 15% (goal 15%), largest 20% (goal 35%)." in text


def test_figure_that_was_typed_fails_lint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, text = tmp_path / "performance.md", page.page(list(ROWS.values()))
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "outputs", lambda: {copy: text})
    copy.write_text(text)
    assert generate.main(["--check"]) == 0
    copy.write_text(text + "| add | 1 | torch | 20 | 20.00 |\n")
    assert generate.main(["--check"]) == 1
    assert "performance.md is out of date" in capsys.readouterr().err
