"""`python -m loadtest.research.training`: train an EAGLE-3 head for a model on a CPU.

``talk`` makes the model talk to itself, and records the text and the hidden states of some layers.
``eagle`` trains a head on these records. Both work in pieces: another call continues.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from baton.errors import BatonError
from engine.build import build_engine
from engine.checkpoint.model_config import ModelConfig, load_model_config
from engine.engine import EngineSettings
from engine.model.model import DecoderModel
from engine.model.weights import load_weights
from loadtest.research.training.eagle_training import EagleTraining, EagleTrainingSettings
from loadtest.research.training.self_talk import (
    Conversation,
    SelfTalk,
    load_conversations,
    save_conversations,
)
from router.text.tokenizer import Tokenizer

app = typer.Typer(add_completion=False, help=__doc__)
_CHECKPOINT = "training.pt"

_Model = Annotated[
    Path, typer.Option(metavar="FOLDER", help="The model; `baton model pull` prints its folder.")
]
_Quantization = Annotated[
    str, typer.Option(help=("Weight format of the served model, as for `baton serve`."))
]
_Material = Annotated[Path, typer.Option(help="Folder of the conversations.")]
_Threads = Annotated[int, typer.Option(help="CPU threads.")]


@app.command()
def talk(
    model: _Model,
    material: _Material,
    seed: Annotated[int, typer.Option(help="Random seed, another one for each piece.")],
    quantization: _Quantization = "auto",
    minutes: Annotated[float, typer.Option(help="How long.")] = 10.0,
    threads: _Threads = 2,
) -> None:
    """Generate conversations of the model with itself, and add a file of them to the folder."""
    material.mkdir(parents=True, exist_ok=True)
    engine = build_engine(EngineSettings(model, threads=threads, quantization=quantization))
    talking = SelfTalk(engine, Tokenizer.load(model), _layers(engine.config), seed)
    found: list[Conversation] = []
    end = time.monotonic() + 60 * minutes
    with torch.inference_mode():
        while time.monotonic() < end or not found:
            found += talking.step()
    save_conversations(found, material / f"{seed}.safetensors")
    tokens = sum(len(each.token_ids) - each.answer for each in found)
    typer.echo(f"{len(found)} conversations, {tokens} tokens of answers")


@app.command()
def eagle(
    model: _Model,
    material: _Material,
    output: Annotated[Path, typer.Option(help="Folder of the head, for --draft-model.")],
    quantization: _Quantization = "auto",
    minutes: Annotated[float, typer.Option(help="Duration of this piece of work.")] = 20.0,
    of: Annotated[float, typer.Option(help="Minutes of all pieces together.")] = 20.0,
    draft_vocab: Annotated[
        int, typer.Option(help=("Number of tokens that the head can propose."))
    ] = 4096,
    threads: _Threads = 2,
) -> None:
    """Train a head, or continue its training, and write it to the folder."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config, cpu = load_model_config(model), torch.device("cpu")
    target = DecoderModel(config, load_weights(model, cpu, torch.bfloat16, quantization), cpu)
    training = EagleTraining(
        target,
        _layers(config),
        load_conversations(material),
        EagleTrainingSettings(draft_vocab=draft_vocab),
    )
    checkpoint = output / _CHECKPOINT
    if checkpoint.is_file():
        training.resume(checkpoint)
    loss = training.run(60 * minutes, 60 * of)
    training.export(output)
    training.save(checkpoint)
    agreement = ", ".join(f"{share:.3f}" for share in training.agreement())
    typer.echo(f"{training.seconds:.0f} s, loss {loss:.3f}, agreement {agreement}")


def _layers(config: ModelConfig) -> tuple[int, int, int]:
    """Return the numbers of the layers whose outputs are recorded: a low layer, a middle layer, and
    the last layer.
    """
    return max(1, config.layers // 4), max(1, config.layers // 2), config.layers


if __name__ == "__main__":
    try:
        app()
    except BatonError as error:
        raise SystemExit(f"error: {error.message}") from error
