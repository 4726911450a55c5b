"""`baton chat`: a conversation in the terminal, over the gRPC front."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from baton.client import Client
from baton.errors import BatonError
from baton.v1.inference_pb2 import ChatMessage, GenerateResponse
from baton.v1.sampling_pb2 import SamplingParameters

_PROMPT = "> "


class Chat:
    """Keeps the conversation, so that the model knows what was said before."""

    def __init__(
        self, client: Client, sampling: SamplingParameters, write: Callable[[str], None]
    ) -> None:
        """``write`` shows a piece of text at once."""
        self._client = client
        self._sampling = sampling
        self._write = write
        self._messages: list[ChatMessage] = []

    def ask(self, text: str) -> bool:
        """Stream the answer to ``text``; False when Ctrl-C ended it. Raises BatonError.

        What there is of an interrupted answer stays in the conversation; a question that failed
        does not.
        """
        self._messages.append(ChatMessage(role="user", content=text))
        pieces: list[str] = []
        try:
            self._show(
                self._client.generate(messages=self._messages, sampling=self._sampling), pieces
            )
            whole = True
        except KeyboardInterrupt:
            whole = False
        except BatonError:
            self._messages.pop()
            raise
        finally:
            self._write("\n")
        self._messages.append(ChatMessage(role="assistant", content="".join(pieces)))
        return whole

    def _show(self, answer: Iterator[GenerateResponse], pieces: list[str]) -> None:
        for piece in answer:
            pieces.append(piece.text)
            self._write(piece.text)


def converse(chat: Chat, complain: Callable[[str], None]) -> None:
    """Ask for questions until the input ends, or Ctrl-C while it waits for one."""
    prompt = _PROMPT if sys.stdin.isatty() else ""
    while (text := _read(prompt)) is not None:
        if not text.strip():
            continue
        try:
            chat.ask(text)
        except BatonError as error:
            complain(error.message)


def _read(prompt: str) -> str | None:
    try:
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        return None
