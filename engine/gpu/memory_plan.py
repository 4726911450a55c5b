"""Computes how much GPU memory an engine needs in addition to its weights and KV blocks.

The inputs are sizes, and no device is queried. Each term names what allocates it. A step's tensors
are allocated and freed, so the phase with the most memory counts. The terms are upper bounds; tests
compare them with real steps (docs/lab-notes/gpu-proofs.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.checkpoint.model_config import ModelConfig
from engine.gpu.block_tables import CHANGE_BYTES, MAX_SENT, table_rows
from engine.gpu.fused_weights import PIECE_VALUES
from engine.gpu.graphs import batch_sizes, length_sizes
from engine.gpu.kernels.attention.decode import SPLIT, scratch_bytes, scratch_rows
from engine.gpu.kernels.linear.quantized import MAX_ROWS
from engine.gpu.step_tensors import StepShape, buffer_bytes, table_width

CUBLAS_BYTES = 128 << 20
"""Bytes of the workspaces of cuBLAS and cuBLASLt: 32 MiB each on sm_90 and later, less on older
GPUs, for the stream of steps and that of captures."""
NCCL_BYTES = 512 << 20
"""Bytes of the buffers of NCCL's channels, if there are several ranks. An estimate, not a
measurement."""
GRAPH_LAYER_BYTES = 256 << 10
"""Bytes of GPU memory for the CUDA graph nodes of one layer in a captured step. An estimate, not a
measurement."""
_FRAGMENTS = 8
"""Assumed fragmentation: the allocator loses one byte for each group of this number of bytes in a
step's tensors."""

_FLOAT = 4
_ROUNDED = 4096
"""Bytes for rounding the sizes of a few small tensors."""
_SAMPLED = 56
"""Bytes per logit while tokens are sampled with top-p (engine/gpu/draws.py). These are five
tensors: logits, the logits of limited rows, scores and sorted scores, each fp32, and an int64
order. The sort needs 32 more: two copies of (row, index), 8 bytes each, its own keys, and an
exchange buffer."""
_RANK = 64
"""Bytes per token of the vocabulary, for all rows together: the token's rank, and rounding of
allocations."""
_SCORED = 20
"""Bytes per logit while log probabilities are computed (engine/sampling/logprobs.py): logits, the
selected rows, their exponentials twice, and a mask."""
_PAIR = 96
"""Bytes per pair (token, expert), without the rows of activations: choices, factors, order,
positions, and a sort."""
_SPLIT_OUTPUTS = 264 * 64
"""Bound for the scratch memory of ``quantized_linear``: its outputs times its splits exceed the
number of outputs by at most this number."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of an engine's steps on one GPU, from which the memory is computed."""

    chunk_tokens: int
    """Maximum tokens of a step with prompts."""
    decode_rows: int
    """Maximum rows of a step without prompts, including draft tokens."""
    scored_tokens: int
    """Maximum tokens of a step that have logits in order to score a prompt, in addition to
    ``decode_rows``."""
    block_size: int
    context: int
    """Maximum tokens of a sequence (the context length)."""
    itemsize: int
    """Bytes per number of the type of weights that are not quantized."""
    quantized: bool = False
    """Whether layers have quantized weights."""
    separate_experts: bool = False
    """Whether experts are computed one after another, so that no step is captured."""
    deterministic: bool = False
    divided: bool = False
    """Whether ranks divide prompts (context parallelism)."""
    ranks: int = 1
    """Number of ranks that divide the model. Each rank computes a memory plan from the
    configuration of its own shard."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of GPU memory that an engine needs in addition to weights and KV blocks, by purpose."""

    step: int
    """Bytes of the tensors of the largest step that is not captured, including sampling."""
    captured: int
    """Bytes of the temporary tensors of the largest captured step; all CUDA graphs share this
    memory."""
    fixed: int
    """Bytes of block tables, and of the inputs and outputs of captured steps. All of these are
    persistent."""
    nodes: int
    """Bytes of the CUDA graphs themselves."""
    libraries: int
    """Bytes of the workspaces of cuBLAS and the buffers of NCCL."""

    @property
    def total(self) -> int:
        # A step runs once on its own tensors before it is captured.
        tensors = max(self.step, self.captured) + self.captured
        return tensors + tensors // _FRAGMENTS + self.fixed + self.nodes + self.libraries


def memory_plan(config: ModelConfig, limits: StepLimits) -> MemoryPlan:
    """Compute the memory plan for a model; ``config`` is the configuration of this GPU's shard."""
    graphs = not limits.separate_experts
    rows = batch_sizes(limits.decode_rows)[-1]
    tokens = max(limits.chunk_tokens, limits.decode_rows)
    outputs = limits.decode_rows + limits.scored_tokens
    return MemoryPlan(
        step=_ROUNDED
        + min(MAX_SENT, limits.decode_rows * _width(limits)) * CHANGE_BYTES
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
    """Compute the bytes of a step's input buffer (``engine.gpu.step_tensors``)."""
    chunk = tokens - rows
    return buffer_bytes(
        StepShape(rows, limits.context, min(1, chunk), chunk, chunk, _width(limits), outputs)
    )


def _width(limits: StepLimits) -> int:
    """Compute the number of blocks in the longest block table."""
    return table_width(limits.context, limits.block_size)


def _fixed(config: ModelConfig, limits: StepLimits, rows: int) -> int:
    """Compute the bytes of sampled tokens, of block tables, and of the inputs and fp32 logits of
    captured steps."""
    tables = table_rows(limits.decode_rows, divided=limits.divided) * _width(limits)
    kept = 8 * limits.decode_rows + 4 * tables + _ROUNDED
    if limits.separate_experts:
        return kept
    return _input_bytes(limits, rows, rows, rows) + rows * config.vocab_size * _FLOAT + kept


def _phases(
    config: ModelConfig,
    limits: StepLimits,
    tokens: int,
    singles: int,
    outputs: int,
    *,
    captured: bool,
) -> Iterator[int]:
    """Yield, for each part of a forward pass (engine/gpu/forward.py), the bytes that are in use at
    the same time."""
    size, hidden = limits.itemsize, config.hidden_size
    # Output of a sublayer: sums of experts are fp32.
    given = _FLOAT if config.experts is not None else size
    # The residual stream in fp32, the last sublayer's output, and this one's normed input.
    carried = tokens * hidden * (_FLOAT + given + size)
    # The lookup of a quantized embedding, or of one that ranks divide: codes and values.
    yield tokens * hidden * (size + 3 * _FLOAT)
    # A sum without a norm before the next sublayer, or after the last one: the addend in fp32, for
    # OLMo with the steps of its norm, and the sum in the weights' type.
    steps = 4 if config.norm_placement == "post" else 1
    yield carried + tokens * hidden * (steps * _FLOAT + size)
    yield carried + _attention(config, limits, tokens, singles)
    yield carried + _feed_forward(config, limits, tokens)
    yield _head(config, limits, tokens, outputs, captured=captured)


def _attention(config: ModelConfig, limits: StepLimits, tokens: int, singles: int) -> int:
    size, dim = limits.itemsize, config.head_dim
    wide = config.heads * dim
    projected = (config.heads + 2 * config.kv_heads) * dim
    # query_key_value's output, rotated queries, and attention's output.
    kernels = tokens * size * (projected + 2 * wide)
    if config.qk_norm == "full":
        # Queries and keys that are normed before the kernel.
        kernels += tokens * size * (projected - config.kv_heads * dim)
    if not limits.deterministic:
        kernels += max(_scratch(config, limits, singles, window) for window in set(config.windows))
    # OLMo's norms over all heads: the queries' fp32 form, its square, the normed and the rounded
    # queries, before the rotation.
    norms = tokens * (size * (projected + wide) + 3 * _FLOAT * wide)
    projection = tokens * size * projected + _linear(limits, tokens, config.hidden_size, projected)
    after = tokens * size * wide + _linear(limits, tokens, wide, config.hidden_size)
    return max(kernels, norms if config.qk_norm == "full" else 0, projection, after)


def _scratch(config: ModelConfig, limits: StepLimits, rows: int, window: int) -> int:
    """Compute the bytes of scratch memory for ``decode_attention``: the splits of all rows, at the
    maximum length."""
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
    # The router's logits, their fp32 form and softmax, and the memory to sort and count.
    routing = tokens * experts.count * (size + 2 * _FLOAT) + pairs * _PAIR
    # Memory of ``add_choices``: rows without those of other ranks, rows by token in fp32, these
    # times their factors, and the sums.
    added = pairs * hidden * (size + 2 * _FLOAT) + tokens * hidden * _FLOAT
    if limits.separate_experts:
        # Rows by expert, the output for each, and all outputs together.
        gathered = 2 * pairs * hidden * size
        one = _mlp(config, limits, tokens, inner)
        return max(dense, routing + gathered + max(one, added))
    # Gate and up of all pairs, then the gated values, and the resulting rows.
    both, rows = 2 * pairs * inner * size, pairs * hidden * size
    mixed = both + rows + max(pairs * inner * size, added)
    return max(dense, routing + mixed)


def _mlp(config: ModelConfig, limits: StepLimits, tokens: int, inner: int) -> int:
    """Compute the bytes of one gated MLP's tensors: gate and up, their gated product, and the
    output."""
    hidden, size = config.hidden_size, limits.itemsize
    return max(
        _linear(limits, tokens, hidden, 2 * inner),
        tokens * size * 3 * inner,
        tokens * size * inner + _linear(limits, tokens, inner, hidden),
    )


def _linear(limits: StepLimits, rows: int, inputs: int, outputs: int) -> int:
    """Compute the bytes of a linear layer's output, and of the memory to compute it."""
    out = rows * outputs * limits.itemsize
    if not limits.quantized:
        return out
    if rows <= MAX_ROWS or limits.deterministic:
        # Splits of the inputs in fp32 (quantized_linear); in fixed order, pieces of the rows.
        some = min(rows, MAX_ROWS)
        return 2 * out + some * _FLOAT * (outputs + _SPLIT_OUTPUTS)
    # A piece of the weights: its codes, scales and minimums spread over all inputs, and their sum,
    # each in fp32 (quantized_linear.dequantized), the previous piece in the weights' type, and the
    # groups' numbers; or afterwards its products.
    values = min(outputs, max(1, PIECE_VALUES // inputs)) * inputs
    made = values * (4 * _FLOAT + limits.itemsize) + 8 * inputs
    multiplied = 2 * values * limits.itemsize + min(out, rows * limits.itemsize * values // inputs)
    return out + max(made, multiplied)


def _head(
    config: ModelConfig, limits: StepLimits, tokens: int, outputs: int, *, captured: bool
) -> int:
    """Compute the bytes of a step's end: the last norm, and the larger of the logits of ``outputs``
    tokens and the embeddings of all tokens."""
    hidden, vocab, size = config.hidden_size, config.vocab_size, limits.itemsize
    states = tokens * hidden * (_FLOAT + size)
    chosen = outputs * hidden * (2 * _FLOAT + size)
    logits = _linear(limits, outputs, hidden, vocab)
    if config.logits_softcap:
        # Two fp32 copies exist at a time.
        logits += outputs * vocab * 2 * _FLOAT
    elif not captured:
        # An fp32 copy; a captured step writes into persistent tensors instead.
        logits += outputs * vocab * _FLOAT
    if limits.ranks > 1:
        # The parts of all ranks, and their concatenation (engine/parallel/rank_model.py).
        logits += 2 * outputs * vocab * _FLOAT
    embedded = tokens * hidden * _FLOAT
    return states + chosen + max(logits, embedded)


def _logits_phases(config: ModelConfig, limits: StepLimits, outputs: int) -> Iterator[int]:
    """Yield the bytes that sampling and log probabilities need after the forward pass."""
    yield config.vocab_size * (limits.decode_rows * _SAMPLED + _RANK)
    yield outputs * config.vocab_size * _SCORED
