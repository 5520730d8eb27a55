"""A question as the guards read it: words in one spelling, the ones that carry meaning, and what stands verbatim."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

from policies.similarity.lexicon import is_word, misspelt, stem
from policies.similarity.quantities import scan, unit_word

_SPELLED: dict[int, str] = dict.fromkeys(map(ord, "’‘ʼ´`＇′"), "'")
_SPELLED |= {ord(char): f" {part}" for char, part in (("½", "1/2"), ("¼", "1/4"), ("¾", "3/4"), ("⅓", "1/3"),
                                                         ("⅔", "2/3"), ("⅛", "1/8"))}  # fmt: skip
_SPELLED |= {ord(char): f"^{digit}" for digit, char in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
_SPELLED |= {ord(char): sign for char, sign in (("→", "->"), ("⇒", "=>"), ("≤", "<="), ("≥", ">="), ("≠", "!="))}
_DASHES = dict.fromkeys(map(ord, "−–—‐‑"), "-")
_QUOTED = re.compile(r"\"([^\"]+)\"|“([^”]+)”|„([^“”]+)[“”]|«([^»]+)»|`([^`]+)`|(?<!\w)'([^']{2,})'(?!\w)")
_URL = re.compile(r"\b(?:https?://|www\.)\S+|\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+", re.IGNORECASE)
_CODE = re.compile(
    r"(?<!\S)[~.]*/[\w./-]*\w|(?<!\w)\w+(?:::\w+)+|(?<!\w)\w+\(\)|(?<!\w)(?=\w*[^\W_]_)\w+|(?<!\S)\.[A-Za-z]{2,5}\b"
    r"|(?<!\w)[A-Za-z]+\.[a-z]{2,6}\b(?!\.)|(?<!\S)--[A-Za-z][\w-]*"
)
_SYMBOLS = re.compile(
    r"(?<!\S)-[A-Za-z]\w*\b|\b[A-Za-z]\+\+|\b[A-Za-z]#(?!\w)|(?<![\w@/])@\w+|(?<!\S)\.[A-Z][A-Z]+\b"
    r"|[<>=!]=|&&|\|\||<<|>>|->|(?<=\w )[<>](?= \w)|!(?=[a-z])|\\[A-Za-z]|\[\d*:\d*\]|\b[ugoa]*[+-][rwxst]+\b"
    r"|\b(?!w/)[a-z] ?(?:\^ ?\d+ ?)?[-+*/=<>] ?[a-z\d]\b|(?<![\w/])\d ?/ ?[a-z]\b"
)
_CONTRACTIONS = [
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        (r"\bwon'?t\b", "will not"),
        (r"\bcan'?t\b|\bcannot\b", "can not"),
        (r"\bshan'?t\b", "shall not"),
        (r"\b(is|are|was|were|do|does|did|could|would|should|has|have|had|must|need|might|ai)n'?t\b", r"\1 not"),
        (
            r"\b(?:do|does|did|is|are|was|were|would|could|should|has|have|had)'nt\b",
            lambda match: f"{match[0][:-3]} not",
        ),
        (r"\bw/o\b|\bwith out\b|\bwith no\b(?= [a-z])(?! one\b)", "without"),
        (r"\bnothing but\b", "only"),
        (r"(?<!at )\bleast expensive\b", "cheapest"),
        (r"\bw/(?=\s|\w)", "with "),
        (r"\s&\s", " and "),
        (r"\b(i|we|you|they|he|she|it|what|who|how|where|when|why|that|there|here|let)'(m|re|ve|ll|d|s)\b", r"\1"),
        (r"\b(what|how|who|where|that)s\b", r"\1"),
        (r"\b(im|ive)\b", "i"),
        (r"(?<=\w)'s\b|(?<=s)'(?!\w)", ""),
        (r"\b(?:e-mail|e mail)", "email"),
        (r"\bwi-fi\b", "wifi"),
        (r"\bun-?install", "uninstall"),
        (r"\b(?:the )?(?:names?|terms?|words?|phrases?|concepts?) (?:of|for)\b|\bthe (?:word|term|phrase)\b", " "),
        (r"\b(?:kind|type|sort)s? of\b|\bin advance\b|\bthe (?:reason|purpose) (?:of|for|why)\b", " "),
        (r"\bwhat (?:year|time) (?:is|was|does|do|did|will)\b", "when"),
        (r"(?-i:\bUS\b)|\bU\.S\.(?:A\.)?", "usa"),
    )
]
_UNITS = [
    (re.compile(pattern, re.IGNORECASE), replacement)
    for pattern, replacement in (
        (r"(?:°|\bdeg(?:ree)?s?) ?(?:c|celsius|centigrade)\b|\bcentigrade\b", " celsius"),
        (r"(?:°|\bdeg(?:ree)?s?) ?(?:f|fahrenheit)\b", " fahrenheit"),
        (r"(?<![^\W\d_])(?:km|kilomet(?:er|re)s?) ?(?:/|per|an) ?(?:h|hr|hour)\b|(?<![^\W\d_])km?ph\b", "kmh"),
        (r"(?<![^\W\d_])miles? (?:per|an) hour\b", "mph"),
        (r"(?<![^\W\d_])(?:pounds|lbs?) per square inch\b", "psi"),
        (r"(?<![^\W\d_])miles per gallon\b", "mpg"),
        (r"(?<![^\W\d_])([kmg])(?-i:b)ps\b", r"\1bit/s"),
        (r"\bper cent\b", "percent"),
        (r"\bk8s\b", "kubernetes"),
        (r"\b401 ?\(k\)", "401k"),
    )
]
"""One way to write a unit."""
_ACRONYMS = frozenset("AND OR NOT WHO IT NOW CAN ME AM PM".split())
_NUMBERED = frozenset("type class phase stage war act part grade level tier volume chapter section".split())
_SUFFIXES = ("ment", "er", "or", "ee", "ful", "less", "ive", "ist", "ism", "ship", "hood")
REMEMBERED = 8192
"""So many questions are kept in the form in which they were read."""
EMPTY: frozenset[str] = frozenset(
    # articles, pronouns, auxiliaries, prepositions: what they say is the business of guards of their own
    "a an the i you he she it we they me him us them my your his its our their mine yours this that these those is are "
    "was were be been being am do does did done has have had having can could will would shall should may might must "
    "to of in on at for with by from into onto as and or but so then there here if than about out up off over under "
    "through per via while during when where who whom whose what which why how when "
    # how questions are put and asked politely
    "please pls plz kindly hi hello hey dear thanks thank thx ty tell explain say know want wanna need like give show "
    "help let get got getting gets want wants wondering wonder ask asking anyone someone somebody people one "
    "possible able best way ways correct correctly properly exactly actually really just also too still ever "
    "way method easily simply quick quickly mean means meaning called u ur r wat lol btw ok okay well now sir guys "
    "make makes making made use using used go goes going work works working happen happens happening thing things "
    "does much many long often us any some etc between versus vs whether describe describes described concept called "
    "named hiya curious earlier learn whilst thru id yous whats wich afternoon morning good put bring said says saying "
    "need needs needed everyone everybody else actual yet already once write writes wrote written create creates "
    "created generate generates generated draft compose enough following available certain various specific differ "
    "differs difference differences different compare compared comparison compares shall should anyway somewhere "
    "myself yourself itself behind consist consists list listed name asks asked tells telling told explains explained "
    "explaining shows showed shown showing helps helped gives given gave giving knows knew known knowing excuse sorry "
    "bother wish gonna asap evening there thereof mine".split()
)
_GROUPS = """
fix repair resolve solve troubleshoot|buy purchase bought|begin start commence began begun|
allowed permitted legal permissible permit|pick choose select|error problem trouble|
picture photo image pic photograph|phone mobile cellphone smartphone|movie film|car vehicle automobile|cancel terminate|
cost price pricing fee charge|remove delete erase|show display|large big|largest biggest|child kid children|
doctor physician|job occupation|company firm|nearest closest|create generate|build built|change modify alter update|
fast quick|restart reboot|recommend suggest suggestion recommendation|
advantage benefit|disadvantage drawback downside|pay paid payment|store shop|laptop notebook|
tv television telly|app application|folder directory|postgres postgresql|kubernetes k8s|javascript js|
typescript ts|python py|usa us american america|uk britain british|germany german|france french|
spain spanish|italy italian|japan japanese|china chinese|russia russian|turkey turkish turk|ireland irish|
taught teach|sold sell|won win winner|told tell|spoke speak spoken|
broke break broken|took take taken|gave give given|find found|left leave|run ran|grow grew grown|fell fall fallen|
invent inventor invention|discover discovered discoverer discovery|men man|women woman|foot feet|tooth teeth|mouse mice|
minute min mins|second sec secs|hour hr hrs|info information|message msg|temperature temp|
documentation docs|database db|repository repo|configuration config|environment env|production prod|
favorite favourite|gray grey|
theater theatre|catalog catalogue|practice practise|mom mum|
regex regexp|tonight tonite|lose loose|almost nearly|enough sufficient|
finish complete|film movie|maximum max|minimum min|fridge refrigerator|
holiday vacation|licence license permit|rubbish trash garbage|petrol gasoline|
lorry truck|chemist pharmacy|pavement sidewalk|biscuit cookie|
assist aid|quit resign|dog dogs|danger risk|answer reply respond|locate find|obtain acquire|
incorrect wrong|tire tyre|cream creme|
highest tallest|every each|lasagna lasagne|calendar calender|register registration|
illness sickness|wage salary|staff personnel
"""


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One text. `content` and `order` hold stems; `content` has every word that carries meaning, in order."""

    text: str
    folded: str
    """All letters and digits, in lower case, without anything between: what stands verbatim can be looked up here."""
    words: tuple[str, ...]
    """In lower case, contractions spelled out; a quantity is one word that begins with #."""
    content: tuple[str, ...]
    spelled: Mapping[str, str]
    """Stem → the word it was made of."""
    quantities: tuple[str, ...]
    quoted: tuple[str, ...]
    code: frozenset[str]
    """Paths, identifiers, addresses of the web and of mail."""
    symbols: frozenset[str]
    """What differs by more than letters and digits: C++, C#, -o and -O."""
    names: frozenset[str]
    """Stems of words that are written like names, or that no dictionary has."""
    capitals: frozenset[str]
    """Words that are written with a capital, but for the first."""
    english: bool


@cache
def _same() -> Mapping[str, str]:
    """Words that may stand for one another in a question, by stem; the first group that has a word counts."""
    groups = [group.split() for group in _GROUPS.replace("\n", "").split("|")]
    return {stem(word): stem(group[0]) for group in reversed(groups) for word in group}


@lru_cache(maxsize=REMEMBERED)
def read(text: str) -> Reading:
    """Take a question apart; about 0.1 ms the first time."""
    plain = normal(text)
    quoted = tuple(next(filter(None, match.groups())) for match in _QUOTED.finditer(plain))
    code = frozenset(match[0] for match in (*_CODE.finditer(plain), *_URL.finditer(plain)))
    spread = _without_accents(plain)
    for pattern, replacement in _CONTRACTIONS:
        spread = pattern.sub(replacement, spread)
    spread = in_one_unit(spread)
    scanned = scan(spread)
    words = _lower(scanned.words)
    capital = {word.lower() for word in scanned.words[1:] if word != word.lower()}
    telling = _telling_capitals(scanned.words)
    english = _is_english(words)
    if not english:  # accents are letters then, and short forms are words
        scanned = scan(plain)
        words = _lower(scanned.words)
    content: list[str] = []
    spelled: dict[str, str] = {}
    names: set[str] = set()
    for word in words:
        if english and says_nothing(word) and word not in telling:
            continue
        if word.startswith("#"):
            continue
        made = meaning(word) if english else word
        content.append(made)
        spelled.setdefault(made, word)
        if word in capital or not is_word(american(word)):
            names.add(made)
    return Reading(
        text=text,
        folded=fold(plain),
        words=words,
        content=tuple(content),
        spelled=spelled,
        quantities=scanned.quantities,
        quoted=quoted,
        code=code,
        symbols=_symbols(plain),
        names=frozenset(names),
        capitals=frozenset(capital),
        english=english,
    )


def in_one_unit(text: str) -> str:
    """A `normal` text with its units written in one way."""
    for pattern, replacement in _UNITS:
        text = pattern.sub(replacement, text)
    return text


def _telling_capitals(words: tuple[str, ...]) -> frozenset[str]:
    """Words that say something by their capitals only: vitamin A, type I, an AND gate, the WHO."""
    if not any(word.islower() for word in words):
        return frozenset()
    found = {word.lower() for word in words[1:] if word in _ACRONYMS}
    for before, word in pairwise(words):
        after_name = before[:1].isupper() and before.lower() not in EMPTY
        if (word == "A" and before not in ("#", "")) or (word == "I" and (after_name or before.lower() in _NUMBERED)):
            found.add(word.lower())
    return frozenset(found)


def _symbols(text: str) -> frozenset[str]:
    """Operators, options and pictures, whatever the spaces around them."""
    found = {match.replace(" ", "") for match in _SYMBOLS.findall(text)}
    pictures = {char for char in text if not char.isascii() and char != "°" and unicodedata.category(char) == "So"}
    return frozenset(found | pictures)


def _lower(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word if word.startswith("#") else word.lower() for word in words)


def _without_accents(text: str) -> str:
    """Accents are left out by whoever has none on the keyboard; what else they tell apart, `folded` keeps apart."""
    if text.isascii():
        return text
    return "".join(char for char in unicodedata.normalize("NFD", text) if not unicodedata.combining(char))


@lru_cache(maxsize=8192)
def says_nothing(word: str) -> bool:
    """Whether a word, mistyped or not, is one of those that carry no meaning of their own."""
    if word in EMPTY:
        return True
    return len(word) > 3 and not is_word(word) and any(len(known) > 3 and misspelt(word, known) for known in EMPTY)


@lru_cache(maxsize=8192)
def meaning(word: str) -> str:
    """The stem of an English word, one for all its spellings and near synonyms."""
    spelled = unit_word(american(word))
    made = stem(spelled)
    if made in _same():
        return _same()[made]
    # A manager is not management, though they have one stem.
    singular = spelled.removesuffix("s")
    suffix = next((end for end in _SUFFIXES if singular.endswith(end) and not made.endswith(end[:3])), "")
    return made + suffix


def normal(text: str) -> str:
    """One spelling for apostrophes, dashes and compatible characters."""
    return unicodedata.normalize("NFKC", text.translate(_SPELLED)).translate(_DASHES)


def fold(text: str) -> str:
    """Letters and digits in lower case, nothing else."""
    return "".join(filter(str.isalnum, text.lower()))


@lru_cache(maxsize=8192)
def american(word: str) -> str:
    """American spelling, if a dictionary has that word and not this one."""
    if is_word(word):
        return word
    for british, other in (("our", "or"), ("is", "iz"), ("ys", "yz"), ("tre", "ter"), ("ogue", "og"), ("ll", "l"),
                           ("ence", "ense"), ("ae", "e"), ("oe", "e")):  # fmt: skip
        if british in word and is_word(made := word.replace(british, other)):
            return made
    return word


def _is_english(words: tuple[str, ...]) -> bool:
    """Whether the guards' word lists mean anything for this text. Doubt means no: then every word counts."""
    words = tuple(word for word in words if not word.startswith("#"))
    known = sum(word in EMPTY or (word.isascii() and is_word(word)) for word in words)
    return 2 * known >= len(words) and (
        len(words) < 4 or any(word in EMPTY for word in words) or 4 * known >= 3 * len(words)
    )
