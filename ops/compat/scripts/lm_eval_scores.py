"""lm-evaluation-harness on a task of a few lines, tokenised by the server; what it measures is left to be compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import BASE_URL, MODEL, SAMPLES, check, main

TASK = """\
task: furrow_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""
LONG = " ".join(f"Row {number} of the table holds {number * 7 % 31}." for number in range(150))
DOCUMENTS = [
    {
        "question": "What is a poisoned replica? It is",
        "choices": [" a group", " one whose state is bad", " Ünicode 😀"],
        "answer": 1,
    },
    {"question": "One two three", "choices": [" four", " nine"], "answer": 0},
    {"question": LONG, "choices": [" Row 150", " Nothing."], "answer": 0},
]


@check("a multiple-choice task with prompts of one and of many steps")
def evaluate() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data.jsonl").write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
        (folder / "choices.yaml").write_text(TASK.format(data=folder / "data.jsonl"))
        model = {
            "model": MODEL,
            "base_url": f"{BASE_URL}/completions",
            "tokenizer_backend": "remote",
            "num_concurrent": "2",
            "max_retries": "1",
            "max_length": "8192",
        }
        options = [
            "--model",
            "local-completions",
            "--model_args",
            ",".join(f"{key}={value}" for key, value in model.items()),
        ]
        options += ["--tasks", "furrow_choices", "--include_path", str(folder), "--batch_size", "2"]
        options += ["--log_samples", "--output_path", str(folder / "out")]
        environment = {**os.environ, "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        command = [sys.executable, "-m", "lm_eval", "run", *options]
        process = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
        assert process.returncode == 0, process.stderr[-280:]
        [samples] = (folder / "out").rglob("samples_*.jsonl")
        scores = [score for line in samples.read_text().splitlines() for score in measured(json.loads(line))]
    assert len(scores) == sum(len(document["choices"]) for document in DOCUMENTS)
    if SAMPLES:
        Path(SAMPLES).write_text(json.dumps(scores))


def measured(sample: dict) -> list[list]:
    """Context, continuation and log-likelihood of each choice of a document."""
    arguments = sample["arguments"]
    pairs = arguments.values() if isinstance(arguments, dict) else arguments
    texts = [list(pair.values()) if isinstance(pair, dict) else list(pair) for pair in pairs]
    return [[*text[:2], float(response[0])] for text, response in zip(texts, sample["filtered_resps"], strict=True)]


main()
