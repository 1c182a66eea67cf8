"""Adds the options of the commands of `ark topo`. Called by ark.cli.topo."""

from __future__ import annotations

import argparse

from ark.collective.programs import TARGETS

FORMATS = ("text", "json", "xml")
MSCCLPP = "msccl++"
_WINDOW_HELP = "puts to pass on under way at a time; 0 is all (forestcoll)"
_ROOT_HELP = "rank at the root of a broadcast or reduce (default: 0)"
_PIECES_HELP = "pieces that a chunk is cut in (default: 1, or the fastest of a few)"
_PROGRAM_HELP = "FILE of a program, as JSON, XML or MSCCL++ plan (default: one is synthesized)"
_HTML_HELP = {None: "FILE for a page (default: none)", "ark-topo.html": "FILE for a page"}
_SIZE_HELP = "bytes of the whole buffer, with K, M or G"


def add_arguments(command: argparse.ArgumentParser, name: str) -> None:
    """Adds the options of the command of that name."""
    command.add_argument("topology", metavar="TOPOLOGY", help="see `ark topo --help`")
    command.add_argument(
        "--group",
        metavar="RANKS",
        help="only these take part, such as 0-3,8, and others relay (default: all)",
    )
    if name in ("show", "optimal"):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    if name == "optimal":
        command.add_argument(
            "--root",
            type=int,
            metavar="RANK",
            help="rank to broadcast from (default: an all-gather)",
        )
    if name in ("optimal", "synthesize", "simulate"):
        command.add_argument(
            "--k",
            type=int,
            metavar="N",
            help="trees a root, of forestcoll (default: the optimum's)",
        )
    if name in ("synthesize", "simulate", "compare"):
        # These options describe the program to synthesise. `simulate` can also read a program from
        # a file. It must know whether the user gave the options, so they have no defaults there.
        usual = name != "simulate"
        default = "all_gather" if usual else None
        command.add_argument(
            "--collective",
            default=default,
            metavar="NAME",
            help="all_gather, all_reduce, ... (default: %s)"
            % ("all_gather" if usual else "the program's, or all_gather"),
        )
        command.add_argument(
            "--reduction", metavar="NAME", help="sum, max, min, ... (default: sum)"
        )
        command.add_argument("--root", type=int, metavar="RANK", help=_ROOT_HELP)
        command.add_argument(
            "--counts",
            metavar="FILE",
            help="an all-to-all of unequal parts: chunks from each rank to each as JSON "
            "(default: equal parts)",
        )
    if name in ("synthesize", "simulate"):
        default = "forestcoll" if usual else None
        command.add_argument(
            "--algorithm",
            default=default,
            metavar="NAME",
            help="forestcoll, taccl, ring, ... (default: %s)"
            % ("forestcoll" if usual else "the program's, or forestcoll"),
        )
        command.add_argument("--sketch", metavar="FILE", help="TACCL sketch (default: by boxes)")
        command.add_argument("--window", type=int, default=0, metavar="N", help=_WINDOW_HELP)
        command.add_argument("--pieces", type=int, metavar="N", help=_PIECES_HELP)
    if name == "synthesize":
        command.add_argument(
            "--format",
            choices=FORMATS,
            help="form of the program (default: text, if no target is given)",
        )
        command.add_argument(
            "--target",
            choices=(*TARGETS, MSCCLPP),
            help="a runtime: MSCCL XML (msccl, rccl) or an MSCCL++ execution plan as JSON "
            "(default: none)",
        )
        command.add_argument(
            "--out", metavar="FILE", help="FILE for the program (default: the terminal)"
        )
    if name == "simulate":
        command.add_argument("--program", metavar="FILE", help=_PROGRAM_HELP)
    if name in ("simulate", "compare"):
        page = "ark-topo.html" if name == "compare" else None
        command.add_argument("--html", metavar="FILE", default=page, help=_HTML_HELP[page])
    if name in ("synthesize", "simulate", "compare"):
        command.add_argument("--size", default="256M", metavar="BYTES", help=_SIZE_HELP)
        command.add_argument(
            "--costs",
            choices=("typical", "none"),
            help="costs of puts and sums: typical ones, or none (default: those that were "
            "measured with the topology, else typical ones)",
        )
        command.add_argument(
            "--time-limit",
            type=float,
            default=10.0,
            metavar="S",
            help="seconds of search of taccl, all stages together",
        )
