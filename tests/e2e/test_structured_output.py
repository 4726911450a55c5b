"""Structured answers of the real model, by the official client: streamed and not, on every path."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from baton.client import Client
from baton.v1.inference_pb2 import ChatMessage
from baton.v1.sampling_pb2 import Choice, Grammar, SamplingParameters
from tests.support.e2e.api import series
from tests.support.e2e.cluster import PATIENT, UpProcess

DEADLINE_S = 200.0
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "country": {"type": "string", "maxLength": 40},
        "population": {"type": "integer", "minimum": 0, "maximum": 100000000},
        "kind": {"enum": ["capital", "town", "village"]},
    },
    "required": ["city", "country", "population", "kind"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
SHORT = "Describe Paris as JSON."
LONG = "Paris is the capital of France, and it lies on the river Seine. " * 60 + SHORT


@pytest.fixture(params=["never", "always"])
def paths(request: pytest.FixtureRequest) -> Iterator[UpProcess]:
    """A cluster that hands everything off, and one that hands nothing off; in bf16 both."""
    if request.param == "never":
        yield request.getfixturevalue("rough_cluster")
        return
    with UpProcess("--local-prefill", request.param, env=PATIENT) as up:
        yield up.wait_ready()
        up.terminate()
        assert up.wait() == 0, up.text


def answers(client: openai.OpenAI, model: str, prompt: str, temperature: float) -> set[str]:
    """The same request whole and streamed."""
    asked: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": temperature,
        "seed": 7,
        "max_tokens": 200,
        "response_format": FORMAT,
    }
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(stream=True, **asked))
    assert [c.choices[0].finish_reason for c in chunks][-1] == "stop"
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks)
    return {whole.choices[0].message.content or "", streamed}


@pytest.mark.long
def test_answers_match_their_schema(paths: UpProcess) -> None:
    with openai.OpenAI(
        base_url=f"{paths.http}/v1",
        api_key="none",
        max_retries=0,
        timeout=DEADLINE_S,
        # A slow machine is no reason to refuse.
        default_headers={"x-baton-deadline-ms": str(int(DEADLINE_S * 1000))},
    ) as client:
        asked = [(prompt, t) for prompt in (SHORT, LONG) for t in (0.0, 1.0)]
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda each: answers(client, paths.model, *each), asked))
        for texts in found:
            for text in texts:
                jsonschema.validate(json.loads(text), SCHEMA)
        check_other_kinds(paths, client)
    assert series(paths, "baton_grammar_compile_seconds_count", role="router") >= 1
    check_grpc(paths)


def check_other_kinds(cluster: UpProcess, client: openai.OpenAI) -> None:
    def ask(**extra: Any) -> str:
        answer = client.completions.create(
            model=cluster.model, prompt="The answer is", max_tokens=120, extra_body=extra
        )
        return answer.choices[0].text

    assert ask(guided_choice=["yes", "no"]) in ("yes", "no")
    assert re.fullmatch("[0-9]{3}-[a-z]{2}", ask(guided_regex="[0-9]{3}-[a-z]{2}"))
    # It may be cut before its end.
    assert re.fullmatch("a+|a*b", ask(guided_grammar='start: "a" start | "b"', max_tokens=5))
    assert ask(structured_outputs={"choice": ["only this"]}) == "only this"
    body = {"model": cluster.model, "prompt": "x", "guided_regex": "("}
    refused = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=DEADLINE_S)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "guided_regex"


def check_grpc(cluster: UpProcess) -> None:
    sampling = SamplingParameters(grammar=Grammar(choice=Choice(texts=["blue", "green"])))
    with Client(cluster.grpc) as client:
        message = ChatMessage(role="user", content="Your favourite colour?")
        pieces = client.generate(messages=[message], sampling=sampling, deadline_s=DEADLINE_S)
        assert "".join(piece.text for piece in pieces) in ("blue", "green")
