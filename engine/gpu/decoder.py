"""Steps on a GPU: Triton kernels, decode steps captured as CUDA graphs, draws on the device.

A step may start before the previous one has ended, and may use tokens that are still being sampled.
Such tokens are read on the GPU, and do not pass through the host first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from engine.gpu.block_tables import BlockTables, table_rows
from engine.gpu.draws import GREEDY, Draw, DrawArrays, keep_allowed
from engine.gpu.forward import Forward
from engine.gpu.fused_weights import GpuWeights
from engine.gpu.graphs import Bucket, Capture, CudaCapture, DecodeGraphs
from engine.gpu.kernels.sample import draw, forbid
from engine.gpu.step_tensors import (
    StepShape,
    StepTensors,
    buffer_bytes,
    fill_step,
    ordered_rows,
    plan_places,
    step_shape,
    step_tensors,
    table_width,
)
from engine.kv.kv_cache import KvCache
from engine.parallel.context_parallel import ContextSteps, StepPart
from engine.parallel.rank_group import RankGroup
from engine.parallel.ranks import Leader
from engine.sampling.grammar_state import Mask, pack
from engine.sampling.step import StepInput, StepOutput

Masks = Callable[[], dict[int, Mask]]
"""Makes the masks of a step's outputs, by output number. It is called while the GPU computes the
logits."""

_CHUNKS = (2, 8, 16, 32, 128)
"""Chunk sizes, in tokens, that warm-up runs, so that attention kernels with different tile sizes
are compiled, whatever the number of heads per group is."""


def gpu_decoder(
    weights: GpuWeights, cache: KvCache, max_rows: int, leader: Leader | None = None
) -> GpuStepModel:
    """Make the GPU's model, which captures its decode steps as CUDA graphs.

    ``max_rows`` is the maximum number of rows in a decode step. With several ranks, rank 0 passes
    the ``leader``, which sends steps to the others.
    """
    capture = CudaCapture(cache.data.device)
    return GpuStepModel(weights, cache, max_rows, capture=capture, leader=leader)


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A step whose work is queued on the GPU; it may still be running."""

    _drawn: torch.Tensor
    """Sampled tokens on the host, int64 [outputs]; valid once ``_ended`` has occurred."""
    _ended: torch.cuda.Event | None

    def has_ended(self) -> bool:
        """Whether the step has ended, so that its tokens are on the host. Never waits."""
        return self._ended is None or bool(self._ended.query())  # type: ignore[no-untyped-call]

    def token_ids(self) -> list[int]:
        """Wait for the step's end, and return the token of each output. The step's KV is then in
        the cache."""
        if self._ended is not None:
            self._ended.synchronize()
        found: list[int] = self._drawn.tolist()
        return found


class GpuStepModel:
    """Computes and samples steps on a GPU. Implements ``engine.sampling.step.StepModel``, and has
    ``start``, which does not wait."""

    def __init__(
        self,
        weights: GpuWeights,
        cache: KvCache,
        max_rows: int,
        *,
        capture: Capture | None = None,
        leader: Leader | None = None,
    ) -> None:
        """``capture`` captures steps as CUDA graphs; if it is None, no step is captured. ``leader``
        sends each step to the other ranks.

        With deterministic weights, a row's logits depend only on its sequence, bit for bit.
        """
        config = weights.config
        self._leader = leader
        self._group = _group_of(weights)
        self._context: ContextSteps | None = None
        """Divides steps among the ranks of a context-parallel worker; None for other workers."""
        if weights.context is not None:
            self._context = ContextSteps(cache, weights.context)
        self._device = cache.data.device
        self._block_size = cache.block_size
        self._singles_first = not weights.deterministic
        self._vocab_size = config.vocab_size
        self._layers = config.layers
        self._forward = Forward(weights, cache)
        self._drawn = torch.zeros(max_rows, dtype=torch.int64, device=self._device)
        context = min(config.context_length, cache.blocks * cache.block_size)
        self._tables = BlockTables(
            table_rows(max_rows, divided=self._context is not None),
            table_width(max(context, *_CHUNKS), cache.block_size),
            self._device,
        )
        self._draws = DrawArrays(())
        self.sent_bytes = 0
        """Bytes of steps' inputs that were copied to the device."""
        self._graphs: DecodeGraphs | None = None
        if capture is not None and not weights.waits:
            self._graphs = DecodeGraphs(self._decode, capture, max_rows, context)
            largest = self._decode_shape(self._graphs.largest)
            self._inputs = torch.zeros(
                buffer_bytes(largest), dtype=torch.uint8, device=self._device
            )
            self._logits = torch.zeros(largest.tokens, config.vocab_size, device=self._device)

    layers_done = 0
    """Always 0: a GPU reports nothing about a step before its end."""

    def clear_progress(self) -> None:
        """Do nothing, because ``layers_done`` is always 0."""

    def use_threads(self, threads: int) -> None:
        """Do nothing: a GPU's steps use one CPU thread."""

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepOutput:
        """Compute a step's tokens, and store their KV. For a greedy step, wait until the tokens are
        on the host.

        Only the output of the last layer is available as hidden states; raises ValueError for
        others.
        """
        with self._leading(step, draws=False):
            return self._run_whole(step)

    def _run_whole(self, step: StepInput) -> StepOutput:
        """Run a step. In a context-parallel worker, the ranks divide the step, and this rank runs
        its part."""
        return self._found(step) if self._context is None else self._context.run(step, self._found)

    def _found(self, step: StepInput) -> StepOutput:
        """Compute this rank's part of a step, and return its output."""
        draws = self._arrays([GREEDY] * len(step.outputs)) if step.greedy else None
        hidden = None
        if step.hidden_layers:
            logits, tensors, hidden = self._watched(step, draws)
        else:
            logits, tensors = self._compute(step, draws)
        if not step.greedy:
            return StepOutput(None, logits, hidden)
        return StepOutput(self._draw(logits, tensors).tolist(), None, hidden)

    @torch.inference_mode()
    def start(
        self, step: StepInput, draws: Sequence[Draw], masks: Masks | None = None
    ) -> StartedStep:
        """Start a step that samples a token for each output. ``draws`` has the sampling parameters
        of each output, and ``masks`` returns the allowed tokens.

        An input token of -1 - n is a placeholder for the token that the previously started step
        samples for its output n. A step has at most ``max_rows`` outputs.
        """
        with self._leading(step, draws=True):
            with self._part(step) as part:
                assert part is not None, "rank 0 has a part of every step"
                assert not part.gathers, "rank 0 has the last token of every row"
                arrays = self._arrays(draws)
                logits, tensors = self._compute(part.step, arrays)
                if masks is not None:
                    made = masks()
                    forbid(logits, list(made), list(made.values()))
                drawn = self._draw(keep_allowed(logits, arrays), tensors)
                self._drawn[: len(drawn)].copy_(drawn)
            self._broadcast_drawn(len(drawn))
        return self._brought(drawn)

    def _part(self, step: StepInput) -> AbstractContextManager[StepPart | None]:
        """Context in which this rank computes its part of a step; its value is None if the rank has
        no part."""
        if self._context is None:
            return nullcontext(StepPart(step))
        return self._context.part(step)

    @torch.inference_mode()
    def follow(self, step: StepInput, *, draws: bool) -> None:
        """Compute the part of a step that belongs to a rank other than 0. With ``draws``, receive
        the tokens that rank 0 samples."""
        if self._context is not None:
            self._context.run(step, self._found)
        elif step.hidden_layers:
            self._watched(step, None)
        else:
            self._compute(step, None)
        if draws:
            self._broadcast_drawn(len(step.outputs))

    def _leading(self, step: StepInput, *, draws: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._leader is None else self._leader.computing(step, draws=draws)

    def _broadcast_drawn(self, count: int) -> None:
        """Send the first ``count`` tokens that rank 0 has sampled to all ranks, so that the next
        step may use them as inputs."""
        if self._group is not None and count:
            self._group.broadcast(self._drawn[:count])

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile the kernels for several chunk sizes and for masks, and capture decode steps of
        usual sizes.

        These steps consist of padding: they write to no block.
        """
        if self._leader is not None:
            self._leader.tell_warm_up()
        nothing = StepInput((), [], [], True)
        any_token = pack(np.ones(self._vocab_size, np.bool_))
        forbid(torch.zeros(1, self._vocab_size, device=self._device), [0], [any_token])
        for tokens in _CHUNKS:
            width = table_width(tokens, self._block_size)
            self._run(StepShape(0, 0, 1, tokens, tokens, width, 1), nothing, None, None)
        if self._graphs is not None:
            for bucket in self._graphs.warm_sizes():
                self._replay(bucket, nothing, None)

    def _draw(self, logits: torch.Tensor, tensors: StepTensors) -> torch.Tensor:
        """Sample a token from each row of logits, fp32 [outputs, vocab_size]. Returns int64
        [outputs]."""
        count = len(logits)
        if not count:
            return torch.zeros(0, dtype=torch.int64, device=self._device)
        return draw(logits, tensors.temperatures[:count], tensors.keys[:count])

    def _brought(self, drawn: torch.Tensor) -> StartedStep:
        if self._device.type != "cuda":
            return StartedStep(drawn.clone(), None)
        host = torch.empty(drawn.shape, dtype=torch.int64, pin_memory=True)
        host.copy_(drawn, non_blocking=True)
        # A thread that waits sleeps: other threads of the process need the CPU.
        ended = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        ended.record(torch.cuda.current_stream(self._device))
        return StartedStep(host, ended)

    def _arrays(self, draws: Sequence[Draw]) -> DrawArrays:
        """Return the arrays of a step's draws. The previous step's arrays serve again if it had the
        same draws."""
        if self._draws.draws != draws:
            self._draws = DrawArrays(draws)
        return self._draws

    def _compute(
        self, step: StepInput, draws: DrawArrays | None
    ) -> tuple[torch.Tensor, StepTensors]:
        """Compute a step's logits, fp32 [outputs, vocab_size]. Also returns the step's input
        tensors on the device."""
        bucket = self._bucket(step)
        if bucket is None:
            return self._eager(step, draws)
        tensors = self._replay(bucket, step, draws)
        logits = self._logits[: len(step.outputs)]
        if step.outputs != list(range(len(step.outputs))):
            logits = self._logits[tensors.outputs[: len(step.outputs)]]
        return logits, tensors

    def _bucket(self, step: StepInput) -> Bucket | None:
        """Choose the size of the CUDA graph for a step; None for a step that is not captured."""
        if self._graphs is None or max([row.count for row in step.rows]) > 1:
            return None
        longest = max([row.start for row in step.rows]) + 1
        return self._graphs.bucket(len(step.rows), longest)

    def _eager(
        self, step: StepInput, draws: DrawArrays | None, states: list[torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, StepTensors]:
        shape = step_shape(
            step.rows, len(step.outputs), self._block_size, singles_first=self._singles_first
        )
        order = ordered_rows(step.rows, singles_first=self._singles_first)
        return self._run(shape, step, order, draws, states)

    def _watched(
        self, step: StepInput, draws: DrawArrays | None
    ) -> tuple[torch.Tensor, StepTensors, torch.Tensor]:
        """Run a step that also returns the last layer's output for ``StepOutput.hidden``. Such a
        step is never captured."""
        if step.hidden_layers != (self._layers,):
            raise ValueError(f"only the hidden states of {self._layers} are available")
        states: list[torch.Tensor] = []
        logits, tensors = self._eager(step, draws, states)
        order = ordered_rows(step.rows, singles_first=self._singles_first)
        places = torch.from_numpy(plan_places(step.rows, order)).to(self._device)
        return logits, tensors, states[0][places][:, None]

    def _run(
        self,
        shape: StepShape,
        step: StepInput,
        order: Sequence[int] | None,
        draws: DrawArrays | None,
        states: list[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, StepTensors]:
        host = self._filled(shape, step, order, draws)
        buffer = host.to(self._device, non_blocking=True)
        tensors = step_tensors(buffer, shape, self._tables.device)
        logits = self._forward.logits(tensors, self._drawn, tensors.outputs, states)
        return logits.float(), tensors

    def _replay(self, bucket: Bucket, step: StepInput, draws: DrawArrays | None) -> StepTensors:
        assert self._graphs is not None, "a bucket comes from them"
        shape = self._decode_shape(bucket)
        host = self._filled(shape, step, None, draws)
        self._inputs[: len(host)].copy_(host, non_blocking=True)
        self._graphs.run(bucket)
        return step_tensors(self._inputs, shape, self._tables.device)

    def _filled(
        self,
        shape: StepShape,
        step: StepInput,
        order: Sequence[int] | None,
        draws: DrawArrays | None,
    ) -> torch.Tensor:
        """Send the changes of the step's block tables to the device. Returns the step's other
        inputs, on the host."""
        self.sent_bytes += self._tables.update(step.rows, order)
        host = self._host_buffer(shape)
        self.sent_bytes += len(host)
        tables = torch.from_numpy(self._tables.host)
        fill_step(step_tensors(host, shape, tables), step, order, self._block_size, draws)
        return host

    def _decode(self, bucket: Bucket) -> None:
        """Run a decode step on persistent tensors. This function is captured as a CUDA graph."""
        tensors = step_tensors(self._inputs, self._decode_shape(bucket), self._tables.device)
        logits = self._forward.logits(tensors, self._drawn, None)
        # With several ranks, only the first has logits.
        self._logits[: len(logits)].copy_(logits)

    def _decode_shape(self, bucket: Bucket) -> StepShape:
        singles = bucket.rows if self._singles_first else 0
        chunks = bucket.rows - singles
        return StepShape(
            singles=singles,
            longest_single=bucket.longest,
            chunks=chunks,
            chunk_tokens=chunks,
            longest_chunk=1,
            width=table_width(bucket.longest, self._block_size),
            outputs=bucket.rows,
        )

    def _host_buffer(self, shape: StepShape) -> torch.Tensor:
        """Allocate host memory for a step's input tensors. The memory is pinned if there is a GPU.

        torch's allocator does not reuse this memory before the copy to the GPU has ended.
        """
        pinned = self._device.type == "cuda"
        return torch.empty(buffer_bytes(shape), dtype=torch.uint8, pin_memory=pinned)


def _group_of(weights: GpuWeights) -> RankGroup | None:
    """The group of ranks that compute together; None if there is only one rank."""
    if weights.rank is not None:
        return weights.rank.group
    return None if weights.context is None else weights.context.group
