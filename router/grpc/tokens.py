"""The gRPC service baton.v1.TokenService."""

from __future__ import annotations

import grpc.aio

from baton.config.cluster import Config
from baton.errors import InvalidRequest
from baton.host.background import off_loop
from baton.rpc.grpc_errors import guarded
from baton.v1 import tokens_pb2, tokens_pb2_grpc
from router.access.access import Access
from router.grpc.call import Context, check_size, metadata_of
from router.grpc.tools import grpc_tool_use, grpc_turns
from router.inference.tokens import TokenService


class TokenServicer(tokens_pb2_grpc.TokenServiceServicer):
    """Implements baton.v1.TokenService of tokens.proto."""

    def __init__(self, tokens: TokenService, config: Config, access: Access) -> None:
        self._tokens = tokens
        self._config = config
        self._access = access

    def add_to(self, server: grpc.aio.Server) -> str:
        """Add the service to a server. Return the service's full name."""
        tokens_pb2_grpc.add_TokenServiceServicer_to_server(self, server)
        return tokens_pb2.DESCRIPTOR.services_by_name["TokenService"].full_name

    @guarded
    async def Tokenize(  # noqa: N802 - gRPC's name
        self, request: tokens_pb2.TokenizeRequest, context: Context
    ) -> tokens_pb2.TokenizeResponse:
        """Convert text or messages to token ids."""
        caller = self._access.caller(metadata_of(context))
        tenant = caller.principal.tenant
        async with self._access.visiting(caller):
            check_size(request, self._config)
            self._tokens.check_model(request.model)
            ids = await self._ids(request, tenant)
            spellings: list[str] = []
            if request.spell:
                spellings = await off_loop(
                    len(ids), lambda: [self._tokens.spelling(number) for number in ids]
                )
        return tokens_pb2.TokenizeResponse(
            token_ids=ids,
            spellings=spellings,
            context_length=self._tokens.context_length,
        )

    @guarded
    async def Detokenize(  # noqa: N802 - gRPC's name
        self, request: tokens_pb2.DetokenizeRequest, context: Context
    ) -> tokens_pb2.DetokenizeResponse:
        """Convert token ids to text."""
        caller = self._access.caller(metadata_of(context))
        async with self._access.visiting(caller):
            check_size(request, self._config)
            self._tokens.check_model(request.model)
            tenant = caller.principal.tenant
            text = await self._tokens.text(request.token_ids, "token_ids", tenant)
        return tokens_pb2.DetokenizeResponse(text=text)

    @guarded
    async def GetModelInfo(  # noqa: N802 - gRPC's name
        self, request: tokens_pb2.GetModelInfoRequest, context: Context
    ) -> tokens_pb2.GetModelInfoResponse:
        """Describe the served model."""
        self._access.caller(metadata_of(context))
        facts = self._tokens.facts()
        return tokens_pb2.GetModelInfoResponse(
            id=facts.id,
            created=facts.created,
            context_length=facts.max_model_len,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            has_chat_template=facts.has_chat_template,
            tool_parser=facts.tool_parser,
            revision=facts.revision,
            quantization=facts.quantization or "",
            dtype=facts.dtype,
            kv_dtype=facts.kv_dtype,
            batch_size=facts.batch_size,
            fingerprint=facts.fingerprint,
        )

    async def _ids(self, request: tokens_pb2.TokenizeRequest, tenant: str) -> tuple[int, ...]:
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if kind == "messages":
            turns = grpc_turns(request.messages.messages)
            return await self._tokens.ids_of_turns(turns, grpc_tool_use(request.tools), tenant)
        special = not request.no_special_tokens
        return await self._tokens.ids_of_text(request.prompt, tenant, special=special)
