"""How much memory of a GPU an engine needs beside its weights and its KV blocks.

Sizes in, bytes out: nothing here asks a device. Each term names what allocates it. A step's tensors
come and go, so that what counts is the highest of its phases; the terms are bounds, which tests
compare with the steps themselves (docs/lab-notes/gpu-proofs.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.checkpoint.model_config import ModelConfig
from engine.gpu.fused_weights import PIECE_VALUES
from engine.gpu.graphs import batch_sizes, length_sizes
from engine.gpu.kernels.attention.decode import SPLIT, scratch_bytes, scratch_rows
from engine.gpu.kernels.linear.quantized import MAX_ROWS
from engine.gpu.step_tensors import StepShape, buffer_bytes, table_width

CUBLAS_BYTES = 128 << 20
"""Workspaces of cuBLAS and cuBLASLt: 32 MiB each on sm_90 and later, less before, for the stream of
steps and the one of captures."""
NCCL_BYTES = 512 << 20
"""Buffers of NCCL's channels, where there are several ranks. An allowance, not a measurement."""
GRAPH_LAYER_BYTES = 256 << 10
"""The nodes of one layer in a captured step, on the GPU. An allowance, not a measurement."""
_FRAGMENTS = 8
"""A part of a step's tensors: what lies between them in the allocator's segments."""

_FLOAT = 4
_ROUNDED = 4096
"""What the sizes of a few small tensors are rounded by."""
_SAMPLED = 56
"""Bytes of a logit while tokens are drawn under top-p (engine/gpu/draws.py): logits, those of the
rows that are limited, scores, sorted scores, each fp32, and an int64 order; and 32 within the sort:
two copies of (row, place), 8 bytes each, its own keys, and what it exchanges them with."""
_RANK = 64
"""Bytes of a token of the vocabulary, for all rows: its rank, and what allocations are rounded by.
"""
_SCORED = 20
"""The same while log probabilities are taken (engine/sampling/logprobs.py): logits, the rows that
are wanted, their exponentials twice, and a mask."""
_PAIR = 96
"""Bytes of a pair (token, expert) beside its rows: choices, factors, order, places; and a sort."""
_SPLIT_OUTPUTS = 264 * 64
"""Outputs times splits of ``quantized_linear`` beyond the outputs themselves, at most."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What bounds the steps of an engine, or of one rank of several."""

    chunk_tokens: int
    """Of a step with a prompt in it."""
    decode_rows: int
    """Of a step without one, drafted tokens included."""
    scored_tokens: int
    """Tokens of a step that have logits beside those of ``decode_rows``."""
    block_size: int
    context: int
    """Tokens of the longest sequence."""
    itemsize: int
    """Bytes of a number of the weights' type, where they are not quantized."""
    quantized: bool = False
    """Whether layers have codes for weights."""
    separate_experts: bool = False
    """Whether experts are computed one after another, without graphs."""
    deterministic: bool = False
    ranks: int = 1
    """That divide the model; the config is one rank's."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on the GPU, by what takes them."""

    step: int
    """Tensors of the largest step that is not captured, what is drawn included."""
    captured: int
    """Tensors between the kernels of the largest captured step: all graphs share them."""
    fixed: int
    """Inputs and outputs of captured steps, which are always there."""
    nodes: int
    """Graphs themselves."""
    libraries: int
    """Workspaces of cuBLAS and buffers of NCCL."""

    @property
    def total(self) -> int:
        # A step runs once on tensors of its own before it is captured.
        tensors = max(self.step, self.captured) + self.captured
        return tensors + tensors // _FRAGMENTS + self.fixed + self.nodes + self.libraries


def memory_plan(config: ModelConfig, limits: StepLimits) -> MemoryPlan:
    """The plan for a model, of which ``config`` is what this GPU holds."""
    graphs = not limits.separate_experts
    rows = batch_sizes(limits.decode_rows)[-1]
    tokens = max(limits.chunk_tokens, limits.decode_rows)
    outputs = limits.decode_rows + limits.scored_tokens
    return MemoryPlan(
        step=_ROUNDED
        + _input_bytes(limits, tokens, limits.decode_rows, outputs)
        + max(
            *_phases(config, limits, tokens, limits.decode_rows, outputs, captured=False),
            *_logits_phases(config, limits, outputs),
        ),
        captured=max(_phases(config, limits, rows, rows, rows, captured=True)) if graphs else 0,
        fixed=_fixed(config, limits, rows),
        nodes=GRAPH_LAYER_BYTES
        * config.layers
        * len(batch_sizes(limits.decode_rows))
        * len(length_sizes(limits.context))
        if graphs
        else 0,
        libraries=CUBLAS_BYTES + (NCCL_BYTES if limits.ranks > 1 else 0),
    )


def _input_bytes(limits: StepLimits, tokens: int, rows: int, outputs: int) -> int:
    """Of the buffer of ``engine.gpu.step_tensors``: mainly block tables."""
    width = table_width(limits.context, limits.block_size)
    chunk = tokens - rows
    return buffer_bytes(
        StepShape(rows, limits.context, min(1, chunk), chunk, chunk, width, outputs)
    )


def _fixed(config: ModelConfig, limits: StepLimits, rows: int) -> int:
    """Drawn tokens; of captured steps the inputs, and logits in fp32."""
    drawn = 8 * limits.decode_rows + _ROUNDED
    if limits.separate_experts:
        return drawn
    return _input_bytes(limits, rows, rows, rows) + rows * config.vocab_size * _FLOAT + drawn


def _phases(
    config: ModelConfig,
    limits: StepLimits,
    tokens: int,
    singles: int,
    outputs: int,
    *,
    captured: bool,
) -> Iterator[int]:
    """What is live together in each part of a pass (engine/gpu/forward.py)."""
    size, hidden = limits.itemsize, config.hidden_size
    # What a sublayer gives: sums of experts are fp32.
    given = _FLOAT if config.experts is not None else size
    # The residual stream in fp32, what the last sublayer gave, and the normed input of this one.
    carried = tokens * hidden * (_FLOAT + given + size)
    # The lookup of a quantized embedding, or of one that ranks divide: codes and values.
    yield tokens * hidden * (size + 3 * _FLOAT)
    # A sum without a norm before the next sublayer, or behind the last one: what is added in fp32,
    # for OLMo with its norm's steps, and the sum in the weights' type.
    steps = 4 if config.norm_placement == "post" else 1
    yield carried + tokens * hidden * (steps * _FLOAT + size)
    yield carried + _attention(config, limits, tokens, singles)
    yield carried + _feed_forward(config, limits, tokens)
    yield _head(config, limits, tokens, outputs, captured=captured)


def _attention(config: ModelConfig, limits: StepLimits, tokens: int, singles: int) -> int:
    size, dim = limits.itemsize, config.head_dim
    wide = config.heads * dim
    projected = (config.heads + 2 * config.kv_heads) * dim
    # query_key_value's output; rotated queries; attention's output.
    kernels = tokens * size * (projected + 2 * wide)
    if config.qk_norm == "full":
        # Queries and keys that were normed before.
        kernels += tokens * size * (projected - config.kv_heads * dim)
    if not limits.deterministic:
        kernels += max(_scratch(config, limits, singles, window) for window in set(config.windows))
    # OLMo's norms over all heads: of the queries their fp32 form, its square, the normed ones and
    # the rounded ones, before they are rotated.
    norms = tokens * (size * (projected + wide) + 3 * _FLOAT * wide)
    projection = tokens * size * projected + _linear(limits, tokens, config.hidden_size, projected)
    after = tokens * size * wide + _linear(limits, tokens, wide, config.hidden_size)
    return max(kernels, norms if config.qk_norm == "full" else 0, projection, after)


def _scratch(config: ModelConfig, limits: StepLimits, rows: int, window: int) -> int:
    """Of ``decode_attention``: splits of all rows as long as the longest may be."""
    keys = min(limits.context, window + SPLIT - 1) if window else limits.context
    splits = -(-keys // SPLIT)
    sharing = scratch_rows(rows, config.heads, config.head_dim, splits)
    return scratch_bytes(sharing, config.heads, config.head_dim, splits)


def _feed_forward(config: ModelConfig, limits: StepLimits, tokens: int) -> int:
    experts = config.experts
    dense = _mlp(config, limits, tokens, config.intermediate_size)
    if experts is None:
        return dense
    if len(experts.layers) == config.layers:
        dense = 0
    hidden, inner, size = config.hidden_size, experts.intermediate_size, limits.itemsize
    pairs = tokens * experts.per_token
    # The router's logits, these in fp32, and their softmax; what is sorted and counted.
    routing = tokens * experts.count * (size + 2 * _FLOAT) + pairs * _PAIR
    # Of ``add_choices``: rows without those of others, rows by token in fp32, these times their
    # factors, and the sums.
    added = pairs * hidden * (size + 2 * _FLOAT) + tokens * hidden * _FLOAT
    if limits.separate_experts:
        # Rows by expert, what each made of them, and all these together.
        gathered = 2 * pairs * hidden * size
        one = _mlp(config, limits, tokens, inner)
        return max(dense, routing + gathered + max(one, added))
    # Gate and up of all pairs, then what is gated, and the rows that come of it.
    both, rows = 2 * pairs * inner * size, pairs * hidden * size
    mixed = both + rows + max(pairs * inner * size, added)
    return max(dense, routing + mixed)


def _mlp(config: ModelConfig, limits: StepLimits, tokens: int, inner: int) -> int:
    """Of one gated MLP: gate and up, what is gated, and its output."""
    hidden, size = config.hidden_size, limits.itemsize
    return max(
        _linear(limits, tokens, hidden, 2 * inner),
        tokens * size * 3 * inner,
        tokens * size * inner + _linear(limits, tokens, inner, hidden),
    )


def _linear(limits: StepLimits, rows: int, inputs: int, outputs: int) -> int:
    """Of a linear layer: its output, and what it takes to compute it."""
    out = rows * outputs * limits.itemsize
    if not limits.quantized:
        return out
    if rows <= MAX_ROWS or limits.deterministic:
        # Splits of the inputs in fp32 (quantized_linear); of fixed order pieces of the rows.
        some = min(rows, MAX_ROWS)
        return 2 * out + some * _FLOAT * (outputs + _SPLIT_OUTPUTS)
    # A piece of the weights: its codes, scales and minimums spread over all inputs, and their sum,
    # each in fp32 (quantized_linear.dequantized), the piece before it in the weights' type, and the
    # groups' numbers; or then its products.
    values = min(outputs, max(1, PIECE_VALUES // inputs)) * inputs
    made = values * (4 * _FLOAT + limits.itemsize) + 8 * inputs
    multiplied = 2 * values * limits.itemsize + min(out, rows * limits.itemsize * values // inputs)
    return out + max(made, multiplied)


def _head(
    config: ModelConfig, limits: StepLimits, tokens: int, outputs: int, *, captured: bool
) -> int:
    """Of the last norm and the head, over some of the tokens; of embeddings over all states."""
    hidden, vocab, size = config.hidden_size, config.vocab_size, limits.itemsize
    states = tokens * hidden * (_FLOAT + size)
    chosen = outputs * hidden * (2 * _FLOAT + size)
    logits = _linear(limits, outputs, hidden, vocab)
    if config.logits_softcap:
        # In fp32, two at a time.
        logits += outputs * vocab * 2 * _FLOAT
    elif not captured:
        # In fp32; a captured step writes these into tensors that are always there.
        logits += outputs * vocab * _FLOAT
    if limits.ranks > 1:
        # The parts of all ranks, and these together (engine/parallel/rank_model.py).
        logits += 2 * outputs * vocab * _FLOAT
    embedded = tokens * hidden * _FLOAT
    return states + chosen + max(logits, embedded)


def _logits_phases(config: ModelConfig, limits: StepLimits, outputs: int) -> Iterator[int]:
    """What is made of the logits, when the pass is over."""
    yield config.vocab_size * (limits.decode_rows * _SAMPLED + _RANK)
    yield outputs * config.vocab_size * _SCORED
