"""GuideLLM."""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from checks import DEADLINE_S, MODEL, MODEL_PATH, URL, command, run, same

GUIDELLM = str(Path(sys.executable).with_name("guidellm"))


def benchmark(endpoint: str) -> None:
    report = Path(tempfile.mkdtemp(prefix="baton-guidellm-")) / "report.json"
    backend = f"kind=openai_http,target={URL},model={MODEL},request_format={endpoint}"
    command(
        [
            *(GUIDELLM, "run", "--disable-console-interactive"),
            *("--backend", backend),
            *("--tokenizer", f"kind=hf_auto,model={MODEL_PATH}"),
            *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
            *("--output", f"kind=json,path={report}"),
        ]
    )
    (done,) = json.loads(report.read_text())["benchmarks"]
    same(done["metrics"]["request_totals"]["successful"], 4)


def usage_in_each_chunk() -> None:
    """What it asks for in every request; its report does not tell why one was refused."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": MODEL, "prompt": "One", "max_tokens": 2, "stream": True}
    request = urllib.request.Request(
        f"{URL}/v1/completions",
        json.dumps({**body, "stream_options": options}).encode(),
        {"content-type": "application/json"},
    )
    try:
        urllib.request.urlopen(request, timeout=DEADLINE_S).close()
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from None


def checked(endpoint: str) -> None:
    usage_in_each_chunk()
    benchmark(endpoint)


run(
    {
        "chat": lambda: checked("/v1/chat/completions"),
        "completions": lambda: checked("/v1/completions"),
    }
)
