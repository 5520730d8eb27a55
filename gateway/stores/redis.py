"""Answers in one Redis database, shared by gateways on several machines. Redis 7 will do: hashes, streams, Lua.

An entry is a hash that expires by itself. What was written is told by streams, whose ids are the numbers of the writes.
What an operator asks for (find, statistics) scans.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import orjson

from gateway.stores.contract import OBSERVATIONS, BrokenRow, Entry, Known, Observation, Row, Selector, Shape, Vector

STREAM_LIMIT = 1_000_000
"""So many writes are remembered, about; whoever was away longer does not hear of the older ones."""
SCOPE_SECONDS = 30 * 86400
_PIECE = 1000

# Stores an entry unless a newer one is there, and tells of it. An older entry takes its vector with it.
_PUT = """
local old = redis.call('HGET', KEYS[1], 'created')
if old and tonumber(old) > tonumber(ARGV[1]) then return 0 end
if old and tonumber(old) < tonumber(ARGV[1]) then redis.call('DEL', KEYS[2]) end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'created', ARGV[1], 'meta', ARGV[2], 'body', ARGV[3], 'seal', ARGV[4])
redis.call('PEXPIREAT', KEYS[1], ARGV[5])
local number = redis.call('INCR', KEYS[4])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[7], number .. '-0', 'row', ARGV[6])
return 1
"""
_PUT_VECTOR = """
if redis.call('HGET', KEYS[1], 'created') ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[2])
redis.call('PEXPIRE', KEYS[2], math.max(redis.call('PTTL', KEYS[1]), 1))
local number = redis.call('INCR', KEYS[4])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[3], number .. '-0', 'row', ARGV[2])
return 1
"""
_DELETE = """
local old = redis.call('HGET', KEYS[1], 'created')
if old and tonumber(old) <= tonumber(ARGV[1]) then redis.call('DEL', KEYS[1], KEYS[2]) end
if ARGV[2] ~= '' then
  local number = redis.call('INCR', KEYS[4])
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[3], number .. '-0', 'row', ARGV[2])
end
return 1
"""
_OBSERVE = """
local number = redis.call('INCR', KEYS[2])
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], number .. '-0', 'row', ARGV[1])
return 1
"""
_HASHES = ("group", "entry", "asked")
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"
_FEEDS = ("entries", "vectors", "removals")


class RedisAnswers:
    """An `AnswerStore` in Redis, under `prefix`; `timeout` seconds for connecting and for each answer. Thread-safe."""

    def __init__(self, url: str, prefix: str = "hitherto:answers:", timeout: float = 1.0) -> None:
        import redis

        # No connection yet: a gateway starts without it, counts the faults, and finds it when it is there.
        self._redis: Any = redis.Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)
        self._prefix = prefix
        self._put: Any = self._redis.register_script(_PUT)
        self._put_vector: Any = self._redis.register_script(_PUT_VECTOR)
        self._delete: Any = self._redis.register_script(_DELETE)
        self._observe: Any = self._redis.register_script(_OBSERVE)
        self._release: Any = self._redis.register_script(_RELEASE)

    def rows(self, after: int = 0) -> Iterator[Row]:
        for piece in self._stream("entries", after):
            told = {}  # of several writes of an entry in a piece the last
            for number, row in piece:
                key, scope, created, expires, kept, size, cost, usage = orjson.loads(row)
                known = Known(created, expires, kept, size, cost, usage, created)
                told[key] = Row(number, bytes.fromhex(key), bytes.fromhex(scope), known)
            there = self._each("hget", [(self._name("e", row.key), "created") for row in told.values()])
            yield from (
                row for row, at in zip(told.values(), there, strict=True) if at and float(at) == row.known.created
            )

    def vectors(self, embedder: str, after: int = 0) -> Iterator[tuple[int, Vector]]:
        for piece in self._stream("vectors", after):
            told = {(vector := _vector(row)).key: (number, row, vector) for number, row in piece}
            there = self._each("get", [(self._name("v", key),) for key in told])
            for (number, row, vector), now in zip(told.values(), there, strict=True):
                if now == row and vector.embedder == embedder:
                    yield number, vector

    def removed(self, after: int) -> list[tuple[int, bytes, float]]:
        found = ((number, *orjson.loads(row)) for piece in self._stream("removals", after) for number, row in piece)
        return [(number, bytes.fromhex(key), created) for number, key, created in found]

    def last(self) -> tuple[int, int, int]:
        entries, vectors, removals = (int(n or 0) for n in self._redis.mget([self._name("n", f) for f in _FEEDS]))
        return entries, vectors, removals

    def get(self, key: bytes) -> Entry | None:
        meta, body, seal = self._redis.hmget(self._name("e", key), "meta", "body", "seal")
        if meta is None:
            return None
        if body is None or seal != _seal(key, meta, body):
            raise BrokenRow(f"the stored answer {key.hex()[:16]} is not what was written")
        return _entry(key, meta, body)

    def put(self, entries: Sequence[Entry]) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for e in {entry.key: entry for entry in entries}.values():
            meta, size = _meta(e), len(e.body) + len(e.question or "")
            facts = [e.created, e.expires, e.kept_until, size, e.cost, e.has_usage]
            row, until = orjson.dumps([e.key.hex(), e.scope.hex(), *facts]), int(e.kept_until * 1000)
            values = [repr(e.created), meta, e.body, _seal(e.key, meta, e.body), until, row, STREAM_LIMIT]
            self._put(self._names(e.key, "entries"), values, client=pipe)
        pipe.execute()

    def put_vectors(self, vectors: Sequence[Vector]) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for v in vectors:
            row = orjson.dumps([v.key.hex(), v.scope.hex(), v.created, v.embedder, v.packed.hex()])
            self._put_vector(self._names(v.key, "vectors"), [repr(v.created), row, STREAM_LIMIT], client=pipe)
        pipe.execute()

    def delete(self, keys: Sequence[tuple[bytes, float]], announce: bool = False) -> None:
        pipe = self._redis.pipeline(transaction=False)
        for key, created in keys:
            row = orjson.dumps([key.hex(), created]) if announce else b""
            self._delete(self._names(key, "removals"), [repr(created), row, STREAM_LIMIT], client=pipe)
        pipe.execute()

    def find(self, selector: Selector) -> list[tuple[bytes, float, int]]:
        everything = list(self._entries())
        before = None if selector.older_than is None else time.time() - selector.older_than
        meant = {
            entry.key
            for entry in everything
            if entry.key.hex().startswith(selector.entry.lower())
            and (not selector.tag or selector.tag in entry.tags)
            and selector.model in ("", entry.model)
            and selector.tenant in ("", entry.tenant)
            and (before is None or entry.created < before)
        }
        found = [entry for entry in everything if entry.key in meant or entry.target in meant]
        return [(entry.key, entry.created, len(entry.body) + len(entry.question or "")) for entry in found]

    def unembedded(self, embedder: str, limit: int) -> list[tuple[bytes, bytes, float, str]]:
        found: list[tuple[bytes, bytes, float, str]] = []
        for entry in self._entries():
            if entry.embeds and entry.question is not None and len(found) < limit:
                row = self._redis.get(self._name("v", entry.key))
                if row is None or _vector(row).embedder != embedder:
                    found.append((entry.key, entry.scope, entry.created, entry.question))
        return found

    def elsewhere(self, scope: bytes, question: str, limit: int) -> list[tuple[bytes, bytes, float]]:
        found = [entry for entry in self._entries() if entry.question == question and entry.scope != scope]
        found.sort(key=lambda entry: -entry.created)
        return [(entry.key, entry.scope, entry.created) for entry in found[:limit]]

    def describe(self, shape: Shape) -> None:
        self._redis.set(self._name("s", shape.scope), orjson.dumps(shape.parts), ex=SCOPE_SECONDS, nx=True)

    def tidy(self) -> None:
        """Nothing to do: what belongs to no entry any more expires."""

    def described(self, scope: bytes) -> dict[str, str]:
        parts = self._redis.get(self._name("s", scope))
        found: dict[str, str] = orjson.loads(parts) if parts is not None else {}
        return found

    def deny(self, asked: bytes, entry: bytes) -> None:
        self._redis.sadd(self._name("denied", ""), f"{asked.hex()} {entry.hex()}")

    def denied(self) -> list[tuple[bytes, bytes]]:
        pairs = (member.decode().split(" ") for member in self._redis.smembers(self._name("denied", "")))
        return [(bytes.fromhex(asked), bytes.fromhex(entry)) for asked, entry in pairs]

    def observe(self, rows: Sequence[Observation]) -> None:
        feed, numbers = self._name("feed", "evidence"), self._name("n", "evidence")
        for row in rows:
            fields = {**asdict(row), **{name: getattr(row, name).hex() for name in _HASHES}}
            self._observe([feed, numbers], [orjson.dumps(fields), 100 * OBSERVATIONS])

    def observed(self, after: int = 0) -> list[tuple[int, Observation]]:
        found = []
        for number, row in (told for piece in self._stream("evidence", after) for told in piece):
            fields = orjson.loads(row)
            found.append((number, Observation(**{**fields, **{name: bytes.fromhex(fields[name]) for name in _HASHES}})))
        return found

    def lease(self, key: bytes, holder: str, seconds: float) -> bool:
        name = self._name("l", key)
        if self._redis.set(name, holder, nx=True, px=max(1, int(seconds * 1000))):
            return True
        return bool(self._redis.get(name) == holder.encode())

    def release(self, key: bytes, holder: str) -> None:
        self._release([self._name("l", key)], [holder])

    def statistics(self) -> dict[str, Any]:
        models: dict[str, int] = {}
        count = size = aliases = 0
        oldest: float | None = None
        for entry in self._entries():
            count, size, aliases = count + 1, size + len(entry.body), aliases + (entry.target is not None)
            models[entry.model] = models.get(entry.model, 0) + 1
            oldest = entry.created if oldest is None else min(oldest, entry.created)
        vectors = sum(1 for _ in self._redis.scan_iter(self._name("v", "*"), count=_PIECE))
        most = dict(sorted(models.items(), key=lambda item: -item[1])[:20])
        return {"entries": count, "bytes": size, "aliases": aliases, "vectors": vectors, "oldest": oldest,
                "models": most, "denied": len(self.denied())}  # fmt: skip

    def close(self) -> None:
        self._redis.close()

    def _entries(self) -> Iterator[Entry]:
        """Every entry that is there, in no order."""
        start = len(self._name("e", ""))
        names: list[bytes] = []
        for name in self._redis.scan_iter(self._name("e", "*"), count=_PIECE):
            names.append(name)
            if len(names) == _PIECE:
                yield from self._read(names, start)
                names = []
        yield from self._read(names, start)

    def _read(self, names: list[bytes], start: int) -> Iterator[Entry]:
        found = self._each("hmget", [(name.decode(), "meta", "body") for name in names])
        for name, (meta, body) in zip(names, found, strict=True):
            if meta is not None and body is not None:
                yield _entry(bytes.fromhex(name[start:].decode()), meta, body)

    def _stream(self, feed: str, after: int) -> Iterator[list[tuple[int, bytes]]]:
        """What was told after a number, in pieces: (number, row)."""
        while found := self._redis.xrange(self._name("feed", feed), min=f"{after + 1}-0", count=_PIECE):
            piece = [(int(id.partition(b"-")[0]), fields[b"row"]) for id, fields in found]
            after = piece[-1][0]
            yield piece

    def _each(self, command: str, arguments: list[tuple[str, ...]]) -> list[Any]:
        """The results of one command for many arguments, in one go."""
        pipe = self._redis.pipeline(transaction=False)
        for these in arguments:
            getattr(pipe, command)(*these)
        results: list[Any] = pipe.execute()
        return results

    def _names(self, key: bytes, feed: str) -> list[str]:
        """What a script about one entry touches: the entry, its vector, a feed and that feed's number."""
        return [self._name("e", key), self._name("v", key), self._name("feed", feed), self._name("n", feed)]

    def _name(self, kind: str, what: bytes | str) -> str:
        return f"{self._prefix}{kind}:{what.hex() if isinstance(what, bytes) else what}"


def _meta(entry: Entry) -> bytes:
    fields = asdict(entry)
    del fields["key"], fields["body"]
    fields |= {"scope": entry.scope.hex(), "target": entry.target.hex() if entry.target is not None else None}
    return orjson.dumps(fields)


def _entry(key: bytes, meta: bytes, body: bytes) -> Entry:
    fields = orjson.loads(meta)
    fields |= {"scope": bytes.fromhex(fields["scope"]), "tags": tuple(fields["tags"]),
               "target": bytes.fromhex(fields["target"]) if fields["target"] is not None else None}  # fmt: skip
    return Entry(key=key, body=body, **fields)


def _vector(row: bytes) -> Vector:
    key, scope, created, embedder, packed = orjson.loads(row)
    return Vector(bytes.fromhex(key), bytes.fromhex(scope), created, embedder, bytes.fromhex(packed))


def _seal(key: bytes, meta: bytes, body: bytes) -> bytes:
    return hashlib.blake2b(meta + body, key=key[:64], digest_size=8).digest()
