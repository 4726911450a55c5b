"""The demo model itself, where it is cached or can be fetched."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2.sandbox
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors import safe_open
from tokenizers import Tokenizer

from baton.errors import ConfigError
from baton.host.cache import cache_dir
from deploy.models.demo_model import KNOWN_MODELS
from deploy.models.model_store import resolve


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return resolve(KNOWN_MODELS[0].name, lambda line: None).path
    except ConfigError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


# Known ids of this vocabulary; the digits are cut one by one.
TOKENS = {
    "123": [33, 34, 35],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "<|im_start|>": [1],
}


@pytest.mark.parametrize("text", TOKENS)
def test_tokens_are_the_known_ones(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text).ids == TOKENS[text]
    assert tokenizer.decode(TOKENS[text], skip_special_tokens=False) == text


def test_the_chat_template_renders(folder: Path, tokenizer: Tokenizer) -> None:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment()
    template = environment.from_string((folder / "chat_template.jinja").read_text())
    messages = [{"role": "user", "content": "Hi"}]
    text = template.render(messages=messages, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode(text).ids.count(1) == 3


def test_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 100000.0)
    assert config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)


def test_weights_are_those_of_the_gguf(folder: Path) -> None:
    gguf = folder / KNOWN_MODELS[0].gguf
    if not gguf.is_file():
        pytest.skip(f"the model in {cache_dir()} came from the hub, without a GGUF file")
    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert len(weights.keys()) == len(tensors)
        for ours, theirs, heads in (
            ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight", 0),
            ("model.layers.29.self_attn.q_proj.weight", "blk.29.attn_q.weight", 9),
            ("model.layers.7.self_attn.k_proj.weight", "blk.7.attn_k.weight", 3),
            ("model.norm.weight", "output_norm.weight", 0),
        ):
            tensor = tensors[theirs]
            values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            if heads:
                pairs = values.reshape(heads, -1, 2, values.shape[1])
                values = pairs.transpose(1, 2).reshape(values.shape)
            assert torch.equal(weights.get_tensor(ours), values.bfloat16()), ours
