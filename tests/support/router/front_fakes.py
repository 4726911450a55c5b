"""What the tests of the fronts share: a tiny real tokenizer and a scripted dispatcher."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import jsonschema
import tokenizers
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp
from tokenizers import decoders, models, pre_tokenizers, trainers

from baton.config.cluster import Config
from baton.errors import Overloaded
from baton.logprobs import TokenLogprobs
from baton.request import FinishReason
from baton.store.registry import WorkerRecord
from baton.telemetry.metrics import RouterMetrics
from router.access.access import Access
from router.batches.batches import Batches
from router.core.accounting import RequestStats
from router.core.request import Dispatcher, GenerationRequest, OutputDelta, Relay
from router.core.served_model import ServedModel
from router.grpc.call import Service
from router.grpc.inference import add_grpc_services
from router.http.protocol import Bounds
from router.http.server import HttpServer
from router.inference.service import InferenceService
from router.inference.tokens import TokenService
from router.listeners import Apps
from router.routes import Apis, make_apps
from router.text.chat_template import ChatTemplate
from router.text.output_processor import OutputProcessor
from router.text.reasoning_counter import reasoning_counter
from router.text.tokenizer import Tokenizer

CONTEXT = 512
MODEL = ServedModel(id="tiny", created=1_700_000_000, context_length=CONTEXT, embedding_size=8)
EOS = "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "the capital of France is Paris, and the quick brown fox jumps over the lazy dog",
    "Grüße aus Köln, 日本語のテキスト, emoji 😀👩‍👩‍👧‍👦 and more text to learn from",
]
SCHEMAS = Path(__file__).resolve().parents[4] / "shared/openai"
SCHEMA_FILE = SCHEMAS / "openai_subset.relaxed.jsonschema.json"


@functools.cache
def tiny_backend() -> tokenizers.Tokenizer:
    """A byte-level BPE of some 400 tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@functools.cache
def _chat_template(source: str) -> ChatTemplate:
    """One for all tests, since each starts a process."""
    return ChatTemplate(source, {"eos_token": EOS})


def tiny_tokenizer(*, template: str | None = TEMPLATE) -> Tokenizer:
    chat = _chat_template(template) if template else None
    backend = tiny_backend()
    eos = backend.token_to_id(EOS)
    assert eos is not None
    return Tokenizer(backend, eos_ids=[eos], chat_template=chat)


Script = Callable[[GenerationRequest], AsyncIterator[OutputDelta]]


@dataclass
class ScriptedDispatcher:
    """Answers with a text, token by token, or as its script says; remembers what it was asked."""

    tokenizer: Tokenizer
    text: str = "Grüße 😀 from Paris"
    script: Script | None = None
    status: tuple[str, str] = ("ok", "")
    addresses: list[str] = field(default_factory=list)
    records: list[WorkerRecord] = field(default_factory=list)
    context_length: int = CONTEXT
    requests: list[GenerationRequest] = field(default_factory=list)
    delivered: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    is_full: bool = False
    asked: list[tuple[str, int]] = field(default_factory=list)
    """Tenant and priority of each request, before it was read."""

    def check_place(self, tenant: str, priority: int) -> None:
        self.asked.append((tenant, priority))
        if self.is_full:
            raise Overloaded("the queue is full", retry_after=2.0)

    async def generate(
        self, request: GenerationRequest, relay: Relay | None = None
    ) -> AsyncIterator[OutputDelta]:
        self.requests.append(request)
        has_begun = False
        try:
            async for delta in (self.script or self.speak)(request):
                # As the real one does: the first delta and the last go to the reader.
                between = has_begun and delta.finish_reason is None
                if not (between and relay is not None and relay(delta)):
                    yield delta
                has_begun = True
                self.delivered += 1
        finally:
            self.closed.set()

    async def speak(self, request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        """The same text for every choice, one after another."""
        for choice in range(request.choices):
            async for delta in self._speak_once(request):
                known = 1 if delta.cached_prompt_tokens and choice == 0 else 0
                scores = self._prompt_scores(request) if known else ()
                yield replace(
                    delta, choice=choice, cached_prompt_tokens=known, prompt_logprobs=scores
                )

    def _prompt_scores(self, request: GenerationRequest) -> tuple[TokenLogprobs, ...]:
        top = request.sampling.prompt_logprobs
        return () if top is None else tuple(map(score_of(top), request.prompt_ids[1:]))

    async def _speak_once(self, request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        sampling = request.sampling
        special = request.shows_special_tokens
        assembler = OutputProcessor(
            self.tokenizer.detokenizer(
                request.prompt_ids, request.shown_ids, special_tokens=special
            ),
            sampling.stop,
            self.tokenizer.eos_ids,
            include_stop=request.shows_stop_string,
            reasoning=reasoning_counter(request.reasoning_markers, request.begins_in),
        )
        tokens = [*self.tokenizer.encode(self.text), *self.tokenizer.eos_ids][: sampling.max_tokens]
        for place, token in enumerate(tokens):
            finish = None
            if token in self.tokenizer.eos_ids:
                finish = FinishReason.STOP
            elif place + 1 == sampling.max_tokens:
                finish = FinishReason.LENGTH
            scores = () if sampling.logprobs is None else (score_of(sampling.logprobs)(token),)
            delta = assembler.push([token], finish, 1 if place == 0 else 0, scores)
            assert delta is not None
            await asyncio.sleep(0)
            yield delta
            if assembler.finished:
                return

    def health(self) -> tuple[str, str]:
        return self.status

    def metrics_addresses(self) -> list[str]:
        return self.addresses

    def worker_records(self) -> list[WorkerRecord]:
        return self.records


def score_of(top: int) -> Callable[[int], TokenLogprobs]:
    """Made-up log probabilities: the token's own is the likeliest, the alternatives follow."""

    def score(token: int) -> TokenLogprobs:
        return TokenLogprobs(-0.5, tuple((token + n, -0.5 - n) for n in range(top)))

    return score


async def endless(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
    """Tokens for ever."""
    while True:
        yield OutputDelta("x" * 1024, (65,), None)
        await asyncio.sleep(0)


async def silent_after_one(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
    """One token, then nothing for ever."""
    yield OutputDelta("x", (65,), None)
    await asyncio.Event().wait()


async def silent(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
    """Nothing for ever."""
    await asyncio.Event().wait()
    yield OutputDelta("", (), None)


@dataclass
class Front:
    """All parts of one front under test."""

    dispatcher: ScriptedDispatcher
    stats: RequestStats
    config: Config
    tokenizer: Tokenizer
    model: ServedModel = MODEL

    @property
    def metrics(self) -> RouterMetrics:
        return self.stats.metrics

    def app(self) -> ASGIApp:
        return create_app(self.dispatcher, self.tokenizer, self.model, self.stats, self.config)

    def count(self, name: str, **labels: str) -> float:
        """A sample of the router's metrics; 0 when there is none."""
        return self.metrics.registry.get_sample_value(f"baton_{name}", labels) or 0.0

    def requests(self) -> dict[tuple[str, str, str], float]:
        """requests_total by class, outcome and code."""
        return {
            (s.labels["class"], s.labels["outcome"], s.labels["code"]): s.value
            for family in self.metrics.requests.collect()
            for s in family.samples
            if s.name.endswith("_total")
        }


def service_of(
    dispatcher: Dispatcher,
    tokenizer: Tokenizer,
    model: ServedModel,
    stats: RequestStats,
    config: Config,
    access: Access | None = None,
) -> InferenceService:
    """Without ``access``, keys are those of ``config``, and their limits are not kept."""
    access = access or Access(config, stats.metrics)
    return InferenceService(dispatcher, tokenizer, model, stats, config, access)


def batches_of(
    dispatcher: Dispatcher,
    tokenizer: Tokenizer,
    model: ServedModel,
    stats: RequestStats,
    config: Config,
    access: Access | None = None,
    *,
    replicated: bool = False,
) -> Batches:
    """Files and batches; not started."""
    service = service_of(dispatcher, tokenizer, model, stats, config, access)
    return Batches(
        service,
        Apis.of(service).endpoints(),
        stats.metrics,
        config.redis_url,
        config.cluster_id,
        replicated=replicated,
    )


def create_apps(
    dispatcher: Dispatcher,
    tokenizer: Tokenizer,
    model: ServedModel,
    stats: RequestStats,
    config: Config,
    access: Access | None = None,
    **options: Any,
) -> Apps:
    """``options`` as for ``make_apps``."""
    service = service_of(dispatcher, tokenizer, model, stats, config, access)
    return make_apps(Apis.of(service), dispatcher, stats.metrics, "test", **options)


def create_app(
    dispatcher: Dispatcher,
    tokenizer: Tokenizer,
    model: ServedModel,
    stats: RequestStats,
    config: Config,
    access: Access | None = None,
    **options: Any,
) -> ASGIApp:
    """The app with all endpoints on one listener."""
    config = config.model_copy(update={"admin_http": ""})
    return create_apps(dispatcher, tokenizer, model, stats, config, access, **options).http


def add_grpc(
    server: grpc.aio.Server,
    dispatcher: Dispatcher,
    tokenizer: Tokenizer,
    model: ServedModel,
    stats: RequestStats,
    config: Config,
    access: Access | None = None,
    *,
    more: Sequence[Service] = (),
) -> None:
    """Mount all gRPC services."""
    service = service_of(dispatcher, tokenizer, model, stats, config, access)
    add_grpc_services(server, service, TokenService(service), dispatcher, more=more)


def make_front(
    script: Script | None = None,
    *,
    template: str | None = TEMPLATE,
    context: int = CONTEXT,
    **config: Any,
) -> Front:
    tokenizer = tiny_tokenizer(template=template)
    dispatcher = ScriptedDispatcher(tokenizer, script=script, context_length=context)
    stats = RequestStats(RouterMetrics(CollectorRegistry()))
    model = replace(MODEL, context_length=context)
    return Front(dispatcher, stats, Config(**config), tokenizer, model)


def listening_socket() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    return listener


def plain_client(**options: Any) -> httpx.AsyncClient:
    """A client that speaks no TLS: to read all known authorities takes it 0.1 s."""
    return httpx.AsyncClient(verify=False, trust_env=False, **options)


@asynccontextmanager
async def serve(
    app: Any,
    slow_client_s: float = 30.0,
    *,
    context: ssl.SSLContext | None = None,
    **bounds: Any,
) -> AsyncIterator[str]:
    """``app`` behind the server that routers use; gives its host:port."""
    server = HttpServer(app, Bounds(slow_client_s=slow_client_s, **bounds), context=context)
    with closing(listening_socket()) as listener:
        host, port = listener.getsockname()
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await until_started(server)
            yield f"{host}:{port}"
        finally:
            server.should_exit = True
            server.force_exit = True
            async with asyncio.timeout(20):
                await task


async def until_started(server: HttpServer) -> None:
    async with asyncio.timeout(20):
        while not server.started:
            await asyncio.sleep(0.001)


@functools.cache
def _bundle() -> dict[str, Any]:
    bundle: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return bundle


@functools.cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**_bundle(), "$ref": f"#/$defs/{name}"})


def check_schema(value: Any, name: str) -> None:
    """Validate against OpenAI's own schema.

    Where that is absent nothing is validated, and tests/unit/router/test_openai_schemas.py skips.
    """
    if SCHEMA_FILE.is_file():
        _validator(name).validate(value)


def sse_payloads(text: str) -> list[str]:
    """The data of each event."""
    events = [event for event in text.split("\n\n") if event]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]
