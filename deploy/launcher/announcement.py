"""The text that the launcher prints when the cluster is ready."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from baton.security.tls import TlsFiles


def announcement(
    *,
    http: str,
    grpc: str,
    model: str,
    workers: Sequence[str],
    logs: Path | None,
    commit: str = "",
    admin_http: str = "",
    needs_key: bool = False,
    tls: TlsFiles | None = None,
) -> str:
    """Return a text with the cluster's addresses (host:port) and a command for the user to try.

    ``logs`` is the folder of the log files; None if there is none.

    If routers run elsewhere, ``http`` is empty, and the text omits the addresses and the command.
    ``commit`` is the commit of a Hugging Face model. ``tls`` has the CA and the client certificate
    that the command uses.
    """
    shown = f"{model} (commit {commit})" if commit else model
    if not http:
        lines = [
            "  routers  `baton router`, with the same configuration",
            f"  model    {shown}",
            f"  workers  {', '.join(workers)}",
        ]
        if logs:
            lines.append(f"  logs     {logs}, and the run directories of the workers' nodes")
        return "\n".join(lines)
    scheme = "http" if tls is None else "https"
    url = f"{scheme}://{http}"
    admin = [f"  admin    {scheme}://{admin_http} (metrics, operators)"] if admin_http else []
    lines = [
        f"  HTTP     {url}/v1 (OpenAI)",
        *admin,
        f"  gRPC     {grpc}{'' if tls is None else ' (TLS)'}",
        f"  model    {shown}",
        f"  workers  {', '.join(workers)}",
        *([f"  logs     {logs}"] if logs else []),
        "Try it:",
        f"  {_curl(url, model, tls, needs_key=needs_key)}",
        "Ctrl-C ends the cluster.",
    ]
    return "\n".join(lines)


def _curl(url: str, model: str, tls: TlsFiles | None, *, needs_key: bool) -> str:
    message = {"role": "user", "content": "What is the capital of Japan?"}
    body = {"model": model, "temperature": 0, "messages": [message]}
    # A model's name may hold a quote, which would end the shell's string.
    quoted = json.dumps(body).replace("'", r"'\''")
    kind = "-H 'Content-Type: application/json'"
    if needs_key:
        kind += ' -H "Authorization: Bearer $BATON_API_KEY"'
    options = []
    if tls is not None and tls.authority is not None:
        options.append(f"--cacert {shlex.quote(str(tls.authority))}")
    if tls is not None and tls.certificate is not None:
        options.append(f"--cert {shlex.quote(str(tls.certificate))}")
        options.append(f"--key {shlex.quote(str(tls.key))}")
    given = " ".join([*options, kind])
    return f"curl -s {url}/v1/chat/completions {given} -d '{quoted}'"
