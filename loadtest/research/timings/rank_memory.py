"""Measures the host memory that a rank needs to load its shard of a large model.

    python -m loadtest.research.timings.rank_memory --ranks 32

The checkpoint has the shape of Llama 3 70B in bfloat16, and is sparse: its tensors are holes of its
files, zeros that take no disk space. It is made in a temporary folder and removed again. The result
is the growth of the process's memory after loading, and its peak, including mapped pages of the
files. Only Linux reports that.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from engine.checkpoint.model_config import ModelConfig, load_model_config
from engine.model.weights import load_weights
from engine.parallel.shard import shard_of
from engine.parallel.weight_slices import WeightSlices

_MIB = 1 << 20
_BYTES = 2
"""Bytes of one bfloat16 value."""
_INDEX = "model.safetensors.index.json"
_STATUS = Path("/proc/self/status")
_CLEAR_PEAK = Path("/proc/self/clear_refs"), "5"


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a Llama model. Sizes are in elements."""

    hidden: int = 8192
    inner: int = 28672
    layers: int = 80
    heads: int = 64
    kv_heads: int = 8
    vocabulary: int = 128256

    def config(self) -> dict[str, object]:
        """Return the contents of the model's config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "eos_token_id": 0,
        }

    def ends(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors outside the layers, such as the embedding, by name."""
        table = (self.vocabulary, self.hidden)
        return {
            "model.embed_tokens.weight": table,
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": table,
        }

    def layer(self, number: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors of one layer, by name."""
        narrow = self.hidden // self.heads * self.kv_heads
        sizes: dict[str, tuple[int, ...]] = {
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (narrow, self.hidden),
            "self_attn.v_proj": (narrow, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.inner, self.hidden),
            "mlp.up_proj": (self.inner, self.hidden),
            "mlp.down_proj": (self.hidden, self.inner),
        }
        return {f"model.layers.{number}.{name}.weight": size for name, size in sizes.items()}


def write_checkpoint(folder: Path, shape: Shape) -> None:
    """Write a checkpoint as sparse files, whose tensors are holes: one file for each layer, and one
    for the other tensors.
    """
    (folder / "config.json").write_text(json.dumps(shape.config()))
    parts = [shape.ends(), *(shape.layer(number) for number in range(shape.layers))]
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(parts):
        file = f"model-{number:05}.safetensors"
        _write_holes(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / _INDEX).write_text(json.dumps({"weight_map": weight_map}))


def _write_holes(path: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    header: dict[str, object] = {}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + _BYTES * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    blob = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(blob).to_bytes(8, "little") + blob)
        file.truncate(8 + len(blob) + end)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Memory of a process that has loaded a shard, in bytes."""

    shard: int
    """Size of the weights that the rank holds."""
    added: int
    """Growth of the process's memory after loading."""
    peak: int
    """Peak growth of the process's memory during loading."""


def load_shard(folder: Path, rank: int, ranks: int) -> Loaded:
    """Load a rank's shard into this process, measure the memory, and drop the shard again."""
    config: ModelConfig = load_model_config(folder)
    slices = WeightSlices(config, shard_of(config, rank, ranks))
    path, what = _CLEAR_PEAK
    path.write_text(what)
    before = psutil.Process().memory_info().rss
    weights = load_weights(folder, torch.device("cpu"), torch.bfloat16, slices=slices)
    added = psutil.Process().memory_info().rss - before
    return Loaded(sum(weight.nbytes for weight in weights.values()), added, _peak() - before)


def _peak() -> int:
    """Return the peak memory of this process, in bytes."""
    lines: Iterator[str] = iter(_STATUS.read_text().splitlines())
    line = next(line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Load the shard of a rank, and print the memory that it needs."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--ranks", type=int, default=32, help="ranks of the worker")
    options.add_argument("--rank", type=int, default=0, help="the rank to load, from 0")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-sparse-") as name:
        folder = Path(name)
        write_checkpoint(folder, Shape())
        whole = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        found = load_shard(folder, given.rank, given.ranks)
    shard, added, peak = (
        f"{size / _MIB:,.0f} MiB" for size in (found.shard, found.added, found.peak)
    )
    sys.stdout.write(
        f"of {whole / _MIB:,.0f} MiB rank {given.rank} of {given.ranks} holds {shard}; loading "
        f"added {added} to the process, and {peak} at the peak\n"
    )


if __name__ == "__main__":
    main()
