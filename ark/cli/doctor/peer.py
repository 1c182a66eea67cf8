"""The second process of the check `peers`: maps exported memory and adds to its first word.

`python -m ark.cli.doctor.peer BACKEND HANDLE ROUNDS` prints how many additions it has executed.
"""

from __future__ import annotations

import sys

from ark.backend import registry
from ark.cli.doctor.bench import Bench
from ark.errors import BaseError


def main(backend: str, handle: str, rounds: int) -> None:
    with Bench(registry.get(backend), 0) as bench:
        memory = bench.device.map_peer(bytes.fromhex(handle))
        try:
            bench.finish(bench.start("add", words=memory.address, rounds=rounds, system=True))
        finally:
            bench.device.free(memory)
        print(rounds * bench.processors * bench.machine.threads)


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    except BaseError as error:
        sys.exit(str(error))
