"""How long ten thousand tenants' files take to read, and what finding one by its key costs.

python -m benchmarks.tenants
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
from pathlib import Path

from gateway.config import load
from gateway.metrics import Metrics
from gateway.reload import Registry

COUNT, RUNS = 10_000, 5
CONFIG = """
tenants: tenants/
backends: {up: {kind: openai, url: "http://127.0.0.1:1/v1"}}
models: {fast: {try: [up]}}
"""
TENANT = """tenant: t{number}
keys: ["sha256:{key}"]
models: [fast]
cache: {{ttl: 1h, semantic: {{threshold: 0.9}}}}
limits: {{requests_per_minute: 600, tokens_per_minute: 200000, concurrency: 32}}
budget: {{per_month: 500 USD, when_spent: cache-only}}
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "hitherto.yaml").write_text(CONFIG)
        (folder / "tenants").mkdir()
        for number in range(COUNT):
            key = hashlib.sha256(f"key {number}".encode()).hexdigest()
            (folder / f"tenants/t{number}.yaml").write_text(TENANT.format(number=number, key=key))
        settings = load(folder / "hitherto.yaml")
        assert settings.tenants is not None
        seconds = []
        for _ in range(RUNS):
            began = time.perf_counter()
            known = Registry(settings, Metrics())
            seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        known._read()
        unchanged = time.perf_counter() - began
        began = time.perf_counter()
        for number in range(COUNT):
            known.tenants.find(f"key {number}")
        found = time.perf_counter() - began
    print(f"reading {COUNT:,} files: median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s, n = {RUNS}")
    print(f"looking again where nothing changed: {unchanged:.2f} s")
    print(f"finding a tenant by its key: {found / COUNT * 1e6:.1f} µs")


if __name__ == "__main__":
    main()
