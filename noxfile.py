"""Sessions for contributors and CI: `nox` runs what a machine without a GPU can prove."""

import nox

nox.options.sessions = ["lint", "types", "tests"]


@nox.session
def lint(session: nox.Session) -> None:
    session.install("ruff>=0.6")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    session.install("-e", ".", "mypy>=1.10")
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    session.install("-e", ".[dev]")
    session.run("pytest", *session.posargs)


@nox.session
def emulator_sweep(session: nox.Session) -> None:
    """The kernel suite on every emulated architecture, at -O0 and -O3, with ten seeds."""
    session.install("-e", ".[dev]")
    suite = "tests/backend/rocm_emulator/"
    files = [f"{suite}test_kernels.py", f"{suite}test_defects.py", f"{suite}test_random_kernels.py"]
    session.run("pytest", "-q", *files, *session.posargs, env={"ARK_EMULATOR_SWEEP": "1"})
