"""Using the prompt caches of cloud providers without the application knowing.

Anthropic caches up to marked places (`cache_control`): at most four, in the order tools, system, messages, each behind
a prefix of a least length that depends on the model; writing costs a quarter more than plain input (twice as much for
the hour), reading a tenth. OpenAI caches by itself, and `prompt_cache_key` sends what shares a prefix to where it is.
Both find only what is the same from the first byte on, so tools are brought into one order.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson
from pydantic import model_validator

from backends.protocol import PromptCacheStyle, Section

Mode = Literal["off", "report", "on"]
Life = Literal["5m", "1h"]
MOST = 4
"""Marks that one request may have."""
_MINIMUM: tuple[tuple[str, int], ...] = (
    # The first that matches, as in the providers' documents of 2026; what is not named needs 1,024.
    (r"opus-5", 512),
    (r"(opus-4-[5-9]|haiku-4-5|haiku-5)", 4096),
    (r"(3-5-haiku|3-haiku|haiku-3)", 2048),
)
_SEEN_MOST = 10_000
_BACK = 19
"""Blocks between two marks, so that what was written at the one is found from the other."""
_MEDIA_BYTES = 6000
"""A picture counts as so many bytes of text."""
_MARKABLE = frozenset({"text", "image", "document", "search_result", "tool_use", "tool_result", "server_tool_use"})
FIVE_MINUTES, HOUR = 300.0, 3600.0


class PromptCacheConfig(Section):
    """`prompt_cache:` of a tenant."""

    mode: Mode = "off"
    """`report` changes nothing, and tells in `x-hitherto-prompt-cache` what `on` would do."""
    ttl: Life | Literal["auto"] = "auto"
    """How long Anthropic shall keep it; `auto`: by how often the prefix was seen to come again."""
    sort_tools: bool = True
    """Bring tools into one order (by name), so that a list that comes in another order is the same prefix."""

    @model_validator(mode="before")
    @classmethod
    def _one_word(cls, value: Any) -> Any:
        if isinstance(value, bool):  # YAML reads on and off as true and false
            return {"mode": "on" if value else "off"}
        if isinstance(value, dict) and isinstance(value.get("mode"), bool):
            return {**value, "mode": "on" if value["mode"] else "off"}
        return {"mode": value} if isinstance(value, str) else value


@dataclass(slots=True)
class Reuse:
    """When prefixes came, to tell how soon they come again. Times are seconds."""

    _parts: dict[str, OrderedDict[bytes, tuple[float, deque[float]]]] = field(default_factory=dict)

    def interval(self, part: str, prefix: bytes, now: float) -> float | None:
        """Note that a part's prefix comes now; the middle one of its last intervals, or None before there are two."""
        seen = self._parts.setdefault(part, OrderedDict())  # by part: many conversations must not push tools out
        last, gaps = seen.pop(prefix, (now, deque[float](maxlen=9)))
        if now > last:
            gaps.append(now - last)
        seen[prefix] = (now, gaps)
        if len(seen) > _SEEN_MOST:
            seen.popitem(last=False)
        return sorted(gaps)[len(gaps) // 2] if len(gaps) >= 2 else None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request made ready for a provider's cache. `note` says what was done, or would be; empty: nothing."""

    body: bytes
    note: str = ""


def prepare(
    body: bytes, style: PromptCacheStyle, config: PromptCacheConfig, tenant: bytes, reuse: Reuse, now: float
) -> Prepared:
    """The request as the provider caches it best. `tenant` is a secret of the tenant's, for keys of its own.

    What cannot be read goes as it is.
    """
    if config.mode == "off" or style == "none":
        return Prepared(body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return Prepared(body)
    if not isinstance(value, dict):
        return Prepared(body)
    try:
        notes = _improve(value, style, config, tenant, reuse, now)
        changed = orjson.dumps(value) if notes else body
    except TypeError:  # orjson reads deeper nesting than it writes
        return Prepared(body)
    words = ",".join(notes)
    if not notes or config.mode == "report":
        return Prepared(body, f"would={words}" if notes else "")
    return Prepared(changed, f"did={words}")


def _improve(
    value: dict[str, Any], style: PromptCacheStyle, config: PromptCacheConfig, tenant: bytes, reuse: Reuse, now: float
) -> list[str]:
    """Change a request; what was done. Raises TypeError for what is nested too deeply."""
    sorted_tools = config.sort_tools and _sort_tools(value)
    notes = ["tools-sorted"] if sorted_tools else []
    if style == "key":
        if "prompt_cache_key" not in value and (prefix := _beginning(value)):
            digest = hashlib.blake2b(prefix, digest_size=16, key=tenant[:64], person=b"prompt-cache-key")
            value["prompt_cache_key"] = f"h-{digest.hexdigest()}"
            notes.append("key")
    else:
        notes += _mark(value, config, tenant, reuse, now)
    return notes


def minimum(model: str) -> int:
    """Tokens that a prefix must have to be cached at all."""
    return next((tokens for pattern, tokens in _MINIMUM if re.search(pattern, model.replace(".", "-"))), 1024)


def _sort_tools(value: dict[str, Any]) -> bool:
    """Whether the tools were in another order. Server tools have no function; marks of the client's own bind order."""
    tools = value.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return False
    if any("cache_control" in tool for tool in tools):
        return False
    ordered = sorted(tools, key=_tool_name)
    changed = ordered != tools
    value["tools"] = ordered
    return changed


def _tool_name(tool: dict[str, Any]) -> str:
    function = tool.get("function")
    return str(function.get("name", "") if isinstance(function, dict) else tool.get("name", tool.get("type", "")))


def _beginning(value: dict[str, Any]) -> bytes:
    """What requests of one application have in common: model, tools, system prompt; without these the first message."""
    messages = value.get("messages")
    messages = messages if isinstance(messages, list) else []
    system = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer"):
            break
        system.append(message.get("content"))
    shared = [value.get("model"), value.get("tools"), value.get("instructions"), system or messages[:1]]
    return orjson.dumps(shared) if any(shared[1:]) else b""


@dataclass(slots=True)
class _Place:
    """A block, what comes before it and with it, and its part of the request. `ours`: it may get a mark."""

    part: str
    block: dict[str, Any]
    tokens: int
    prefix: bytes
    ours: bool = True


def _mark(value: dict[str, Any], config: PromptCacheConfig, tenant: bytes, reuse: Reuse, now: float) -> list[str]:
    """Set marks; the names of the parts that got one."""
    if "cache_control" in value:
        return []  # the provider's automatic mode, by the client's own wish
    _as_blocks(value)
    places = list(_places(value, tenant))
    own = {place.part for place in places if "cache_control" in place.block}
    free = MOST - sum("cache_control" in place.block for place in places)
    # How soon a prefix comes again: a conversation's is known by its first block, since its end is always new.
    roots = {place.part: place.prefix for place in reversed(places) if place.part == "messages"}
    roots |= {place.part: place.prefix for place in places if place.part != "messages"}
    wanted: list[_Place] = []
    for part in ("tools", "system"):
        fit = [place for place in places if place.part == part and place.ours]
        wanted += fit[-1:] if part not in own else []
    if "messages" not in own and _goes_on(value):
        wanted += _turns([place for place in places if place.part == "messages"], max(1, free - len(wanted)))
    least = minimum(str(value.get("model", "")))
    done: list[str] = []
    longest: Life = "1h"
    for place in [place for place in wanted if place.tokens >= least][: max(0, free)]:
        gap = reuse.interval(place.part, roots[place.part], now)
        if gap is not None and gap > HOUR and config.ttl == "auto":
            continue  # it was never found again in time, and writing costs more than not caching
        life: Life = config.ttl if config.ttl != "auto" else "1h" if gap is not None and gap > FIVE_MINUTES else "5m"
        life = _beside_own(life, place, places, longest)
        longest = life  # longer ones must come first
        place.block["cache_control"] = {"type": "ephemeral", **({"ttl": "1h"} if life == "1h" else {})}
        done.append(f"{place.part}:{life}")
    return done


def _goes_on(value: dict[str, Any]) -> bool:
    """Whether it is a conversation: of single questions the end never comes again, and writing it costs extra."""
    messages = value.get("messages")
    return isinstance(messages, list) and any(
        isinstance(message, dict) and message.get("role") == "assistant" for message in messages
    )


def _as_blocks(value: dict[str, Any]) -> None:
    """Texts that are plain strings as lists of one block, which can carry a mark."""
    system = value.get("system")
    if isinstance(system, str) and system:
        value["system"] = [{"type": "text", "text": system}]
    messages = value.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and isinstance(message.get("content"), str) and message["content"]:
            message["content"] = [{"type": "text", "text": message["content"]}]


def _places(value: dict[str, Any], tenant: bytes) -> Iterator[_Place]:
    """Every block in the order in which the provider reads them, those inside of tool results included."""
    digest = hashlib.blake2b(str(value.get("model")).encode(), digest_size=16, key=tenant[:64])
    size = 0
    messages = value.get("messages")
    parts: list[tuple[str, Any]] = [("tools", value.get("tools")), ("system", value.get("system"))]
    parts += [
        ("messages", message.get("content"))
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict)
    ]
    for part, blocks in parts:
        for block in blocks if isinstance(blocks, list) else ():
            if not isinstance(block, dict):
                continue
            inner = block.get("content")
            for nested in inner if isinstance(inner, list) else ():
                if isinstance(nested, dict) and "cache_control" in nested:
                    yield _Place(part, nested, size // 4, digest.digest(), ours=False)
            text = orjson.dumps({name: item for name, item in block.items() if name != "cache_control"})
            size += min(len(text), _MEDIA_BYTES) if block.get("type") in ("image", "document") else len(text)
            digest.update(text)
            yield _Place(part, block, size // 4, digest.digest(), _may_carry(part, block))


def _may_carry(part: str, block: dict[str, Any]) -> bool:
    """Which blocks take a mark: of tools those that are not loaded later, else those of known kinds, if not empty."""
    if part == "tools":
        custom = block.get("custom")
        return block.get("defer_loading") is not True and not (isinstance(custom, dict) and custom.get("defer_loading"))
    kind = block.get("type")
    return kind in _MARKABLE and not (kind == "text" and not block.get("text"))


def _turns(blocks: list[_Place], free: int) -> list[_Place]:
    """The end of the conversation, for the next turn to read, and places before it for this turn to read: a mark finds
    what was written up to 20 blocks before it."""
    chosen: list[_Place] = []
    last = len(blocks)
    while len(chosen) < free and (fit := [n for n in range(max(0, last - _BACK), last) if blocks[n].ours]):
        at = fit[-1] if not chosen else fit[0]
        chosen.insert(0, blocks[at])
        last = at
        if last < _BACK:
            break
    return chosen


def _beside_own(life: Life, place: _Place, places: list[_Place], longest: Life) -> Life:
    """A life that keeps the provider's order: no longer one behind a shorter one, the client's own marks included."""
    position = places.index(place)
    before = [_life(other.block) for other in places[:position] if "cache_control" in other.block]
    after = [_life(other.block) for other in places[position + 1 :] if "cache_control" in other.block]
    if "1h" in after:
        return "1h"
    return "5m" if "5m" in before or longest == "5m" else life


def _life(block: dict[str, Any]) -> Life:
    mark = block["cache_control"]
    return "1h" if isinstance(mark, dict) and mark.get("ttl") == "1h" else "5m"
