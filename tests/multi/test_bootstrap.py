"""The bootstrap between real processes: joining, comparing, failing, leaving."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ark.errors import InvalidUsageError, SystemError
from ark.runtime import rendezvous as rdv
from ark.runtime.bootstrap import Bootstrap
from tests.slow import slow

ROOT = Path(__file__).resolve().parents[2]
PREAMBLE = """
import json, os, sys, time
from ark.errors import BaseError
from ark.runtime.bootstrap import Bootstrap
rank, size, port = (int(word) for word in sys.argv[1:4])
def say(**words):
    print(json.dumps(words), flush=True)
def join(timeout_s=60.0, **options):
    options = {"job": "test", "silence_s": 30.0, **options}
    return Bootstrap.connect(rank, size, "127.0.0.1", port, timeout_s, **options)
try:
"""
EPILOGUE = """
except BaseError as error:
    say(error=str(error))
    sys.exit(2)
"""


@dataclass
class Job:
    """A set of rank processes, each of which prints lines of JSON that the test reads."""

    port: int
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, body: str, rank: int, size: int) -> subprocess.Popen[str]:
        script = PREAMBLE + textwrap.indent(textwrap.dedent(body), "    ") + EPILOGUE
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(size), str(self.port)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def run(self, body: str, size: int) -> list[list[dict[str, object]]]:
        for rank in range(size):
            self.start(body, rank, size)
        return self.finish()

    def finish(self) -> list[list[dict[str, object]]]:
        outputs = [process.communicate(timeout=120)[0] for process in self.processes]
        return [[json.loads(line) for line in text.splitlines()] for text in outputs]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def job() -> Iterator[Job]:
    it = Job(free_port())
    yield it
    for process in it.processes:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def errors(outputs: list[list[dict[str, object]]]) -> list[str]:
    return [str(lines[-1].get("error", "")) for lines in outputs]


def test_ranks_exchange_bytes_in_rank_order(job: Job) -> None:
    outputs = job.run(
        """
        with join() as group:
            first = group.all_gather(bytes([rank]) * (300000 + rank))
            group.barrier()
            second = [part.decode() for part in group.all_gather(f"r{rank}".encode())]
            group.check_same("the plan", "same")
            say(first=[[part[0], len(part)] for part in first], second=second)
        """,
        3,
    )
    expected = {
        "first": [[0, 300000], [1, 300001], [2, 300002]],
        "second": ["r0", "r1", "r2"],
    }
    assert outputs == [[expected]] * 3
    assert [process.returncode for process in job.processes] == [0, 0, 0]


def test_one_rank_needs_no_network() -> None:
    with Bootstrap.connect(0, 1, "no.such.host.invalid", 1, 1.0) as group:
        assert group.all_gather(b"alone") == [b"alone"]
        group.barrier()
        group.check_same("anything", "x")
        assert group.failure() is None


@pytest.mark.parametrize("dying", [0, pytest.param(1, marks=slow)])
def test_rank_that_dies_is_noticed_by_all(job: Job, dying: int, tmp_path: Path) -> None:
    outputs = job.run(
        f"""
        group = join()
        group.barrier()
        if rank == {dying}:
            while len(os.listdir({str(tmp_path)!r})) < 2:
                time.sleep(0.01)  # until the others have passed the barrier
            os._exit(9)
        open(os.path.join({str(tmp_path)!r}, str(rank)), "w").close()
        give_up = time.monotonic() + 60
        while group.failure() is None and time.monotonic() < give_up:
            time.sleep(0.01)
        say(failure=group.failure())
        group.barrier()
        """,
        3,
    )
    for rank, lines in enumerate(outputs):
        if rank != dying:
            assert f"rank {dying}" in str(lines[0]["failure"])
            assert lines[1]["error"] == lines[0]["failure"]


def test_rank_that_falls_silent_is_noticed(job: Job) -> None:
    outputs = job.run(
        """
        group = join(silence_s=2.0)
        group.barrier()
        if rank == 1:
            import signal
            import threading, subprocess
            subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        group.barrier()
        """,
        3,
    )
    assert "rank 1" in errors(outputs)[0] and "sent nothing for 2 s" in errors(outputs)[0]
    assert "rank 1" in errors(outputs)[2]


def test_reported_error_reaches_everyone(job: Job) -> None:
    outputs = job.run(
        """
        with join() as group:
            group.barrier()
            if rank == 2:
                raise BaseError("the file is gone")
            group.barrier()
        """,
        3,
    )
    assert errors(outputs)[2] == "the file is gone"
    for rank in (0, 1):
        assert "rank 2" in errors(outputs)[rank]
        assert "the file is gone" in errors(outputs)[rank]


def test_disagreement_is_an_error_on_every_rank(job: Job) -> None:
    outputs = job.run(
        """
        with join() as group:
            group.check_same("the plan", "aaaa" if rank != 1 else "bbbb")
        """,
        3,
    )
    for message in errors(outputs):
        assert "disagree on the plan" in message
        assert "rank 0, 2 has 'aaaa'" in message and "rank 1 has 'bbbb'" in message


@slow
def test_different_programs_are_told_apart(job: Job) -> None:
    outputs = job.run(
        """
        with join() as group:
            group.barrier("weights" if rank else "prompt")
        """,
        2,
    )
    for message in errors(outputs):
        assert "'weights'" in message and "'prompt'" in message


def test_rank_that_leaves_early_is_missed(job: Job) -> None:
    outputs = job.run(
        """
        with join() as group:
            if rank == 0:
                group.barrier("the end")
            else:
                say(left=True)
        """,
        2,
    )
    assert "rank 1 has left" in errors(outputs)[0] and "the end" in errors(outputs)[0]


def knock(port: int, address: str = "127.0.0.1") -> socket.socket:
    """Connects to a server that may not listen yet: retries until it does. Returns the
    connection.
    """
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection((address, port), 5.0)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_peer_that_never_comes() -> None:
    """Two ranks are threads of this process and ready at once; the third rank is missing."""
    port, message_of = free_port(), {}

    def work(rank: int, timeout_s: float) -> None:
        try:
            Bootstrap.connect(rank, 3, "127.0.0.1", port, timeout_s, job="test")
        except SystemError as error:
            message_of[rank] = str(error)

    threads = [threading.Thread(target=work, args=at) for at in ((0, 3.0), (2, 60.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(message_of) == [0, 2]
    for message in message_of.values():
        assert "rank 1 did not join" in message


def test_missing_server_is_reported(job: Job) -> None:
    job.start("join(timeout_s=0.5)", 1, 2)
    (message,) = errors(job.finish())
    assert f"port {job.port}" in message and "did not find rank 0" in message


@slow
def test_world_sizes_that_differ(job: Job) -> None:
    job.start("join()", 0, 2)
    job.start("join()", 1, 3)
    for message in errors(job.finish()):
        assert "rank 1 was started for 3 ranks but rank 0 for 2" in message


@slow
def test_rank_that_is_there_twice(job: Job) -> None:
    for rank in (0, 1, 1):
        job.start("join()", rank, 3)
    for message in errors(job.finish()):
        assert "rank 1 was started twice" in message


def foreign(listener: socket.socket, behave: Callable[[socket.socket], None]) -> None:
    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            behave(peer)

    threading.Thread(target=serve, daemon=True).start()


def test_port_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SystemError, match=rf"port {port}: Address already in use"):
            Bootstrap.connect(0, 2, "127.0.0.1", port, 1.0)


@slow
def test_ports_that_others_hold_are_passed_by(job: Job) -> None:
    with socket.create_server(("127.0.0.1", job.port)) as other:
        foreign(other, lambda peer: peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
        outputs = job.run(
            """
            with join(ports=8) as group:
                say(all=len(group.all_gather(b"x")))
            """,
            2,
        )
    assert outputs == [[{"all": 2}]] * 2


def test_strangers_do_not_disturb(job: Job) -> None:
    body = """
        with join() as group:
            say(all=[part.decode() for part in group.all_gather(str(rank).encode())])
        """
    job.start(body, 0, 2)
    strangers = []
    while len(strangers) < 3:
        stranger = knock(job.port)
        stranger.sendall((b"GET / HTTP/1.1\r\n\r\n", b"\x01\xff\xff\xff\xff", b"")[len(strangers)])
        strangers.append(stranger)
    wrong = Job(job.port)
    wrong.start('join(timeout_s=3.0, job="another")', 1, 2)
    (message,) = errors(wrong.finish())
    assert "another program, job or user answers" in message
    job.start(body, 1, 2)
    assert job.finish() == [[{"all": ["0", "1"]}]] * 2
    for stranger in strangers:
        stranger.close()


def test_rank_must_be_below_the_world_size() -> None:
    with pytest.raises(InvalidUsageError, match="rank 2 is out of range for 2"):
        Bootstrap.connect(2, 2, "127.0.0.1", 1, 1.0)


def test_server_that_does_not_know_the_job() -> None:
    """A rank rejects a server that cannot answer its nonce, whatever else it sends."""

    def pretend(peer: socket.socket) -> None:
        peer.sendall(rdv.MAGIC + bytes(rdv.NONCE_BYTES))
        peer.recv(4096)
        peer.sendall(rdv._HEADER.pack(rdv.PROVEN, 32) + bytes(32))
        peer.sendall(rdv._HEADER.pack(rdv.WELCOME, 0))

    with socket.create_server(("127.0.0.1", 0)) as other:
        foreign(other, pretend)
        with pytest.raises(SystemError, match=r"another program, job or user answers at port"):
            Bootstrap.connect(1, 2, "127.0.0.1", other.getsockname()[1], 0.5, job="mine")


def test_rank_that_sends_the_servers_proof_back(job: Job) -> None:
    """A client without the secret receives no proof that it could use with another process."""
    job.start('join(timeout_s=5.0, job="secret")', 0, 2)
    sock = knock(job.port)
    link = rdv.Link(sock)
    nonce = rdv.read_exactly(sock, len(rdv.MAGIC) + rdv.NONCE_BYTES)[len(rdv.MAGIC) :]
    hello = json.dumps({"rank": 1, "world_size": 2, "host": "h", "pid": 1}).encode()
    assert rdv.proof("secret", b"rank", nonce, hello) != rdv.proof(
        "secret", b"server", nonce, hello
    )
    link.send(rdv.HELLO, hello + bytes(rdv.NONCE_BYTES) + rdv.proof("guess", b"rank", nonce, hello))
    with pytest.raises(OSError):
        link.receive()
    link.close()
    (message,) = errors(job.finish())
    assert "rank 1 did not join" in message


@pytest.mark.parametrize("address", ["127.0.0.1", "own"])
def test_rank_0_listens_on_the_needed_address_alone(address: str) -> None:
    others = {"127.0.0.2", "127.0.0.1"}
    if address == "own":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # sends nothing
            except OSError:
                pytest.skip("this machine has no address but loopback")
            address = probe.getsockname()[0]
    with socket.create_server((address, 0)) as free:
        port = free.getsockname()[1]
    done: list[str] = []

    def serve() -> None:
        try:
            Bootstrap.connect(0, 2, address, port, 2.0, job="x")
        except SystemError as error:
            done.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    knock(port, address).close()
    for other in others - {address}:
        with pytest.raises(OSError):
            socket.create_connection((other, port), 1.0)
    thread.join()
    assert "rank 1 did not join" in done[0]


def test_address_that_is_not_this_machines() -> None:
    with pytest.raises(SystemError, match="set ARK_LISTEN_ADDR"):
        Bootstrap.connect(0, 2, "192.0.2.1", 29500, 1.0)
