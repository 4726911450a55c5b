"""What fuzzing has found, so that it stays fixed; and that every target takes its own seeds."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.client.http_api import event_of
from baton.errors import ConfigError, HandoffError, WorkerFailed
from baton.rpc import convert
from baton.v1 import worker_pb2
from deploy.models.gguf_convert import convert as convert_gguf
from kvtransfer.transports import shm_transport
from tests.fuzz.target import Target, judged
from tests.fuzz.targets import TARGETS
from tests.support.deploy.tiny_gguf import write_gguf


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_every_target_takes_its_seeds(target: object) -> None:
    assert isinstance(target, Target)
    one = judged(target)
    for seed in target.seeds():
        one(seed)
        one(seed[: len(seed) // 2])
    one(b"")


@pytest.mark.parametrize(
    ("cost", "why"),
    [(lambda: sum(range(10**7)), "s of CPU time"), (lambda: len(bytearray(64 << 20)), "MiB")],
    ids=["time", "memory"],
)
def test_an_input_that_costs_much_is_a_fault(cost: Callable[[], int], why: str) -> None:
    def one(data: bytes) -> None:
        if data == b"expensive":
            cost()

    cpu_s = 0.01 if "CPU" in why else 5.0
    target = Target("t", (), lambda: one, lambda: [b"cheap"], max_cpu_s=cpu_s, max_memory_mib=32)
    judge = judged(target)
    judge(b"cheap")
    with pytest.raises(AssertionError, match=why):
        judge(b"expensive")


def test_log_probabilities_without_their_tokens() -> None:
    """A ValueError of zip would have ended the reader of a worker's stream."""
    message = worker_pb2.TokenLogprobs(logprob=-1, top_ids=[1], top_logprobs=[-1, -2])
    with pytest.raises(HandoffError, match="without their tokens"):
        convert.logprobs_from_proto(message)


@pytest.mark.parametrize("line", ["data: [", "data: 1", "data: " + "[" * 100_000])
def test_events_that_are_none(line: str) -> None:
    with pytest.raises(WorkerFailed, match="cannot be read"):
        event_of(line)


def test_a_peers_offer_is_what_it_says() -> None:
    """A pid is part of a path: /proc/PID/fd/NUMBER."""
    for pid in (b'"self/../.."', b"-1", b"1.5", b"true", b"null"):
        offer = (
            b'{"boot_id": "b", "pid_namespace": "n", "pid": %s, "descriptor": 3, "inode": 4,'
            b' "bytes": 64, "block_bytes": 8}' % pid
        )
        with pytest.raises(HandoffError, match=r"(cannot be read|has an invalid value): pid"):
            shm_transport._parse(offer)
    with pytest.raises(HandoffError, match="cannot be read"):
        shm_transport._parse(b"[" * 100_000)


def test_a_gguf_that_promises_more_than_it_has(tmp_path: Path) -> None:
    """An array of 2^60 entries was read for ever, and layers were listed until memory ended."""
    file = write_gguf(tmp_path / "tiny.gguf")
    whole = file.read_bytes()
    at = whole.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    file.write_bytes(whole[:at] + struct.pack("<Q", 1 << 60) + whole[at + 8 :])
    with pytest.raises(ConfigError, match="not a readable GGUF file"):
        convert_gguf(file, tmp_path)
    at = whole.index(b"llama.block_count") + len(b"llama.block_count") + 4
    file.write_bytes(whole[:at] + struct.pack("<I", (1 << 31) - 1) + whole[at + 4 :])
    with pytest.raises(ConfigError, match=r"llama\.block_count"):
        convert_gguf(file, tmp_path)
