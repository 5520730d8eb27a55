"""`POST /v1/chat/completions`."""

from __future__ import annotations

from backends.dialects import openai_chat
from gateway.api.endpoint import Door, Endpoint
from gateway.exchange import Incoming, Served
from gateway.pipeline import Pipeline


class ChatEndpoint(Endpoint):
    """Chat completions go through the whole pipeline."""

    surface = openai_chat.SURFACE

    def __init__(self, pipeline: Pipeline, door: Door) -> None:
        super().__init__(door)
        self._pipeline = pipeline

    async def serve(self, request: Incoming) -> Served:
        return await self._pipeline.serve(request)
