"""Targets of fuzzing. A target generates a hostile input from a random source and passes it to ark,
which may accept it or refuse it with a clear error. Any other outcome (another exception, a wrong
result) is a finding.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ark.backend import registry
from ark.collective import topology as networks
from ark.collective.forestcoll import optimal
from ark.collective.taccl import Sketch
from ark.errors import BaseError, InternalError
from ark.parallel.pipeline import Placement, tessel
from ark.plan import serialize
from ark.runtime import rendezvous
from ark.runtime.admission import admit
from tests.fuzz import (
    WrongResultError,
    checkpoints,
    collectives,
    exports,
    mutate,
    mutate_onnx,
    plans,
)
from tests.fuzz.checkpoints import NOAH
from tests.fuzz.commands import command
from tests.fuzz.execute import compare
from tests.fuzz.task_plans import run_task_plan, task_plan

CORPUS = Path(__file__).parent.parent / "corpus"

# The type of the function by which a target saves its next input, so that the parent process can
# read it if this process dies.
Keep = Callable[[str], None]


def seeds(name: str) -> list[str]:
    """Returns the stored inputs of a target, as text."""
    folder = CORPUS / name
    return [p.read_text() for p in sorted(folder.iterdir())] if folder.is_dir() else []


def plan(rng: random.Random, keep: Keep) -> bool | str:
    """The target: a mutated plan is refused, or runs under the sanitizer with the oracle's
    result.
    """
    text = plans.mutated(rng)
    keep(text)
    return run_plan(text)


def run_plan(text: str) -> bool | str:
    """Returns False if the plan is refused, "executed" if its result is right, "ended alike" if it
    and its oracle (the serial execution) end with the same error, True if it is an unmutated plan,
    which is not run.
    """
    try:
        mutated = serialize.from_json(text)
        admit([mutated], registry.machine("cpu-2"))
    except BaseError:
        return False
    if not plans.is_base(mutated):
        comparison = compare(mutated)
        if comparison.wrong:
            raise WrongResultError(comparison.wrong)
        return "executed" if comparison.ran else "ended alike"
    return True


def topology(rng: random.Random, keep: Keep) -> bool:
    named = (networks.full_mesh(3), networks.load("h100x2"))
    base = json.loads(networks.to_json(rng.choice(named)))
    text = mutate.text_of(mutate.of_json(base, rng))
    keep(text)
    return run_topology(text)


def run_topology(text: str) -> bool:
    try:
        network = networks.from_json(text)
        network.validate()
        if len(network.nodes) <= 8:
            optimal(network)
    except BaseError:
        return False
    return True


SKETCH: dict[str, Any] = {
    "nnodes": 2,
    "symmetry_offsets": [[2, 4]],
    "intranode_sketch": {
        "strategy": "relay",
        "switches": [[0, 1]],
        "switch_hyperedge_strategy": ["uc-min"],
        "intranode_conn": {"0": [1], "1": [0]},
    },
    "internode_sketch": {
        "strategy": "relay",
        "internode_conn": {"0": [1]},
        "gpus_to_sender_rev_map": {"0": [0, 1]},
        "chunk_to_relay_map": [2, 0],
        "beta_split": {"0": 2},
        "enforce_ordering": True,
    },
    "hyperparameters": {"input_chunkup": 2, "input_size": "1M"},
}


def sketch(rng: random.Random, keep: Keep) -> bool:
    text = mutate.text_of(mutate.of_json(SKETCH, rng))
    keep(text)
    return run_sketch(text)


def run_sketch(text: str) -> bool:
    try:
        Sketch.from_json(text)
    except BaseError:
        return False
    return True


PLACEMENT: dict[str, Any] = {
    "devices": 2,
    "blocks": [
        {"name": "f", "span": 1, "memory": 1, "devices": [0]},
        {"name": "g", "span": 2, "memory": 0, "devices": [0, 1], "after": ["f"]},
        {"name": "b", "span": 1, "memory": -1, "devices": [0], "after": ["f", "g"]},
    ],
}


def placement(rng: random.Random, keep: Keep) -> bool:
    """The target: a pipeline's placement. The schedule of an accepted placement is checked by the
    code that constructs it.
    """
    text = mutate.text_of(mutate.of_json(PLACEMENT, rng))
    keep(text)
    return run_placement(text)


def run_placement(text: str) -> bool:
    try:
        placement = Placement.from_json(text)
        if placement.devices <= 16 and len(placement.blocks) <= 8:
            tessel(placement, 4, 3, time_limit_s=2.0)
    except InternalError as error:
        raise WrongResultError(str(error)) from error
    except BaseError:
        return False
    return True


WORDS: tuple[str, ...] = (
    *(
        "plan",
        "emit",
        "cache",
        "topo",
        "layout",
        "tessel",
        "V",
        "--memory",
        "--shape",
        "generate",
        "bench",
        "trace",
        "info",
        "decode",
    ),
    *("show", "optimal", "clear", "--machine", "cpu-2", "h100", "cpu-0", "cpu-²", "-o"),
    *("--output", "/dev/full", "/nowhere/x", "/dev/zero", "--chunk", "--context", "--ranks"),
    *("0", "-1", "1", "2147483648", "9" * 30, "inf", "nan", "1e-39", "²", "", " ", "\x00", "a"),
    *("--temperature", "--top-k", "--seed", "--prompt", "--budget", "--plan", "--json", "--set"),
    *("processors=0", "lanes=-1", "--device", "--backend", "cpu", "cuda", "abacus", "--arch"),
    *("--require", "cpu:1", "cpu:²", "ring3", "ring99999999", "h100x2", "full3:bandwidth=1e999"),
    *("full3:bandwidth=0", "--k", "--root", "--size", "1K", "--time-limit", "--debug", "--help"),
    *("--mesh", "2x2", "0x3", "1x1x1x1x1", "--batch", "--sequence", "--link-gbps", "--host-ranks"),
    *("--inference", "--recompute", "--keep-mesh", "--html", "--dtype", "int4", "--topology"),
    *("--devices", "--forward", "--backward", "--micro-batches", "--name", "int", "--input", "x="),
    *("--dim", "n=0", "--from", "S0S0", "--to", "PR", "auto", "megatron"),
    *("--max-new-tokens", "--processors", "../x", "~nobody/x", "\udc80", "--tasks", "--version"),
)
COMMANDS = (
    *("plan", "emit", "cache", "topo", "info", "generate", "bench", "trace"),
    *("parallelize", "export", "layout", "tessel", "run"),
)
# Commands that may run for long; they are only called with arguments that they refuse.
UNSAFE = {"generate", "bench", "trace"}


def command_line(rng: random.Random, keep: Keep) -> bool:
    words = [rng.choice(COMMANDS)]
    if words[0] in UNSAFE:
        words.append("/nowhere" if words[0] != "bench" else "decode")
        if words[0] == "bench":
            words += ["--config", "/nowhere/at/all"]
    elif rng.random() < 0.5:
        words += {
            "plan": [str(NOAH), "--machine", "cpu-2", "--context", "16"],
            "emit": ["/nowhere/plan.json", "--backend", "cpu", "-o", "/nowhere/x"],
            "topo": ["show", "full3"],
            "parallelize": ["llama-3.1-8b", "--mesh", "2x2", "--machine", "h100"],
            "export": ["/nowhere/plan.json", "--backend", "cpu", "-o", "/nowhere/x"],
            "layout": ["--shape", "8x8", "--from", "S0R", "--to", "RS0"],
            "tessel": ["V", "--memory", "4", "--micro-batches", "2", "--time-limit", "1"],
            "run": ["/nowhere/model.onnx"],
        }.get(words[0], [])
    for _ in range(rng.randrange(5)):
        words.insert(rng.randrange(1, len(words) + 1), rng.choice(WORDS))
    keep(json.dumps(words))
    return run_command_line(words)


def run_command_line(words: list[str]) -> bool:
    """Returns True for exit code 0, False for the refusals 1 and 2. Raises WrongResultError for
    others.
    """
    code, _ = command([w for w in words if w != "--debug"])
    if code not in (0, 1, 2):
        raise WrongResultError(f"exit code {code}")
    return code == 0


def onnx_file(rng: random.Random, keep: Keep) -> bool:
    """The target: a mutated ONNX file runs, or is refused by exit code 2 and one paragraph."""
    data = mutate_onnx.of_model(rng)
    keep(repr(data))
    with tempfile.TemporaryDirectory(prefix="ark-fuzz-") as folder:
        Path(folder, "m.onnx").write_bytes(data)
        np.save(Path(folder, "x.npy"), np.arange(8, dtype=np.float32).reshape(2, 4))
        words = ["run", f"{folder}/m.onnx", "--input", f"{folder}/x.npy", "--backend", "cpu"]
        code, output = command(words)
    if code == 0:
        return True
    if "UserWarning: float64" in output:  # this warning may come before the refusal
        output = output[output.find("ark: ") :]
    if code != 2 or not output.startswith("ark: ") or "\n\n" in output or len(output) > 3000:
        raise WrongResultError(f"exit code {code}: {output[-2000:]}")
    return False


def ops(rng: random.Random, keep: Keep) -> bool | str:
    """The target: a random program over the public ops. tests.fuzz.programs imports torch."""
    from tests.fuzz import programs

    return programs.program(rng, keep)


def run_ops(text: str) -> bool | str:
    from tests.fuzz import programs

    return programs.run_program(text)


def module(rng: random.Random, keep: Keep) -> bool | str:
    """The target: a random torch module by ark.from_torch. tests.fuzz.modules imports torch."""
    from tests.fuzz import modules

    return modules.module(rng, keep)


class _Served:
    """A rendezvous server that hostile clients connect to. It keeps the exceptions of its
    threads.
    """

    def __init__(self) -> None:
        self.raised: list[str] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        threading.excepthook = lambda args: self.raised.append(repr(args.exc_value))
        self.server = rendezvous.Server(self.listener, 2, "a job", 5.0)


@cache
def _served() -> _Served:
    return _Served()


def bootstrap(rng: random.Random, keep: Keep) -> bool:
    """The target: bytes from a client that violates the protocol. The server must continue
    to wait.
    """
    hello = json.dumps({"rank": 1, "world_size": 2, "pid": 3, "host": "x"}).encode()
    frame = bytes([rendezvous.HELLO]) + (len(hello) + 48).to_bytes(4, "little") + hello + b"\0" * 48
    data = mutate.of_bytes(frame, rng)
    keep(repr(data))
    served = _served()
    with socket.create_connection(served.address, timeout=5) as client:
        client.settimeout(5)
        with contextlib.suppress(OSError):
            client.recv(64)
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            client.recv(64)
    if served.raised:
        raise WrongResultError(served.raised[0])
    if served.server.missing() != [0, 1]:
        raise WrongResultError(f"the server believes that {served.server.missing()} are missing")
    return False


Target = Callable[[random.Random, Keep], bool | str]

TARGETS: dict[str, Target] = {
    "plan": plan,
    "task_plan": task_plan,
    "checkpoint": checkpoints.checkpoint,
    "topology": topology,
    "sketch": sketch,
    "placement": placement,
    "program": collectives.program,
    "xml": collectives.xml,
    "execution_plan": collectives.execution_plan,
    "command_line": command_line,
    "onnx_file": onnx_file,
    "ops": ops,
    "module": module,
    "export": exports.export,
    "bootstrap": bootstrap,
}
# By a target's name: the function that runs one of its stored inputs.
REPLAY: dict[str, Callable[[str], bool | str]] = {
    "plan": run_plan,
    "task_plan": run_task_plan,
    "topology": run_topology,
    "sketch": run_sketch,
    "ops": run_ops,
    "program": collectives.run_program,
    "execution_plan": collectives.run_execution_plan,
    "command_line": lambda text: run_command_line(json.loads(text)),
}
