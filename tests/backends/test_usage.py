"""Every provider's words for tokens mean the same here."""

from __future__ import annotations

from typing import Any

import pytest

from backends.dialects.usage import merged, read
from backends.protocol import Usage


@pytest.mark.parametrize(
    ("told", "meant"),
    [
        ({"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}, Usage(10, 2)),
        ({"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}, Usage(10, 2, 8)),
        ({"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": None}, Usage(10, 2)),
        ({"input_tokens": 10, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 8}}, Usage(10, 2, 8)),
        (
            {"input_tokens": 3, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 7, "output_tokens": 2},
            Usage(100, 2, 90, {}, 7),
        ),
        (
            {"input_tokens": 3, "cache_read_input_tokens": None, "cache_creation_input_tokens": 7, "output_tokens": 2,
             "cache_creation": {"ephemeral_5m_input_tokens": 5, "ephemeral_1h_input_tokens": 2}},
            Usage(10, 2, 0, {}, 7, 2),
        ),
        ({"input_tokens": 3, "output_tokens": 2}, Usage(3, 2)),
        ({"prompt_tokens": 8, "total_tokens": 8}, Usage(8, 0)),  # embeddings
        ({"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 60}, Usage(8, 52)),  # what was thought is billed
        (
            {"prompt_tokens": 2000, "completion_tokens": 50, "prompt_tokens_details": {"cached_tokens": 1800},
             "cache_read_input_tokens": 1800, "cache_creation_input_tokens": 100},
            Usage(2000, 50, 1800, {}, 100),  # LiteLLM's
        ),
        ({"prompt_tokens": -5, "completion_tokens": 1 << 80}, Usage(0, 1 << 40)),
        (
            {"promptTokenCount": 10, "candidatesTokenCount": 2, "thoughtsTokenCount": 5, "cachedContentTokenCount": 8},
            Usage(10, 7, 8),
        ),
        (
            {"prompt_tokens": 10, "completion_tokens": 2, "prompt_cache_hit_tokens": 6, "prompt_cache_miss_tokens": 4},
            Usage(10, 2, 6),
        ),
        (
            {"prompt_tokens": 9, "completion_tokens": 1,
             "prompt_tokens_details": {"cached_tokens": 4, "cached_by_tier": {"device": 3, "ram": 1}}},
            Usage(9, 1, 4, {"device": 3, "ram": 1}),
        ),
    ],
)  # fmt: skip
def test_usage(told: dict[str, Any], meant: Usage) -> None:
    assert read(told) == meant


@pytest.mark.parametrize(
    "nonsense", [None, [], "x", {}, {"prompt_tokens": "3"}, {"prompt_tokens": True, "completion_tokens": 1}]
)
def test_what_is_no_usage(nonsense: object) -> None:
    assert read(nonsense) is None


def test_a_stream_that_tells_it_in_two_events() -> None:
    start = {"input_tokens": 3, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 0, "output_tokens": 1}
    assert read(merged(merged({}, start), {"output_tokens": 40, "input_tokens": None})) == Usage(93, 40, 90, {}, 0)
