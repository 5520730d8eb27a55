"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, seeds, logprobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from backends.engine.sequence import SamplingParams, Sequence, TokenLogprobs

GREEDY_TEMPERATURE = 1e-5


@dataclass(slots=True)
class SamplerState:
    """What a request's sampling remembers between steps."""

    generator: torch.Generator
    counts: Counter[int] = field(default_factory=Counter)
    counted: int = 0


@torch.inference_mode()
def sample(logits: torch.Tensor, sequences: Seq[Sequence]) -> list[tuple[int, TokenLogprobs | None] | ValueError]:
    """One token for each row of `logits` `[sequences, vocabulary]` (float32), with its logprobs where wanted.

    A row depends on nothing but its own request, so the same seed gives the same text in any company, and a request
    whose constraint gives up fails alone.
    """
    logits = logits.to("cpu")
    best = logits.argmax(dim=-1).tolist()  # what most requests behind a cache want, for all rows at once
    results: list[tuple[int, TokenLogprobs | None] | ValueError] = []
    for row, (sequence, top) in enumerate(zip(sequences, best, strict=True)):
        params = sequence.params
        if sequence.constraint is None and _plain(params) and params.temperature < GREEDY_TEMPERATURE:
            token = top
        else:
            try:
                token = _constrained(logits[row], sequence)
            except ValueError as error:
                results.append(error)
                continue
        wanted = params.top_logprobs
        results.append((token, None if wanted is None else logprobs(logits[row : row + 1], [token], wanted)[0]))
    return results


def _constrained(logits: torch.Tensor, sequence: Sequence) -> int:
    scores = _penalised(logits, sequence)
    constraint = sequence.constraint
    if constraint is None:
        return _choose(scores, sequence)
    allowed = torch.from_numpy(constraint.mask(scores.shape[0]))
    token = _choose(scores.masked_fill(~allowed, float("-inf")), sequence)
    if token not in sequence.eos:
        constraint.accept(token)
    return token


def _plain(params: SamplingParams) -> bool:
    return not (params.presence_penalty or params.frequency_penalty or params.logit_bias)


def _state(sequence: Sequence) -> SamplerState:
    state = sequence.sampler_state
    if state is None:
        generator = torch.Generator()
        if sequence.params.seed is None:
            generator.seed()
        else:
            generator.manual_seed(sequence.params.seed % 2**63)
        state = sequence.sampler_state = SamplerState(generator)
    return state  # type: ignore[no-any-return]


def _penalised(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """`logit - count × frequency - (count > 0) × presence + bias` over the output so far, as OpenAI defines it."""
    params = sequence.params
    if _plain(params):
        return logits
    logits = logits.clone()
    if params.presence_penalty or params.frequency_penalty:
        state = _state(sequence)
        output = sequence.output
        state.counts.update(output[state.counted :])
        state.counted = len(output)
        if state.counts:
            ids = torch.tensor(list(state.counts))
            counts = torch.tensor(list(state.counts.values()), dtype=logits.dtype)
            logits[ids] -= counts * params.frequency_penalty + params.presence_penalty
    for token, bias in params.logit_bias.items():
        if 0 <= token < logits.shape[0]:
            logits[token] += bias
    return logits


def _choose(scores: torch.Tensor, sequence: Sequence) -> int:
    params = sequence.params
    if params.temperature < GREEDY_TEMPERATURE:
        return int(scores.argmax())
    scores = scores / params.temperature
    ids: torch.Tensor | None = None
    if 0 < params.top_k < scores.shape[0]:
        scores, ids = scores.topk(params.top_k)
    probabilities = torch.softmax(scores, dim=-1)
    if params.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        ordered[before >= params.top_p] = 0.0  # the most likely token always stays
        probabilities, ids = ordered, order if ids is None else ids[order]
    if params.min_p > 0.0:
        probabilities[probabilities < params.min_p * probabilities.max()] = 0.0
    # argmax(p / e) with e ~ Exp(1) draws from p (the exponential race): one pass, no normalising.
    noise = torch.empty_like(probabilities).exponential_(generator=_state(sequence).generator)
    winner = int((probabilities / noise).argmax())
    return winner if ids is None else int(ids[winner])


def logprobs(logits: torch.Tensor, tokens: Seq[int], top: int) -> list[TokenLogprobs]:
    """Of one token a row of `logits` `[tokens, vocabulary]`, and of the `top` most likely ones."""
    values = torch.log_softmax(logits, dim=-1)
    chosen = values.gather(1, torch.tensor(tokens, device=values.device)[:, None])[:, 0].tolist()
    if not top:
        return [TokenLogprobs(token, value, ()) for token, value in zip(tokens, chosen, strict=True)]
    likely = values.topk(top)
    return [
        TokenLogprobs(token, value, tuple(zip(ids, scores, strict=True)))
        for token, value, ids, scores in zip(
            tokens, chosen, likely.indices.tolist(), likely.values.tolist(), strict=True
        )
    ]
