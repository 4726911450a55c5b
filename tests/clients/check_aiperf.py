"""NVIDIA's AIPerf."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from checks import MODEL, MODEL_PATH, URL, command, run

AIPERF = str(Path(sys.executable).with_name("aiperf"))


def profile(kind: str) -> None:
    folder = tempfile.mkdtemp(prefix="baton-aiperf-")
    command(
        [
            *(AIPERF, "profile", "--model", MODEL, "--url", URL, "--endpoint-type", kind),
            *("--streaming", "--tokenizer", MODEL_PATH, "--request-count", "8"),
            *("--concurrency", "2", "--synthetic-input-tokens-mean", "32"),
            *("--output-tokens-mean", "8", "--artifact-dir", folder, "--ui-type", "none"),
        ],
        # Told that it is offline, it takes a folder's path for a name.
        HF_HUB_OFFLINE="",
    )


run({"chat": lambda: profile("chat"), "completions": lambda: profile("completions")})
