"""`baton serve` with codes for weights and KV: it comes up, and its answers make sense."""

from __future__ import annotations

import httpx
import pytest

from tests.support.e2e.cluster import START_S, UpProcess

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--dtype", "float32"],
        ["--quantization", "int8", "--kv-dtype", "int8"],
        ["--quantization", "int8", "--kv-dtype", "fp8", "--deterministic"],
    ],
    ids=" ".join,
)
def test_answers_make_sense(flags: list[str]) -> None:
    with UpProcess(*flags) as up:
        up.wait_ready()
        body = {
            "model": up.model,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_tokens": 20,
        }
        with httpx.Client(trust_env=False, timeout=START_S) as client:
            answer = client.post(f"{up.http}/v1/chat/completions", json=body)
        assert "Paris" in answer.json()["choices"][0]["message"]["content"], answer.text
        up.terminate()
        assert up.wait() == 0, up.text


def test_a_promise_that_cannot_be_kept_is_refused() -> None:
    with UpProcess("--deterministic", "--dtype", "float32") as up:
        assert up.wait(START_S) == 1
        assert "dtype is float32: set dtype bfloat16" in up.text
