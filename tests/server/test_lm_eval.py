"""lm-eval's local-completions on local tasks, compared with lm-eval's own transformers model. It
runs only where lm-eval is installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.server.running import Running, running_checkpoint
from tests.slow import slow

ANIMALS = ["fox", "dog", "cat", "cow"]
CHOICE: dict[str, Any] = {
    "task": "animals",
    "output_type": "multiple_choice",
    "doc_to_text": "The quick brown {{word}} jumps over the lazy",
    "doc_to_choice": ANIMALS,
    "doc_to_target": "label",
}
PERPLEXITY: dict[str, Any] = {
    "task": "words",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}],
}
TEXT: dict[str, Any] = {
    "task": "answers",
    "output_type": "generate_until",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{word}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("served") / "small", context=256)


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Running]:
    with running_checkpoint(directory) as started:
        yield started


def numbers(values: dict[str, Any]) -> dict[str, float]:
    """Returns the results that are numbers; others are names."""
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


@slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("task", [CHOICE, PERPLEXITY, TEXT], ids=lambda task: task["task"])
def test_local_completions(
    server: Running, directory: Path, task: dict[str, Any], tmp_path: Path
) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    rows = [
        {"word": word, "label": n % 4, "text": f"A tile of {word} leaves for its peer {n}"}
        for n, word in enumerate(ANIMALS * 2)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    asked = {**task, **files, "test_split": "test"}
    models = [
        (
            "hf",
            {
                "pretrained": str(directory),
                "dtype": "float32",
                "device": "cpu",
                "add_bos_token": False,
            },
        ),
        (
            "local-completions",
            {
                "base_url": f"{server.url}/v1/completions",
                "model": "small",
                "tokenizer": str(directory),
                "tokenizer_backend": "huggingface",
                "num_concurrent": 4,
                "max_length": 200,
                "add_bos_token": False,
            },
        ),
    ]
    theirs, ours = (
        lm_eval.simple_evaluate(
            model=model, model_args=arguments, tasks=[dict(asked)], bootstrap_iters=0
        )
        for model, arguments in models
    )
    name = task["task"]
    mine, other = (numbers(run["results"][name]) for run in (ours, theirs))
    assert mine and mine == pytest.approx(other, rel=1e-3)
    pairs = zip(ours["samples"][name], theirs["samples"][name], strict=True)
    for sample, peer in pairs:
        if name == "answers":
            assert sample["filtered_resps"] == peer["filtered_resps"]
            continue
        for one, two in zip(sample["resps"], peer["resps"], strict=True):
            assert one[0] == pytest.approx(two[0], abs=1e-2)
