"""Drills: many clients at once while things break and change. What is counted here is what was promised."""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import psutil
import pytest

from backends.fake import FakeServer, Script
from gateway.tenants import hash_key
from tests.conftest import Gateway

SECONDS = float(os.environ.get("HITHERTO_DRILL_SECONDS", "60"))
CLIENTS, TIMEOUT = 200, 6.0
WINDOW = 2.5
"""Seconds in which it is counted who is asked."""
CONFIG = """
backends:
  sick: {{kind: openai, url: "{sick}"}}
  well: {{kind: openai, url: "{well}"}}
models:
  m: {{try: [sick, well], retry: {{attempts: 2, within: 3s}}, timeout: {{first_byte: 2s, total: 6s}}}}
cache: {{exact: false}}
breakers: {{sick: {{pause: 1s}}}}
"""
WAYS = (
    Script(status=500),
    Script(cut_after=0),
    Script(delay=10.0),
    Script(status=429, headers=(("retry-after", "30"),)),
    Script(status=503),
)


@pytest.fixture
def two() -> Iterator[tuple[FakeServer, FakeServer]]:
    with FakeServer() as sick, FakeServer() as well:
        yield sick, well


async def crowd(url: str, seconds: float, headers: dict[str, str]) -> tuple[list[float], Counter[int]]:
    """Clients that ask again and again: how long each answer took, and their statuses."""
    numbers, times, statuses = itertools.count(), list[float](), Counter[int]()
    end = time.monotonic() + seconds

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        await asyncio.sleep(number / CLIENTS)
        while time.monotonic() < end:
            messages = [{"role": "user", "content": f"question {next(numbers)}"}]
            began = time.monotonic()
            try:
                body = {"model": "m", "messages": messages, "stream": number % 2 == 0}
                async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
                    text = await reply.read()
                    whole = reply.status == 200 and (b"[DONE]" in text or b"choices" in text)
                    statuses[200 if whole else reply.status if reply.status != 200 else 0] += 1
            except (aiohttp.ClientError, TimeoutError):
                statuses[-1] += 1
            times.append(time.monotonic() - began)
            await asyncio.sleep(0.5)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(30)) as session:
        await asyncio.gather(*(client(session, number) for number in range(CLIENTS)))
    return times, statuses


async def test_a_flapping_backend_is_hardly_noticed(tmp_path: Path, two: tuple[FakeServer, FakeServer]) -> None:
    sick, well = two
    gateway = Gateway(tmp_path, CONFIG.format(sick=sick.url, well=well.url))
    process = psutil.Process(gateway.process.pid)
    resident: list[int] = []
    late: list[int] = []
    """Requests that reached the sick one in a while after its breaker has opened."""
    back: list[int] = []
    """And in as long a while after it has closed again."""
    stop = threading.Event()

    def state() -> str:
        listing = gateway.client.get("/admin/breakers").json()  # who has never been asked is not there
        return next((str(one["state"]) for one in listing if one["place"] == "sick"), "closed")

    def flap() -> None:
        for way in itertools.cycle(WAYS):
            sick.app.script = way
            while state() != "open":
                if stop.wait(0.1):
                    return
            if stop.wait(1.0):  # those who were waiting for it give up
                return
            sick.app.seen.clear()
            if stop.wait(WINDOW):
                return
            late.append(len(sick.app.seen))
            sick.app.script = Script()
            while state() != "closed":
                if stop.wait(0.1):
                    return
            sick.app.seen.clear()
            if stop.wait(WINDOW):
                return
            back.append(len(sick.app.seen))
            resident.append(process.memory_info().rss)
            well.app.seen.clear()

    with ThreadPoolExecutor(1) as pool:
        flapping = pool.submit(flap)
        try:
            times, statuses = await crowd(gateway.url, SECONDS, {})
        finally:
            stop.set()
        flapping.result()
    total = sum(statuses.values())
    asked = total / SECONDS * WINDOW
    print(f"{total} requests, {dict(statuses)}, slowest {max(times):.2f} s, late {late} of {asked:.0f}, back {back}, "
          f"rss {resident}")  # fmt: skip
    assert max(times) < TIMEOUT + 2.5, "no request waits longer than its timeout"
    assert total - statuses[200] < total / 100, "fewer than one in a hundred fail, as there is a healthy fallback"
    assert late and max(late) < asked / 10, "the sick one gets probes only"
    assert len(back) >= SECONDS // 20 and statistics.median(back) > asked / 2, "and all again when it is well"
    if len(resident) >= 3:
        assert resident[-1] < resident[0] * 1.15, "memory is flat"
    assert gateway.stop() == 0


async def test_a_reload_under_load_drops_no_request(tmp_path: Path, two: tuple[FakeServer, FakeServer]) -> None:
    _, well = two
    (tmp_path / "tenants").mkdir()
    path = tmp_path / "tenants/acme.yaml"
    text = f"tenant: acme\nkeys: ['{hash_key('acme')}']\nlimits: {{requests_per_minute: 1000000}}\n"
    path.write_text(text)
    gateway = Gateway(tmp_path, f"""
tenants: tenants/
backends: {{well: {{kind: openai, url: "{well.url}"}}}}
models: {{m: {{try: [well]}}}}
cache: {{exact: false}}
""")  # fmt: skip
    stop = threading.Event()
    written = []

    def change() -> None:
        for number in itertools.count():
            if stop.wait(0.4):
                return
            more = f"cache: {{ttl: {number + 1}m}}\nroutes: {{extra{number}: {{try: [well]}}}}\n"
            fresh = text.replace("keys: [", f"keys: ['{hash_key(str(number))}', ")
            path.write_text(fresh + more if number % 3 else "tenant: acme\nbroken: 1\n")
            written.append(number)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        _, statuses = await crowd(gateway.url, 8.0, {"authorization": "Bearer acme"})
    finally:
        stop.set()
        changing.join()
    assert set(statuses) == {200} and sum(statuses.values()) > 200, statuses
    assert len(written) > 5 and "acme: cache.ttl" in gateway.log and "this key is not known here" in gateway.log
    assert gateway.stop() == 0
