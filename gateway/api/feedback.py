"""`POST /v1/feedback`: whoever was served a stored answer says whether it was right."""

from __future__ import annotations

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from backends import asgi
from backends.dialects.openai_chat import MalformedRequest
from gateway.api.endpoint import Door, Endpoint
from gateway.cache.control import Control
from gateway.exchange import Incoming, Served
from policies.similarity import LONGEST


class Report(BaseModel):
    """Which answer is meant: by the `x-request-id` of its response, or by its entry and the question that got it."""

    model_config = ConfigDict(extra="forbid")

    correct: bool
    request_id: str = Field(default="", max_length=200)
    entry: str = Field(default="", pattern="^([0-9a-fA-F]{16,64})?$")
    """As `x-hitherto-entry` told it."""
    question: str = Field(default="", max_length=LONGEST)

    @model_validator(mode="after")
    def _one_way(self) -> Report:
        if bool(self.request_id) == bool(self.entry and self.question):
            raise ValueError("say which answer is meant: either request_id, or entry and question")
        return self


class FeedbackEndpoint(Endpoint):
    """Tenants can only report answers of their own."""

    surface = "feedback"

    def __init__(self, control: Control, door: Door) -> None:
        super().__init__(door)
        self._control = control

    async def serve(self, request: Incoming) -> Served:
        await self.door.admission.enter(request, "", "")
        try:
            report = Report.model_validate_json(request.body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise MalformedRequest(first["msg"].removeprefix("Value error, "), where or None) from error
        if report.request_id:
            done = await self._control.report_served(request.tenant.name, report.request_id, report.correct)
        else:
            done = await self._control.report(request.tenant.name, report.entry, report.question, report.correct)
        served = Served(200, [asgi.JSON], orjson.dumps(done), tenant=request.tenant.name, cache="none")
        served.reason = "feedback"
        return served
