"""What a person reads when the cluster is ready."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def announcement(
    *,
    http: str,
    grpc: str,
    model: str,
    workers: Sequence[str],
    logs: Path,
    admin_http: str = "",
    needs_key: bool = False,
) -> str:
    """The addresses (host:port), none where routers are elsewhere; and a command to paste."""
    if not http:
        lines = [
            "  routers  `baton router`, with the same configuration",
            f"  model    {model}",
            f"  workers  {', '.join(workers)}",
            f"  logs     {logs}, and the run directories of the workers' nodes",
        ]
        return "\n".join(lines)
    admin = [f"  admin    http://{admin_http} (metrics, operators)"] if admin_http else []
    lines = [
        f"  HTTP     http://{http}/v1 (OpenAI; http://{http}/docs)",
        *admin,
        f"  gRPC     {grpc}",
        f"  model    {model}",
        f"  workers  {', '.join(workers)}",
        f"  logs     {logs}",
        "Try it:",
        f"  {_curl(http, model, needs_key=needs_key)}",
        "Ctrl-C ends the cluster.",
    ]
    return "\n".join(lines)


def _curl(http: str, model: str, *, needs_key: bool) -> str:
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Hello!"}]}
    # A model's name may hold a quote, which would end the shell's string.
    quoted = json.dumps(body).replace("'", r"'\''")
    kind = "-H 'Content-Type: application/json'"
    if needs_key:
        kind += ' -H "Authorization: Bearer $BATON_API_KEY"'
    return f"curl -N http://{http}/v1/chat/completions {kind} -d '{quoted}'"
