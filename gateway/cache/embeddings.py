"""Embeddings, cached input by input: of a batch only what is new is computed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from backends.protocol import View
from gateway.cache.answers import Answers
from gateway.cache.key import Scope, key_digest
from gateway.cache.question import Question
from gateway.stores.contract import Entry
from gateway.tenant import Tenant
from policies import cacheability
from policies.controls import Controls

SURFACE = "openai-embeddings"


@dataclass(frozen=True, slots=True)
class Batch:
    """A request for embeddings: one question for each input, in order."""

    fields: Mapping[str, Any]
    inputs: Sequence[Any]
    questions: Sequence[Question]

    @property
    def model(self) -> str:
        return str(self.fields["model"])

    def body(self, places: Sequence[int]) -> bytes:
        """A request for some of the inputs only."""
        return orjson.dumps({**self.fields, "input": [self.inputs[place] for place in places]})


def inputs_of(body: object) -> list[Any] | None:
    """The inputs of a request; None if it is not one that could be taken apart."""
    model = body.get("model") if isinstance(body, dict) else None
    if not isinstance(body, dict) or not isinstance(model, str) or not model.isprintable():
        return None
    value = body.get("input")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        return None
    if all(isinstance(item, int) for item in value):
        return [value]  # one input, as token ids
    one_kind = all(isinstance(item, str) for item in value) or all(isinstance(item, list) for item in value)
    return value if one_kind else None


def batch(
    body: Mapping[str, Any],
    inputs: list[Any],
    tenant: Tenant,
    user: str,
    target: tuple[str, ...],
    headers: Mapping[str, str],
    query: str,
    controls: Controls,
) -> Batch:
    """The questions of a request."""
    fields = {name: value for name, value in body.items() if name != "input"}
    view = View(SURFACE, str(body["model"]), False, False, None, "embedding", fields, temperature=0.0)
    rules = tenant.policy.rules
    apart = user if rules.per_user else ""
    scope = Scope(view, tenant.name, target, headers, query, controls.namespace, apart).digest()
    questions = [
        Question(key_digest(scope, orjson.dumps(item).decode()), scope, tenant.name, view, controls, rules)
        for item in inputs
    ]
    return Batch(fields, inputs, questions)


async def known(answers: Answers, asked: Batch) -> list[bytes | None]:
    """For each input its stored embedding as JSON, or None."""
    found: list[bytes | None] = []
    for question in asked.questions:
        lookup = await answers.lookup(question)
        fresh = lookup.entry is not None and lookup.tier == "exact"
        found.append(lookup.entry.body if fresh and lookup.entry is not None else None)
    return found


def missing(asked: Batch, found: Sequence[bytes | None]) -> list[int]:
    """The places of the inputs that must be computed, each different one once."""
    places: dict[bytes, int] = {}
    for place, (question, body) in enumerate(zip(asked.questions, found, strict=True)):
        if body is None:
            places.setdefault(question.key, place)
    return list(places.values())


def computed(reply: bytes, count: int) -> tuple[dict[str, Any], list[bytes]] | None:
    """A backend's answer without its data, and the embeddings as JSON in the order of the inputs; None if unfit."""
    try:
        answer = orjson.loads(reply)
        rows = {row["index"]: row["embedding"] for row in answer["data"]}
        ordered = [rows[place] for place in range(count)]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    if len(answer["data"]) != count or not all(isinstance(row, list | str) and row for row in ordered):
        return None
    return {name: value for name, value in answer.items() if name != "data"}, list(map(orjson.dumps, ordered))


def remember(answers: Answers, asked: Batch, places: Sequence[int], bodies: Sequence[bytes], backend: str) -> str:
    """Keep computed embeddings; empty, or why not."""
    first = asked.questions[0]
    rules, controls = first.rules, first.controls
    if not rules.exact or controls.no_store or controls.ttl == 0:
        return "no-store" if rules.exact else "disabled"
    now = time.time()
    expires = now + cacheability.fresh_for(first.view, rules, controls)
    for place, body in zip(places, bodies, strict=True):
        question = asked.questions[place]
        cost = len(orjson.dumps(asked.inputs[place])) / 4
        answers.keep(
            Entry(question.key, question.scope, question.tenant, SURFACE, asked.model, backend, None, body, True, now,
                  expires, cost, expires + rules.stale, controls.tags)
        )  # fmt: skip
    answers.metrics.answer_writes.labels("stored", "").inc(len(places))
    return ""


def merged(
    asked: Batch, found: Sequence[bytes | None], places: Sequence[int], bodies: Sequence[bytes], rest: Mapping[str, Any]
) -> bytes:
    """The response to the whole request: every input's embedding at its own place, usage of what was computed."""
    fresh = {asked.questions[place].key: body for place, body in zip(places, bodies, strict=True)}
    rows = b",".join(
        b'{"object":"embedding","index":%d,"embedding":%b}' % (place, body or fresh[question.key])
        for place, (question, body) in enumerate(zip(asked.questions, found, strict=True))
    )
    head = {"object": "list", "model": asked.model, "usage": {"prompt_tokens": 0, "total_tokens": 0}, **rest}
    return orjson.dumps(head)[:-1] + b',"data":[' + rows + b"]}"
