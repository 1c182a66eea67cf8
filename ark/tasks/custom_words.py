"""Which words of the device ABI a user's text may use: those that compute, and load and store what
the op declares.

What waits, signals or polls is left out: waits are edges of the plan, which the verifier has seen
and which have a budget, and a body that looked at memory until it changes would have neither.
docs/custom-ops.md lists the words; tests/unit/ops/test_custom.py compares.
"""

from __future__ import annotations

import re

from ark.errors import InvalidUsageError

WORDS = {
    "types": "ark_u32 ark_i32 ark_i64 ark_u64 ark_f16 ark_bf16 ark_e4m3 ark_e5m2 ArkCtx ArkPack",
    "the block": "ARK_DEVICE ARK_LANES ARK_WARPS ARK_THREADS ark_tid ark_lane ark_warp ark_sync "
    "ark_all ark_agree",
    "a warp": "ark_warp_sum ark_warp_max ark_ballot ark_shfl_xor",
    "shared memory": "ARK_SCRATCH ark_block_sum ark_copy_ahead ark_copies_done",
    "operands": "ark_load ark_store ark_address ark_get ark_put ark_load_pack "
    "ark_store_pack ark_aligned",
    "products": "ark_row_dot ark_rows_dot ark_dots",
    "conversions": "ark_bits_float ark_float_bits ark_float ark_half ark_bfloat",
    "functions": "ark_exp ark_log ark_sqrt ark_rsqrt ark_tanh ark_sin ark_cos ark_sincos ark_floor "
    "ark_round ark_trunc ark_inf ark_reciprocal ark_erf ark_expm1 ark_log1p ark_pow ark_fmod "
    "ark_mod ark_atan ark_sinh ark_asinh ark_acosh ark_atanh ark_int_div ark_philox",
    "loops": "ARK_VECTOR_LOOP ARK_VECTOR_BYTES",
}
ALLOWED = frozenset(word for words in WORDS.values() for word in words.split())

_PLAIN = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.S)  # comments, strings
_WORD = re.compile(r"[A-Za-z_]\w*")
_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w+)", re.M)
_DIRECTIVES = ("if", "ifdef", "ifndef", "elif", "else", "endif", "define", "undef", "pragma")
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.M)
# Ways to look at memory again and again, or past the plan.
_POLLING = re.compile(
    r"asm|_*asm_*|_*volatile_*|\w*atomic\w*|__threadfence\w*|__nanosleep|__ld(cv|cg|lu)|"
    r"__builtin_amdgcn_(s_sleep|fence|\w*load\w*)|__builtin_nontemporal_\w+|__sync_\w+"
)


def _stripped(text: str) -> str:
    """The text with spaces for comments and strings, its lines where they were."""
    return _PLAIN.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text.replace("\\\n", " \n"))


def macros(text: str) -> tuple[str, ...]:
    """What the text defines; it ends behind the text."""
    return tuple(dict.fromkeys(_MACRO.findall(_stripped(text))))


def check_words(name: str, file: str, text: str) -> None:
    """InvalidUsageError for a word that a body may not use, or a text without the op's function."""
    plain = _stripped(text)

    def at(place: int) -> str:
        line = plain.count("\n", 0, place) + 1
        return f"custom op {name!r}: {file}:{line}"

    for found in _DIRECTIVE.finditer(plain):
        if found[1] not in _DIRECTIVES:
            raise InvalidUsageError(
                f"{at(found.start())} has #{found[1]}; the text is one piece, which every vendor's "
                "compiler gets as it is: put what it needs into it"
            )
    for found in _WORD.finditer(plain):
        word = found[0]
        if _POLLING.fullmatch(word):
            raise InvalidUsageError(
                f"{at(found.start())} uses {word}; a body may not look at memory that others "
                "change: waits are edges of the plan, which an op gets by waits= and signals= "
                "(docs/custom-ops.md)"
            )
        if word.lower().startswith("ark") and word not in ALLOWED and "ARK_HAS_" not in word:
            raise InvalidUsageError(
                f"{at(found.start())} uses {word}, which is no word for bodies of custom ops; "
                "docs/custom-ops.md lists those"
            )
    if name not in _WORD.findall(plain):
        raise InvalidUsageError(
            f"custom op {name!r}: {file} has no function of that name; expected a template "
            f"`ARK_DEVICE void {name}(ArkCtx& c, const Task& task, ...)` with every operand"
        )
