"""What kind of answer is asked for: a person or a date, one sentence or a table, English or French."""

from __future__ import annotations

import re
from functools import lru_cache

from policies.similarity.text import REMEMBERED, Reading

_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("frequency", r"how often|how frequently|how many times"),
        ("duration", r"how long|how soon|how quickly|how many (?:seconds|minutes|hours|days|weeks|months|years)\b"),
        ("amount", r"how (?:much|many)|what (?:amount|number) of|number of"),
        ("measure", r"how (?:old|tall|high|deep|far|big|large|wide|heavy|hot|cold|fast|thick)"),
        (
            "reason",
            r"\bwhy\b|how come|what causes?|what made|(?:the )?reasons? (?:for|why|that)|what is the (?:cause|reason)",
        ),
        ("time", r"\bwhen\b|(?:what|which) (?:year|date|day|month|time|century)"),
        ("place", r"\bwhere\b|(?:what|which) (?:place|city|country|location)"),
        ("person", r"\bwho\b|\bwhose\b|\bwhom\b"),
        ("manner", r"\bhow\b|ways? (?:to|of)|steps (?:to|for)"),
        ("thing", r"\b(?:what|which)\b"),
    )
)
_WHETHER = re.compile(r"(?:is|are|was|were|do|does|did|has|have|should|will|would|can|could|may|must)\b")
"""How a question begins that wants a yes or a no."""
_MAY = re.compile(r"(?:can|could|may)\b")
"""That often asks how."""
_TENSES = {
    **dict.fromkeys("was were did had".split(), "past"),
    **dict.fromkeys("is are am do does has have".split(), "present"),
    **dict.fromkeys("will shall".split(), "future"),
}
_DUTY = re.compile(r"(?:must|should)\b|(?:do|does|did) (?:\S+ ){1,4}?(?:have|need) to\b")
_STRONG = frozenset("frequency duration amount reason time place person".split())

_LANGUAGES = frozenset(
    "english french german spanish italian portuguese dutch danish swedish norwegian finnish polish czech slovak "
    "hungarian romanian bulgarian greek turkish arabic hebrew hindi urdu bengali tamil japanese chinese mandarin "
    "cantonese korean vietnamese thai indonesian malay russian ukrainian welsh irish catalan latin swahili croatian "
    "serbian icelandic persian farsi esperanto".split()
)
_OF_A_PEOPLE = frozenset("mythology restaurant restaurants schools".split())
"""In Greek mythology, not: in Greek."""
_FORMS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("json", r"\b(?:as|in|into|to) json\b"),
        ("yaml", r"\b(?:as|in|into|to) yaml\b"),
        ("xml", r"\b(?:as|in|into|to) xml\b"),
        ("csv", r"\b(?:as|in|into|to) csv\b"),
        ("html", r"\b(?:as|in|into|to) html\b"),
        ("markdown", r"\bmarkdown\b"),
        ("table", r"\b(?:as|in) an? (?:\w+ ){0,2}table\b|\btabular\b"),
        ("bullets", r"\bbullet ?points?\b|\b(?:in|as|with) (?:\w+ )?bullets\b|\bbulleted\b|#n:\d+ bullets?\b"),
        ("numbered", r"\bnumbered list\b"),
        ("list", r"\bas an? (?:\w+ )?list\b"),
        ("checklist", r"\bas an? checklist\b"),
        (
            "sentence",
            r"(?:\bin |\bone |\bsingle |#n:\d+ )(?:(?!(?:this|that|the|these|those|my|your)\b)\w+ )?sentences?\b",
        ),
        ("words", r"#n:\d+ words?\b"),
        ("paragraph", r"\bparagraphs?\b"),
        ("essay", r"\bwrite an essay\b"),
        ("poem", r"\bpoem\b|\brhymes?\b|\bhaiku\b|\blimerick\b"),
        ("dialogue", r"\bdialogue\b"),
        ("script", r"\bas a script\b"),
        ("detail", r"\bin (?:\w+ )?detail\b|\bin depth\b|\bthorough(?:ly)?\b"),
        ("short", r"\bbriefly\b|\bconcise(?:ly)?\b|\bin short\b|\bin a few words\b|\bone word\b|\bquick summary\b"),
        ("simple", r"\b(?:simple|plain) (?:terms?|words|english|language)\b|\blike i am\b|\bfor dummies\b"),
        ("steps", r"\bstep by step\b"),
        ("example", r"\b(?:with|using|giving) (?:an? )?(?:[\w#:]+ )?ex[ae]mples?\b"),
        ("yesno", r"\byes or no\b"),
        (
            "only",
            r"^(?!how |where ).*\b(?:just|only) the\b|\bnothing else\b"
            r"|\b(?:just|only) (?:give|answer|reply)\b",
        ),
    )
)


@lru_cache(maxsize=REMEMBERED)
def kind(reading: Reading) -> str:
    """What a question asks for: "person", "time", "reason" …; empty if it does not say."""
    text = " ".join(reading.words)
    first = min(
        ((match.start(), rank, name) for rank, (name, pattern) in enumerate(_KINDS) if (match := pattern.search(text))),
        default=None,
    )
    if first is not None:
        return first[2]
    if _MAY.match(text):
        return "leave"
    return "fact" if _WHETHER.match(text) else ""


def other_kind(a: Reading, b: Reading) -> bool:
    """Whether one asks when and the other one where."""
    ours, theirs = kind(a), kind(b)
    same = set(a.content) == set(b.content)
    if same and (_other_tense(a, b) or _other_duty(a, b)):
        return True
    if ours == theirs:
        return False
    if ours in _STRONG and theirs in _STRONG:
        return True
    if "fact" in (ours, theirs) or "leave" in (ours, theirs):
        other = ours if theirs in ("fact", "leave") else theirs
        how = other == "manner" and "fact" in (ours, theirs)
        return same and (other in _STRONG | {"thing"} or how)
    strong = ours in _STRONG or theirs in _STRONG
    return strong and (same or "manner" in (ours, theirs)) and "" not in (ours, theirs)


def _other_tense(a: Reading, b: Reading) -> bool:
    """Whether one asks of what was, and the other one of what is or will be."""
    ours, theirs = ({_TENSES[word] for word in reading.words if word in _TENSES} for reading in (a, b))
    # How long something takes is asked in the future as in the present.
    still = kind(a) == "duration" and "past" not in ours | theirs
    return bool(ours and theirs) and ours.isdisjoint(theirs) and not still


def _other_duty(a: Reading, b: Reading) -> bool:
    """Whether one asks what must be, and the other one what may be."""
    ours, theirs = (" ".join(reading.words) for reading in (a, b))
    return any(_DUTY.match(one) and _MAY.match(other) for one, other in ((ours, theirs), (theirs, ours)))


@lru_cache(maxsize=REMEMBERED)
def constraints(reading: Reading) -> frozenset[str]:
    """What a text demands of its answer: language, format, length, audience."""
    text = " ".join(reading.words)
    found = {name for name, pattern in _FORMS if pattern.search(text)}
    for index, word in enumerate(reading.words[:-1]):
        behind = reading.words[index + 2] if index + 2 < len(reading.words) else ""
        if word in _LANGUAGES and reading.words[index + 1] in ("translation", "version", "equivalent"):
            found.add(word)
        into = word in ("in", "into") or (word == "to" and "translat" in reading.content)
        if into and reading.words[index + 1] in _LANGUAGES and behind not in _OF_A_PEOPLE:
            found.add(reading.words[index + 1])
    return frozenset(found)


def other_form(a: Reading, b: Reading) -> bool:
    """Whether the answer is wanted in another form."""
    ours, theirs = constraints(a), constraints(b)
    if not (ours & _LANGUAGES and theirs & _LANGUAGES):
        ours, theirs = ours - {"english"}, theirs - {"english"}  # in the language of the question, most likely
    return ours != theirs
