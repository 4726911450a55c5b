"""The right answers: those of an engine in this process, which no fault meets.

There is one for each fingerprint that the cluster may serve. The engine has the cluster's model
and settings, no prefill worker, no speculation and no batch. Its tokens become answers by the
fronts' own code, so that texts and tool calls can be compared as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry

from baton.config.cluster import Config
from baton.request import SequenceSpec
from baton.rpc.grpc_channel import make_server
from baton.store.registry import WorkerRecord
from baton.telemetry.metrics import RouterMetrics
from deploy.models.model_store import ResolvedModel, resolve
from engine.build import build_engine
from engine.engine import Engine, EngineSettings
from engine.offline import OfflineOutput, generate
from router.core.accounting import RequestStats
from router.core.request import GenerationRequest, OutputDelta, Relay
from router.core.served_model import ServedModel
from router.text.output_processor import OutputProcessor
from router.text.tokenizer import Tokenizer
from tests.chaos.load.answer import AnswerSoFar
from tests.chaos.load.call import Call, Fronts
from tests.chaos.load.questions import WAYS, Question, Way
from tests.support.router.front_fakes import add_grpc, create_app, serve

_KV_POOL_BYTES = 128 << 20

Answers = Mapping[tuple[str, Way], AnswerSoFar]
"""By a question's name and the way it was asked: finish reasons have other names over gRPC."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The right answers by fingerprint. The cluster begins with the first one."""

    answers: Mapping[str, Answers]

    def expected(self, call: Call) -> AnswerSoFar:
        """What a call must get from the fingerprint that its answer names; nothing if it names
        none."""
        known = self.answers.get(call.answer.fingerprint)
        asked = call.question.name, call.way
        return AnswerSoFar.empty(call.question.choices) if known is None else known[asked]


class WrongBeforeFaults(Exception):
    """The undisturbed cluster fails, or says something else than the engine."""


class _EngineDispatcher:
    """A ``Dispatcher`` with no cluster: one engine answers one request after the other."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._known: dict[tuple[object, ...], list[OfflineOutput]] = {}
        self._lock = asyncio.Lock()
        self.context_length = engine.context_length

    def check_place(self, tenant: str, priority: int) -> None:
        """There is always a place."""

    async def generate(
        self, request: GenerationRequest, relay: Relay | None = None
    ) -> AsyncIterator[OutputDelta]:
        async with self._lock:
            answers = await asyncio.to_thread(self._answers, request)
        for choice, answer in enumerate(answers):
            processor = OutputProcessor(
                self._tokenizer.detokenizer(request.prompt_ids, request.shown_ids),
                request.sampling.stop,
                self._tokenizer.eos_ids,
            )
            for token in answer.token_ids[:-1]:
                delta = processor.push([token])
                if delta is not None:
                    yield _of_choice(delta, choice)
            last = processor.push(answer.token_ids[-1:], answer.finish_reason)
            if last is not None:
                yield _of_choice(last, choice)

    def _answers(self, request: GenerationRequest) -> list[OfflineOutput]:
        asked = request.prompt_ids, request.sampling, request.choices
        if asked not in self._known:
            spec = SequenceSpec(
                request_id=request.request_id,
                attempt=0,
                router_id="",
                token_ids=request.prompt_ids,
                prompt_length=len(request.prompt_ids),
                sampling=request.sampling,
                choices=request.choices,
            )
            self._known[asked] = generate(self._engine, [spec])
        return self._known[asked]

    def health(self) -> tuple[str, str]:
        return "ok", ""

    def metrics_addresses(self) -> list[str]:
        return []

    def worker_records(self) -> list[WorkerRecord]:
        return []


def _of_choice(delta: OutputDelta, choice: int) -> OutputDelta:
    return replace(delta, choice=choice)


async def engine_reference(questions: Sequence[Question], configs: Sequence[Config]) -> Reference:
    """What one engine of each configuration answers. Raises BatonError."""
    return Reference(dict([await _answers(questions, config) for config in configs]))


async def _answers(questions: Sequence[Question], config: Config) -> tuple[str, Answers]:
    """The fingerprint of a configuration's engine, and its answers."""
    model = await asyncio.to_thread(resolve, config.model, lambda _: None, config.quantization)
    settings = EngineSettings(
        model.path,
        config.dtype,
        device="cpu",
        kv_pool_bytes=_KV_POOL_BYTES,
        quantization=config.quantization,
        kv_dtype=config.kv_dtype,
        deterministic=config.deterministic,
        drafter="none",
    )
    engine = await asyncio.to_thread(build_engine, settings)
    async with _fronts_of(engine, model) as fronts:
        return engine.fingerprint, {
            (question.name, way): await _ask(fronts, Call.of(question, way))
            for question in questions
            for way in WAYS
        }


@asynccontextmanager
async def _fronts_of(engine: Engine, model: ResolvedModel) -> AsyncIterator[Fronts]:
    tokenizer = Tokenizer.load(model.path)
    dispatcher = _EngineDispatcher(engine, tokenizer)
    stats = RequestStats(RouterMetrics(CollectorRegistry()))
    served = ServedModel.of(model.name, model.path, sampling=model.sampling)
    parts = (dispatcher, tokenizer, served, stats, Config())
    server = make_server()
    add_grpc(server, *parts)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with serve(create_app(*parts)) as address:
            yield Fronts(address, f"127.0.0.1:{port}", model.name)
    finally:
        await server.stop(0)


async def ask_undisturbed(
    fronts: Fronts, questions: Sequence[Question], reference: Reference
) -> None:
    """Each question is asked alone. Raises WrongBeforeFaults."""
    for number, question in enumerate(questions):
        way = WAYS[number % len(WAYS)]
        call = Call.of(question, way)
        answer = await _ask(fronts, call)
        expected = reference.expected(call)
        if answer != expected:
            raise WrongBeforeFaults(
                f"{question.name} over {way}: the cluster says {answer}, the engine {expected}"
            )


async def _ask(fronts: Fronts, call: Call) -> AnswerSoFar:
    await call.run(fronts)
    if call.error:
        raise WrongBeforeFaults(
            f"{call.question.name} over {call.way}: {call.error}: {call.error_text}"
        )
    return call.answer
