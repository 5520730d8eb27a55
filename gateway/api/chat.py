"""`POST /v1/chat/completions`."""

from __future__ import annotations

from backends.dialects import openai_chat
from gateway.api.auth import OpenAuth, TransparentAuth
from gateway.api.endpoint import Endpoint
from gateway.exchange import Incoming, Served
from gateway.metrics import Metrics
from gateway.pipeline import Pipeline


class ChatEndpoint(Endpoint):
    """Chat completions go through the whole pipeline."""

    surface = openai_chat.SURFACE

    def __init__(self, pipeline: Pipeline, auth: OpenAuth | TransparentAuth, metrics: Metrics, body_limit: int) -> None:
        super().__init__(auth, metrics, body_limit)
        self._pipeline = pipeline

    async def serve(self, request: Incoming) -> Served:
        return await self._pipeline.serve(request)
