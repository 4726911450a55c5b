"""`vllm bench serve`; docs/how-to/use/clients.md has more of it."""

from __future__ import annotations

import sys
from pathlib import Path

from checks import MODEL, MODEL_PATH, URL, command, run

VLLM = str(Path(sys.executable).with_name("vllm"))


def bench(backend: str, endpoint: str) -> None:
    command(
        [
            *(VLLM, "bench", "serve", "--base-url", URL, "--endpoint", endpoint),
            *("--backend", backend, "--model", MODEL, "--tokenizer", MODEL_PATH),
            *("--dataset-name", "random", "--random-input-len", "32"),
            *("--random-output-len", "8", "--num-prompts", "8", "--max-concurrency", "2"),
            *("--ignore-eos", "--temperature", "0"),
        ]
    )


run(
    {
        "completions": lambda: bench("openai", "/v1/completions"),
        "chat": lambda: bench("openai-chat", "/v1/chat/completions"),
    }
)
