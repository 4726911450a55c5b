"""Steps of a model on a pretended GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, cycle, repeat

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.gpu.decoder import GpuStepModel
from engine.gpu.draws import GREEDY, Draw
from engine.gpu.forward import Forward
from engine.gpu.fused_weights import GpuWeights, gpu_weights
from engine.gpu.step_tensors import StepShape, buffer_bytes, step_tensors, table_width
from engine.kv.kv_cache import KvCache
from engine.sampling.logprobs import Scored, token_logprobs
from engine.sampling.step import StepInput
from engine.scheduling.plan import PlanRow
from tests.kernels.gpu.fake.device import CUDA, FakeGpu
from tests.kernels.gpu.fake.models import WeightType, model_of

BLOCK = 16
LIMITED = Draw(0.7, 1, 0, 0, 0.9, 0.0)
"""A draw that looks at the whole vocabulary."""


@dataclass(frozen=True, slots=True)
class Steps:
    """A step model whose blocks hold one sequence of the whole context, and what watches it."""

    gpu: FakeGpu
    config: ModelConfig
    weights: GpuWeights
    cache: KvCache
    model: GpuStepModel
    fixed_bytes: int
    """What the step model holds by itself."""

    def decode(self, rows: int, longest: int) -> None:
        """A captured step of sequences that attend to at most ``longest`` tokens.

        Where the model has no graphs its pass is watched as if it were captured.
        """
        if not self.weights.waits:
            self.model.start(self._step([(longest - 1, 1)] * rows), [GREEDY] * rows)
            return
        singles = 0 if self.weights.deterministic else rows
        width, chunks = table_width(longest, BLOCK), rows - singles
        shape = StepShape(singles, longest, chunks, chunks, 1, width, rows)
        buffer = torch.empty(buffer_bytes(shape), dtype=torch.uint8, device=CUDA)
        drawn = torch.empty(rows, dtype=torch.int64, device=CUDA)
        tables = torch.empty(rows, width, dtype=torch.int32, device=CUDA)
        forward = Forward(self.weights, self.cache)
        with self.gpu.capturing():
            forward.logits(step_tensors(buffer, shape, tables), drawn, None)

    def draw(self, rows: int, tokens: int) -> None:
        """``rows`` sequences; one has a chunk that makes it ``tokens`` in all."""
        self._answer(tokens)
        self.model.start(self._mixed(rows, tokens), [LIMITED] * rows)

    def score(self, rows: int, tokens: int, outputs: int) -> None:
        """The same, and log probabilities of ``outputs`` tokens."""
        self._answer(tokens)
        logits = self.model.run(self._mixed(rows, tokens, outputs)).logits
        assert logits is not None
        self.gpu.answers = None
        token_logprobs(logits, [Scored(n, 0, 1) for n in range(outputs)])

    def embed(self, rows: int, tokens: int) -> None:
        """The same with the last layer's states."""
        self._answer(tokens)
        self.model.run(self._mixed(rows, tokens, hidden=(self.config.layers,)))

    def _mixed(
        self, rows: int, tokens: int, outputs: int | None = None, hidden: tuple[int, ...] = ()
    ) -> StepInput:
        last = self.config.context_length - 1
        chunk = tokens - rows + 1
        return self._step([(last, 1)] * (rows - 1) + [(last + 1 - chunk, chunk)], outputs, hidden)

    def _step(
        self,
        rows: list[tuple[int, int]],
        outputs: int | None = None,
        hidden: tuple[int, ...] = (),
    ) -> StepInput:
        """Rows (start, count); ``outputs`` tokens have logits, or as many as there are rows."""
        plan = tuple(PlanRow(n, start, count, (), True) for n, (start, count) in enumerate(rows))
        wanted = list(range(len(rows) if outputs is None else outputs))
        return StepInput(plan, [0] * sum(count for _, count in rows), wanted, False, hidden)

    def _answer(self, tokens: int) -> None:
        """Where the host asks for it: all tokens have chosen the same experts."""
        experts = self.config.experts
        if experts is not None:
            rest = experts.count - experts.per_token
            counts: Iterator[int] = chain(repeat(tokens, experts.per_token), repeat(0, rest))
            self.gpu.answers = cycle(counts)


def steps_of(
    gpu: FakeGpu,
    config: ModelConfig,
    kind: WeightType,
    max_rows: int,
    *,
    deterministic: bool = False,
    ranks: int = 1,
) -> Steps:
    """Steps without a prompt have up to this many rows; ``config`` is the whole model's.

    Of several ``ranks`` the steps of rank 0.
    """
    weights = gpu_weights(model_of(config, kind, ranks), deterministic=deterministic)
    blocks = -(-config.context_length // BLOCK) + 1
    cache = KvCache(weights.config, blocks, BLOCK, torch.bfloat16, CUDA)
    before = gpu.ledger.live
    model = GpuStepModel(weights, cache, max_rows, capture=gpu.capture)
    return Steps(gpu, weights.config, weights, cache, model, gpu.ledger.live - before)
