"""`ark generate --ranks N`: ranks in separate processes with shared memory give the tokens of a
single rank. Also tests what happens if a rank fails.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ark.backend import registry
from ark.models.tokenizer import Tokenizer
from tests.cases.decoders import CASES as DECODERS
from tests.cases.generate_ranks import NOAH, PROMPT, alone, answer, start
from tests.checkpoints import make_checkpoint
from tests.slow import SLOW, slow

SHARED = (
    "qwen3-tied-wide-heads", "qwen3-moe", "smollm3", "granite", "phi3", "phi4-mini", "gemma2",
    "gemma3", "glm", "glm4",
)  # fmt: skip


def usable(name: str, ranks: int) -> bool:
    devices = len(registry.probe(name).devices) if name in registry.names() else 0
    return name == "cpu" or devices >= ranks


BACKENDS = [
    pytest.param(n, marks=pytest.mark.skipif(not usable(n, 2), reason=f"{n} has no 2 devices"))
    for n in ("cpu", "cuda")
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_give_the_tokens_of_one(backend: str) -> None:
    answered = answer(NOAH, "--backend", backend, "--max-new-tokens", "24", "--ranks", "2")
    assert answered["tokens"] == alone(NOAH, 24, backend=backend)
    assert answered["text"] == Tokenizer.open(NOAH).decode(answered["tokens"])


@pytest.mark.parametrize(
    "case",
    ["mixtral", "qwen2", *(pytest.param(c, marks=slow) for c in SHARED)],
)
def test_ranks_share_other_decoders(case: str, tmp_path: Path) -> None:
    """Two ranks generate the same tokens as one rank, for decoders other than Llama. Each rank
    holds half of the attention heads, half of every expert and half of the output layer's rows.
    """
    directory = make_checkpoint(tmp_path / case, **DECODERS[case])
    answered = answer(directory, "--backend", "cpu", "--max-new-tokens", "20", "--ranks", "2")
    assert answered["tokens"] == alone(directory, 20)


@pytest.mark.parametrize(
    "filters", [("--top-k", "3"), ("--top-p", "0.8", "--repetition-penalty", "1.3")]
)
def test_two_ranks_draw_the_tokens_of_one(filters: tuple[str, ...]) -> None:
    """Two ranks sample the same tokens as one rank. Without filters each rank searches its own
    logits; filters such as top-p need the logits of all ranks.
    """
    drawn = ("--temperature", "1.5", *filters, "--seed", "11", "--max-new-tokens", "16")
    common = (*drawn, "--backend", "cpu")
    one, two = (answer(NOAH, *common, "--ranks", str(n))["tokens"] for n in (1, 2))
    assert one == two and len(one) == 16


@pytest.mark.parametrize("backend", BACKENDS)
def test_benchmark_measures_ranks_together(backend: str) -> None:
    argv = [sys.executable, "-m", "ark", "bench", "decode", "--config", str(NOAH), "--json", "-"]
    argv += ["--backend", backend, "--ranks", "2", "--tokens", "12", "--repeats", "2"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["machine"]["name"].startswith("2 ranks") and figures["machine"]["devices"] == 2
    (row,) = (figure["detail"] for figure in figures["figures"])
    assert len(row["runs"]) == 2 and len(row["tokens"]) == 12
    assert min(row["runs"]) > 0 and row["weight_bytes"] > 0


@slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_emulated_devices_give_the_tokens_of_the_cpu(ranks: str) -> None:
    """One and two processes with an emulated gfx942 each give the CPU's tokens, with puts, signals
    and waits between them.
    """
    pytest.importorskip("ark_rocm_emulator")
    pytest.importorskip("hip")
    tokens = 12 if SLOW else 6
    common = ("--max-new-tokens", str(tokens), "--budget", "120")
    process = start(
        NOAH,
        "--json",
        "--backend",
        "rocm",
        "--ranks",
        ranks,
        *common,
        ARK_ROCM_DEVICE=f"emulated:gfx942,{ranks}",
    )
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    assert "emulated" in err
    assert json.loads(out.splitlines()[-1])["tokens"] == alone(NOAH, tokens)


@pytest.mark.parametrize(
    ("backend", "ranks"),
    [
        *(pytest.param("cpu", ranks, marks=slow) for ranks in (4, 8)),
        *(("cuda", ranks) for ranks in (4, 8)),
    ],
)
def test_more_ranks_of_an_fp32_model(backend: str, ranks: int, tmp_path: Path) -> None:
    if not usable(backend, ranks):
        pytest.skip(f"{backend} has fewer than {ranks} devices")
    directory = make_checkpoint(tmp_path / "m", heads=8, kv_heads=ranks, head_dim=8, layers=2)
    answered = answer(
        directory, "--backend", backend, "--max-new-tokens", "8", "--ranks", str(ranks)
    )
    assert answered["tokens"] == alone(directory, 8, backend=backend)


FOUR_EMULATED = {"ARK_ROCM_DEVICE": "emulated:gfx942,4"}
CHECKED = {**FOUR_EMULATED, "ARK_ROCM_EMULATOR_CHECKS": "1"}


def start_emulated(
    directory: Path, count: int, *extra: str, environment: dict[str, str] = FOUR_EMULATED
) -> subprocess.Popen[str]:
    pytest.importorskip("ark_rocm_emulator")
    pytest.importorskip("hip")
    words = ("--backend", "rocm", "--ranks", "4", "--chunk", "4", "--budget", "250", *extra)
    return start(directory, *words, "--max-new-tokens", str(count), **environment)


@slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", ["2", "4"])
def test_checked_emulated_devices_give_the_tokens_of_one(ranks: str, tmp_path: Path) -> None:
    """Ranks on emulated devices with all checks generate the same tokens as one rank. In the
    prompt's phase, memory is reused after another processor has read it; packets order the read and
    the next write.
    """
    directory = make_checkpoint(tmp_path / "m", heads=4, kv_heads=4, layers=1)
    # Two chunks of a prompt and two tokens; three of each in the slow session.
    text, count = (PROMPT, 3) if SLOW else ("The fox", 2)
    words = ("--json", "--context", "64", "--prompt", text, "--ranks", ranks)
    environment = {**CHECKED, "ARK_ROCM_DEVICE": f"emulated:gfx942,{ranks}"}
    process = start_emulated(directory, count, *words, environment=environment)
    out, err = process.communicate(timeout=850)
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["tokens"] == alone(directory, count, text)


@slow
def test_torchrun_variables_start_the_ranks_too() -> None:
    """Two processes started with torchrun's variables, without --ranks, generate the same tokens as
    one rank.
    """
    port = str(20000 + os.getpid() % 20000)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common = ("--backend", "cpu", "--max-new-tokens", "6", "--json")
    ranks = [start(NOAH, *common, RANK=str(r), LOCAL_RANK=str(r), **shared) for r in range(2)]
    outs = [p.communicate(timeout=120) for p in ranks]
    assert [p.returncode for p in ranks] == [0, 0], outs
    assert json.loads(outs[0][0].splitlines()[-1])["tokens"] == alone(NOAH, 6)
    assert outs[1][0] == ""


CHANGES = {
    "the prompt's tokens": ("--prompt", "The queen"),
    "the number of new tokens": ("--max-new-tokens", "7"),
    "the sampling: seed": ("--seed", "2"),
    "the sampling: temperature": ("--temperature", "0.5"),
    "the sampling: top-k": ("--top-k", "3"),
    "the context": ("--context", "192"),
    "the chunk": ("--chunk", "8"),
    "the weights": (),
}
FEW = ("the prompt's tokens", "the weights")  # each is detected in another way


@pytest.mark.parametrize(
    "difference", [pytest.param(c, marks=[slow] * (c not in FEW)) for c in CHANGES]
)
def test_ranks_that_disagree_both_end_with_an_error(difference: str, tmp_path: Path) -> None:
    """Ranks that were given different inputs end with an error. Otherwise each rank would print
    text that neither input asks for.
    """
    port = str(20000 + (os.getpid() + 7) % 20000)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    directory = NOAH
    if difference == "the weights":
        directory = tmp_path / "other"
        shutil.copytree(NOAH, directory)
        with (directory / "model.safetensors").open("r+b") as file:
            file.seek(-2000, os.SEEK_END)
            file.write(b"x")
    common = ("--backend", "cpu", "--context", "128", "--seed", "1", "--temperature", "0.7")
    ranks = [
        start(
            directory if r else NOAH,
            *common,
            *(CHANGES[difference] if r else ()),
            RANK=str(r),
            LOCAL_RANK=str(r),
            **shared,
        )
        for r in range(2)
    ]
    for process in ranks:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 2, err
        assert f"the ranks disagree on {difference.split(':', 1)[0]}: rank 0 has" in " ".join(
            err.split()
        )
        assert not out


@pytest.mark.parametrize("ranks", [pytest.param("1", marks=slow), "2"])
@pytest.mark.parametrize(
    "prompt", [pytest.param("--no option " + PROMPT, marks=slow), PROMPT + "\0 and\n so on"]
)
def test_prompt_from_standard_input_reaches_every_rank(ranks: str, prompt: str) -> None:
    """A prompt from standard input reaches every rank, also a prompt that is too long for a command
    line.
    """
    argv = [sys.executable, "-m", "ark", "generate", str(NOAH), "--prompt", "-", "--json"]
    argv += ["--backend", "cpu", "--max-new-tokens", "6", "--ranks", ranks]
    done = subprocess.run(argv, input=prompt, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == alone(NOAH, 6, prompt)


@slow
def test_prompt_from_standard_input_under_a_launcher() -> None:
    """A prompt from standard input reaches all ranks under mpirun and torchrun, which pass standard
    input to rank 0 only.
    """
    port = str(20000 + (os.getpid() + 17) % 20000)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    argv = [sys.executable, "-m", "ark", "generate", str(NOAH), "--prompt", "-", "--json"]
    argv += ["--backend", "cpu", "--max-new-tokens", "6"]
    ranks = [
        subprocess.Popen(
            argv,
            stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    out, err = ranks[0].communicate(PROMPT, timeout=120)
    ranks[1].communicate(timeout=60)
    assert [p.returncode for p in ranks] == [0, 0], err
    assert json.loads(out)["tokens"] == alone(NOAH, 6)


@pytest.mark.parametrize("ranks", [pytest.param("1", marks=slow), "2"])
@pytest.mark.parametrize(
    ("text", "words"),
    [(b"a " * 200_000, "context holds"), (b"\xff\xfe", "UTF-8")],
)
def test_prompts_that_cannot_be_served(ranks: str, text: bytes, words: str) -> None:
    argv = [sys.executable, "-m", "ark", "generate", str(NOAH), "--prompt", "-"]
    argv += ["--backend", "cpu", "--ranks", ranks]
    done = subprocess.run(argv, input=text, capture_output=True, timeout=120)
    errors = " ".join(done.stderr.decode().split())
    assert done.returncode == 2 and words in errors and "Traceback" not in errors, errors


def children(pid: int) -> list[int]:
    actual = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(c) for c in actual]


def check_that_the_others_name(rank: int, process: subprocess.Popen[str]) -> None:
    """Kills a rank while its kernel runs. Asserts that all others end soon and name it."""
    assert process.stdout is not None
    assert process.stdout.read(1), process.communicate()  # the kernels are running
    everyone = children(process.pid)
    os.kill(everyone[rank], signal.SIGKILL)
    begin = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - begin < 30
    assert process.returncode != 0
    assert f"rank {rank}" in err
    assert "Traceback" not in err
    for pid in everyone:  # unless the id belongs to another process by now
        command = Path(f"/proc/{pid}/cmdline")
        assert not command.exists() or b"generate" not in command.read_bytes()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("backend", "ranks", "victim"),
    [
        ("cpu", 2, 1),
        pytest.param("cpu", 4, 2, marks=slow),
        pytest.param("cpu", 8, 5, marks=slow),
        pytest.param("cpu", 8, 0, marks=slow),
        ("cuda", 2, 1),
        ("cuda", 4, 2),
        ("cuda", 8, 5),
    ],
)
def test_rank_that_dies_ends_the_job_with_a_clear_error(
    backend: str, ranks: int, victim: int, tmp_path: Path
) -> None:
    if not usable(backend, ranks):
        pytest.skip(f"{backend} has fewer than {ranks} devices")
    wide = {"heads": 8, "kv_heads": 8} if ranks > 2 else {}
    count = 8000 if backend == "cpu" else 64000  # enough for some seconds
    directory = make_checkpoint(
        tmp_path / "long", context=count + 192, layers=2, hidden=128, intermediate=512, **wide
    )
    words = ("--backend", backend, "--max-new-tokens", str(count), "--context", str(count + 192))
    check_that_the_others_name(victim, start(directory, *words, "--ranks", str(ranks)))


@slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_one_of_four_emulated_devices_dies(tmp_path: Path) -> None:
    directory = make_checkpoint(
        tmp_path / "m", heads=4, kv_heads=4, layers=1, context=512, vocab=258
    )
    check_that_the_others_name(2, start_emulated(directory, 400, "--context", "512"))


def test_peer_that_never_comes(tmp_path: Path) -> None:
    port = str(20000 + (os.getpid() + 13) % 20000)
    begin = time.monotonic()
    process = start(
        NOAH,
        "--backend",
        "cpu",
        RANK="1",
        LOCAL_RANK="1",
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        ARK_JOIN_TIMEOUT="4",
    )
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert time.monotonic() - begin < 29
    assert "Traceback" not in err and "rank" in err
