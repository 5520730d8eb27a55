"""Why a request hit or missed, in a sentence: from the words of `x-hitherto-reason` to what they mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TIERS = {
    "exact": "The same request was answered before, and its stored answer was served.",
    "semantic": "The same question had been answered in other words, and nothing spoke against serving that answer.",
    "alias": "This very wording was found to have the same answer as a stored question, and that answer was served.",
    "stale": "A stored answer was served although its time was up, as the tenant's rules allow.",
    "bypass": "The answer cache was not asked.",
    "none": "The request ended before the answer cache was asked.",
}
_REASONS = {
    "first-in-scope": "Nothing is stored yet for this model, system prompt, history and options.",
    "below-threshold": "No stored question is similar enough to be considered.",
    "semantic-disabled": "No answer is stored for exactly this request, and the semantic tier is off.",
    "semantic-unavailable": "No answer is stored for exactly this request, and there is no encoder.",
    "exact-only": "The caller wanted exact answers only.",
    "buckets": "The request wants variety, and fewer answers are stored than the rules serve in turn.",
    "sampling": "The request asks for random sampling, and the tenant's rules do not reuse such answers.",
    "several-choices": "The request asks for several choices; only an exact answer will do.",
    "logprobs": "The request asks for log probabilities; only an exact answer will do.",
    "volatile": "The question is about this moment, so its answer is not reused.",
    "last-turn-not-user": "The last turn is not a user's question; only an exact answer will do.",
    "not-text-only": "The question is not text alone; only an exact answer will do.",
    "no-text": "There is no text to compare; only an exact answer will do.",
    "embedding": "Embeddings are stored exactly, input by input.",
    "beyond-window": "The question is longer than the encoder reads.",
    "deadline": "Looking took longer than allowed, so the request went on as a miss.",
    "fault": "A part of the cache failed (counted in hitherto_faults_total), so the request went on as a miss.",
    "expired": "An answer was stored, but its time is up.",
    "max-age": "An answer was stored, but it is older than the caller allows.",
    "usage-unknown": "An answer was stored, but without the token counts that this request must have.",
    "changed": "The stored answer was replaced while it was being read.",
    "verifier": "The verifier is not sure enough that the nearest stored question has the same answer.",
    "unreadable": "The verifier cannot read this question and the nearest stored one as a whole.",
    "evidence": "What was seen of hits like this one speaks against serving it.",
    "judge": "The judge did not find the nearest stored answer right for this question.",
    "judgement": "A model was asked whether a stored answer is the same as a fresh one, or right for a question.",
    "language": "The question is not in a language that guards and verifier read; only an exact answer will do.",
    "shadow": "A stored answer would have been served, but the tenant's semantic tier only counts (shadow mode).",
    "audit": "A stored answer was served, and this fresh one was computed behind it to see whether it was right.",
    "feedback": "A report on a stored answer.",
    "disabled": "The answer cache is off for this tenant.",
    "no-cache": "The caller asked for a fresh answer.",
    "revalidate": "A stale answer was served, and this fresh one was computed behind it.",
    "collapsed": "An identical request was being answered just then, and both got the same answer.",
    "collapsed-near": "A nearly identical question was being answered just then, and both got the same answer.",
    "not-cacheable": "Answers of this path are passed on and not stored.",
    "invalid_api_key": "The key is not known.",
    "model_not_allowed": "The tenant may not use this model.",
    "model_not_found": "No such model is configured.",
    "rate_limit_exceeded": "A rate limit of the tenant was reached.",
    "budget_spent": "The tenant's budget is spent.",
    "not_cached": "The caller wanted a stored answer only, and there was none.",
    "backends_unavailable": "Every backend of the model fails too often to be asked just now.",
    "backend_starting": "The backend was still starting.",
    "upstream_timeout": "The backend did not answer in time.",
    "upstream_interrupted": "The backend broke off its answer.",
    "upstream_unreachable": "The backend could not be reached.",
    "upstream_failed": "The backend failed.",
    "invalid_request_error": "The request was malformed.",
    "timeout": "This try got no first byte in time; the provider has probably read the prompt.",
    "abandoned": "Nobody waited for this try any more: another was faster, or the client had left.",
    "interrupted": "This try broke off before its first byte.",
    "again": "The backend's first answer could not be used, and it was asked once more.",
    "background": "This ended after its request, whose client had left while others waited for the same answer.",
    "refresh": "A stale answer was served, and this fresh one was computed behind it.",
}
_GUARDS = {
    "numbers": "numbers differ", "verbatim": "quoted text or code differs", "calendar": "dates or times differ",
    "units": "units differ", "negation": "one is negated", "antonym": "one says the opposite",
    "quantifier": "quantities like all and some differ", "kind": "they ask for different kinds of answer",
    "form": "they want different forms of answer", "order": "the same words stand in another order",
    "role": "who does what to whom differs", "language": "their languages differ",
    "passage": "they carry different passages", "names": "names differ", "scope": "one asks for more than the other",
    "word": "a word that matters differs", "length": "they are too long to be compared",
    "reported": "this answer was reported wrong for this question",
    "answer": "the stored answer speaks of what this question does not ask",
}  # fmt: skip
_STORED = {
    "stored": "Its answer was stored.",
    "fallback": "Its answer was not stored: another backend than the first answered.",
    "interrupted": "Its answer was not stored: it broke off.",
    "too-long": "Its answer was not stored: it is too long.",
    "no-store": "Its answer was not stored: the caller forbade it.",
    "volatile": "Its answer was not stored: it holds for this moment only.",
    "unterminated": "Its answer was not stored: the stream had no end.",
}


def why(row: Mapping[str, Any]) -> list[str]:
    """Sentences that explain a row of the ledger."""
    said = []
    if row["cache"] in _TIERS and row["part"] == "answer":
        said.append(_TIERS[row["cache"]])
    if row["cache"] == "miss":
        said.append("No stored answer was served.")
    if row["reason"]:
        said.append(_reason(row["reason"]))
    if row["similarity"] is not None:
        whose = "The stored question" if row["cache"] in ("semantic", "alias") else "The nearest stored question"
        said.append(f"{whose} has a cosine of {row['similarity']:.4f}.")
    if row["cached"]:
        share = row["cached"] / row["prompt"] if row["prompt"] else 0.0
        places = ", ".join(f"{count:,} from {source}" for source, count in row["sources"].items() if count)
        said.append(f"{row['cached']:,} of {row['prompt']:,} prompt tokens ({share:.0%}) were cached: {places}.")
    if row["stored"] and row["cache"] == "miss" and row["part"] == "answer":
        said.append(_STORED.get(row["stored"], f"Its answer was not stored ({row['stored']})."))
    if row["estimated"]:
        said.append("Nobody told its tokens, so they are guessed.")
    if row["cost"] is None:
        said.append("There is no price for this model; give one under prices: in hitherto.yaml.")
    if row["status"] == 499:
        said.append("The client left before the end.")
    return said


def _reason(reason: str) -> str:
    if reason.startswith("veto-"):
        guard = reason.removeprefix("veto-")
        return f"A stored question is similar enough, but {_GUARDS.get(guard, guard)}."
    if known := re.fullmatch(r"(\d+)-of-(\d+)-known", reason):
        return f"{known[1]} of {known[2]} inputs were stored; the others were computed."
    return _REASONS.get(reason, f"Reason: {reason}.")
