"""What the router is told with a prompt's first token."""

from __future__ import annotations

from baton import convert
from baton.request import FinishReason, LoadSnapshot, TokenOutput
from baton.v1 import prefill_pb2
from engine.sequence import Sequence


def first_token(
    sequence: Sequence, token: int, finish: FinishReason | None, load: LoadSnapshot
) -> prefill_pb2.PrefillResponse:
    """The event of a sequence whose prompt is computed and whose first token is ``token``."""
    spec = sequence.spec
    index = len(spec.token_ids) - spec.prompt_length
    output = TokenOutput(spec.request_id, spec.attempt, index, (token,), finish)
    return prefill_pb2.PrefillResponse(
        first_token=convert.output_to_proto(output),
        load=convert.load_to_proto(load),
        cached_prompt_tokens=min(sequence.cached_tokens, spec.prompt_length),
        queue_ms=sequence.queue_s * 1e3,
        compute_ms=sequence.compute_s * 1e3,
        computed_tokens=sequence.computed_here,
    )
