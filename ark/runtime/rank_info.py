"""Reads the rank of this process and the job's size from the environment that its launcher set.

It supports torchrun (and ark.launch, which sets the same variables), Open MPI, PMI (MPICH, Intel
MPI) and Slurm, in this order. Without a launcher, it supports processes that a script has started
by multiprocessing and given their ranks (ark.set_rank). Jobs are distinguished by ARK_JOB_SECRET,
which ark.launch sets. Without it they are distinguished by the launcher's number of the job or by
the port that was set for the job, together with a key of the user (ark.runtime.bootstrap). Opens no
connection.
"""

from __future__ import annotations

import math
import os
import re
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from ark.errors import InvalidUsageError

# For each launcher, the environment variables that have the rank, the world size, the rank on this
# machine and the number of ranks on this machine; "" if it has no such variable.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    (
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # The number of tasks of the Slurm step, not of the job: a job can be larger than the step, and
    # a batch script is not a rank.
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""),
)
# For each launcher, variables that are equal on the ranks of one job and on no others. Under mpirun
# within Slurm, ranks are in different steps, so Slurm's variable is used for Slurm's own ranks
# only.
_JOB_IDS = {
    "torchrun": ("TORCHELASTIC_RUN_ID",),
    "Open MPI": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    "PMI": ("PMI_JOBID", "PALS_APID", "SLURM_JOB_ID"),
    "Slurm": ("SLURM_JOB_ID",),
}
SECRET = "ARK_JOB_SECRET"
JOIN_TIMEOUT = "ARK_JOIN_TIMEOUT"
PORT_BASE = "ARK_IPC_LISTEN_PORT_BASE"


@dataclass(frozen=True)
class RankInfo:
    """The data that a rank has before it connects.

    local_rank: the rank's number on this machine. address, port: those of rank 0. Another program
    may use the port (torchrun's own store does), so `ports` consecutive ports are tried. job: a
    text that only the processes of one job share; secret: True if no other user can know it.
    join_s: how many seconds ranks wait for one another at the start.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    ports: int = 8
    job: str = ""
    secret: bool = False
    join_s: float = 30.0


def rank_from_environment(environ: Mapping[str, str] | None = None) -> RankInfo:
    """The rank that the launcher's variables describe; rank 0 of 1 without a launcher.

    Raises InvalidUsageError if variables are missing or contradict each other.
    """
    env = os.environ if environ is None else environ
    for launcher, rank_name, size_name, local_name, local_size_name in _LAUNCHERS:
        if rank_name not in env or size_name not in env:
            continue
        rank = _number(env, rank_name)
        size = _number(env, size_name)
        if size < 1 or not 0 <= rank < size:
            raise InvalidUsageError(
                f"{launcher} says {rank_name}={rank} and {size_name}={size}; a rank must be at "
                "least 0 and below the world size: correct the two variables"
            )
        local = _number(env, local_name) if env.get(local_name) else rank
        if size == 1:
            return RankInfo(local_rank=local)
        job = _job(env, launcher)
        secret = env.get(SECRET, "")
        if not (secret or job or env.get("MASTER_PORT")):
            raise InvalidUsageError(
                f"{launcher} does not give its ranks a job number, so they could connect to "
                f"another job on this machine; set {SECRET} to the same random word on all "
                f"ranks, for example `mpiexec -genv {SECRET} $(openssl rand -hex 16) ...`, or "
                "MASTER_PORT to a port that no other job uses"
            )
        everyone_here = (
            env.get(local_size_name) == env[size_name] or env.get("SLURM_STEP_NUM_NODES") == "1"
        )
        return RankInfo(
            rank,
            size,
            local,
            _address(env, launcher, everyone_here),
            _port(env, "MASTER_PORT") if env.get("MASTER_PORT") else _free_for_all(job),
            job=secret or job,
            secret=bool(secret),
            join_s=_join_s(env),
        )
    return RankInfo()


def rank_among_siblings(
    rank: int, world_size: int, environ: Mapping[str, str] | None = None
) -> RankInfo | None:
    """The rank information of a process that got its rank from its script (ark.set_rank). None if
    it cannot find the other ranks on this machine.

    The other ranks are processes that the same parent has started by multiprocessing, which share
    the parent's random key, or all processes with the same ARK_IPC_LISTEN_PORT_BASE.
    """
    env = os.environ if environ is None else environ
    secret = env.get(SECRET, "")
    if env.get(PORT_BASE):
        port = _port(env, PORT_BASE)
        job = f"port {port}"
    else:
        started = sys.modules.get("multiprocessing.process")
        if started is None or (parent := started.parent_process()) is None:
            return None
        job = f"processes of {parent.pid}"
        port = _free_for_all(job)
        secret = secret or started.current_process().authkey.hex()
    return RankInfo(
        rank,
        world_size,
        rank,
        port=port,
        job=secret or job,
        secret=bool(secret),
        join_s=_join_s(env),
    )


def _job(env: Mapping[str, str], launcher: str) -> str:
    """The launcher's name for the job; empty if it has none (torchrun then writes "none")."""
    job = next((env[name] for name in _JOB_IDS[launcher] if env.get(name)), "")
    if launcher == "Slurm" and job and env.get("SLURM_STEP_ID"):
        job += f".{env['SLURM_STEP_ID']}"
    return "" if job == "none" else job


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError as error:
        raise InvalidUsageError(
            f"the environment has {name}={env[name]!r}, which is not a whole number; correct or "
            f"unset it"
        ) from error


def _join_s(env: Mapping[str, str]) -> float:
    text = env.get(JOIN_TIMEOUT)
    if not text:
        return RankInfo.join_s
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= 86400:
        raise InvalidUsageError(
            f"the environment has {JOIN_TIMEOUT}={text!r}; it is the number of seconds that ranks "
            "wait for one another at the start, above 0 and at most 86400: correct or unset it"
        )
    return seconds


def _address(env: Mapping[str, str], launcher: str, everyone_here: bool) -> str:
    if env.get("MASTER_ADDR"):
        return env["MASTER_ADDR"]
    if everyone_here:
        return "127.0.0.1"
    if env.get("SLURM_STEP_NODELIST"):
        return first_host(env["SLURM_STEP_NODELIST"])
    raise InvalidUsageError(
        f"{launcher} started ranks on several machines, but MASTER_ADDR is not set, so the ranks "
        f"cannot find rank 0; set MASTER_ADDR to the name or address of rank 0's machine on all"
    )


def _port(env: Mapping[str, str], name: str) -> int:
    port = _number(env, name)
    if not 0 < port < 65536:
        raise InvalidUsageError(
            f"the environment has {name}={port}; a port lies between 1 and 65535: correct it"
        )
    return port


def _free_for_all(job: str) -> int:
    """The port at which a job's ranks look for rank 0 if no port was set. It is computed from a
    hash of the job's text, so that different jobs use different ports.
    """
    return 20000 + zlib.crc32(job.encode()) % 10000


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list, such as `gpu[04-07,11],login` (gpu04)."""
    match = re.match(r"([^,\[]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    return "".join(part or "" for part in match.groups()) if match else nodes
