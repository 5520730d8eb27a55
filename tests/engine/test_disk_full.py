"""A disk that takes no more: the block is lost, nothing else is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import resource, signal, sys, threading
from pathlib import Path
from backends.engine.tiers.disk import DiskTier
from backends.engine.tiers.ladder import Ladder, Wanted

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
folder = Path(sys.argv[1])
ladder = Ladder([DiskTier(folder, 1 << 30, 3600.0)], b"r" * 32)
small, large = Wanted(b"s" * 32, (1, 2)), Wanted(b"l" * 32, (3, 4))
ladder.store(large, lambda: lambda: b"x" * 100_000)
ladder.store(small, lambda: lambda: b"x" * 100)
found, done = [], threading.Event()
ladder.find([large], lambda load: found.append(len(load.payloads)))
ladder.find([small], lambda load: (found.append(len(load.payloads)), done.set()))
assert done.wait(10)
while ladder._stores: pass
again = threading.Event()
ladder.find([small], lambda load: (found.append(len(load.payloads)), again.set()))
assert again.wait(10)
ladder.close()
files = sorted(path.name[:2] for path in folder.rglob("*") if path.is_file())
print(found[0], found[-1], ladder.states[0].faults, files)
"""


def test_half_a_block_is_never_left_and_the_tier_goes_on(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout.strip() == "0 1 1 ['73']", result.stdout + result.stderr
