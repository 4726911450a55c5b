from __future__ import annotations

from tests.chaos.load.questions import questions


def test_a_seed_is_a_mix() -> None:
    assert questions(1) == questions(1)
    assert questions(1) != questions(2)


def test_every_question_has_one_right_answer_and_a_name_of_its_own() -> None:
    asked = questions(3)
    assert len({one.name for one in asked}) == len(asked)
    for one in asked:
        body, message = one.body("model"), one.message()
        assert (body["temperature"] == 0) == (one.seed is None) == ("seed" not in body)
        assert message.sampling.temperature == body["temperature"]
        assert message.sampling.HasField("seed") == ("seed" in body)
        assert message.sampling.max_tokens == body["max_tokens"] == one.max_tokens
        assert message.n == body["n"] == one.choices
        assert message.sampling.HasField("grammar") == (one.schema is not None)
        assert bool(message.tools.tools) == ("tools" in body)
        assert message.HasField("messages") == ("messages" in body)


def test_the_mix_has_one_of_everything() -> None:
    asked = questions(4)
    for has in (
        lambda one: one.seed is None,
        lambda one: one.seed is not None,
        lambda one: one.choices > 1,
        lambda one: one.schema is not None,
        lambda one: one.tool is not None,
        lambda one: bool(one.stop),
        lambda one: one.is_chat,
    ):
        assert any(map(has, asked))
