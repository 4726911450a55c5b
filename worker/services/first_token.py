"""What the router is told with a prompt's first token."""

from __future__ import annotations

from baton.request import FirstToken, LoadSnapshot, TokenOutput
from baton.rpc import convert
from baton.v1 import prefill_pb2
from engine.scheduling.sequence import Sequence, SequenceUpdate


def first_of(update: SequenceUpdate) -> FirstToken:
    """The first token of a choice, of the update that brought it."""
    logprobs = update.logprobs[0] if update.logprobs else None
    return FirstToken(update.token_ids[0], update.sequence.finish_reason, logprobs)


def first_token(
    sequence: Sequence, first: FirstToken, load: LoadSnapshot
) -> prefill_pb2.PrefillResponse:
    """The event of a sequence whose prompt is computed and whose first token is ``first``.

    What the prompt has cost, and what the model thinks of it, is told with the first choice alone.
    """
    spec = sequence.spec
    output = TokenOutput(
        spec.request_id,
        spec.attempt,
        len(spec.token_ids) - spec.prompt_length,
        (first.token_id,),
        first.finish_reason,
        choice=sequence.choice,
        logprobs=(first.logprobs,) if first.logprobs is not None else (),
        prompt_logprobs=tuple(sequence.prompt_logprobs),
        embedding=sequence.embedding,
    )
    response = prefill_pb2.PrefillResponse(
        first_token=convert.output_to_proto(output), load=convert.load_to_proto(load)
    )
    if sequence.choice == spec.choice:
        response.cached_prompt_tokens = min(sequence.cached_tokens, spec.prompt_length)
        response.queue_ms = sequence.queue_s * 1e3
        response.compute_ms = sequence.compute_s * 1e3
        response.computed_tokens = sequence.computed_here
    return response
