"""A stored answer as a response of its own."""

from __future__ import annotations

import time

from backends.dialects import openai_chat
from gateway.cache.lookup import Lookup, probability
from gateway.cache.question import Question
from gateway.exchange import Served
from gateway.logs import new_id


def replay(question: Question, lookup: Lookup, started: float) -> Served:
    """The entry that a lookup found, in the shape that was asked for. Raises what an unreadable entry raises."""
    entry, view = lookup.entry, question.view
    assert entry is not None
    now = time.time()
    headers = [
        (b"x-hitherto-cache", lookup.tier.encode()),
        (b"cache-status", f"hitherto; hit; ttl={int(entry.expires - now)}; detail={lookup.tier}".encode()),
        (b"age", str(max(0, int(now - entry.created))).encode()),
        (b"x-hitherto-entry", entry.key.hex()[:16].encode()),
        (b"x-hitherto-model", entry.model.encode("latin-1", "replace")),
    ]
    if lookup.similarity is not None:
        headers.append((b"x-hitherto-similarity", f"{lookup.similarity:.4f}".encode()))
    if lookup.score is not None:
        headers.append((b"x-hitherto-score", f"{probability(lookup.score):.4f}".encode()))
    served = Served(200, headers, started=started, tenant=question.tenant, model=view.model, cache=lookup.tier)
    served.stream, served.similarity = view.stream, lookup.similarity
    id, created = f"chatcmpl-{new_id()}", int(now)
    if view.stream:
        headers.append((b"content-type", b"text/event-stream; charset=utf-8"))
        served.body = b"".join(openai_chat.render_stream(entry.body, id, created, view.include_usage))
    else:
        headers.append((b"content-type", b"application/json"))
        served.body = openai_chat.render_json(entry.body, id, created)
    served.overhead = time.perf_counter() - started
    return served
