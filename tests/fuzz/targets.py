"""The entrances that are fuzzed, and where each begins."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from tests.fuzz.sandboxed_targets import SANDBOXED
from tests.fuzz.target import Target


def _gguf() -> Callable[[bytes], None]:
    from baton.errors import ConfigError
    from deploy.models.gguf_convert import convert

    def one(data: bytes) -> None:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
            file, folder = Path(name) / "m.gguf", Path(name) / "out"
            file.write_bytes(data)
            folder.mkdir()
            with suppress(ConfigError):
                convert(file, folder, keep_codes=bool(data) and data[-1] % 2 == 0)

    return one


def _gguf_seeds() -> list[bytes]:
    from tests.support.deploy.tiny_gguf import write_gguf

    with tempfile.TemporaryDirectory() as name:
        return [write_gguf(Path(name) / "tiny.gguf").read_bytes()]


def _safetensors() -> Callable[[bytes], None]:
    from baton.errors import ConfigError
    from engine.model.weights import _TensorFiles, fingerprint

    def one(data: bytes) -> None:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as name, ExitStack() as stack:
            file = Path(name) / "model.safetensors"
            file.write_bytes(data)
            with suppress(ConfigError):
                files = _TensorFiles([file], stack, stay_open=True, renames=True)
                for tensor in files:
                    assert files[tensor].numel() * files[tensor].element_size() <= len(data)
            with suppress(ConfigError), fingerprint(Path(name), "bfloat16") as hashed:
                hashed.result()

    return one


def _safetensors_seeds() -> list[bytes]:
    import torch
    from safetensors.torch import save

    tensors = {"a.weight": torch.zeros(2, 3), "b": torch.ones(1, dtype=torch.bfloat16)}
    return [save(tensors), save({})]


def _sse() -> Callable[[bytes], None]:
    from baton.client.http_api import event_of
    from baton.errors import BatonError
    from loadtest.generator.targets.openai_target import EventSplitter

    def one(data: bytes) -> None:
        whole = EventSplitter().feed(data)
        cut = EventSplitter()
        at = data[0] if data else 0
        assert cut.feed(data[:at]) + cut.feed(data[at:]) == whole
        for line in data.decode(errors="replace").split("\n"):
            with suppress(BatonError):
                event_of(line)

    return one


def _sse_seeds() -> list[bytes]:
    delta = {"id": "c", "choices": [{"index": 0, "delta": {"content": "a"}, "text": "a"}]}
    done: dict[str, Any] = {"type": "response.completed", "response": {"usage": None}}
    error = {"error": {"message": "m", "code": "overloaded", "type": "t", "param": None}}
    return [f"data: {json.dumps(one)}\n\ndata: [DONE]\n\n".encode() for one in (delta, done, error)]


def _protobuf() -> Callable[[bytes], None]:
    from google.protobuf.message import DecodeError, EncodeError

    from baton.errors import BatonError
    from baton.rpc import convert
    from baton.v1 import decode_pb2, inference_pb2, sampling_pb2, transfer_pb2, worker_pb2
    from router.grpc.sampling import grpc_sampling
    from router.grpc.tools import grpc_tool_use, grpc_turns

    kinds: list[tuple[Any, Sequence[Callable[[Any], Any]]]] = [
        (worker_pb2.SequenceSpec, [convert.sequence_from_proto]),
        (worker_pb2.TokenOutput, [convert.output_from_proto]),
        (worker_pb2.LoadSnapshot, [convert.load_from_proto]),
        (transfer_pb2.Geometry, [convert.geometry_from_proto]),
        (
            decode_pb2.CommitRequest,
            [convert.first_tokens_from_proto],
        ),
        (sampling_pb2.SamplingParameters, [convert.sampling_from_proto, grpc_sampling]),
        (
            inference_pb2.GenerateRequest,
            [
                lambda message: grpc_turns(message.messages.messages),
                lambda message: grpc_tool_use(message.tools),
                lambda message: grpc_sampling(message.sampling),
            ],
        ),
    ]
    back: dict[Any, Callable[[Any], Any]] = {
        convert.sequence_from_proto: convert.sequence_to_proto,
        convert.output_from_proto: convert.output_to_proto,
        convert.load_from_proto: convert.load_to_proto,
        convert.geometry_from_proto: convert.geometry_to_proto,
    }

    def one(data: bytes) -> None:
        if not data:
            return
        kind, readers = kinds[data[0] % len(kinds)]
        try:
            message = kind.FromString(data[1:])
        except DecodeError:
            return
        for read in readers:
            with suppress(BatonError):
                found = read(message)
                if read in back:
                    with suppress(EncodeError):
                        again = read(back[read](found))
                        assert repr(again) == repr(found)

    return one


def _protobuf_seeds() -> list[bytes]:
    from baton.v1 import inference_pb2, sampling_pb2, worker_pb2

    sampling = sampling_pb2.SamplingParameters(temperature=0.5, stop=["a"], seed=1, max_tokens=3)
    logprobs = worker_pb2.TokenLogprobs(logprob=-1, top_ids=[1], top_logprobs=[-1])
    asked = inference_pb2.GenerateRequest(model="m", prompt="p", sampling=sampling)
    asked.tools.tools.add(name="f")
    outputs = worker_pb2.TokenOutput(request_id="r", token_ids=[1], logprobs=[logprobs])
    spec = worker_pb2.SequenceSpec(request_id="r", token_ids=[1, 2], sampling=sampling)
    return [
        bytes([number]) + message.SerializeToString()
        for number, message in ((0, spec), (1, outputs), (5, sampling), (6, asked))
    ]


_MODEL = "tiny"
_SEEDS = 8
"""Bodies of each path."""


def plain_paths() -> tuple[str, ...]:
    """Paths of ``BODIES`` that an app answers before a scripted dispatcher."""
    from tests.fuzz.bodies import BODIES

    # Others need a store, or workers whose answers are vectors.
    others = (
        *("/v1/batches", "/v1/cache/prefixes", "/v1/embeddings"),
        *("/v1/feedback", "/console/what-if"),
    )
    return tuple(path for path in BODIES if path not in others)


def _http_body() -> Callable[[bytes], None]:
    import httpx

    from tests.support.router.front_fakes import make_front

    front = make_front()
    app = front.app()
    paths = plain_paths()

    async def ask(path: str, body: bytes) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", verify=False
        ) as client:
            return await client.post(
                path, content=body, headers={"content-type": "application/json"}
            )

    def one(data: bytes) -> None:
        if data:
            path = paths[data[0] % len(paths)]
            answer = asyncio.run(ask(path, data[1:]))
            front.dispatcher.requests.clear()
            assert answer.status_code < 500, answer.text

    return one


def _http_body_seeds() -> list[bytes]:
    from tests.fuzz.bodies import plausible_body

    return [
        bytes([place]) + json.dumps(plausible_body(random.Random(number), path, _MODEL)).encode()
        for place, path in enumerate(plain_paths())
        for number in range(_SEEDS)
    ]


def _handoff() -> Callable[[bytes], None]:
    from baton.errors import BatonError
    from kvtransfer.transports import cuda_ipc_transport, frames, shm_transport
    from kvtransfer.transports.nixl import transport as nixl_transport
    from kvtransfer.transports.process_group import transport as group_transport
    from kvtransfer.transports.transport import Peer

    peer = Peer("writer", "127.0.0.1:1")

    def one(data: bytes) -> None:
        if not data:
            return
        rest = data[1:]
        readers: list[Callable[[], Any]] = [
            lambda: frames.decode_frame(rest),
            lambda: shm_transport._parse(rest),
            lambda: cuda_ipc_transport._parse(rest),
            lambda: nixl_transport._decode(rest),
            lambda: group_transport._decode(group_transport._Offer, rest, peer),
            lambda: group_transport._decode(group_transport._Answer, rest, peer),
        ]
        number = data[0] % len(readers)
        with suppress(BatonError, *([ValueError] if number == 0 else [])):
            readers[number]()

    return one


def _handoff_seeds() -> list[bytes]:
    from kvtransfer.transports.frames import Frame

    frame = Frame(3, 5)
    frame.data[:] = b"block"
    offers: list[tuple[int, dict[str, Any]]] = [
        (
            1,
            {
                "boot_id": "b",
                "pid_namespace": "n",
                "pid": 1,
                "descriptor": 3,
                "inode": 4,
                "bytes": 64,
                "block_bytes": 8,
            },
        ),
        (
            2,
            {
                "boot_id": "b",
                "pid_namespace": "n",
                "pid": 1,
                "device": "g",
                "handle": "AAAA" * 21 + "AA==",
                "offset": 0,
                "blocks": 1,
                "block_bytes": 8,
            },
        ),
        (3, {"agent": "a", "metadata": "AA==", "address": 1, "blocks": 1, "block_bytes": 8}),
        (4, {"host": "h", "machine": "m", "device": "", "message_bytes": 1}),
        (5, {"host": "h", "port": 1, "token": "t", "message_bytes": 1}),
    ]
    made = [bytes([number]) + json.dumps(offer).encode() for number, offer in offers]
    return [b"\x00" + frame.finish(7), *made]


TARGETS = {
    target.name: target
    for target in (
        Target("gguf", ("deploy.models.gguf_convert", "gguf"), _gguf, _gguf_seeds, 1 << 15),
        Target("safetensors", ("engine.model.weights",), _safetensors, _safetensors_seeds),
        Target(
            "sse",
            ("baton.client.http_api", "loadtest.generator.targets.openai_target"),
            _sse,
            _sse_seeds,
        ),
        Target("protobuf", ("baton.rpc.convert", "router"), _protobuf, _protobuf_seeds),
        Target("http-body", ("router", "baton"), _http_body, _http_body_seeds),
        Target("handoff", ("kvtransfer",), _handoff, _handoff_seeds),
        *SANDBOXED,
    )
}
