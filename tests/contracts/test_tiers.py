"""One suite over every KV tier; Redis is a real server."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backends.engine.tiers.contract import Tier
from backends.engine.tiers.disk import DiskTier
from backends.engine.tiers.ram import RamTier
from backends.engine.tiers.redis import RedisTier
from tests.conftest import eventually
from tests.servers import RedisServer

LIMIT = 1000
Make = Callable[..., Tier]


class Clock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["ram", "disk", "redis"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes a tier; made again, it finds what the first one left (but for RAM)."""
    clock = Clock()

    def build(limit: int = LIMIT, ttl: float = 3600.0) -> Tier:
        if request.param == "ram":
            return RamTier(limit, ttl, clock)
        if request.param == "disk":
            return DiskTier(tmp_path / "kv", limit, ttl, clock)
        server: RedisServer = request.getfixturevalue("redis_server")
        return RedisTier(server.url, limit, ttl, prefix=f"{request.node.name}:", timeout=10, clock=clock)

    build.clock = clock  # type: ignore[attr-defined]
    return build


def test_what_is_put_is_got_bit_for_bit(make: Make) -> None:
    tier, block = make(), random.Random(1).randbytes(300)
    tier.put(key(1), block)
    assert tier.get([key(1), key(2)]) == [block, None]
    assert tier.bytes_used == 300
    tier.put(key(1), block[:200])
    assert tier.get([key(1)]) == [block[:200]] and tier.bytes_used == 200
    assert tier.get([]) == []


def test_has_counts_from_the_first_without_a_gap(make: Make) -> None:
    tier = make()
    for number in (1, 2, 4):
        tier.put(key(number), b"x")
    assert tier.has([key(1), key(2), key(3), key(4)]) == 2
    assert tier.has([key(3)]) == 0 and tier.has([]) == 0
    assert tier.has([key(2), key(4)]) == 2


def test_the_limit_holds_and_the_least_recently_used_goes_first(make: Make) -> None:
    tier = make()
    for number in range(3):
        tier.put(key(number), bytes(300))
    tier.get([key(0)])
    tier.put(key(3), bytes(300))
    assert tier.has([key(1)]) == 0, "the oldest unused one gave way"
    assert tier.get([key(0), key(2), key(3)]) == [bytes(300)] * 3
    assert tier.bytes_used == 900


def test_a_block_larger_than_the_limit_is_not_stored_and_drives_nothing_out(make: Make) -> None:
    tier = make()
    tier.put(key(1), bytes(400))
    tier.put(key(2), bytes(LIMIT + 1))
    assert tier.get([key(1), key(2)]) == [bytes(400), None]


def test_deleted_and_cleared_blocks_are_gone(make: Make) -> None:
    tier = make()
    for number in range(3):
        tier.put(key(number), bytes(100))
    tier.delete(key(1))
    tier.delete(key(99))
    assert tier.has([key(0), key(1)]) == 1 and tier.bytes_used == 200
    tier.clear()
    assert tier.has([key(0)]) == 0 and tier.bytes_used == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_use_keeps_the_limit_and_never_gives_a_wrong_block(make: Make, seed: int) -> None:
    chance, tier, model = random.Random(seed), make(), {}
    for _ in range(150):
        number = chance.randrange(12)
        if chance.random() < 0.6:
            model[number] = chance.randbytes(chance.randrange(1, 400))
            tier.put(key(number), model[number])
        elif chance.random() < 0.3:
            tier.delete(key(number))
            model.pop(number, None)
        else:
            (found,) = tier.get([key(number)])
            assert found is None or found == model.get(number)
        assert 0 <= tier.bytes_used <= LIMIT
    there = [number for number in range(12) if tier.has([key(number)])]
    assert tier.bytes_used == sum(len(model[number]) for number in there)


@pytest.mark.parametrize("make", ["ram", "disk"], indirect=True)
def test_old_blocks_are_gone(make: Make) -> None:
    tier = make(ttl=10.0)
    tier.put(key(1), b"x")
    make.clock.now += 11  # type: ignore[attr-defined]
    assert tier.has([key(1)]) == 0 and tier.get([key(1)]) == [None]


def test_redis_expires_blocks(redis_server: RedisServer) -> None:
    tier = RedisTier(redis_server.url, LIMIT, 0.05, prefix="expiry:", timeout=10)
    tier.put(key(1), b"x")
    assert eventually(lambda: tier.has([key(1)]) == 0) and tier.get([key(1)]) == [None]


@pytest.mark.parametrize("make", ["disk", "redis"], indirect=True)
def test_another_one_finds_what_was_left(make: Make) -> None:
    make().put(key(7), b"left behind")
    again = make()
    assert again.get([key(7)]) == [b"left behind"] and again.bytes_used == 11


def test_disk_ignores_and_removes_what_a_crash_left(tmp_path: Path) -> None:
    DiskTier(tmp_path, LIMIT, 3600.0).put(key(1), b"whole")
    folder = tmp_path / "00"
    foreign = {"notes.txt", "zz.kv", "thesis.tmp"}
    for name in (f"{key(2).hex()}.123.tmp", *foreign):
        (folder / name).write_bytes(b"half")
    (folder / "folder.kv").mkdir()
    tier = DiskTier(tmp_path, LIMIT, 3600.0)
    assert tier.bytes_used == 5
    assert {path.name for path in folder.iterdir()} == {f"{key(1).hex()}.kv", "folder.kv", *foreign}, (
        "others' files stay"
    )


def test_disk_opened_with_a_smaller_limit_shrinks(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, LIMIT, 3600.0)
    for number in range(4):
        tier.put(key(number), bytes(200))
    assert DiskTier(tmp_path, 450, 3600.0).bytes_used == 400


def test_a_redis_that_hangs_or_is_gone_raises_within_its_timeout(tmp_path: Path) -> None:
    import time

    with RedisServer(tmp_path) as server:
        tier = RedisTier(server.url, LIMIT, 60.0, timeout=2)
        tier.put(key(1), b"x")
        server.pause()
        started = time.monotonic()
        with pytest.raises(Exception, match=r"[Tt]imeout|timed out"):
            tier.get([key(1)])
        assert time.monotonic() - started < 20
        server.resume()
        assert tier.get([key(1)]) == [b"x"]
    with pytest.raises(Exception, match=r"[Cc]onnect|refused|closed"):
        tier.get([key(1)])
