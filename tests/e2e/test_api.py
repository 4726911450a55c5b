"""The `openai` client and plain HTTP and gRPC against `baton serve` with the real model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import (  # type: ignore[import-untyped]
    reflection_pb2,
    reflection_pb2_grpc,
)
from openai.types.chat import ChatCompletionMessageParam

from baton.client import Client
from baton.errors import InvalidRequest, ModelNotFound
from baton.v1.inference_pb2 import FINISH_REASON_LENGTH, ChatMessage
from baton.v1.sampling_pb2 import SamplingParameters
from tests.support.e2e.api import DEADLINE_S, series
from tests.support.e2e.cluster import UpProcess

HELLO: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "Name three colours of the rainbow."}
]
LONG_TEXT = "The quick brown fox jumps over the lazy dog near the old river bank. " * 30


@pytest.fixture
def client(cluster: UpProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{cluster.http}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
    ) as client:
        yield client


def until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Wait for what no event tells of."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "it did not come to pass in time"
        time.sleep(0.05)


def test_chat_streamed_is_chat_whole(cluster: UpProcess, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=cluster.model, messages=HELLO, temperature=0, max_tokens=24
    )
    stream = client.chat.completions.create(
        model=cluster.model,
        messages=HELLO,
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_a_chat_ends_by_itself(cluster: UpProcess, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=cluster.model,
        messages=[{"role": "user", "content": "Say yes."}],
        temperature=0,
        max_tokens=300,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in (answer.choices[0].message.content or "")


def test_seeds_repeat(cluster: UpProcess, client: openai.OpenAI) -> None:
    def answer(seed: int) -> str | None:
        return (
            client.chat.completions.create(
                model=cluster.model, messages=HELLO, temperature=1, seed=seed, max_tokens=16
            )
            .choices[0]
            .message.content
        )

    assert answer(7) == answer(7)
    assert len({answer(seed) for seed in range(4)}) > 1


def test_completions_take_text_and_token_ids(cluster: UpProcess, client: openai.OpenAI) -> None:
    def complete(prompt: str | list[str] | list[int]) -> list[str]:
        answer = client.completions.create(
            model=cluster.model, prompt=prompt, temperature=0, max_tokens=5
        )
        return [choice.text for choice in sorted(answer.choices, key=lambda c: c.index)]

    one = complete("The capital of France is")
    assert complete(["The capital of France is", "1, 2, 3,"])[0] == one[0]
    assert len(complete([504, 3575, 282, 4649, 314])) == 1


async def test_the_async_client(cluster: UpProcess) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{cluster.http}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
    ) as client:

        async def answer(number: int) -> str:
            stream = await client.chat.completions.create(
                model=cluster.model,
                messages=[{"role": "user", "content": f"Count from {number}."}],
                temperature=0,
                max_tokens=12,
                stream=True,
            )
            parts = [c.choices[0].delta.content or "" async for c in stream if c.choices]
            return "".join(parts)

        together = await asyncio.gather(*(answer(number) for number in range(6)))
        assert all(together)


def test_models(cluster: UpProcess, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [cluster.model]
    assert client.models.retrieve(cluster.model).id == cluster.model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"model": "nope", "messages": [{"role": "user", "content": "x"}]}', 404),
        (b'{"model": "MODEL", "messages": []}', 400),
        (b'{"model": "MODEL", "messages": [{"role": "user", "content": 3}]}', 400),
        (b'{"model": "MODEL", "messages": [{"role": "user", "content": "x"}], "n": 0}', 400),
        (
            b'{"model": "MODEL", "messages": [{"role": "user", "content": "x"}],'
            b' "temperature": -1}',
            400,
        ),
        (
            b'{"model": "MODEL", "messages": [{"role": "user", "content": "x"}],'
            b' "max_tokens": 999999}',
            400,
        ),
    ],
)
def test_bad_input(cluster: UpProcess, body: bytes, status: int) -> None:
    answer = httpx.post(
        f"{cluster.http}/v1/chat/completions",
        content=body.replace(b"MODEL", cluster.model.encode()),
        headers={"content-type": "application/json"},
        timeout=DEADLINE_S,
    )
    assert answer.status_code == status
    assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}


def test_a_prompt_longer_than_the_context(cluster: UpProcess, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=cluster.model, prompt=[100] * 9000, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"


def test_a_body_that_is_too_large(cluster: UpProcess) -> None:
    answer = httpx.post(
        f"{cluster.http}/v1/completions",
        content=b" " * (9 << 20),
        headers={"content-type": "application/json"},
        timeout=DEADLINE_S,
    )
    assert answer.status_code == 413


def test_a_prefix_is_computed_once(cluster: UpProcess, client: openai.OpenAI) -> None:
    def ask(question: str) -> int:
        answer = client.chat.completions.create(
            model=cluster.model,
            messages=[{"role": "user", "content": LONG_TEXT + question}],
            temperature=0,
            max_tokens=2,
        )
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        assert details is not None
        return details.cached_tokens or 0

    def computed() -> float:
        # Wherever: short prompts may be computed where they are decoded.
        return series(cluster, "baton_computed_prompt_tokens_total")

    before = computed()
    assert ask("Who jumps?") < 100
    first = computed() - before
    assert first > 400
    assert ask("Who is lazy?") > 400
    assert computed() - before - first < first / 4


def test_a_client_that_hangs_up_frees_its_blocks(cluster: UpProcess) -> None:
    body = {
        "model": cluster.model,
        "prompt": "Once upon a time",
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"{cluster.http}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=DEADLINE_S) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert series(cluster, "baton_kv_blocks", state="used") > 0
    until(lambda: series(cluster, "baton_kv_blocks", state="used") == 0)
    until(lambda: series(cluster, "baton_requests_total", outcome="aborted") >= 1)


def test_health_and_pages(cluster: UpProcess) -> None:
    for path in ("/health", "/live", "/metrics", "/metrics/cluster", "/openapi.json"):
        assert httpx.get(f"{cluster.http}{path}", timeout=DEADLINE_S).status_code == 200
    assert httpx.get(f"{cluster.http}/health", timeout=DEADLINE_S).json() == {"status": "ok"}


def test_grpc(cluster: UpProcess, client: openai.OpenAI) -> None:
    with Client(cluster.grpc) as baton:
        assert [model.id for model in baton.models()] == [cluster.model]
        messages = [ChatMessage(role="user", content=str(HELLO[0]["content"]))]
        sampling = SamplingParameters(temperature=0, max_tokens=24)
        responses = list(baton.generate(messages=messages, sampling=sampling))
        assert responses[-1].finish_reason == FINISH_REASON_LENGTH
        assert responses[-1].usage.completion_tokens == 24
        whole = client.chat.completions.create(
            model=cluster.model, messages=HELLO, temperature=0, max_tokens=24
        )
        text = "".join(response.text for response in responses)
        assert text == whole.choices[0].message.content
        with pytest.raises(ModelNotFound):
            list(baton.generate(prompt="x", model="another"))
        with pytest.raises(InvalidRequest):
            list(baton.generate(prompt="x", sampling=SamplingParameters(top_p=7)))


def test_grpc_health_and_reflection(cluster: UpProcess) -> None:
    with grpc.insecure_channel(cluster.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        found = next(reflection.ServerReflectionInfo(iter([asked]), timeout=DEADLINE_S))
        names = {service.name for service in found.list_services_response.service}
        assert "baton.v1.InferenceService" in names


def test_log_probabilities_join_to_the_text(cluster: UpProcess, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=cluster.model,
        messages=[{"role": "user", "content": "Say: Grüße 😀 from Paris."}],
        temperature=0,
        max_tokens=24,
        n=2,
        logprobs=True,
        top_logprobs=3,
    )
    assert len({choice.message.content for choice in answer.choices}) == 1
    for choice in answer.choices:
        assert choice.logprobs is not None
        tokens = choice.logprobs.content or []
        spelled = b"".join(bytes(token.bytes or []) for token in tokens)
        assert spelled.decode(errors="replace") == choice.message.content
        for token in tokens:
            assert token.logprob == token.top_logprobs[0].logprob, "greedy takes the likeliest"
            assert token.logprob <= 0


def test_an_echo_is_scored_even_where_it_is_cached(
    cluster: UpProcess, client: openai.OpenAI
) -> None:
    """As lm-eval's local-completions asks: token ids, echo, one token that it drops."""
    ids = list(range(1000, 1100))
    scores: list[list[float | None]] = []
    for _ in range(2):
        answer = client.completions.create(
            model=cluster.model, prompt=ids, max_tokens=1, echo=True, logprobs=1, temperature=0
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.top_logprobs is not None
        assert len(logprobs.token_logprobs) == len(ids) + 1
        assert logprobs.token_logprobs[0] is None
        known = zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], strict=True)
        assert all(own <= max(top.values()) for own, top in known)
        scores.append(logprobs.token_logprobs[1:-1])
    assert scores[0] == pytest.approx(scores[1], abs=0.05)


def test_choices_differ_and_are_drawn_again(cluster: UpProcess, client: openai.OpenAI) -> None:
    def texts(n: int) -> list[str]:
        answer = client.completions.create(
            model=cluster.model,
            prompt="Once upon a time",
            max_tokens=16,
            n=n,
            seed=7,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 16 * n
        return [choice.text for choice in answer.choices]

    three = texts(3)
    assert len(set(three)) == 3
    assert texts(1) == three[:1]


def test_embeddings(cluster: UpProcess, client: openai.OpenAI) -> None:
    texts = [
        *("A cat sits on the mat.", "A cat sits on the mat.", "A cat is sitting on a rug."),
        *("Interest rates rose in May.", "The central bank raised its rates."),
    ]
    # The client asks for base64 by default.
    coded = client.embeddings.create(model=cluster.model, input=texts)
    plain = client.embeddings.create(model=cluster.model, input=texts, encoding_format="float")
    vectors = [one.embedding for one in coded.data]
    for one, other in zip(vectors, plain.data, strict=True):
        assert one == pytest.approx(other.embedding, abs=1e-2)
    assert coded.usage.prompt_tokens == plain.usage.prompt_tokens > len(texts)

    def cosine(one: list[float], other: list[float]) -> float:
        return sum(a * b for a, b in zip(one, other, strict=True))

    assert cosine(vectors[0], vectors[0]) == pytest.approx(1, abs=1e-5)
    assert cosine(vectors[0], vectors[1]) == pytest.approx(1, abs=1e-3)
    # Texts of one topic are nearer to each other than to those of another.
    alike = cosine(vectors[0], vectors[2]), cosine(vectors[3], vectors[4])
    unlike = [cosine(cat, rates) for cat in vectors[1:3] for rates in vectors[3:]]
    assert min(alike) > max(unlike) + 0.03
