"""lm-eval's local-completions: generated text, and log-probabilities of given text."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from checks import MODEL, MODEL_PATH, URL, command, run

LM_EVAL = str(Path(sys.executable).with_name("lm_eval"))
HOME = Path(tempfile.mkdtemp(prefix="baton-lm-eval-"))
_ROWS = [
    {"question": "The sky is", "choices": ["blue", "square"], "answer": 0},
    {"question": "Two and two make", "choices": ["four", "Tuesday"], "answer": 0},
]
_TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
_GENERATE = """output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match}]
"""
_CHOOSE = """output_type: multiple_choice
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}]
"""


def evaluate(name: str, more: str) -> None:
    rows = HOME / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in _ROWS))
    (HOME / f"{name}.yaml").write_text(_TASK.format(name=name, rows=rows) + more)
    arguments = (
        f"model={MODEL},base_url={URL}/v1/completions,tokenizer={MODEL_PATH},"
        "num_concurrent=2,max_retries=1,tokenized_requests=True"
    )
    command(
        [
            *(LM_EVAL, "--model", "local-completions", "--model_args", arguments),
            *("--tasks", name, "--include_path", str(HOME)),
        ]
    )


run(
    {
        "generate": lambda: evaluate("baton_generate", _GENERATE),
        "logprobs": lambda: evaluate("baton_choose", _CHOOSE),
    }
)
