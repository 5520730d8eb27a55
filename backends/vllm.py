"""`kind: vllm`: replicas of one vLLM server. Requests that begin alike go where their prefix is, load permitting."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence

import orjson

from backends.protocol import BackendError, PromptCacheStyle
from backends.upstream import Upstream

log = logging.getLogger("hitherto.vllm")

LOOK_SECONDS = 2.0
SICK = 2
"""So many looks in a row find nobody before a replica is asked last."""
_SALT = re.compile(rb'"cache_salt"|\\u00')

Ranking = Callable[[bytes, Sequence[str], Mapping[str, int], float], list[str]]


class VllmBackend:
    """The replicas, which must serve the same model. `rank(affinity, names, load, slack)` orders them."""

    kind = "vllm"
    prompt_cache: PromptCacheStyle = "none"

    def __init__(self, name: str, replicas: Sequence[Upstream], rank: Ranking, slack: float) -> None:
        self.name = name
        self._replicas = {replica.name: replica for replica in replicas}
        self._rank, self._slack = rank, slack
        self.asks_for_usage = all(replica.asks_for_usage for replica in replicas)
        self._misses = dict.fromkeys(self._replicas, 0)
        self._task: asyncio.Task[None] | None = None

    @property
    def identity(self) -> str:
        """Replicas come and go without a change of what they answer."""
        return f"vllm {self.name}"

    async def start(self) -> None:
        for replica in self._replicas.values():
            await replica.start()
        self._task = asyncio.create_task(self._look(), name=f"health of {self.name}")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for replica in self._replicas.values():
            await replica.stop()

    def places(self, affinity: bytes) -> list[Upstream]:
        load = {name: replica.in_flight for name, replica in self._replicas.items()}
        order = self._rank(affinity, list(self._replicas), load, self._slack)
        healthy = [name for name in order if self._misses[name] < SICK]
        sick = [
            name for name in order if self._misses[name] >= SICK
        ]  # the look may be wrong: better asked than refused
        return [self._replicas[name] for name in (*healthy, *sick)]

    async def ready(self) -> str:
        reasons = await asyncio.gather(*(self._probe(replica) for replica in self._replicas.values()))
        return "" if not all(reasons) else "; ".join(reasons)

    async def _look(self) -> None:
        while True:
            replicas = list(self._replicas.values())
            for replica, reason in zip(replicas, await asyncio.gather(*map(self._probe, replicas)), strict=True):
                before = self._misses[replica.name]
                self._misses[replica.name] = before + 1 if reason else 0
                if self._misses[replica.name] == SICK:
                    log.warning("%s does not answer: %s", replica.name, reason)
                elif before >= SICK and not reason:
                    log.info("%s answers again", replica.name)
            await asyncio.sleep(LOOK_SECONDS)

    async def _probe(self, replica: Upstream) -> str:
        try:
            await replica.get_json("/models")
        except BackendError as error:
            return str(error)
        return ""


def salted(body: bytes, salt: str) -> bytes:
    """The request with a `cache_salt`, so that tenants share no KV; a client's own salt goes into it."""
    if _SALT.search(body):  # an escape may hide the key, and the last of two would win
        try:
            value = orjson.loads(body)
        except orjson.JSONDecodeError:
            return body
        if isinstance(value, dict):
            own = value.pop("cache_salt", None)
            value["cache_salt"] = f"{salt}-{own}" if isinstance(own, str) and own else salt
            return orjson.dumps(value)
    start = body.lstrip()
    if not start.startswith(b"{"):
        return body
    comma = b"" if start[1:].lstrip().startswith(b"}") else b","
    return b'{"cache_salt":' + orjson.dumps(salt) + comma + start[1:]
