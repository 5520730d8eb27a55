"""Looking answers up, and remembering them. A fault in any part is a miss, counted, never an error."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import orjson

from backends.protocol import Answer
from gateway.cache.arbiter import Arbiter
from gateway.cache.asking import Asking
from gateway.cache.choice import Chooser, Considered
from gateway.cache.evidence import Evidence, Hit, Hits
from gateway.cache.feed import Feed
from gateway.cache.key import group_digest
from gateway.cache.learning import Learning
from gateway.cache.lookup import Found, Lookup, Tier
from gateway.cache.memory import Memory, cost
from gateway.cache.question import Question
from gateway.cache.writer import Writer
from gateway.metrics import Metrics
from gateway.stores.contract import AnswerStore, BrokenRow, Entry, Known, Shape, Vector
from policies import cacheability, similarity
from policies.cacheability import CacheRules
from policies.similarity.language import is_english

if TYPE_CHECKING:  # numpy and faiss are not there where only exact answers are served
    from gateway.cache.semantic import Neighbours, Semantic

log = logging.getLogger("hitherto.cache")

SWEEP_SECONDS = 30.0
TURNS = 10_000
"""How many requests that want variety are remembered with the answer that they had last."""


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
        self.store = store
        self.semantic: Semantic | None = None
        """None: exact answers only."""
        self.evidence: Evidence | None = None
        """What is known of semantic hits, where there are some."""
        self.hits = Hits()
        self.arbiter = Arbiter()
        self.learning = Learning(self)
        self.shared = shared
        self.metrics = metrics
        self.memory = Memory(size)
        self._deadline = deadline
        self._reader = ThreadPoolExecutor(2, "answers-read")
        self._side = ThreadPoolExecutor(2, "answers-aside")
        self._lessor = ThreadPoolExecutor(1, "answers-lease")
        self.writer = Writer(store, self.is_current, self.fault)
        self._tasks: set[asyncio.Task[None]] = set()
        self.denied: set[tuple[bytes, bytes]] = set()
        """(question, entry): what was reported, or found, wrong."""
        self._described: set[bytes] = set()
        self._turns: OrderedDict[bytes, int] = OrderedDict()
        self.feed = Feed(self)
        self.asking = Asking()
        """Questions whose answers are under way."""
        if semantic is not None:
            self.use(semantic)
        self._chores: list[asyncio.Task[None]] = []

    def use(self, semantic: Semantic) -> None:
        """Have a semantic tier; to be called before `open`."""
        verifier = semantic.verifier
        calibration = () if verifier is None else verifier.calibration
        judge = f"cosine {semantic.fingerprint}" if verifier is None else verifier.fingerprint
        self.semantic, self.evidence = semantic, Evidence(calibration, judge)
        self._chooser = Chooser(self, semantic, self.evidence)

    async def open(self) -> None:
        """Load what earlier runs stored and still lives, and build the semantic index from it."""
        now = time.time()
        try:
            await self.feed.begin()
            self.denied = set(await self.aside(self.store.denied))
            rows = self.store.rows()
            while some := await self.aside(lambda: list(islice(rows, 10_000))):
                for row in some:
                    if row.known.kept_until > now:
                        self.memory.add(row.key, row.known)
                    else:
                        self.writer.delete([(row.key, row.known.created)])
        except Exception:
            self.fault("store")
        if self.semantic is not None:
            try:
                stored = (vector for _, vector in self.store.vectors(self.semantic.fingerprint))
                await self.semantic.fill(stored, self.is_current)
            except Exception:
                self.fault("index")
            try:
                await self.feed.evidence()
            except Exception:
                self.fault("store")
        self.evict()
        self._publish_size()
        self._chores = [asyncio.create_task(self._sweep()), asyncio.create_task(self.feed.embed_the_rest())]
        self._chores.append(asyncio.create_task(self.feed.tidy()))
        if self.shared:
            self._chores.append(asyncio.create_task(self.feed.follow()))

    async def close(self) -> None:
        """Write what is waiting to be written."""
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.writer.close()
        self._reader.shutdown()
        self._side.shutdown()
        self._lessor.shutdown()
        if self.semantic is not None:
            await asyncio.to_thread(self.semantic.close)
        self.store.close()

    async def lookup(self, question: Question) -> Lookup:
        """Exact first, then semantic, within the deadline. Never raises for a cache fault."""
        lookup = await self._lookup(question)
        self.metrics.answer_lookups.labels(
            "semantic" if lookup.neighbours is not None else "exact",
            "hit" if lookup.entry is not None else lookup.tier,
            lookup.reason,
        ).inc()
        return lookup

    async def _lookup(self, question: Question) -> Lookup:
        readable = cacheability.may_read(question.view, question.rules, question.controls)
        if not readable.exact:
            return Lookup("bypass", readable.reason)
        found, unfit = await self._exact(question)
        if found is not None:
            tier: Tier = "stale" if found.stale else "alias" if found.alias else "exact"
            return Lookup(tier, entry=found.entry)
        if not readable.semantic or self.semantic is None:
            return Lookup("miss", unfit or readable.reason or "semantic-unavailable")
        lookup = await self._lookup_semantic(question)
        if lookup.entry is None and unfit:
            lookup.reason = unfit  # there was an exact entry, and this is why it was not served
        return lookup

    async def again(self, question: Question) -> Entry | None:
        """The exact entry of a question that was looked up before, if somebody else has stored it meanwhile."""
        found, _ = await self._exact(question)
        return found.entry if found is not None and not found.stale else None

    async def _exact(self, question: Question) -> tuple[Found | None, str]:
        """The entry under the question's own key, or None and why not."""
        found, unfit = await self.fetched(question.key, question)
        if found is not None and found.alias:
            readable = cacheability.may_read(question.view, question.rules, question.controls)
            if not readable.semantic or question.rules.shadow:
                return None, readable.reason or "shadow"  # another wording's answer, and this request wants its own
        return found, unfit

    async def stale(self, question: Question) -> Entry | None:
        """An answer whose time is up, for when no backend gives another, as far as the rules allow it."""
        if not cacheability.may_read(question.view, question.rules, question.controls).exact:
            return None
        known = self.memory.get(question.key)
        if known is None or not 0 <= time.time() - known.expires <= question.rules.stale_if_error:
            return None
        found, _ = await self.fetched(question.key, replace(question, rules=_patient(question.rules)))
        return found.entry if found is not None else None

    def vector(self, question: Question) -> asyncio.Future[Neighbours | None] | None:
        """The question's vector on its way; None where there is no encoder."""
        if self.semantic is None or question.view.question is None:
            return None
        return self.semantic.neighbours(question.scope, question.view.question)

    async def agrees(self, question: Question, other: str, key: bytes, cosine: float) -> bool:
        """Whether the answer to another one, to be stored under a key, serves this question; False where nobody can
        tell."""
        text = question.view.question
        if self.semantic is None or text is None:
            return False
        try:
            return await self._chooser.agrees(question, text, other, key, cosine)
        except Exception:
            self.fault("semantic")
            return False

    def note_served(self, request: str, question: Question, lookup: Lookup) -> None:
        """Remember which answer a request got, for whoever reports on it."""
        if lookup.entry is not None:
            group = group_digest(question) if lookup.tier == "semantic" else b""
            score = lookup.score if lookup.tier == "semantic" else None
            entry = lookup.entry
            self.hits.served(request, Hit(question.tenant, question.key, entry.key, group, entry.created, score))

    def denies(self, question: Question, key: bytes) -> bool:
        """Whether that answer was reported wrong for this question."""
        return (question.key, key) in self.denied

    async def settled(self) -> bool:
        """Return when what was remembered so far has been tried to be written: whether it is."""
        return await self.writer.settled()

    def turn(self, key: bytes, buckets: int) -> int:
        """Which of several answers a request that wants variety gets now: each in turn."""
        number = self._turns.pop(key, -1) + 1
        self._turns[key] = number
        if len(self._turns) > TURNS:
            self._turns.popitem(last=False)
        return number % buckets

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
        now, view = time.time(), question.view
        expires = now + cacheability.fresh_for(view, question.rules, question.controls)
        controls = replace(question.controls, no_cache=False)  # it asked for a fresh answer, not for none to be kept
        body, text = orjson.dumps(answer.body), question.text()
        entry = Entry(
            key=question.key,
            scope=question.scope,
            tenant=question.tenant,
            surface=view.surface,
            model=view.model,
            backend=backend,
            question=text,
            body=body,
            has_usage=complete,
            created=now,
            expires=expires,
            cost=cost(answer, body),
            stale_until=expires + question.rules.stale,
            tags=question.controls.tags,
            # What may not be stored as it is could not be compared with other questions as it is.
            embeds=text is not None
            and text == view.question
            and cacheability.may_read(view, question.rules, controls).semantic,
        )
        self.keep(entry)
        if entry.embeds and self.semantic is not None:
            vector = self.semantic.add(entry.scope, entry.key, entry.question or "", lookup.packed())
            self._background(self._write_vector(entry, vector))
        if lookup.near is not None and entry.embeds and self.evidence is not None:
            self._background(self.learning.compare(question, lookup, entry))
        return ""

    def describe(self, question: Question, parts: Callable[[], dict[str, str]]) -> None:
        """Keep what a scope is made of, once, for `explain`."""
        if question.scope in self._described:
            return
        if len(self._described) > 100_000:
            self._described.clear()
        self._described.add(question.scope)
        self.writer.describe(Shape(question.scope, parts()))

    def describe_anew(self) -> None:
        """What scopes are made of may have been dropped from the store."""
        self._described.clear()

    def forget(self, found: list[tuple[bytes, float]]) -> None:
        """Forget entries here and wherever the store is shared."""
        self._forget([key for key, _ in found])
        self.writer.delete(found, announce=True)
        self._publish_size()

    def deny_again(self, denied: set[tuple[bytes, bytes]]) -> None:
        """What was reported bad to any process that shares the store."""
        self.denied |= denied

    def deny(self, asked: bytes, entry: bytes) -> None:
        """Never again serve an entry to the question with the key `asked`."""
        self.denied.add((asked, entry))

    async def leasing(self, call: Any, *arguments: Any) -> Any:
        """As `aside`, without waiting for what others read there."""
        return await asyncio.get_running_loop().run_in_executor(self._lessor, call, *arguments)

    async def aside(self, call: Any, *arguments: Any) -> Any:
        """The result of a blocking call of the store, made from a thread that no lookup waits for."""
        return await asyncio.get_running_loop().run_in_executor(self._side, call, *arguments)

    async def _lookup_semantic(self, question: Question) -> Lookup:
        semantic, text = self.semantic, question.view.question
        assert semantic is not None and text is not None  # may_read allows semantic only with a question
        if not semantic.has(question.scope):
            return Lookup("miss", "first-in-scope")
        if len(text) > similarity.LONGEST:
            return Lookup("miss", "beyond-window")
        if semantic.languages == "en" and not is_english(text):
            return Lookup("miss", "language")
        began, future = time.perf_counter(), semantic.neighbours(question.scope, text)
        try:
            similarity.prepare(text)  # while another thread encodes it
            async with asyncio.timeout(self._deadline):
                # Shielded: past the deadline the vector is still wanted for storing the answer.
                neighbours = await asyncio.shield(future)
                if neighbours is None:
                    return Lookup("miss", "beyond-window")
                lookup = await self._chooser.choose(question, text, neighbours.nearest)
        except TimeoutError:
            lookup = Lookup("miss", "deadline")
        except Exception:
            self.fault("semantic")
            return Lookup("miss", "fault")
        lookup.neighbours, lookup.took = future, (time.perf_counter() - began, len(text) // 4)
        return lookup

    async def consider(self, question: Question) -> list[Considered]:
        """The nearest stored questions, whether they would be served or not."""
        text, coming = question.view.question, self.vector(question)
        neighbours = await coming if coming is not None else None
        if neighbours is None or text is None:
            return []
        return await self._chooser.consider(question, text, neighbours.nearest)

    async def fetched(self, key: bytes, question: Question) -> tuple[Found | None, str]:
        """An entry or the reason why not, within the deadline and without an exception."""
        if key not in self.memory:
            return None, ""
        try:
            async with asyncio.timeout(self._deadline):
                return await self._fetch(key, question)
        except TimeoutError:
            return None, "deadline"
        except BrokenRow:
            self.fault("store")
            self._forget([key])
        except Exception:
            self.fault("store")
        return None, "fault"

    async def _fetch(self, key: bytes, question: Question, follow: bool = True) -> tuple[Found | None, str]:
        """An entry that this request may have, or None and why not."""
        known = self.memory.get(key)
        if known is None:
            return None, ""
        now = time.time()
        late = now - known.expires
        if known.kept_until <= now:
            self._forget([key])
            return None, "expired"
        if late >= 0 and (late >= question.rules.stale_while_revalidate or key != question.key):
            return None, "expired"
        max_age = question.controls.max_age
        if max_age is not None and (late >= 0 or now - known.created > max_age):
            return None, "max-age"
        if not known.has_usage and (question.view.include_usage or not question.view.stream):
            return None, "usage-unknown"  # the client waits for a usage chunk that we could only invent
        entry = self.memory.body(key)
        if entry is None:
            entry = await asyncio.get_running_loop().run_in_executor(self._reader, self.store.get, key)
            if self.memory.get(key) is not known:
                return None, "changed"  # replaced or evicted while we read
            if entry is None or entry.created < known.created:
                self._forget([key])  # never written, or an older answer under this key
                return None, "lost"
            if entry.created > known.created:
                return None, "changed"  # another worker's; we shall hear of it
            self.memory.heat(entry)
        known.used = now
        if entry.target is None:
            return Found(entry, entry.question, alias=False, stale=late >= 0), ""
        return await self._fetch_target(entry, question) if follow else (None, "lost")  # no alias stands for another

    async def _fetch_target(self, alias: Entry, question: Question) -> tuple[Found | None, str]:
        """What an alias stands for, if it is still the very answer that it was found to share."""
        assert alias.target is not None
        if (alias.key, alias.target) in self.denied:
            return None, "veto-reported"
        found, unfit = await self._fetch(alias.target, question, follow=False)
        known = self.memory.get(alias.target)
        if known is None or known.created > alias.created or unfit == "lost":
            self._forget([alias.key])
            return None, unfit or "lost"
        return (None, unfit) if found is None else (Found(found.entry, alias.question, alias=True), "")

    def keep(self, entry: Entry) -> None:
        """Take an entry in: findable now, durable soon."""
        known = Known(
            created=entry.created,
            expires=entry.expires,
            kept_until=entry.kept_until,
            size=len(entry.body) + len(entry.question or ""),
            cost=entry.cost,
            has_usage=entry.has_usage,
            used=entry.created,
        )
        self.memory.add(entry.key, known, entry)
        if self.evidence is not None:
            self.evidence.forget(entry.key)  # of an older answer under this key
        self.writer.put(entry)
        self.evict()
        self._publish_size()

    def _forget(self, keys: list[bytes]) -> None:
        gone = []
        for key in keys:
            known = self.memory.remove(key)
            if known is not None:
                gone.append((key, known.created))
        if gone:
            self.writer.delete(gone)
            if self.semantic is not None:
                self.ignore(self.semantic.remove([key for key, _ in gone]))

    def evict(self) -> None:
        """Keep within the budget."""
        now = time.time()
        while self.memory.over():
            self._forget([self.memory.least(now)])
            self.metrics.answer_evictions.inc()

    async def _sweep(self) -> None:
        """Expired entries must not fill the budget just because nobody asks for them."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self._forget(self.memory.dead(time.time()))
            self._publish_size()

    async def _write_vector(self, entry: Entry, coming: asyncio.Future[bytes | None]) -> None:
        try:
            packed = await coming
        except Exception:
            self.fault("semantic")
            return
        assert self.semantic is not None
        self.writer.put_vector(Vector(entry.key, entry.scope, entry.created, self.semantic.fingerprint, packed or b""))

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def is_current(self, key: bytes, created: float) -> bool:
        """Whether this very entry is known."""
        known = self.memory.get(key)
        return known is not None and known.created == created

    def _publish_size(self) -> None:
        self.metrics.answer_entries.set(len(self.memory))
        self.metrics.answer_bytes.set(self.memory.bytes)

    @staticmethod
    def ignore(future: asyncio.Future[Any]) -> None:
        """Let nobody complain that a future's exception was not looked at."""
        future.add_done_callback(lambda done: done.cancelled() or done.exception())

    def fault(self, part: str) -> None:
        """Count and log the exception being handled: a cache fault is a miss, never an error."""
        self.metrics.faults.labels(part).inc()
        log.exception("a fault in the %s part of the answer cache counts as a miss", part)


def _patient(rules: CacheRules) -> CacheRules:
    return replace(rules, stale_while_revalidate=max(rules.stale_while_revalidate, rules.stale_if_error))
