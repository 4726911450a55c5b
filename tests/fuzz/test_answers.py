"""Answers under faults are those of one calm engine; and planted bugs are found."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.request import AttemptName, SequenceSpec
from decode_worker.requests import DecodeRequests
from engine.sampling.step import StepWork
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.transports import grpc_transport
from kvtransfer.transports.transport import AnnouncedBatch
from router.dispatch.running_request import RunningRequest
from tests.fuzz.answers import cluster
from tests.fuzz.answers.main import Found, fuzz

SEEDS = (126, 308)
"""The first one begins with a worker that is killed and pairs that break, the second one with a
change of the model."""
SECONDS = 5.0
LONG_MINUTES = 10.0
LONG_SEED = 1000


def check(found: Found) -> None:
    """Fail with what was found, unless it is nothing."""
    assert not found.faults, "\n\n".join([str(found), *found.faults[:5]])


@pytest.mark.parametrize("seed", SEEDS)
def test_answers_under_faults_are_those_of_one_engine(seed: int, tmp_path: Path) -> None:
    found = fuzz(SECONDS / 60, seed, tmp_path)
    check(found)
    assert found.compared
    assert found.strikes


@pytest.mark.long
@pytest.mark.timeout(2 * LONG_MINUTES * 60)
def test_answers_under_faults_are_those_of_one_engine_for_long(tmp_path: Path) -> None:
    found = fuzz(LONG_MINUTES, LONG_SEED, tmp_path)
    check(found)
    assert len(found.by_model) > 1


# Bugs


def draw_other_rows(patch: pytest.MonkeyPatch) -> None:
    """As many outputs as draws stand for one output for each draw."""
    sound = StepWork.draw_logits

    def draw_logits(self: StepWork, logits: torch.Tensor) -> torch.Tensor:
        return logits if len(self.outputs) == len(self.draws) else sound(self, logits)

    patch.setattr(StepWork, "draw_logits", draw_logits)


def forget_penalties(patch: pytest.MonkeyPatch) -> None:
    """A request that moves leaves its penalties behind."""
    sound = RunningRequest.sequence_spec

    def sequence_spec(self: RunningRequest, *args: object, **more: object) -> SequenceSpec:
        spec: SequenceSpec = sound(self, *args, **more)  # type: ignore[arg-type]
        if not spec.attempt:
            return spec
        plain = replace(
            spec.sampling, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0
        )
        return replace(spec, sampling=plain)

    patch.setattr(RunningRequest, "sequence_spec", sequence_spec)


def skip_checksums(patch: pytest.MonkeyPatch) -> None:
    """Blocks arrive damaged now and then, and their checksums are not compared."""
    numbers = itertools.count()
    patch.setattr(cluster, "shape_of", lambda source: {"transport": "grpc"})

    def place(
        memory: BlockMemory,
        batch: AnnouncedBatch,
        source: memoryview,
        starts: Sequence[int],
        first: int = 0,
    ) -> tuple[int, ...]:
        data = bytearray(source)
        if next(numbers) % 5 == 0:
            data[1::2] = bytes(len(data[1::2]))
        parts, count = batch.target, len(starts)
        blocks = parts.blocks[first : first + count]
        memory.write_many(blocks, parts.offset, parts.length, memoryview(data), starts)
        return batch.checksums[first : first + count]

    patch.setattr(grpc_transport, "place", place)


def leak_blocks(patch: pytest.MonkeyPatch) -> None:
    """A sequence that is aborted keeps a block."""
    sound = DecodeRequests._forget

    def abort(self: DecodeRequests, attempt: AttemptName, choice: int | None = None) -> None:
        for sequence in sound(self, attempt, choice):
            self.context.engine.pool.pin(sequence.block_table[:1])
            self.context.core.remove(sequence)

    patch.setattr(DecodeRequests, "abort", abort)


WRONG = r"token \d+ is|tokens, expected|no model's answer begins"


@pytest.mark.long
@pytest.mark.parametrize(
    ("plant", "kinds", "told"),
    [
        (draw_other_rows, (), WRONG),
        (forget_penalties, ("token stream breaks", "worker killed"), WRONG),
        (skip_checksums, (), WRONG),
        (leak_blocks, (), r"left over: decode-\d"),
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    kinds: tuple[str, ...],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    found = fuzz(0.5, 5, tmp_path, kinds or ("pair breaks",))
    assert any(re.search(told, fault) for fault in found.faults), str(found)
