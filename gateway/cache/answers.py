"""Looking answers up, and remembering them. A fault in any part is a miss, counted, never an error."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orjson

from backends.protocol import Answer, View
from gateway.cache.semantic import Neighbours, Semantic
from gateway.metrics import Metrics
from gateway.stores.contract import AnswerStore, Entry, Known
from policies import cacheability, similarity
from policies.cacheability import CacheRules, Controls

log = logging.getLogger("hitherto.cache")

Tier = Literal["exact", "semantic", "miss", "bypass"]
_OVERHEAD = 600
"""Bytes that an entry costs beside its answer: facts in memory, part of its vector."""
HOT_BYTES = 64 << 20
SWEEP_SECONDS = 30.0
FOLLOW_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Question:
    """A request as the cache sees it."""

    key: bytes
    scope: bytes
    tenant: str
    view: View
    controls: Controls
    rules: CacheRules


@dataclass(slots=True)
class Lookup:
    """What a lookup found, or why it found nothing. `neighbours` holds the question's vector for storing the answer."""

    tier: Tier
    reason: str = ""
    entry: Entry | None = None
    similarity: float | None = None
    neighbours: asyncio.Future[Neighbours | None] | None = field(default=None, repr=False)


class Answers:
    """The answer cache of one gateway process.

    In memory: facts of every entry, the bodies of the hot ones, and the semantic index. On disk: everything.
    """

    def __init__(
        self,
        store: AnswerStore,
        size: int,
        deadline: float,
        metrics: Metrics,
        semantic: Semantic | None = None,
        shared: bool = False,
    ) -> None:
        """`shared`: other processes write to the same store, and what they remember is wanted here too."""
        self._store = store
        self.semantic = semantic
        """Set before `open`; None: exact answers only."""
        self._shared = shared
        self._size_limit = size
        self._deadline = deadline
        self.metrics = metrics
        self._known: OrderedDict[bytes, Known] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._hot: OrderedDict[bytes, Entry] = OrderedDict()
        self._hot_bytes = 0
        self._reader = ThreadPoolExecutor(2, "answers-read")
        self._writer = ThreadPoolExecutor(1, "answers-write")
        self._to_write: list[Entry] = []
        self._to_delete: list[tuple[bytes, float]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing = False
        self._followed = 0
        """The number of the newest write that we know of."""
        self._chores: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Load what earlier runs stored and still lives, and build the semantic index from it."""
        loop = asyncio.get_running_loop()
        try:
            self._followed = await loop.run_in_executor(self._reader, self._store.last)
            known = await loop.run_in_executor(self._reader, lambda: list(self._store.known()))
        except Exception:
            self.fault("store")
            known = []
        now = time.time()
        for key, facts in known:
            if facts.expires > now:
                self._know(key, facts)
            else:
                self._to_delete.append((key, facts.created))
        if self.semantic is not None:
            try:
                await self.semantic.warm()
                await self.semantic.rebuild(self._store, self._known.__contains__)
            except Exception:
                self.fault("index")
        self._evict()
        self._publish_size()
        self._flush_soon()
        self._chores = [asyncio.create_task(self._sweep())]
        if self._shared:
            self._chores.append(asyncio.create_task(self._follow()))

    async def close(self) -> None:
        """Write what is waiting to be written."""
        for chore in self._chores:
            chore.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._reader.shutdown()
        self._writer.shutdown()
        if self.semantic is not None:
            await asyncio.to_thread(self.semantic.close)
        self._store.close()

    async def lookup(self, question: Question) -> Lookup:
        """Exact first, then semantic, within the deadline. Never raises for a cache fault."""
        readable = cacheability.may_read(question.view, question.rules, question.controls)
        if not readable.exact:
            return self._counted("exact", Lookup("bypass", readable.reason))
        try:
            entry, unfit = await self._fetch(question.key, question)
        except Exception:
            self.fault("store")
            entry, unfit = None, "fault"
        if entry is not None:
            return self._counted("exact", Lookup("exact", entry=entry))
        if not readable.semantic or self.semantic is None:
            return self._counted("exact", Lookup("miss", unfit or readable.reason or "semantic-unavailable"))
        lookup = await self._lookup_semantic(question)
        if lookup.entry is None and unfit:
            lookup.reason = unfit  # there was an exact entry, and this is why it was not served
        return self._counted("semantic", lookup)

    def remember(
        self, question: Question, lookup: Lookup, backend: str, status: int, answer: Answer, complete: bool = True
    ) -> str:
        """Keep an answer if it may be kept: findable when this returns, durable soon after. Empty, or why not.

        `complete`: the backend told all it has to tell, usage included.
        """
        reason = cacheability.may_write(question.view, question.rules, question.controls, status, answer)
        self.metrics.answer_writes.labels("skipped" if reason else "stored", reason).inc()
        if reason:
            return reason
        now = time.time()
        entry = Entry(
            key=question.key,
            scope=question.scope,
            tenant=question.tenant,
            surface=question.view.surface,
            model=question.view.model,
            backend=backend,
            question=question.view.question,
            body=orjson.dumps(answer.body),
            has_usage=complete,
            created=now,
            expires=now + cacheability.fresh_for(question.rules, question.controls),
        )
        self._keep(entry)
        self._background(self._write(entry, self._add_to_index(question, lookup, entry)))
        return ""

    def _add_to_index(self, question: Question, lookup: Lookup, entry: Entry) -> asyncio.Future[bytes | None] | None:
        """The entry's vector, on its way into the index; None where the semantic tier has no place for it."""
        controls = replace(question.controls, no_cache=False)  # it asked for a fresh answer, not for none to be kept
        if self.semantic is None or entry.question is None:
            return None
        if not cacheability.may_read(question.view, question.rules, controls).semantic:
            return None
        known, vector = lookup.neighbours, None
        if known is not None and known.done() and not known.cancelled() and known.exception() is None:
            result = known.result()
            vector = result.vector if result is not None else None
        return self.semantic.add(entry.scope, entry.key, entry.question, vector)

    async def _lookup_semantic(self, question: Question) -> Lookup:
        semantic, text = self.semantic, question.view.question
        assert semantic is not None and text is not None  # may_read allows semantic only with a question
        if not semantic.has(question.scope):
            return Lookup("miss", "first-in-scope")
        future = semantic.neighbours(question.scope, text)
        try:
            async with asyncio.timeout(self._deadline):
                # Shielded: past the deadline the vector is still wanted for storing the answer.
                neighbours = await asyncio.shield(future)
                if neighbours is None:
                    return Lookup("miss", "beyond-window")
                lookup = await self._choose(question, text, neighbours.nearest)
        except TimeoutError:
            lookup = Lookup("miss", "deadline")
        except Exception:
            self.fault("semantic")
            return Lookup("miss", "fault")
        lookup.neighbours = future
        return lookup

    async def _choose(self, question: Question, text: str, nearest: list[tuple[bytes, float]]) -> Lookup:
        """The first candidate that nothing speaks against; else the reason why the best one was refused."""
        threshold = max(question.rules.threshold, question.controls.threshold or 0.0)
        refused = "below-threshold"
        best = nearest[0][1] if nearest else None
        for key, cosine in nearest:
            if cosine < threshold:
                break
            entry, unfit = await self._fetch(key, question)
            if entry is None or entry.question is None or entry.scope != question.scope:
                refused = unfit or refused
                continue
            if veto := similarity.veto(text, entry.question):
                refused = f"veto-{veto}"
                continue
            return Lookup("semantic", entry=entry, similarity=cosine)
        return Lookup("miss", refused, similarity=best)

    async def _fetch(self, key: bytes, question: Question) -> tuple[Entry | None, str]:
        """An entry that this request may have, or None and why not."""
        known = self._known.get(key)
        if known is None:
            return None, ""
        now = time.time()
        if known.expires <= now:
            self._forget([key])
            return None, "expired"
        max_age = question.controls.max_age
        if max_age is not None and now - known.created > max_age:
            return None, "max-age"
        if not known.has_usage and (question.view.include_usage or not question.view.stream):
            return None, "usage-unknown"  # the client waits for a usage chunk that we could only invent
        entry = self._hot.get(key)
        if entry is None:
            loop = asyncio.get_running_loop()
            entry = await loop.run_in_executor(self._reader, self._store.get, key)
            if self._known.get(key) is not known:
                return None, "changed"  # replaced or evicted while we read
            if entry is None or entry.created < known.created:
                self._forget([key])  # never written, or an older answer under this key
                return None, "lost"
            if entry.created > known.created:
                return None, "changed"  # another worker's; we shall hear of it
            self._warm_up(entry)
        self._known.move_to_end(key)
        return entry, ""

    def _keep(self, entry: Entry) -> None:
        self._know(entry.key, Known(entry.created, entry.expires, _size(entry), entry.scope, entry.has_usage))
        self._warm_up(entry)
        self._evict()
        self._publish_size()

    def _know(self, key: bytes, facts: Known) -> None:
        """Take in the facts of an entry, in place of an older one's under the same key."""
        self._forget([key], delete=False)
        self._known[key] = facts
        self._bytes += facts.size + _OVERHEAD

    def _warm_up(self, entry: Entry) -> None:
        if (old := self._hot.pop(entry.key, None)) is not None:
            self._hot_bytes -= _size(old)
        self._hot[entry.key] = entry
        self._hot_bytes += _size(entry)
        while self._hot_bytes > HOT_BYTES and len(self._hot) > 1:
            _, cold = self._hot.popitem(last=False)
            self._hot_bytes -= _size(cold)

    def _forget(self, keys: list[bytes], delete: bool = True) -> None:
        gone = []
        for key in keys:
            known = self._known.pop(key, None)
            if known is not None:
                self._bytes -= known.size + _OVERHEAD
                gone.append((key, known.created))
            hot = self._hot.pop(key, None)
            if hot is not None:
                self._hot_bytes -= _size(hot)
        if delete and gone:
            self._to_delete += gone
            if self.semantic is not None:
                _ignore_result(self.semantic.remove([key for key, _ in gone]))
            self._flush_soon()

    def _evict(self) -> None:
        while self._bytes > self._size_limit and len(self._known) > 1:
            self._forget([next(iter(self._known))])

    async def _sweep(self) -> None:
        """Expired entries must not fill the budget just because nobody asks for them."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = time.time()
            self._forget([key for key, known in self._known.items() if known.expires <= now])
            self._publish_size()

    async def _follow(self) -> None:
        """Learn what other workers have stored."""
        loop = asyncio.get_running_loop()
        embedder = self.semantic.fingerprint if self.semantic is not None else ""
        while True:
            await asyncio.sleep(FOLLOW_SECONDS)
            try:
                rows = await loop.run_in_executor(self._reader, self._news, self._followed, embedder)
            except Exception:
                self.fault("store")
                continue
            for number, key, facts, vector in rows:
                self._followed = number
                mine = self._known.get(key)
                if facts.expires <= time.time() or (mine is not None and mine.created >= facts.created):
                    continue
                self._know(key, facts)
                if self.semantic is not None and vector is not None:
                    _ignore_result(self.semantic.add(facts.scope, key, "", vector))
            self._evict()

    def _news(self, number: int, embedder: str) -> list[tuple[int, bytes, Known, bytes | None]]:
        return list(self._store.since(number, embedder))

    async def _write(self, entry: Entry, coming: asyncio.Future[bytes | None] | None) -> None:
        if coming is not None and self.semantic is not None:
            try:
                vector = await coming
            except Exception:
                self.fault("semantic")
            else:
                if vector is not None:
                    entry = replace(entry, vector=vector, embedder=self.semantic.fingerprint)
        self._to_write.append(entry)
        self._flush_soon()

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _flush_soon(self) -> None:
        if not self._writing and (self._to_write or self._to_delete):
            self._writing = True
            self._background(self._flush())

    async def _flush(self) -> None:
        """Write what has gathered, in one transaction, until nothing is left."""
        loop = asyncio.get_running_loop()
        try:
            while self._to_write or self._to_delete:
                entries, self._to_write = self._to_write, []
                keys, self._to_delete = self._to_delete, []
                live = [entry for entry in entries if self._is_current(entry)]
                try:
                    if keys:
                        await loop.run_in_executor(self._writer, self._store.delete, keys)
                    if live:
                        await loop.run_in_executor(self._writer, self._store.put, live)
                except Exception:
                    self.fault("store")  # they live on in memory until they are evicted
        finally:
            self._writing = False

    def _is_current(self, entry: Entry) -> bool:
        known = self._known.get(entry.key)
        return known is not None and known.created == entry.created

    def _counted(self, tier: str, lookup: Lookup) -> Lookup:
        result = "hit" if lookup.entry is not None else lookup.tier
        self.metrics.answer_lookups.labels(tier, result, lookup.reason).inc()
        return lookup

    def _publish_size(self) -> None:
        self.metrics.answer_entries.set(len(self._known))
        self.metrics.answer_bytes.set(self._bytes)

    def fault(self, part: str) -> None:
        """Count and log the exception being handled: a cache fault is a miss, never an error."""
        self.metrics.faults.labels(part).inc()
        log.exception("a fault in the %s part of the answer cache counts as a miss", part)


def _size(entry: Entry) -> int:
    return len(entry.body) + len(entry.question or "")


def _ignore_result(future: asyncio.Future[Any]) -> None:
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
