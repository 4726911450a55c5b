"""A drafter's training, from the target's own words to a head that drafts, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from baton.errors import ConfigError
from engine.build import build_engine
from engine.checkpoint.model_config import load_model_config
from engine.engine import Engine, EngineSettings
from engine.model.model import DecoderModel
from engine.model.weights import load_weights
from loadtest.research.training.__main__ import app
from loadtest.research.training.eagle_training import EagleTraining, EagleTrainingSettings
from loadtest.research.training.self_talk import (
    Conversation,
    SelfTalk,
    load_conversations,
    save_conversations,
)
from router.text.tokenizer import Tokenizer
from tests.support.drafter_heads import make_counting_model
from tests.support.models import VOCAB

LAYERS = (1, 1, 2)
CPU = torch.device("cpu")
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}|"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that counts, with a chat template."""
    found = make_counting_model(tmp_path_factory.mktemp("tiny"), context=1024)
    path = found / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return found


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return build_engine(
        EngineSettings(folder, dtype="float32", device="cpu", threads=1, kv_pool_bytes=4 << 20)
    )


@pytest.fixture(scope="module")
def conversations(engine: Engine, folder: Path) -> list[Conversation]:
    talking = SelfTalk(engine, Tokenizer.load(folder), LAYERS, seed=1, at_a_time=6)
    found: list[Conversation] = []
    with torch.inference_mode():
        while len(found) < 20:
            found += talking.step()
    return found


def test_a_conversation_is_what_the_layers_made_of_it(conversations: list[Conversation]) -> None:
    for each in conversations:
        count = len(each.token_ids)
        assert each.hidden.shape == (count, 3, 48)
        assert each.hidden.dtype == torch.bfloat16
        assert 0 < each.answer < count <= 768


def test_the_last_layer_says_what_comes(folder: Path, conversations: list[Conversation]) -> None:
    config = load_model_config(folder)
    target = DecoderModel(config, load_weights(folder, CPU, torch.float32), CPU)
    each = conversations[0]
    tokens = each.token_ids.long()
    assert isinstance(target.embedding, torch.Tensor)
    torch.testing.assert_close(
        each.hidden[:, 0].float(), target.embedding[tokens], atol=0.05, rtol=0.01
    )
    likeliest = target.logits(each.hidden[:, 2].float()).argmax(dim=-1)
    assert likeliest.tolist() == ((tokens + 1) % VOCAB).tolist()


def test_conversations_are_kept(conversations: list[Conversation], tmp_path: Path) -> None:
    save_conversations(conversations[:3], tmp_path / "1.safetensors")
    save_conversations(conversations[3:5], tmp_path / "2.safetensors")
    found = load_conversations(tmp_path)
    assert [each.answer for each in found] == [each.answer for each in conversations[:5]]
    for one, other in zip(found, conversations[:5], strict=True):
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.hidden, other.hidden)


def test_material_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no conversations"):
        load_conversations(tmp_path)
    (tmp_path / "1.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_conversations(tmp_path)


@pytest.mark.long
def test_a_head_learns_and_goes_on(
    folder: Path, conversations: list[Conversation], tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = load_model_config(folder)
    target = DecoderModel(config, load_weights(folder, CPU, torch.float32), CPU)
    settings = EagleTrainingSettings(
        draft_vocab=VOCAB - 8, learning_rate=5e-3, batch_tokens=512, passes=2
    )
    training = EagleTraining(target, LAYERS, conversations, settings)
    before = training.agreement()
    first = training.learn(0.0)
    for _ in range(30):
        training.learn(0.2)
    training.run(0.01, 1.0)
    training.save(tmp_path / "training.pt")
    training = EagleTraining(target, LAYERS, conversations, settings)
    training.resume(tmp_path / "training.pt")
    assert training.seconds > 0
    losses = [training.learn(0.5) for _ in range(30)]
    after = training.agreement()
    assert len(after) == 2
    assert sum(losses[-5:]) / 5 < first / 2
    assert after[0] > before[0] + 0.2
    training.export(tmp_path / "head")
    settings_of = EngineSettings(
        folder,
        dtype="float32",
        device="cpu",
        threads=1,
        kv_pool_bytes=1 << 20,
        drafter="eagle",
        draft_model=tmp_path / "head",
    )
    assert build_engine(settings_of).runner.drafter == "eagle"


@pytest.mark.long
def test_the_commands(folder: Path, tmp_path: Path) -> None:
    model = ["--model", str(folder), "--threads", "1", "--material", str(tmp_path / "talk")]
    command = CliRunner()
    talked = command.invoke(app, ["talk", *model, "--seed", "1", "--minutes", "0.03"])
    assert talked.exit_code == 0, talked.output
    assert "tokens of answers" in talked.output
    head = ["--output", str(tmp_path / "head"), "--minutes", "0.01", "--of", "0.02"]
    for _ in range(2):
        trained = command.invoke(app, ["eagle", *model, *head, "--draft-vocab", "100"])
        assert trained.exit_code == 0, trained.output
    assert "agreement" in trained.output
    assert (tmp_path / "head" / "model.safetensors").is_file()
