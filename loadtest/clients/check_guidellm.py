"""GuideLLM."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from checks import MODEL, MODEL_PATH, URL, command, run

GUIDELLM = str(Path(sys.executable).with_name("guidellm"))


def benchmark() -> None:
    folder = tempfile.mkdtemp(prefix="baton-guidellm-")
    command(
        [
            *(GUIDELLM, "benchmark", "run", "--target", URL, "--model", MODEL),
            *("--processor", MODEL_PATH, "--profile", "synchronous", "--max-requests", "4"),
            *("--data", "prompt_tokens=32,output_tokens=8"),
            *("--output-dir", folder, "--disable-console-interactive"),
        ]
    )


run({"benchmark": benchmark})
