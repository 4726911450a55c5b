"""What a person reads when the cluster is ready."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def announcement(*, http: str, grpc: str, model: str, workers: Sequence[str], logs: Path) -> str:
    """The addresses (host:port), and a command to paste."""
    lines = [
        f"  HTTP     http://{http}/v1 (OpenAI; http://{http}/docs)",
        f"  gRPC     {grpc}",
        f"  model    {model}",
        f"  workers  {', '.join(workers)}",
        f"  logs     {logs}",
        "Try it:",
        f"  {_curl(http, model)}",
        "Ctrl-C ends the cluster.",
    ]
    return "\n".join(lines)


def _curl(http: str, model: str) -> str:
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Hello!"}]}
    # A model's name may hold a quote, which would end the shell's string.
    quoted = json.dumps(body).replace("'", r"'\''")
    kind = "-H 'Content-Type: application/json'"
    return f"curl -N http://{http}/v1/chat/completions {kind} -d '{quoted}'"
