"""Finding the longest known beginning of a prompt: chained block keys over token ids. No torch.

The key of a block covers everything before it: `key(i) = blake2b-256(key(i-1) ‖ token ids as u32 little endian)`,
as in vLLM's automatic prefix caching. The root covers what makes KV incomparable (model, weights, dtype, block size,
tenant salt), so a mismatch of identity is a miss and never a collision.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from backends.engine.blocks import BlockPool


def root_key(identity: Mapping[str, str]) -> bytes:
    """The root of all chains of one engine: the same in every process with the same identity."""
    return hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=32).digest()


def salted(root: bytes, salt: str) -> bytes:
    """The root of one tenant's chains. Tenants with different salts never meet."""
    return hashlib.blake2b(root + salt.encode(), digest_size=32, person=b"salt").digest() if salt else root


def extend_chain(chain: list[bytes], root: bytes, tokens: Sequence[int], block_size: int) -> None:
    """Append to `chain` the keys of the full blocks of `tokens` that it does not have yet."""
    for index in range(len(chain), len(tokens) // block_size):
        ids = tokens[index * block_size : (index + 1) * block_size]
        parent = chain[-1] if chain else root
        chain.append(hashlib.blake2b(parent + struct.pack(f"<{len(ids)}I", *ids), digest_size=32).digest())


QUARANTINED = 4096
"""Keys that are remembered."""


class PrefixCache:
    """Looks prompts up in a block pool and publishes computed blocks into it."""

    def __init__(self, pool: BlockPool, root: bytes, block_size: int) -> None:
        self.pool = pool
        self.root = root
        self.block_size = block_size
        self.quarantined: OrderedDict[bytes, None] = OrderedDict()
        """Keys whose content was once found to be wrong: neither found nor published again."""

    def quarantine(self, keys: Sequence[bytes]) -> None:
        """Let nobody use these blocks any more."""
        self.pool.forget(keys)
        self.quarantined.update(dict.fromkeys(keys))
        while len(self.quarantined) > QUARANTINED:
            self.quarantined.popitem(last=False)

    def match(self, tokens: Sequence[int], chain: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix. The last token is never matched: its logits are needed."""
        blocks: list[int] = []
        size = self.block_size
        for index in range(min(len(chain), (len(tokens) - 1) // size)):
            block = self.pool.find(chain[index], tokens[index * size : (index + 1) * size])
            if block is None or chain[index] in self.quarantined:
                break
            blocks.append(block)
        return blocks

    def publish(
        self, tokens: Sequence[int], chain: Sequence[bytes], table: Sequence[int], computed: int, published: int
    ) -> int:
        """Make full blocks findable whose KV is computed (`computed` tokens); returns how many are published now."""
        size = self.block_size
        full = min(computed // size, len(chain))
        for index in range(published, full):
            if chain[index] in self.quarantined:
                continue
            self.pool.publish(table[index], chain[index], tokens[index * size : (index + 1) * size])
        return max(full, published)
