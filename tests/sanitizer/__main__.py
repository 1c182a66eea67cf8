"""`python -m tests.sanitizer [synccheck]`: prints the findings of racecheck (or synccheck) for each
way in which ark orders accesses to shared memory. Each way (form) has a separate kernel in
forms.cu. Needs an NVIDIA GPU, nvcc and compute-sanitizer.

Forms named `one-` and `all-` differ only in the lanes that arrive at an mbarrier: one lane for its
warp, after __syncwarp (as the loop kernel does), or every lane. All of them compute the right
result. In the forms named `polled-`, a reader polls a flag: by volatile accesses (`polled-word`),
by ld.acquire and st.release (`polled-ordered`) or by atomics (`polled-atomic`). For the forms in
CLEAN and RACES the program checks the tool's findings; for all others it only prints them.
`divided` and `divided-vote` show whether a tool supports a barrier at which a warp arrives in
parts, which PTX allows.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("forms.cu")
RACES = ("early-write", "early-read")
TOOLS = ("racecheck", "synccheck")
CLEAN = ("named", "all-stores", "all-records", "all-bulk", "polled-atomic")
SUMMARY = re.compile(
    r"(?:RACECHECK SUMMARY: .*\(|ERROR SUMMARY: )(\d+) errors?(?:, (\d+) warnings?\))?"
)


def said_of(tool: str, program: str, form: str) -> tuple[int, int] | None:
    """Runs the tool on the kernel of a form. Returns the numbers of errors and warnings, or None if
    the tool or the kernel failed.
    """
    argv = ["compute-sanitizer", "--tool", tool, program, form]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return None
    summary = SUMMARY.search(done.stdout)
    if summary is None or (done.returncode and not int(summary[1])):
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
        return None
    return int(summary[1]), int(summary[2] or 0)


def main() -> int:
    tool = sys.argv[1] if len(sys.argv) > 1 else TOOLS[0]
    if tool not in TOOLS:
        print(f"{tool!r} is none of the tools {', '.join(TOOLS)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="ark-forms-") as folder:
        program = str(Path(folder, "forms"))
        flags = ["-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-O2", "-lineinfo"]
        subprocess.run(["nvcc", *flags, "-o", program, str(SOURCE)], check=True)
        names = subprocess.run([program], capture_output=True, text=True, check=True)
        bad = 0
        for form in names.stdout.split():
            counts = said_of(tool, program, form)
            races = RACES if tool == "racecheck" else ()
            expected = form not in races + CLEAN or (
                counts is not None and (counts[0] > 0) == (form in races)
            )
            bad += counts is None or not expected
            print(
                f"{form:12} {counts or 'did not end'}{'' if expected else ' (not as expected)'}",
                flush=True,
            )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
