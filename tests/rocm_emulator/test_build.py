"""The build of the emulator's C++: headers that many sources share are precompiled."""

from __future__ import annotations

import fcntl
import subprocess
import threading
from pathlib import Path

import pytest
from ark_rocm_emulator import build

SOURCE = "int twice() { return 2 * value(); }"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets an empty build cache, and a small header in place of the one that the emulator's sources
    share.
    """
    monkeypatch.setenv("ARK_CACHE_DIR", str(tmp_path))
    build.cache_folder().mkdir(parents=True)
    header = tmp_path / "shared.h"
    header.write_text("inline int value() { return 21; }")
    monkeypatch.setattr(build, "_PRECOMPILED", header)
    (tmp_path / "source.cpp").write_text(SOURCE)
    return tmp_path


def compiles(folder: Path, *flags: str) -> str:
    """The compiler's messages for the source; empty if it compiles."""
    command = [*build.compiler(), *build.FLAGS, *flags, "-c", str(folder / "source.cpp")]
    command += ["-o", str(folder / "object.o")]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_parsed_sources_are_shared_between_levels(folder: Path) -> None:
    version = subprocess.run(
        [*build.compiler(), "--version"], capture_output=True, text=True, check=True
    )
    if "Free Software Foundation" not in version.stdout:
        pytest.skip("clang looks whether a header has changed since")
    with build._parsed_once(build._WORTH_PRECOMPILING, build.FLAGS) as parsed:
        (folder / "shared.h").write_text("#error parsed again")
        Path(parsed[-1]).write_text("#error parsed again")
        for level in ("-O1", "-O2", "-O3"):
            assert compiles(folder, level, *parsed) == ""
    assert not Path(parsed[-1]).parent.exists()


def test_few_sources_parse_for_themselves(folder: Path) -> None:
    with build._parsed_once(build._WORTH_PRECOMPILING - 1, build.FLAGS) as parsed:
        assert parsed == ()
    assert "value" in compiles(folder, "-O1")


def test_compiler_without_precompiled_headers_still_builds(folder: Path) -> None:
    (folder / "shared.h").write_text("#error no")
    with build._parsed_once(build._WORTH_PRECOMPILING, build.FLAGS) as parsed:
        assert parsed == ()


def test_code_of_every_instruction_is_optimised_most() -> None:
    levels = {source.stem: build._level(source) for source in build.core_sources()}
    for name in ("exec_mfma", "exec_lds", "scheduler"):
        assert levels[name] == ("-O3",)
    assert levels["exec_valu_int"] == ("-O2", "-fpeel-loops")
    assert levels["checks_races"] == levels["exec_salu"] == ("-O2",)
    assert levels["decode_gfx9"] == build._level(build.PACKAGE / "hip" / "memory.cpp") == ("-O1",)


def test_waiting_for_another_build_is_reported(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (build.cache_folder() / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        release = threading.Timer(3, lambda: fcntl.flock(file, fcntl.LOCK_UN))
        release.start()
        with build._one_at_a_time("libamdhip64.so"):
            errors = capfd.readouterr().err
        release.join()
    assert errors.count("waiting for another process that builds") == 1
    assert "libamdhip64.so" in errors and str(build.cache_folder()) in errors


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("int a;  // one\nint b;\n", "int a;\n// two\n\nint b;\n", True),
        ("int a; /* one\n two */ int b;", "int a;   int b;", True),
        ('auto s = "// one";', 'auto s = "// two";', False),
        ('auto s = R"(\n// "one\n)";', 'auto s = R"(\n// "two\n)";', False),
        ("char c = '\"'; // one\nint b = 1;", "char c = '\"'; // two\nint b = 2;", False),
        ("int a = 1;", "int a = 2;", False),
    ],
)
def test_comments_do_not_change_the_objects_name(
    tmp_path: Path, before: str, after: str, same: bool
) -> None:
    (tmp_path / "before.cpp").write_text(before)
    (tmp_path / "after.cpp").write_text(after)
    left, right = (build._code_of(tmp_path / f"{name}.cpp") for name in ("before", "after"))
    assert (left == right) == same
