"""Does the last turn of a conversation mean the same whatever was said before?

"What is the boiling point of ethanol?" does; "And at two bar?", "How do I turn that off?", "What does the garage "
"cost?" do
not, nor does any question after "please answer in French from now on". A turn stands alone only if nothing in it points
back and nothing before it points forward; every doubt keeps the history. Rules after the classes of Halliday and
Hasan, Cohesion in English (1976): reference, substitution, ellipsis, conjunction, lexical cohesion.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from policies.similarity import LONGEST
from policies.similarity.lexicon import stem
from policies.similarity.text import EMPTY

FEWEST = 3
"""So many words with a meaning a turn needs to be a question of its own; two where it asks what something means."""
PLENTY = 6
"""With so many it says all that its answer depends on, most likely."""
_SWITCH = re.compile(
    r"\W*(?:(?:thanks|thank you|great|good|nice|perfect|ok|okay|anyway)\b[^.?!:,]{0,30}[.!:,]\s*)*(?:next|now for "
    r"something else|another question|"
    r"different (?:question|topic)|unrelated|change of topic|by the way|new topic|something (?:completely "
    r")?(?:else|different)|"
    r"a general question|one (?:more|other|last) (?:question|thing)|while i'm waiting)\b",
    re.IGNORECASE,
)
_REFERENCE = re.compile(
    r"\b(?:it|its|it's|itself|they|them|their|theirs|they're|he|she|him|his|her|hers|he's|she's|this|that(?! is\b|"
    r" are\b)|"
    r"that's|these|those|there(?! (?:is|are|was|were|a|an|any)\b)|here|"
    r"then|we|us|our|ours|we're|we've|my|mine|(?<!can )(?<!could )(?<!would )(?<!do )your?|i'm|i've|i'd|such an?|"
    r"so far|until then|"
    r"the (?:same|other|others|former|latter|rest|above|following|previous|next|first|second|third|last) (?:one|ones|"
    r"option|point|step|version|part|thing|two|line|item|answer)?)\b",
    re.IGNORECASE,
)
_PRONOUN = re.compile(r"(?:it|its|it's|they|them|their|that)", re.IGNORECASE)
_STATEMENT = re.compile(r"[^.?!]+[.!](?=\s)")
_CLAUSE = re.compile(r"\b(?:and|but|or|when|if|so that|because|while|before|after)\b|[,;:]", re.IGNORECASE)
_DEFINING = re.compile(
    r"\b(?:stands? for|short for|means?|meaning|definition|define|differences? between|rhymes? with)\b", re.IGNORECASE
)
_SUBSTITUTION = re.compile(
    r"\b(?:one(?:s)?(?= (?:is|are|do|does|would|should|costs?|has|have)\b)|which (?:one|ones|of)|another|else|other|"
    r"others|too|also|"
    r"either(?! \w+ or)|instead|again|more(?!\s+than|\s+\w+\s+than)(?=\?|$| (?:detail|about|examples?|of)\b)|"
    r"both(?! \w+ and)|"
    r"do so|likewise|(?:point|option|idea|step|item|number|part|version|line) (?:[a-z]|\d+|one|two|three|four)|"
    r"(?:longer|shorter|better|simpler|another) version|each line|line by line|anymore|any "
    r"more|besides|still|already|yet|now|back|finally|anyway)\b",
    re.IGNORECASE,
)
_ELLIPSIS = re.compile(
    r"^\W*(?:and|but|or|so|also|then|because|what about|how about|ok|okay|yes|no|yeah|yep|nope|sure|right|exactly|"
    r"why not|"
    r"why\W*$|how come\W*$|how so|since when|for how long\W*$|where\W*$|when\W*$|who\W*$|actually|sorry|correction|not|"
    r"in that case|otherwise|make|shorten|rewrite|rephrase|translate|continue|go on|just|only|with|without|for|in|"
    r"on|to|by|at|"
    r"from|after|before)\b",
    re.IGNORECASE,
)
_PLEASANTRY = re.compile(
    r"^\W*(?:(?:thanks|thank you|thx|cheers|great|good|nice|perfect|cool|awesome|ok|okay|alright|wow|ha|haha|hi|"
    r"hello|hey|got it|"
    r"makes sense|i see|yes|no|anyway|new topic|while i'm waiting|a general question|different (?:question|"
    r"topic))\b[^?.!:;,]{0,40}(?:[.!:;]+|,(?= (?:what|who|when|where|how|which|why|is|are|do|does|"
    r"can)\b))\s*)+(?:(?:next|now|one "
    r"(?:more|other|last) (?:question|thing)|another question|different (?:question|topic)|unrelated|"
    r"change of topic|by the way|"
    r"quick question|new topic|something else|also)\b[^:?]{0,30}[:,.–-]\s*)?"
    r"|^\W*(?:another question|different (?:question|topic)|unrelated(?: question)?|change of topic|by the way|"
    r"new topic|something (?:else|"
    r"completely different)|one (?:more|other|last) (?:question|thing))\b[^:?]{0,30}[:,.–-]\s*",
    re.IGNORECASE,
)
_QUESTION = re.compile(
    r"\b(?:what|who|whom|whose|when|where|which|why|how|is|are|was|were|do|does|did|can|could|should|will|would|may|must|define|"
    r"explain|describe|list|name|give|tell|write|convert|calculate|compare|summari[sz]e)\b",
    re.IGNORECASE,
)
_WH = re.compile(r"(?:what|who|whom|whose|when|where|which|why|how)(?:'s)?\b", re.IGNORECASE)
_DEFINITE = re.compile(r"\bthe ((?:[\w'-]+ ?){1,4})", re.IGNORECASE)
_UNIQUE = frozenset(
    "difference differences capital population meaning definition history purpose cause causes symptoms speed "
    "distance height length size weight boiling freezing melting chemical sum square area volume formula best most "
    "least largest smallest longest highest tallest fastest oldest first biggest cheapest easiest safest main world "
    "sun moon earth internet us usa uk eu united european sky sea ocean sahara nile amazon pacific atlantic name term "
    "word words number amount average maximum minimum standard correct right usual normal typical legal advantages "
    "disadvantages pros benefits risks effect effects role process rules way ways plural singular past roman british "
    "french german american great second starry bible pope president king queen human point type types kind kinds "
    "phrase expression concept idea command keyboard".split()
)
"""What may be spoken of as "the …" by somebody who has not introduced it."""
_STANDING = re.compile(
    r"\b(?:from now on|from here on|must|limit|cite|assume|suppose|consider|we use|we measure|"
    r"(?:each|every|all)(?: (?:of )?your)? (?:message|repl|answer|claim)|in mind|remember|note "
    r"that|correction|typo|always|never|every time|whatever i|"
    r"everything i|anything i|for the rest|until i say|in future|"
    r"(?:answer|reply|respond|write|speak|talk|explain|say)s?\b[^.?!]{0,40}\b(?:in|as|like|with|without|using|only|briefly|shortly|simply)\b|"
    r"keep (?:it|your|the|things|everything)|be (?:a|an|my|brief|short|concise|precise|honest|formal)|you(?:'re|"
    r" are) (?:my|a|an|the|now)\b|"
    r"act as|pretend|imagine|play the|call me|no (?:basics|jargon|explanations?|comments?|code|emojis?|markdown)|"
    r"only the|just the|nothing else|bullet|one sentence|step by step|simple (?:words|terms|language)|"
    r"plain (?:english|language)|"
    r"beginner|newbie|expert|experienced|years of experience|never (?:programmed|done|used|heard|learn)|first time|"
    r"professional|"
    r"native|i(?:'m| am) (?:a|an|new|not|in|from|allergic|vegan|vegetarian|pregnant|diabetic|\d)|(?:doctor|lawyer|"
    r"engineer|teacher|nurse|"
    r"student|pupil|developer|admin|surgeon)\b|dialect|language|english|french|german|spanish|italian|units?\b|metric|imperial|dollars|euros)\b",
    re.IGNORECASE,
)
_CHAT = re.compile(
    r"(?:hi|hello|hey|good (?:morning|afternoon|evening|day|night)|thanks?|thank "
    r"you|thx|ty|cheers|great|good|nice|perfect|cool|awesome|"
    r"ok|okay|alright|wow|ha|haha|lol|got it|makes sense|i see|bye|see you|happy (?:friday|monday|new year)|welcome|"
    r"(?:i hope|hope) you|how are you|you(?:'re| are| were) (?:so |very )?(?:great|helpful|welcome|kind|fast)|"
    r"that(?:'s| is| was) (?:great|helpful|good|perfect|clear|it)|interesting|sorry|never mind|no problem|long time "
    r"no see)\b"
    r"[^.?!]{0,40}[.?!]*$",
    re.IGNORECASE,
)
"""Sentences that no answer depends on."""
_WORD = re.compile(r"[^\W\d_][\w'’-]+")


def stands_alone(question: str, earlier: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the question may be answered without the turns before it. `earlier`: messages, oldest first.

    What was said before may be questions and small talk; a fact, a wish or an order may matter, and so may what is no
    text (pictures, tool calls).
    """
    said = [message for message in earlier if message.get("role") not in ("system", "developer")]
    if not said:
        return True
    if len(question) + sum(len(str(message.get("content"))) for message in said) > LONGEST:
        return False
    texts: list[str] = []
    # A turn that changes the subject, or says as much as this, needs none of the facts that were told before.
    settled = _SWITCH.match(question.strip()) is not None or len(_meaning(question)) >= PLENTY
    for message in said:
        content = message.get("content")
        is_turn = message.get("role") in ("user", "assistant") and not message.get("tool_calls")
        if not is_turn or not isinstance(content, str):
            return False
        texts.append(content)
        if message["role"] == "user" and (_STANDING.search(content) or not (settled or _asks_or_chats(content))):
            return False
    asked = _PLEASANTRY.sub("", question.strip())
    return not _points_back(asked) and not _meaning(asked) & _meaning(" ".join(texts))


def _asks_or_chats(turn: str) -> bool:
    """Whether every sentence is a question, or says nothing that could matter later."""
    sentences = re.findall(r"[^.?!\n]+[.?!]*", turn)
    return all(
        sentence.rstrip().endswith("?") or _WH.match(sentence.strip()) or _CHAT.match(sentence.strip())
        for sentence in sentences
        if sentence.strip()
    )


def _points_back(asked: str) -> bool:
    plain = re.sub(r"[\"“][^\"“”]*[\"”]", " ", asked.replace("’", "'"))  # what is quoted points nowhere
    fewest = FEWEST - bool(_DEFINING.search(plain))
    if not _QUESTION.search(plain) or len(_meaning(asked)) < fewest:
        return True
    if _ELLIPSIS.search(plain) or _SUBSTITUTION.search(plain):
        return True
    if _STATEMENT.match(plain):
        return True  # an answer to what the other side has asked, most likely
    reference = _REFERENCE.search(plain)
    if reference is not None:
        # What a pronoun stands for may have been named in the same sentence, in a clause before its own.
        before = _CLAUSE.split(plain[: reference.start()])
        if not _PRONOUN.fullmatch(reference[0]) or len(before) < 2 or len(_meaning(" ".join(before[:-1]))) < 2:
            return True
    return any(not _is_unique(match, plain) for match in _DEFINITE.finditer(plain))


def _is_unique(match: re.Match[str], text: str) -> bool:
    """Whether "the …" needs no introduction: a name, a superlative, or something of something."""
    words = match[1].split()
    head = words[0].lower()
    if head in _UNIQUE or words[0][0].isupper() or head.endswith("est") or head[0].isdigit():
        return True
    return any(word in ("of", "between", "for", "in") for word in words[1:])


def _meaning(text: str) -> set[str]:
    words = (word.lower().replace("’", "'") for word in _WORD.findall(text))
    return {stem(word) for word in words if word not in EMPTY}
