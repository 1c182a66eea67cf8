"""`ark doctor`: a working device passes, planted faults fail, and the command reports them."""

from __future__ import annotations

import json

import pytest

from ark.backend import registry
from ark.backend.codegen.dialect import Source
from ark.cli import main
from ark.cli.doctor import bench as benches
from ark.cli.doctor import checks
from ark.cli.doctor.bench import Bench

FAULTS = {
    # check: (the text in the kernel, the faulty text that replaces it)
    "messages": ("data[i] = ark_expected(round, i)", "data[i] = ark_expected(round - 1u, i)"),
    "packets": ("high | ark_expected(epoch, 0u)", "high | ark_expected(epoch - 1u, 0u)"),
    "additions": (
        "ark_add_release(ark_word(p, 0u), 1u, p->persistent != 0u);\n  }\n}",
        "if (round != 0u) ark_add_release(ark_word(p, 0u), 1u, p->persistent != 0u);\n  }\n}",
    ),
    "residency": ("round * p->processors, start)) return;\n    ark_count(p, 0u, 1u)",
                  "round * p->processors + 1u, start)) return;\n    ark_count(p, 0u, 1u)"),
    "host_words": ("ark_store_host(&ark_host(p)->done, round)", ""),
    "clock": ("= ark_time_ns();\n    ark_add", "= ~ark_time_ns();\n    ark_add"),
}  # fmt: skip


def test_sound_device_passes(backend: str) -> None:
    findings: list[checks.Finding] = []
    with Bench(registry.get(backend), 0) as bench:
        checks.examine(bench, findings.append)
    assert [f for f in findings if f.verdict == "fail"] == []
    assert len(findings) == len(checks.ALL) and len({f.check for f in findings}) == len(findings)


@pytest.mark.parametrize("check", FAULTS)
def test_fault_fails(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = benches.source
    old, new = FAULTS[check]

    def faulty(*args: object) -> Source:
        text = original(*args).text  # type: ignore[arg-type]
        assert text.count(old) == 1
        return Source(text.replace(old, new))

    monkeypatch.setattr(benches, "source", faulty)
    monkeypatch.setattr(benches, "BUDGET_S", 1.0)
    with Bench(registry.get("cpu"), 0) as bench:
        assert getattr(checks, check)(bench).verdict == "fail"


def test_error_gives_back_nothing_that_a_kernel_uses() -> None:
    with pytest.raises(KeyError), Bench(registry.get("cpu"), 0) as bench:
        words, data = bench.words(2), bench.alloc(8 * bench.processors)
        launch = bench.start("clock", data.address, words.address, lasts_s=0.3)
        raise KeyError
    assert launch.done()


def test_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checks, "ALL", (checks.residency, checks.additions))
    assert main(["doctor", "--backend", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [c["verdict"] for c in report["checks"]] == ["pass", "pass"]
    failing = checks.Finding("residency", "fail", "nobody came")
    monkeypatch.setattr(checks, "ALL", (lambda bench: failing,))
    assert main(["doctor", "--backend", "cpu"]) == 1
    assert "nobody came" in capsys.readouterr().out
    assert main(["doctor", "--backend", "cpu", "--device", "7"]) == 2
    assert "it has 1" in " ".join(capsys.readouterr().err.split())
