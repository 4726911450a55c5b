"""The model that the serving phase serves: a Llama of random weights, with a tokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from engine.checkpoint.model_config import ModelConfig
from loadtest.common.byte_tokenizer import write_tokenizer
from loadtest.gpu.common.models import write_folder
from loadtest.gpu.common.shapes import llama_1b

TINY = replace(
    llama_1b(4096),
    hidden_size=64,
    intermediate_size=96,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=320,
    windows=(0,) * 2,
    layer_ropes=(0,) * 2,
    ropes=(replace(llama_1b().ropes[0], rotary_dim=16),),
    attention_scale=16**-0.5,
)
BILLION = replace(llama_1b(8192), vocab_size=32768)
"""Llama 3.2 1B with a smaller vocabulary."""


def write_model(folder: Path, config: ModelConfig, device: str) -> None:
    """Write config, tokenizer and weights in bf16, which are drawn on ``device``."""
    write_folder(config, folder, torch.device(device))
    write_tokenizer(folder, config.vocab_size)
