"""What turns a question round: negation, antonyms, quantifiers."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from itertools import pairwise

from policies.similarity.lexicon import stem
from policies.similarity.text import EMPTY, REMEMBERED, Reading, meaning, normal, read

NEGATORS = frozenset(
    "no not non never none nobody nothing nowhere neither nor without except unless hardly barely".split()
)
_AUXILIARIES = frozenset(
    "is are was were do does did can could will would shall should has have had may might must".split()
)
_SOFT = frozenset(
    "lack lacks lacking avoid prevent refuse fail fails absent missing miss free instead stop impossible unable "
    "disallow exclude excluding skip rather substitute forgot lost other otherwise unlike beyond refuses useless "
    "failed".split()
)
"""Words that may say in one question what a "not" says in the other."""
_PREFIXES = tuple(
    "un in im ir il non dis de mis anti counter under over sub super hyper hypo pre post inter intra ex up down".split()
)
_COMPLEMENTS = (("pass", "fail"), ("remember", "forget"))
"""Who did not pass has failed; what does not increase need not decrease."""
_LOOSE = frozenset("non anti sub super hyper".split())
"""Prefixes that some write as a word of its own."""

_ANTONYMS = """
before after|increase decrease|increase reduce|raise lower|raise reduce|rise fall|rise drop|enable disable|
activate deactivate|start stop|begin end|begin finish|start end|start finish|begin stop|open close|open shut|
opening closing|lock unlock|add remove|add subtract|add delete|install uninstall|install remove|connect disconnect|
allow forbid|allow block|allow deny|allow ban|allow prevent|permit forbid|permit prohibit|accept reject|
accept decline|accept refuse|approve reject|approve deny|import export|upload download|send receive|give receive|
buy sell|borrow lend|hire fire|win lose|pass fail|attack defend|push pull|encrypt decrypt|encode decode|
compress decompress|zip unzip|mount unmount|merge split|join leave|join split|enter exit|enter leave|arrive depart|
arrival departure|attach detach|freeze unfreeze|freeze thaw|block unblock|mute unmute|hide show|hide unhide|
subscribe unsubscribe|follow unfollow|pin unpin|link unlink|pause resume|expand collapse|ascending descending|
maximize minimize|maximum minimum|max min|upper lower|high low|higher lower|highest lowest|big small|large small|
larger smaller|bigger smaller|largest smallest|biggest smallest|long short|longer shorter|longest shortest|
tall short|tallest shortest|fast slow|faster slower|fastest slowest|early late|earlier later|earliest latest|
first last|old new|older newer|oldest newest|oldest youngest|older younger|old young|hot cold|hotter colder|
hottest coldest|warm cold|warmer colder|warm cool|heat cool|light dark|lighter darker|lighten darken|light heavy|
lighter heavier|lightest heaviest|wet dry|hard soft|hard easy|harder easier|hardest easiest|difficult easy|
strong weak|stronger weaker|thick thin|thicker thinner|wide narrow|deep shallow|near far|nearest farthest|
closest furthest|loud quiet|louder quieter|loudest quietest|expensive cheap|cheaper dearer|cheapest dearest|
cheapest expensive|safest dangerous|easiest difficult|fastest slow|
rich poor|full empty|full part|safe dangerous|safe unsafe|healthy unhealthy|good bad|better worse|best worst|
positive negative|advantage disadvantage|benefit drawback|benefit risk|pros cons|pro con|strength weakness|
strengths weaknesses|more less|more fewer|most least|above below|inside outside|indoor outdoor|indoors outdoors|
internal external|inner outer|public private|male female|man woman|boy girl|husband wife|father mother|son daughter|
brother sister|king queen|buyer seller|landlord tenant|employer employee|teacher student|lender borrower|
host guest|parent child|doctor patient|winner loser|supply demand|profit loss|gain lose|gain loss|gross net|
income expense|debit credit|deposit withdraw|deposit withdrawal|hardware software|input output|source target|
north south|east west|northern southern|eastern western|left right|top bottom|front back|head tail|summer winter|
spring autumn|day night|morning evening|morning afternoon|am pm|weekday weekend|today tomorrow|today yesterday|
tomorrow yesterday|next last|next previous|past future|ancient modern|formal informal|formal casual|happy sad|
happiest saddest|funny serious|love hate|like dislike|cause cure|cause prevent|cause relieve|cause treat|
cause effect|symptom treatment|symptom cause|symptom prevention|cause treatment|
treatment prevention|diagnosis treatment|synonym antonym|agree disagree|appear disappear|visible invisible|
active inactive|passive active|
legal illegal|possible impossible|singular plural|prefix suffix|vertical horizontal|vertically horizontally|
even odd|common rare|common rarest|rarest commonest|simple complex|sweet sour|alive dead|live die|born died|
birth death|marriage divorce|marry divorce|married single|arm disarm|inflate deflate|grow shrink|widen narrow|
tighten loosen|shorten lengthen|lengthen shorten|shorten extend|strengthen weaken|speed slow|wake sleep|
sit stand|remember forget|find lose|save spend|save waste|earn spend|lend borrow|rent own|rent buy|with without|
include exclude|including excluding|optional mandatory|optional required|voluntary compulsory|temporary permanent|
manual automatic|manually automatically|local remote|client server|sender recipient|sender receiver|
plaintiff defendant|prosecution defence|upstream downstream|uphill downhill|upstairs downstairs|upgrade downgrade|
promote demote|encourage discourage|support oppose|for against|praise criticize|praise criticise|compliment insult|
hope fear|optimistic pessimistic|hero villain|friend enemy|victory defeat|peace war|solid liquid|liquid gas|
acid base|acidic alkaline|evaporate condense|melt freeze|dissolve precipitate|inhale exhale|hungry full|
thin fat|gain lose|sharp blunt|clean dirty|fresh stale|raw cooked|ripe unripe|absent present|guilty innocent|
true false|right wrong|correct incorrect|same different|similar different|everything nothing|always never|
everyone nobody|often rarely|frequently rarely|usually rarely|start cancel|renew cancel|extend cancel|book cancel|
upbeat melancholic|serious funny|minor major|junior senior|beginner expert|beginners experts|amateur professional|
single double|single multiple|inbound outbound|incoming outgoing|entry exit|entrance exit|check-in check-out|
shallow deep|smooth rough|polite rude|quiet noisy|noisiest quietest|wake asleep|mild severe|mild strong|acute chronic
"""
_PARTICLES = (("on", "off"), ("in", "out"), ("up", "down"), ("over", "under"))
_SWITCHES = (
    ("on", "off"),
    ("up", "down"),
    ("and", "or"),
    ("already", "still"),
    ("for", "against"),
    ("make", "use"),
    ("made", "used"),
    ("list", "create"),
)
_PHRASES = tuple(
    tuple(pair.split("|"))
    for pair in (
        "at least|at most",
        "at least|no more than",
        "at most|no less than",
        "more than|less than",
        "more than|fewer than",
        "more than|at most",
        "less than|at least",
        "up to|at least",
        "minimum|at most",
        "maximum|at least",
        "greater than|less than",
    )
)
_QUANTIFIERS = {
    **dict.fromkeys(("all", "every", "each", "everyone", "everything", "always", "entire", "whole"), "all"),
    **dict.fromkeys(("most", "mostly", "usually"), "most"),
    **dict.fromkeys(("some", "sometimes", "several"), "some"),
    **dict.fromkeys(("any", "ever"), "any"),
    **dict.fromkeys(("few", "little"), "few"),
    "only": "only",
    "both": "both",
    "either": "either",
}
_CLASHING = frozenset(
    frozenset(pair.split())
    for pair in (
        "all any|all most|all some|all few|most few|most some|most any|both either|all only|few some|any few".split("|")
    )
)


@cache
def _antonyms() -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for pair in _ANTONYMS.replace("\n", "").split("|"):
        first, second = (stem(word) for word in pair.strip().split(" "))
        if first != second:
            found.setdefault(first, set()).add(second)
            found.setdefault(second, set()).add(first)
    return {word: frozenset(others) for word, others in found.items()}


_BEGUN = re.compile(
    r"^(?:(?:hi|hello|hey|sorry|so|but|well|ok|please) )*(?:i |we )?"
    r"(?:(?:do|did|can|could) not (?:really |quite |even )?(?:know|understand|remember|recall|(?:figure|work|find) out)"
    r"|(?:am |are )?not (?:really |quite )?(?:sure|certain)|(?:have |got )*no (?:idea|clue)) "
    r"(?=(?:how|what|where|when|who|why|which)\b)"
)
"""I do not know how …"""
_NOT = r"(?:cannot|can(?: not|'?t)|(?:do|did|could)(?: not|n'?t))"
_CLAUSE = re.compile(r"(?<![.?!,;:])[.?!,;:]+(?:\s|$)|(?<!\s)\s+-\s")
_ASIDE = re.compile(
    r"(?:(?:sorry|and|but|so|because) )*(?:(?:i|we)(?:'m|'ve| am| have)? )?(?:"
    rf"{_NOT} (?:seem to )?(?:know|understand|remember|find|get|(?:figure|work)(?= (?:it|this|that) out))"
    r"(?: (?:it|this|that|this one|an answer))?(?: (?:out|anywhere|online|on my own|myself|at all))*"
    r"|not (?:really )?sure(?: (?:about (?:this|that)|at all))?|(?:got )?no (?:idea|clue)(?: myself)?"
    r"|(?:there(?: is|'s) )?no (?:rush|hurry)|(?:it|this|that)(?:(?: is|'s) not|(?: is)?n'?t) (?:urgent|clear to me)"
    r"|never (?:done|had to do) (?:it|this|that) before|no ?(?:body|[- ]one)(?: here| else)* (?:knows|could tell me)"
    r"|the (?:manual|website|faq) (?:does not|doesn'?t) say)",
    re.IGNORECASE,
)
"""A clause of its own that only says that who asks does not know, or is in no hurry."""
_KEYS = "know understand remember find get figure work sure certain idea clue rush hurry urgent clear tell say".split()


@lru_cache(maxsize=REMEMBERED)
def _aside(reading: Reading) -> tuple[Reading, frozenset[str]]:
    """(The text without such clauses, what they speak of); the text itself if it has none, or nothing else."""
    parts = [part.strip() for part in _CLAUSE.split(normal(reading.text)) if part.strip()]
    left = [part for part in parts if _ASIDE.fullmatch(part) is None]
    text, dropped = reading, set(reading.words)
    if left and len(left) < len(parts):
        text = read(". ".join(left))
    if len(left) == 1 and (begun := _BEGUN.match(" ".join(text.words))) is not None:
        text = read(" ".join(text.words)[begun.end() :])
    return text, frozenset(map(meaning, dropped - set(text.words))).intersection(map(meaning, _KEYS))


def _denied(reading: Reading, other: Reading) -> tuple[str, ...]:
    """What a text negates, less what is only said in passing, if the other text does not speak of that."""
    if NEGATORS.isdisjoint(reading.words):
        return ()
    text, keys = _aside(reading)
    return negated(reading if keys.intersection(map(meaning, other.words)) else text)


@lru_cache(maxsize=REMEMBERED)
def negated(reading: Reading) -> tuple[str, ...]:
    """What a text negates: for each "not", "never", "without" … the next word that carries meaning, by its stem."""
    words = reading.words
    found = []
    for index, word in enumerate(words):
        if word not in NEGATORS or (word == "not" and index and words[index - 1] == "or"):
            continue
        rest = (other for other in words[index + 1 :] if other not in EMPTY and other not in NEGATORS)
        found.append(meaning(next(rest, "")))
    return tuple(found)


def _inverted(reading: Reading) -> bool:
    """Whether a question begins with a negated auxiliary ("why doesn't my phone charge"), far from what it negates."""
    return "not" in reading.words[1:3] and reading.words[reading.words.index("not") - 1] in _AUXILIARIES


def negation(a: Reading, b: Reading) -> bool:
    """Whether one denies what the other one asserts."""
    ours, theirs = _denied(a, b), _denied(b, a)
    if bool(ours) != bool(theirs):
        quiet, loud = (b, a) if ours else (a, b)
        return _SOFT.isdisjoint(set(quiet.words) - set(loud.words))
    if ours and set(a.content) == set(b.content):
        if len(ours) != len(theirs):
            return True
        if set(ours) != set(theirs):
            return not (_inverted(a) or _inverted(b))
    return prefixed(a, b)


def prefixed(a: Reading, b: Reading) -> bool:
    """Whether a word of one is a word of the other with a prefix that turns it round: registered, unregistered."""
    ours, theirs = set(a.words) - set(b.words), set(b.words) - set(a.words)
    return any(
        long.startswith(_PREFIXES) and any(long == prefix + short for prefix in _PREFIXES)
        for long, short in [*((x, y) for x in ours for y in theirs), *((y, x) for x in ours for y in theirs)]
        if len(short) > 3 and long != "overnight" and not _in_two_words(long, short, a, b)
    )


def _in_two_words(long: str, short: str, a: Reading, b: Reading) -> bool:
    """Whether one text has the prefix as a word of its own: "superglue", "super glue"."""
    prefix = long.removesuffix(short)
    return prefix in _LOOSE and any((prefix, short) in pairwise(reading.words) for reading in (a, b))


def opposed(a: Reading, b: Reading) -> bool:
    """Whether one has a word where the other one has its opposite."""
    mine, yours = _stems(a), _stems(b)
    only_mine, only_yours = mine - yours, yours - mine
    table = _antonyms()
    for word in only_mine:
        for other in table.get(word, frozenset()) & only_yours:
            complements = any({word, other} == set(map(stem, pair)) for pair in _COMPLEMENTS)
            if not (complements and ("not" in a.words) != ("not" in b.words)):
                return True
    texts = [" ".join(reading.words) for reading in (a, b)]
    for phrase, other in _PHRASES:
        for first, second in (texts, texts[::-1]):
            if phrase in first and other in second and phrase not in second:
                return True
    return _particles(a, b)


@lru_cache(maxsize=REMEMBERED)
def _stems(reading: Reading) -> frozenset[str]:
    return frozenset(map(stem, reading.words))


def _particles(a: Reading, b: Reading) -> bool:
    """ "turn on", "turn off"; "in stock", "out of stock"."""
    for pair in _PARTICLES:
        if pair[0] not in a.words and pair[1] not in a.words:
            continue
        mine, yours = (tuple(_beside(reading, particle) for particle in pair) for reading in (a, b))
        if (mine[0] - mine[1]) & (yours[1] - yours[0]) or (mine[1] - mine[0]) & (yours[0] - yours[1]):
            return True
    if set(a.content) != set(b.content):
        return False
    # "turn on dark mode", "turn dark mode off"
    ours, theirs = set(a.words), set(b.words)
    return any({*pair} & ours != {*pair} & theirs and {*pair} == {*pair} & (ours ^ theirs) for pair in _SWITCHES)


def _beside(reading: Reading, particle: str) -> frozenset[str]:
    """The meaningful words on both sides of a particle."""
    words, found = reading.words, set()
    for index, word in enumerate(words):
        if word == particle:
            for side in (words[max(0, index - 3) : index][::-1], words[index + 1 : index + 3]):
                found.update(next(([stem(other)] for other in side if other not in EMPTY), []))
    return frozenset(found)


def quantified(a: Reading, b: Reading) -> bool:
    """Whether one asks of all what the other one asks of some."""
    mine, yours = ({_QUANTIFIERS[word] for word in reading.words if word in _QUANTIFIERS} for reading in (a, b))
    only_mine, only_yours = mine - yours, yours - mine
    if set(a.content) == set(b.content) and ("too" in a.words) != ("too" in b.words):
        return True  # "too much" is another amount
    return any(frozenset((x, y)) in _CLASHING for x in only_mine for y in only_yours)
