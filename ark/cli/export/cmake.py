"""Writes the CMakeLists.txt of an exported model: for a static library, and for a program if the
model has one. Called by ark.cli.export.write.
"""

from __future__ import annotations

from collections.abc import Sequence

_PARTS = "ark.c device.c safetensors.c decoder.c"


def of_source(name: str, arch: str, flags: Sequence[str], suffix: str, program: str) -> str:
    """The file for a loop kernel that is C++ source. arch: the value of the compiler's -march.
    suffix: the file suffix of the library that was compiled at export. program: "generate", "run"
    or empty.
    """
    lines = [
        "cmake_minimum_required(VERSION 3.16)",
        f"project({name} C CXX)",
        "set(CMAKE_C_STANDARD 11)",
        f'set(ARK_ARCH "{arch}" CACHE STRING "what -march is given for the loop kernel")',
        'option(ARK_PREBUILT "link the loop kernel that was compiled at export" OFF)',
        "find_package(Threads REQUIRED)",
        f"add_library({name} STATIC {_PARTS} {name}.c)",
        f"target_include_directories({name} PUBLIC ${{CMAKE_CURRENT_SOURCE_DIR}})",
        f"target_link_libraries({name} PUBLIC Threads::Threads)",
        "if(ARK_PREBUILT)",
        f"  add_library({name}_loop SHARED IMPORTED)",
        f"  set_target_properties({name}_loop PROPERTIES IMPORTED_NO_SONAME TRUE",
        f"    IMPORTED_LOCATION ${{CMAKE_CURRENT_SOURCE_DIR}}/lib{name}_loop{suffix})",
        f"  target_link_libraries({name} PUBLIC {name}_loop)",
        "else()",
        f"  target_sources({name} PRIVATE {name}_loop.cpp)",
        f"  set_source_files_properties({name}_loop.cpp PROPERTIES",
        f'    COMPILE_OPTIONS "{";".join(flags)};-march=${{ARK_ARCH}}")',
        "endif()",
        *_program(name, program),
    ]
    return "\n".join(lines) + "\n"


def of_image(name: str, program: str) -> str:
    """The text of CMakeLists.txt for a model whose loop kernel is machine code in a C array. It
    needs only a C compiler.
    """
    lines = [
        "cmake_minimum_required(VERSION 3.16)",
        f"project({name} C)",
        "set(CMAKE_C_STANDARD 11)",
        f"add_library({name} STATIC {_PARTS} {name}.c {name}_image.c)",
        f"target_include_directories({name} PUBLIC ${{CMAKE_CURRENT_SOURCE_DIR}})",
        f"target_link_libraries({name} PUBLIC ${{CMAKE_DL_LIBS}})",
        *_program(name, program),
    ]
    return "\n".join(lines) + "\n"


def _program(name: str, program: str) -> list[str]:
    if not program:
        return []
    lines = [
        f"add_executable({name}_{program} {program}.c)",
        f"target_link_libraries({name}_{program} PRIVATE {name})",
    ]
    if program == "generate":
        lines += [
            "enable_testing()",
            f"add_test(NAME generate COMMAND {name}_generate",
            f"  ${{CMAKE_CURRENT_SOURCE_DIR}}/{name}.safetensors 8 0)",
        ]
    return lines
