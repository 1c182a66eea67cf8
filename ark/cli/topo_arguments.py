"""Adds the options of the commands of `ark topo`. Called by ark.cli.topo."""

from __future__ import annotations

import argparse

from ark.cli.parser import flag, option
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
    option(
        command,
        "--group RANKS",
        "only these take part, such as 0-3,8, and others relay (default: all)",
    )
    if name in ("show", "optimal"):
        flag(command, "--json", "print one JSON object")
    if name == "optimal":
        option(command, "--root RANK", "rank to broadcast from (default: an all-gather)", int)
    if name in ("optimal", "synthesize", "simulate"):
        option(command, "--k N", "trees a root, of forestcoll (default: the optimum's)", int)
    if name in ("synthesize", "simulate", "compare"):
        # These options describe the program to synthesise. `simulate` can also read a program from
        # a file. It must know whether the user gave the options, so they have no defaults there.
        usual = name != "simulate"
        default = "all_gather" if usual else None
        option(
            command,
            "--collective NAME",
            "all_gather, all_reduce, ... (default: %s)"
            % ("all_gather" if usual else "the program's, or all_gather"),
            default=default,
        )
        option(command, "--reduction NAME", "sum, max, min, ... (default: sum)")
        option(command, "--root RANK", _ROOT_HELP, int)
        option(
            command,
            "--counts FILE",
            "an all-to-all of unequal parts: chunks from each rank to each as JSON "
            "(default: equal parts)",
        )
    if name in ("synthesize", "simulate"):
        default = "forestcoll" if usual else None
        option(
            command,
            "--algorithm NAME",
            "forestcoll, taccl, ring, ... (default: %s)"
            % ("forestcoll" if usual else "the program's, or forestcoll"),
            default=default,
        )
        option(command, "--sketch FILE", "TACCL sketch (default: by boxes)")
        option(command, "--window N", _WINDOW_HELP, int, 0)
        option(command, "--pieces N", _PIECES_HELP, int)
    if name == "synthesize":
        option(
            command,
            "--format",
            "form of the program (default: text, if no target is given)",
            choices=FORMATS,
        )
        option(
            command,
            "--target",
            "a runtime: MSCCL XML (msccl, rccl) or an MSCCL++ execution plan as JSON "
            "(default: none)",
            choices=(*TARGETS, MSCCLPP),
        )
        option(command, "--out FILE", "FILE for the program (default: the terminal)")
    if name == "simulate":
        option(command, "--program FILE", _PROGRAM_HELP)
    if name in ("simulate", "compare"):
        page = "ark-topo.html" if name == "compare" else None
        option(command, "--html FILE", _HTML_HELP[page], default=page)
    if name in ("synthesize", "simulate", "compare"):
        option(command, "--size BYTES", _SIZE_HELP, default="256M")
        option(
            command,
            "--costs",
            "costs of puts and sums: typical ones, or none (default: those that were "
            "measured with the topology, else typical ones)",
            choices=("typical", "none"),
        )
        option(
            command,
            "--time-limit S",
            "seconds of search of taccl, all stages together",
            float,
            10.0,
        )
