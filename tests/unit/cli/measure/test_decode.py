"""`ark bench decode`: its figures match the requested contexts and prompts, and a wrong result is
reported.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

import ark
from ark.cli import bench, main
from ark.cli.measure import decode, results
from ark.cli.measure.comm_peer import Peer
from ark.cli.measure.fidelity import GREEDY_STEPS, TOLERANCE, compare, greedy
from tests.slow import slow

NOAH = str(Path(__file__).parents[4] / "examples" / "noah")
BENCH = ["bench", "decode", "--backend", "cpu", "--config", NOAH, "--repeats", "1"]


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    """Returns the plan's figures, read through the schema."""
    (output,) = by_batch(capsys, *words)
    return output


def by_batch(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict]:
    assert main([*BENCH, "--json", "-", *words]) == 0
    read = results.checked(msgspec.json.decode(capsys.readouterr().out, type=results.Results))
    assert read.machine.backend == "cpu" and read.command.startswith("ark bench decode")
    plans: dict[int, dict] = {}
    for row in read.figures:
        result = plans.setdefault(
            row.detail["batch"], {**row.detail, "contexts": [], "prompts": []}
        )
        result["contexts" if "context" in row.detail else "prompts"].append(row.detail)
        seconds = row.detail["per_token" if "context" in row.detail else "seconds"]
        assert row.us == pytest.approx(seconds * 1e6) and row.figure.startswith("decode/noah")
    return list(plans.values())


def test_contexts_and_prompts_of_one_plan(capsys: pytest.CaptureFixture[str]) -> None:
    output = figures(
        capsys, "--context", "16,200", "--tokens", "8", "--prompt", "40", "--chunk", "8"
    )
    near, far = output["contexts"]
    assert [near["context"], far["context"]] == [16, 200]
    assert len(near["tokens"]) == len(far["tokens"]) == 8
    # Noah's cache has 6 layers of 2 heads, with keys and values of width 32 in bf16.
    assert far["read_bytes"] - near["read_bytes"] == (200 - 16) * 6 * 2 * 32 * 2 * 2
    assert near["read_bytes"] > output["weight_bytes"] > 0
    assert output["prompts"][0]["length"] == 40 and output["prompts"][0]["seconds"] > 0


def test_logits_are_checked_without_times_of_a_peer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    words = ("--context", "16", "--tokens", "2", "--prompt", "20", "--check")
    for turn in ((), ("--turn", str(tmp_path / "turn"))):
        output = figures(capsys, *words, *turn)
        (row,), (prompt,) = output["contexts"], output["prompts"]
        assert row["fidelity"]["ark"]["rows"] == GREEDY_STEPS
        assert row["fidelity"]["ark"]["distance"] < TOLERANCE["bf16"]
        assert row["peer_s"] == prompt["peer_s"] == {} and output["build_s"] > 0


@pytest.mark.parametrize("words", [(), ("--model", "any")])
def test_prediction_needs_no_warm_up(
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `--repeats 2`, a measurement runs three times, and the first run is a warm-up that does
    not count. A prediction has two runs without a warm-up, and then a launch of one token: its time
    is subtracted to get the time of the further tokens.
    """
    whole, result = decode._run, []
    monkeypatch.setattr(decode, "_run", lambda *a: result.append(whole(*a)) or result[-1])
    monkeypatch.setattr(bench, "predict", lambda backend, model: None)
    got = figures(capsys, "--repeats", "2", "--context", "16", "--tokens", "2", *words)
    (row,) = got["contexts"]
    times = [seconds for seconds, _ in result]
    counted = times[:2] if words else times[1:]
    assert row["runs"] == pytest.approx([seconds / 2 for seconds in counted])
    assert [len(tokens) for _, tokens in result] == ([2, 2, 1] if words else [2, 2, 2])
    further = max(counted) - times[2] if words else None
    assert row["further"] == (pytest.approx(further) if words else None)


def test_prediction_of_one_token_has_no_time_of_further_tokens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "predict", lambda backend, model: None)
    words = ["--context", "16", "--tokens", "1", "--model", "any"]
    assert figures(capsys, *words)["contexts"][0]["further"] is None


def test_batches(capsys: pytest.CaptureFixture[str]) -> None:
    one, three = by_batch(capsys, "--context", "16", "--tokens", "8", "--batch", "1,3")
    assert [one["batch"], three["batch"]] == [1, 3]
    assert one["weight_bytes"] == three["weight_bytes"] > 0
    keys = [f["contexts"][0]["read_bytes"] - f["weight_bytes"] for f in (one, three)]
    assert keys[1] == 3 * keys[0] > 0


@slow
def test_every_row_is_beside_torch(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    output = figures(capsys, "--context", "12", "--tokens", "4", "--vs", "torch")
    (row,) = output["contexts"]
    actual = row["fidelity"]["ark"]
    assert actual["rows"] == actual["agreed"] == GREEDY_STEPS
    assert 0 < actual["mean"] < actual["most"] < 0.1 and actual["distance"] < 5e-3
    assert row["peer_s"]["eager"] > 0 and output["read_bandwidth"] > 0


def test_every_sequence_of_a_batch_is_beside_torch(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    output = figures(capsys, "--context", "12", "--tokens", "4", "--batch", "3", "--vs", "torch")
    (row,) = output["contexts"]
    actual = row["fidelity"]["ark"]
    assert actual["rows"] == actual["agreed"] == 3 * GREEDY_STEPS
    assert 0 < actual["mean"] < actual["most"] < 0.1 and actual["distance"] < 5e-3
    assert row["peer_s"]["eager"] > 0 and output["read_bandwidth"] > 0


def test_nccl_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ark.SystemError, match="compare with --vs gloo"):
        Peer("nccl", None, None)  # type: ignore[arg-type]


def test_distance_is_by_row() -> None:
    right = np.array([[3.0, 4.0, 0.0], [0.0, 0.0, 10.0]])
    off = right.copy()
    off[1] = [0.0, 10.5, 10.0]
    actual = compare(off, right)
    assert actual.mean == pytest.approx(10.5 / 6) and actual.most == 10.5
    assert actual.distance == pytest.approx(1.05) and actual.agreed == 1
    assert not any(actual.passes(name) for name in TOLERANCE)
    assert compare(right, right).passes("fp32")


def test_nan_fails_the_comparison() -> None:
    right = np.ones((2, 4))
    off = right.copy()
    off[0, 2] = np.nan
    assert not compare(off, right).passes("bf16")


def test_each_step_reads_the_best_of_the_one_before() -> None:
    def step(tokens: list[int], position: int) -> np.ndarray:
        return np.eye(64)[[(token + position) % 64 for token in tokens]]

    read, rows = greedy(step, [5, 7], 10)
    assert read[:3] == [[5, 7], [15, 17], [26, 28]] and rows.shape == (2 * GREEDY_STEPS, 64)
    assert rows[:-2].argmax(1).tolist() == [token for tokens in read[1:] for token in tokens]


@pytest.mark.parametrize(
    ("words", "errors"),
    [
        (["--context", "8,500"], "a context of 500 tokens"),
        (["--prompt", "512"], "a prompt of 512 tokens"),
    ],
)
def test_lengths_beyond_the_context_are_refused(
    words: list[str], errors: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BENCH, *words]) != 0
    assert errors in capsys.readouterr().err
