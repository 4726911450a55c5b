"""The C++ decoder against plain torch, and against itself: a row's bits depend on the row alone."""

from __future__ import annotations

import itertools
import random
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.checkpoint.model_config import load_model_config
from engine.cpu import library
from engine.cpu.decoder import CpuDecoder, cpu_decoder
from engine.cpu.library import cpu_library
from engine.kv.kv_cache import KvCache
from engine.model.layers import Linear
from engine.model.model import DecoderModel
from engine.model.torch_step import TorchStepModel
from engine.model.weights import load_weights
from engine.quantization.packed_cache import PackedCache
from engine.quantization.weight import QuantizedWeight, QuantKind, quantize
from engine.sampling.step import StepInput, StepModel
from engine.scheduling.plan import PlanRow
from tests.support.engine.families import CASES, make_reference
from tests.support.engine.model_pair import VOCAB

CPU = torch.device("cpu")
TOKENS = 300
"""Three runs of the attention's 128 keys, the last one in part."""
BLOCK = 16
BLOCKS = 64
TABLE = tuple(range(40, 20, -1))
NOISE = 1.2
"""How much larger than that of torch in bf16 the median error may be: both are roundings. Not the
mean: where rounding sends a token to another expert, that one token outweighs all others."""
CODES = [torch.int8, torch.float8_e4m3fn]
"""What a cache may hold instead of bf16."""
CXX = shutil.which("g++")

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def new_cache(model: DecoderModel, dtype: torch.dtype = torch.bfloat16) -> KvCache:
    cache = KvCache(model.config, BLOCKS, BLOCK, dtype, CPU)
    # What others have left there must not matter.
    if cache.scales is None:
        cache.data.fill_(50.0)
    else:
        cache.data.view(torch.uint8).fill_(100)
        cache.scales.fill_(50.0)
    return cache


def load(folder: Path, dtype: torch.dtype = torch.bfloat16) -> DecoderModel:
    # What fp32 computes here are the bf16 weights too.
    weights = load_weights(folder, CPU, torch.bfloat16)
    if dtype == torch.float32:
        weights = {
            name: w.float() if isinstance(w, torch.Tensor) else w for name, w in weights.items()
        }
    return DecoderModel(load_model_config(folder), weights, CPU)


def decoder(model: DecoderModel, kv: torch.dtype = torch.bfloat16) -> CpuDecoder:
    found = cpu_decoder(model, new_cache(model, kv))
    assert found is not None
    return found


def some_tokens(count: int, vocab: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()


def compute(model: StepModel, rows: list[tuple[list[int], PlanRow]]) -> list[torch.Tensor]:
    """Logits of every row's tokens, fp32 [count, vocab] each; a row comes with its sequence."""
    token_ids = [
        token for tokens, row in rows for token in tokens[row.start : row.start + row.count]
    ]
    plan = tuple(row for _, row in rows)
    found = model.run(StepInput(plan, token_ids, list(range(len(token_ids))), False)).logits
    assert found is not None
    return list(torch.split(found.clone(), [row.count for row in plan]))


def prefill(model: StepModel, tokens: list[int], table: tuple[int, ...] = TABLE) -> torch.Tensor:
    return compute(model, [(tokens, PlanRow(0, 0, len(tokens), table, True))])[0]


def pieces(model: StepModel, tokens: list[int], counts: list[int]) -> torch.Tensor:
    """The same in chunks."""
    found, start = [], 0
    for count in counts:
        found += compute(model, [(tokens, PlanRow(0, start, count, TABLE, True))])
        start += count
    assert start == len(tokens)
    return torch.cat(found)


def check_error(
    model: DecoderModel,
    plain: DecoderModel,
    found: torch.Tensor,
    tokens: list[int],
    kv: torch.dtype | None = None,
) -> None:
    """``found`` is as near to fp32 as torch in bf16 is; ``kv`` are the codes of all caches."""
    exact = new_cache(plain, kv or torch.float32)
    expected = prefill(TorchStepModel(plain, exact, CPU), tokens)
    rounded = new_cache(model, kv or torch.bfloat16)
    half = prefill(TorchStepModel(model, rounded, CPU), tokens)
    assert expected.std() > 0.3, "logits that are all alike would prove nothing"
    assert (found - expected).abs().median() < NOISE * (half - expected).abs().median()


@pytest.mark.parametrize("name", CASES)
def test_every_family_is_computed_as_torch_does(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    # Heads of 24 are no multiple of a vector's lanes: torch's business.
    wider = {"head_dim": 32} if case.changes.get("head_dim") == 24 else {}
    make_reference(case, max_position_embeddings=512, **wider).save_pretrained(tmp_path)
    model = load(tmp_path)
    tokens = some_tokens(TOKENS, model.config.vocab_size)
    whole = prefill(decoder(model), tokens)
    check_error(model, load(tmp_path, torch.float32), whole, tokens)
    counts = [13, 2, 30, 8, *(1,) * 20, TOKENS - 73]
    assert torch.equal(pieces(decoder(model), tokens, counts), whole)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    sizes = {"head_dim": 64, "intermediate_size": 96, "tie_word_embeddings": True}
    make_reference(CASES["llama"], max_position_embeddings=512, **sizes).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> DecoderModel:
    return load(folder)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return some_tokens(TOKENS, VOCAB)


@pytest.mark.parametrize(
    ("head_dim", "heads"),
    [
        *itertools.product((48, 64, 80, 96), ((3, 1), (7, 7), (9, 1), (8, 2))),
        # One large shape is enough.
        (128, (3, 1)),
        (256, (3, 1)),
    ],
)
def test_shapes_of_heads(tmp_path: Path, head_dim: int, heads: tuple[int, int]) -> None:
    """Groups of 1 to 9 queries a key, whole vectors and parts of them."""
    many, few = heads
    reference = make_reference(
        CASES["llama"],
        head_dim=head_dim,
        num_attention_heads=many,
        num_key_value_heads=few,
        hidden_size=many * 16,
        max_position_embeddings=512,
    )
    reference.save_pretrained(tmp_path)
    model = load(tmp_path)
    tokens = some_tokens(TOKENS, model.config.vocab_size)
    whole = prefill(decoder(model), tokens)
    check_error(model, load(tmp_path, torch.float32), whole, tokens)
    assert torch.equal(pieces(decoder(model), tokens, [129, 1, 1, TOKENS - 131]), whole)


def test_chunks_of_every_size_give_the_same_bits(model: DecoderModel, tokens: list[int]) -> None:
    ours = decoder(model)
    whole = prefill(ours, tokens)
    for size in (1, 3, 16, 100, 128):
        counts = [size] * (TOKENS // size) + [TOKENS % size] * (TOKENS % size > 0)
        assert torch.equal(pieces(ours, tokens, counts), whole), size


@pytest.mark.parametrize("seed", range(6))
def test_strangers_in_the_batch_change_no_bit(
    model: DecoderModel, tokens: list[int], seed: int
) -> None:
    """Sequences of all lengths, some in chunks and some one token at a time, in any order."""
    chance = random.Random(seed)
    kv = (torch.bfloat16, *CODES)[seed % 3]
    ours = decoder(model, kv)
    whole = prefill(decoder(model, kv), tokens)
    count = chance.randint(2, 32)
    sequences = [some_tokens(chance.randint(1, 30), VOCAB, 100 + n) for n in range(count - 1)]
    tables = [(n,) * 1 + (n + 32,) for n in range(count - 1) if n + 32 < BLOCKS]
    sequences = sequences[: min(len(tables), 20)]
    done = [0] * len(sequences)
    start, found = 0, []
    while start < TOKENS:
        step = min(chance.choice([1, 1, 5, 40]), TOKENS - start)
        rows = [(tokens, PlanRow(0, start, step, TABLE, True))]
        for n, (other, table) in enumerate(zip(sequences, tables, strict=False)):
            left = len(other) - done[n]
            if left and not set(table) & set(TABLE):
                part = chance.randint(1, left)
                rows.append((other, PlanRow(n + 1, done[n], part, table, True)))
                done[n] += part
        chance.shuffle(rows)
        logits = compute(ours, rows)
        mine = next(n for n, (_, row) in enumerate(rows) if row.sequence_id == 0)
        found.append(logits[mine])
        start += step
    assert torch.equal(torch.cat(found), whole)


@pytest.mark.parametrize("kv", CODES, ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_caches_of_codes(tmp_path: Path, name: str, kv: torch.dtype) -> None:
    """With windows and soft caps too; chunks and single tokens give the same bits."""
    reference = make_reference(CASES[name], max_position_embeddings=512, head_dim=32)
    reference.save_pretrained(tmp_path)
    model = load(tmp_path)
    tokens = some_tokens(TOKENS, model.config.vocab_size)
    whole = prefill(decoder(model, kv), tokens)
    check_error(model, load(tmp_path, torch.float32), whole, tokens, kv)
    for counts in ([129, 1, 1, TOKENS - 131], [13, 2, 30, 8, *(1,) * 20, TOKENS - 73]):
        assert torch.equal(pieces(decoder(model, kv), tokens, counts), whole)
    assert not torch.equal(whole, prefill(decoder(model), tokens)), "the cache held no codes"


@pytest.mark.parametrize("kv", CODES, ids=str)
@pytest.mark.parametrize(("head_dim", "heads"), [(48, (3, 1)), (80, (9, 1)), (64, (8, 2))])
def test_shapes_of_heads_of_codes(
    tmp_path: Path, head_dim: int, heads: tuple[int, int], kv: torch.dtype
) -> None:
    many, few = heads
    make_reference(
        CASES["llama"],
        head_dim=head_dim,
        num_attention_heads=many,
        num_key_value_heads=few,
        hidden_size=many * 16,
        max_position_embeddings=512,
    ).save_pretrained(tmp_path)
    model = load(tmp_path)
    tokens = some_tokens(TOKENS, model.config.vocab_size)
    whole = prefill(decoder(model, kv), tokens)
    check_error(model, load(tmp_path, torch.float32), whole, tokens, kv)
    assert torch.equal(pieces(decoder(model, kv), tokens, [129, 1, 1, TOKENS - 131]), whole)


def test_threads_change_no_bit(model: DecoderModel, tokens: list[int]) -> None:
    ours = decoder(model)
    ours.threads = 1
    whole = prefill(ours, tokens)
    for threads in (2, 3, 5):
        ours.threads = threads
        assert torch.equal(pieces(ours, tokens, [200, 1, 1, TOKENS - 202]), whole)


@pytest.mark.parametrize("kind", ["cpu", "torch"])
def test_a_reported_layer_does_not_change(model: DecoderModel, kind: str) -> None:
    """Others send what is there while the rest of the step is computed."""
    cache = new_cache(model)
    found = cpu_decoder(model, cache) if kind == "cpu" else TorchStepModel(model, cache, CPU)
    assert found is not None
    tokens = some_tokens(TOKENS, model.config.vocab_size)
    found.clear_progress()
    assert found.layers_done == 0
    running = threading.Thread(target=prefill, args=(found, tokens))
    running.start()
    seen = []
    while running.is_alive():
        layers = found.layers_done
        seen.append((layers, cache.data[list(TABLE), :layers].clone()))
    running.join()
    assert found.layers_done == model.config.layers
    for layers, keys_and_values in seen:
        assert torch.equal(keys_and_values, cache.data[list(TABLE), :layers])


@pytest.mark.parametrize("outputs", [[], [TOKENS - 1], [3, 17, TOKENS - 1]])
def test_what_goes_into_layers(model: DecoderModel, tokens: list[int], outputs: list[int]) -> None:
    """Of every token, in the order that is asked for, and with the same logits as without."""
    layers = model.config.layers
    row = PlanRow(0, 0, TOKENS, TABLE, True)
    plain = decoder(model).run(StepInput((row,), tokens, outputs, False))
    assert plain.hidden is None
    assert plain.logits is not None
    for asked in ((1,), (1, 0, layers // 2), (layers, 1)):
        step = StepInput((row,), tokens, outputs, False, asked)
        found = decoder(model).run(step)
        wanted = TorchStepModel(model, new_cache(model), CPU).run(step).hidden
        assert found.hidden is not None
        assert found.logits is not None
        assert wanted is not None
        assert found.hidden.shape == (TOKENS, len(asked), model.config.hidden_size)
        for place in range(len(asked)):
            one, other = found.hidden[:, place], wanted[:, place]
            assert torch.nn.functional.cosine_similarity(one, other).min() > 0.99
        assert torch.equal(found.logits, plain.logits)


@pytest.mark.parametrize("outputs", [[], [0], [TOKENS - 1], [3, 17, TOKENS - 1]])
def test_few_outputs_are_those_of_all(
    model: DecoderModel, tokens: list[int], outputs: list[int]
) -> None:
    """The last layer computes the outputs' rows alone, and keys and values of all."""
    ours = decoder(model)
    whole = prefill(decoder(model), tokens)
    found = ours.run(StepInput((PlanRow(0, 0, TOKENS, TABLE, True),), tokens, outputs, False))
    assert found.logits is not None
    assert torch.equal(found.logits, whole[outputs])
    more = [*tokens, 5]
    row = PlanRow(0, TOKENS, 1, TABLE, True)
    assert torch.equal(compute(ours, [(more, row)])[0], prefill(decoder(model), more)[-1:])


@pytest.mark.parametrize("token_ids", [[VOCAB], [-1], []])
def test_token_ids_that_there_are_not(model: DecoderModel, token_ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"token ids|zero-size|broadcast"):
        decoder(model).run(StepInput((PlanRow(0, 0, 1, TABLE, True),), token_ids, [0], True))


def test_the_likeliest_tokens_are_those_of_the_logits(
    model: DecoderModel, tokens: list[int]
) -> None:
    ours = decoder(model)
    step = StepInput((PlanRow(0, 0, TOKENS, TABLE, True),), tokens, [3, 17, TOKENS - 1], True)
    found = ours.run(step).best
    logits = ours.run(replace(step, greedy=False)).logits
    assert logits is not None
    assert found == logits.argmax(dim=-1).tolist()
    assert ours.run(replace(step, outputs=[])).best == []


def _quantized(model: DecoderModel, kind: QuantKind, group: int | None) -> None:
    """Every linear layer's weight, exchanged in place."""
    for layer in model.layers:
        for linear in (layer.query, layer.key, layer.value, layer.output):
            _exchange(linear, kind, group)
        for linear in (layer.mlp.gate, layer.mlp.up, layer.mlp.down):  # type: ignore[union-attr]
            _exchange(linear, kind, group)


def _exchange(linear: Linear, kind: QuantKind, group: int | None) -> None:
    assert isinstance(linear.weight, torch.Tensor)
    weight = quantize(linear.weight.float(), kind, group)
    inputs = weight.shape[1]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    linear.__init__(replace(weight, columns=order), linear.bias)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "group"), [("int8", 32), ("int8", 16), ("int4", 32), ("int4", 16), ("fp8", None)]
)
def test_quantized_weights(
    folder: Path, tokens: list[int], kind: QuantKind, group: int | None
) -> None:
    """With columns in another order too; one token at a time and many give the same bits."""
    model, plain = load(folder), load(folder, torch.float32)
    _quantized(model, kind, group)
    _quantized(plain, kind, group)
    whole = prefill(decoder(model), tokens)
    check_error(model, plain, whole, tokens)
    counts = [1] * 10 + [9, 8, 15, 100, TOKENS - 142]
    assert torch.equal(pieces(decoder(model), tokens, counts), whole)


def test_a_quantized_tied_embedding(folder: Path, tokens: list[int]) -> None:
    model, plain = load(folder), load(folder, torch.float32)
    assert isinstance(model.embedding, torch.Tensor)
    weight = quantize(model.embedding.float(), "int8", 32)
    for one in (model, plain):
        one.embedding = weight
        one.head = Linear(weight)
    check_error(model, plain, prefill(decoder(model), tokens), tokens)


def test_int8_with_minimums(folder: Path, tokens: list[int]) -> None:
    """As Q5_K's codes are kept."""
    model, plain = load(folder), load(folder, torch.float32)
    for one in (model, plain):
        for layer in one.layers:
            weight = layer.output.weight
            assert isinstance(weight, torch.Tensor)
            quantized = quantize(weight.float(), "int8", 32)
            scales = quantized.scales.float()
            layer.output.__init__(  # type: ignore[misc]
                QuantizedWeight(quantized.codes, "int8", scales, scales / 3, 32)
            )
    check_error(model, plain, prefill(decoder(model), tokens), tokens)


def test_packed_weights_are_kept_and_shared(
    model: DecoderModel, tokens: list[int], tmp_path: Path
) -> None:
    whole = prefill(decoder(model), tokens)
    for _ in range(2):
        ours = cpu_decoder(model, new_cache(model), PackedCache(tmp_path), "key")
        assert ours is not None
        assert torch.equal(prefill(ours, tokens), whole)
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) == 1


@pytest.fixture
def other_target(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    cpu_library.cache_clear()
    yield monkeypatch
    cpu_library.cache_clear()


@pytest.mark.parametrize(
    "target", ["-march=x86-64-v3", pytest.param("-march=x86-64", marks=pytest.mark.long)]
)
def test_other_cpus(
    model: DecoderModel,
    folder: Path,
    tokens: list[int],
    other_target: pytest.MonkeyPatch,
    target: str,
) -> None:
    """AVX2, and a CPU with neither: other instructions, the same results within rounding."""
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    assert CXX is not None
    other_target.setattr(library, "_TARGET", target)
    whole = prefill(decoder(model), tokens)
    check_error(model, load(folder, torch.float32), whole, tokens)
    assert torch.equal(pieces(decoder(model), tokens, [100, 1, 1, TOKENS - 102]), whole)
    quantized, plain = load(folder), load(folder, torch.float32)
    _quantized(quantized, "int4", 32)
    _quantized(plain, "int4", 32)
    check_error(quantized, plain, prefill(decoder(quantized), tokens), tokens)
    for kv in CODES:
        coded = prefill(decoder(quantized, kv), tokens)
        check_error(quantized, plain, coded, tokens, kv)


def test_what_it_does_not_compute_is_left_to_torch(
    folder: Path, other_target: pytest.MonkeyPatch
) -> None:
    single = load(folder, torch.float32)
    assert cpu_decoder(single, new_cache(single, torch.float32)) is None
    half = load(folder)
    assert cpu_decoder(half, KvCache(half.config, 4, 8, torch.bfloat16, CPU)) is None
    other_target.setenv("CXX", "false")
    assert cpu_decoder(half, new_cache(half)) is None
