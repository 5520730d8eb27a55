"""What several end-to-end modules start: an upstream, and the SDK in front of the module's own `gateway`."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from backends.fake import FakeServer, Script
from tests.conftest import Gateway


@pytest.fixture(scope="module")
def upstream() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def sdk(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0, timeout=120)


@pytest.fixture
def fresh(upstream: FakeServer) -> None:
    """An upstream that has seen nothing, and answers as it does by itself."""
    upstream.app.seen.clear()
    upstream.app.script, upstream.app.scripts = Script(), []
