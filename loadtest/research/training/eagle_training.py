"""Trains an EAGLE-3 head for a target model on the target's own answers.

The head learns the target's distribution of each next token, over the tokens that the head can
propose. At the start it also learns the output of the target's last layer for the token. The head's
output matrix is the target's and does not change, so the distribution follows from that output.
Thus existing weights do most of a head's work, which makes training possible on a CPU.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from safetensors.torch import save_file

from engine.model.model import DecoderModel
from engine.quantization.weight import QuantizedWeight, dequantize
from loadtest.research.training.eagle_trainee import FEATURE_LAYERS, EagleTrainee
from loadtest.research.training.self_talk import Conversation

_HELD_BACK = 15
"""One in this number of conversations is used to measure agreement, and not for training."""
_PASS_SHARE = 0.8
"""Loss weight of each pass of the training-time test, relative to the previous pass."""
_QUESTION_SHARE = 0.1
"""Weight of a question's token in the loss, relative to an answer's token."""
_LOST_FEATURES = 0.01
"""Share of training rows whose feature is replaced by zeros. After a handoff, a feature is missing
in the same way."""
_WARM_UP_STEPS = 30
_MIN_RATE = 0.05
"""Final learning rate of the cosine schedule, relative to the initial one."""
_MAX_LENGTH = 512
_NORM_BOUND = 1.0


@dataclass(frozen=True, slots=True)
class EagleTrainingSettings:
    """Sizes and rates of a head's training."""

    draft_vocab: int = 4096
    """Number of tokens that the head can propose: the most frequent ones of the answers."""
    passes: int = 3
    """Number of passes of the training-time test. The head learns to draft as many tokens."""
    batch_tokens: int = 1536
    learning_rate: float = 1.5e-3


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch of conversations of similar length, padded: [rows, length, …]."""

    token_ids: torch.Tensor
    features: torch.Tensor
    """The target's features of the token before each row's token, fp32 [rows, length, 3 *
    hidden_size]."""
    last: torch.Tensor
    """Normed output of the target's last layer, fp32 [rows, length, hidden_size]."""
    weight: torch.Tensor
    """Weight of each row in the loss; 0 for padding."""
    answered: torch.Tensor
    """For each row, whether the token after the row's token belongs to the answer."""


class EagleTraining:
    """Trains a head with an optimizer, in pieces of some seconds."""

    def __init__(
        self,
        target: DecoderModel,
        layers: Sequence[int],
        conversations: Sequence[Conversation],
        settings: EagleTrainingSettings,
    ) -> None:
        """``layers`` are the layers whose outputs were recorded, numbered as inputs in
        ``StepInput.hidden_layers``.

        The last entry is the output of the target's last layer.
        """
        self._target, self._settings = target, settings
        self._layers = tuple(layers)
        assert len(self._layers) == FEATURE_LAYERS
        assert self._layers[-1] == target.config.layers
        self._held = [c for n, c in enumerate(conversations) if n % _HELD_BACK == 0]
        self._learned = [c for n, c in enumerate(conversations) if n % _HELD_BACK]
        self._embedding = _dense(target.embedding)
        self._head = _dense(target.head.weight)
        self._token_ids = _frequent(conversations, target.config.vocab_size, settings.draft_vocab)
        self._trainee = EagleTrainee(target.config, settings.draft_vocab)
        self._outputs: list[torch.Tensor] = []
        self._trainee.norm.register_forward_hook(
            lambda _m, _i, output: self._outputs.append(output)
        )
        self._begin()
        self._optimizer = self._make_optimizer()
        self._seconds = 0.0
        self._steps = 0
        self._random = random.Random(0)  # noqa: S311 - it shuffles
        self._pool: list[list[Conversation]] = []

    def _begin(self) -> None:
        trainee, hidden = self._trainee, self._target.config.hidden_size
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in trainee.named_parameters():
                if weight.ndim == 2:
                    weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
                    if name.endswith(("o_proj.weight", "down_proj.weight")):
                        weight.mul_(0.1)
            trainee.fc.weight.normal_(0.0, 0.01, generator=generator)
            # The prediction for the token before is the most informative feature of the position.
            trainee.fc.weight[:, -hidden:] += 0.3 * torch.eye(hidden)
            trainee.lm_head.weight.copy_(self._head[self._token_ids])
            trainee.norm.weight.copy_(self._target.norm)
        trainee.lm_head.weight.requires_grad_(False)
        trainee.norm.weight.requires_grad_(False)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        learning = [weight for weight in self._trainee.parameters() if weight.requires_grad]
        matrices = [weight for weight in learning if weight.ndim == 2]
        norms = [weight for weight in learning if weight.ndim != 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": 0.02},
            {"params": norms, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self._settings.learning_rate, betas=(0.9, 0.95))

    @property
    def seconds(self) -> float:
        """Return the training time so far, in seconds."""
        return self._seconds

    def run(self, seconds: float, of: float) -> float:
        """Train for ``seconds``, as a part of a training that takes ``of`` seconds in total. Return
        the mean loss of the last steps.
        """
        began = time.perf_counter()
        before = self._seconds
        losses: list[float] = []
        while time.perf_counter() - began < seconds:
            losses.append(self.learn(min(1.0, self._seconds / of)))
            self._seconds = before + time.perf_counter() - began
        last = losses[-50:]
        return sum(last) / max(1, len(last))

    def learn(self, share: float) -> float:
        """Do one training step. ``share`` is the share of the whole training that is already done.
        Return the loss of the first pass.
        """
        self._set_rate(share)
        loss = self._step(self._batch(self._next()))
        self._steps += 1
        return loss

    def _set_rate(self, share: float) -> None:
        cosine = 0.5 * (1 + math.cos(math.pi * share))
        warm = min(1.0, (self._steps + 1) / _WARM_UP_STEPS)
        for group in self._optimizer.param_groups:
            rate = _MIN_RATE + (1 - _MIN_RATE) * cosine
            group["lr"] = self._settings.learning_rate * warm * rate

    def _next(self) -> list[Conversation]:
        """Return the conversations of the next batch. They have similar lengths, and together at
        most the batch's number of tokens."""
        if not self._pool:
            order = self._learned[:]
            self._random.shuffle(order)
            for start in range(0, len(order), 256):
                self._pool += self._divided(order[start : start + 256])
            self._random.shuffle(self._pool)
        return self._pool.pop()

    def _divided(self, conversations: list[Conversation]) -> list[list[Conversation]]:
        found: list[list[Conversation]] = [[]]
        for each in sorted(conversations, key=lambda c: len(c.token_ids)):
            length = min(_MAX_LENGTH, len(each.token_ids))
            if found[-1] and length * (len(found[-1]) + 1) > self._settings.batch_tokens:
                found.append([])
            found[-1].append(each)
        return found

    def _batch(self, conversations: Sequence[Conversation]) -> _Batch:
        rows = len(conversations)
        length = min(_MAX_LENGTH, max(len(each.token_ids) for each in conversations))
        config = self._target.config
        hidden = config.hidden_size
        token_ids = torch.zeros(rows, length, dtype=torch.int64)
        features = torch.zeros(rows, length, FEATURE_LAYERS * hidden)
        last = torch.zeros(rows, length, hidden)
        weight = torch.zeros(rows, length)
        answered = torch.zeros(rows, length, dtype=torch.bool)
        for n, each in enumerate(conversations):
            count = min(length, len(each.token_ids))
            states = each.hidden[:count].float()
            token_ids[n, :count] = each.token_ids[:count]
            features[n, 1:count] = states[:-1].flatten(1)
            last[n, :count] = states[:, -1]
            weight[n, :count] = _QUESTION_SHARE
            weight[n, each.answer - 1 : count] = 1.0
            answered[n, each.answer - 1 : count] = True
        last = F.rms_norm(last, (hidden,), self._target.norm.float(), config.rms_norm_eps)
        return _Batch(token_ids, features, last, weight, answered)

    def _step(self, batch: _Batch) -> float:
        self._trainee.train()
        features = batch.features
        features[torch.rand(features.shape[:2]) < _LOST_FEATURES] = 0.0
        found = self._logits(batch, self._settings.passes)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            wanted = (batch.last @ self._head[self._token_ids].T).float().softmax(dim=-1)
        loss = torch.zeros(())
        share, first = 1.0, 0.0
        for logits, output in zip(found, self._outputs, strict=True):
            missed = -(wanted * logits.float().log_softmax(dim=-1)).sum(dim=-1)
            far = F.smooth_l1_loss(output.float(), batch.last, reduction="none", beta=0.5)
            missed = ((missed + far.mean(dim=-1)) * batch.weight).sum() / batch.weight.sum()
            loss = loss + share * missed
            share *= _PASS_SHARE
            first = first or float(missed.detach())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._trainee.parameters(), _NORM_BOUND)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return first

    def _logits(self, batch: _Batch, passes: int) -> list[torch.Tensor]:
        self._outputs.clear()
        with torch.autocast("cpu", torch.bfloat16):
            embedded = F.embedding(batch.token_ids, self._embedding)
            found: list[torch.Tensor] = self._trainee(embedded, batch.features, passes)
        return found

    @torch.no_grad()
    def agreement(self, most: int = 64) -> list[float]:
        """Return the shares of draft tokens at which the head and the target have the same most
        likely token, after the same earlier tokens.

        Entries are for the first token of a draft, the second, and so on. Only held-out answers
        count.
        """
        self._trainee.eval()
        passes = self._settings.passes
        right = torch.zeros(passes)
        counted = 0
        for each in self._held[:most]:
            batch = self._batch([each])
            with torch.autocast("cpu", torch.bfloat16):
                wanted = (batch.last @ self._head.T).argmax(dim=-1)[0]
            for n, logits in enumerate(self._logits(batch, passes)):
                same = self._token_ids[logits[0].argmax(dim=-1)] == wanted
                right[n] += same[batch.answered[0]].sum()
            counted += int(batch.answered.sum())
        return (right / max(1, counted)).tolist()

    def save(self, path: Path) -> None:
        """Save the state of the training, from which ``resume`` continues."""
        state = {
            "trainee": self._trainee.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "seconds": self._seconds,
            "steps": self._steps,
            "token_ids": self._token_ids,
        }
        torch.save(state, path)

    def resume(self, path: Path) -> None:
        """Load the state that ``save`` has written, and continue from it."""
        state = torch.load(path, weights_only=True)
        self._token_ids = state["token_ids"]
        self._trainee.load_state_dict(state["trainee"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._seconds, self._steps = state["seconds"], state["steps"]

    def export(self, folder: Path) -> None:
        """Write the head in the published form of EAGLE-3 heads: ``config.json`` and
        ``model.safetensors`` in bf16."""
        folder.mkdir(parents=True, exist_ok=True)
        config, count = self._target.config, len(self._token_ids)
        known = torch.zeros(config.vocab_size, dtype=torch.bool)
        known[self._token_ids] = True
        weights = {
            name: weight.to(torch.bfloat16).contiguous()
            for name, weight in self._trainee.state_dict().items()
        }
        weights |= {"d2t": self._token_ids - torch.arange(count), "t2d": known}
        save_file(weights, folder / "model.safetensors")
        rope = config.ropes[0]
        fields = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": config.context_length,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": rope.theta,
            "vocab_size": config.vocab_size,
            "draft_vocab_size": count,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "eagle_config": {
                "use_aux_hidden_state": True,
                # In that form layers are numbered by their outputs.
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in self._layers],
            },
        }
        (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n")


def _dense(weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    """Return a weight in fp32, dequantized if necessary."""
    plain = weight if isinstance(weight, torch.Tensor) else dequantize(weight)
    return plain.float()


def _frequent(conversations: Sequence[Conversation], vocab: int, count: int) -> torch.Tensor:
    """Return the ``count`` most frequent tokens of the answers, in the order of their ids, int64
    [count].
    """
    seen = torch.zeros(vocab, dtype=torch.int64)
    for each in conversations:
        seen += torch.bincount(each.token_ids[each.answer :].long(), minlength=vocab)
    return seen.topk(count).indices.sort().values
