"""`ark cache` shows the folder of compiled programs; `ark cache clear` empties it."""

from __future__ import annotations

import argparse

from ark.cli.parser import Subparsers
from ark.runtime import cache


def register(subparsers: Subparsers) -> None:
    p = subparsers.add_parser("cache", help="show or clear the cache of plans and programs")
    p.add_argument(
        "action",
        choices=("show", "clear"),
        nargs="?",
        default="show",
        help="show (the default) or clear",
    )
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    if args.action == "clear":
        count, nbytes = cache.clear()
        print(f"removed {count} entries, {nbytes / 1e6:.1f} MB, from {cache.folder()}")
        return 0
    files = cache.entries()
    print(
        f"{len(files)} entries, {sum(p.stat().st_size for p in files) / 1e6:.1f} MB, in "
        f"{cache.folder()}"
    )
    return 0
