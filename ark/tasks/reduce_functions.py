"""The functions of the task kind ark.tasks.reduce: the names of their C++ types, the types that
they read and write, and the value that they store.
"""

from __future__ import annotations

from ark.tasks import text

FOLDS = {
    "sum": "ArkAddFold",
    "mean": "ArkAddFold",
    "max": "ArkMaxFold",
    "min": "ArkMinFold",
    "prod": "ArkMulFold",
    "squares": "ArkMomentsFold",
    "moments": "ArkMomentsFold",
    "mean_of_moments": "ArkMomentsFold",
    "sums": "ArkSumsFold",
    "first_sum": "ArkSumsFold",
    "second_sum": "ArkSumsFold",
    "logsumexp": "ArkExpSumFold",
}
MOMENTS = tuple(name for name, fold in FOLDS.items() if fold == "ArkMomentsFold")
SUMS = tuple(name for name, fold in FOLDS.items() if fold == "ArkSumsFold")
# Bytes of totals that are structs.
STRUCT_BYTES = {**dict.fromkeys(MOMENTS, 12), **dict.fromkeys((*SUMS, "logsumexp"), 8)}
# The types of the elements that a function supports, if not all; and of its result, if another one.
ELEMENTS = {
    "squares": ("float", "ark_i64"),
    **dict.fromkeys(("moments", "sums", "logsumexp"), ("float",)),
    **dict.fromkeys(("mean_of_moments", "first_sum", "second_sum"), ("ark_i64",)),
}
RESULTS = {
    **dict.fromkeys(("moments", "sums"), "ark_i64"),
    **dict.fromkeys(("squares", "mean_of_moments", "first_sum", "second_sum"), "float"),
}


def stored_text(function: str, count: int) -> str:
    """The C++ text of the value that is stored for the total v, such as v / count for a mean."""
    texts = {
        "mean": f"v / {text.literal(count)}",
        "squares": "v.squares",
        "moments": "ark_moments_word(v)",
        "mean_of_moments": "v.mean",
        "sums": "ark_sums_word(v)",
        "first_sum": "v.first",
        "second_sum": "v.second",
        "logsumexp": "ark_exp_sum_log(v)",
    }
    return texts.get(function, "v")
