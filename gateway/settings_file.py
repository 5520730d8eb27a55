"""Reading YAML files of settings: whatever is wrong is told with file, line, key, and the nearest valid word."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader where it is there: ten times as fast, which counts with thousands of tenants."""

_KEY_MOST = 32
"""A longer one is shown by its beginning: somebody may have pasted a secret in a key's place."""
Model = TypeVar("Model", bound=BaseModel)


class ConfigError(ValueError):
    """A configuration that cannot be used; the text names file, line and key."""


class _Unique(_LOADER):  # type: ignore[misc, valid-type]
    """A key that stands twice is an error: the second would silently win."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[Any] = set()
        for key, _ in node.value:
            if key.value in seen and key.value != "<<":
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"line {line}: {key.value}: this key stands there twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse(text: str, source: str) -> dict[str, Any]:
    """The mapping that a file's text holds. Raises `ConfigError`."""
    try:
        values = yaml.load(text, Loader=_Unique) or {}
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # an impossible date, an unhashable key …
        raise ConfigError(f"{source}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: the file must be a mapping of settings")
    return values


def read(path: Path) -> str:
    """A file's text. Raises `ConfigError`."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from error


def validated(model: type[Model], values: Mapping[str, Any], source: str, text: str = "", **context: Any) -> Model:
    """The settings in `values`, which came from `text`. Raises `ConfigError`."""
    try:
        return model.model_validate(values, context=context)
    except ValidationError as error:
        node = yaml.compose(text, Loader=_LOADER) if text else None
        lines = [_explain(source, node, item, model) for item in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from error


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` if one of the known words is near, else nothing."""
    found = difflib.get_close_matches(word, sorted(known), 1, 0.6)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _explain(source: str, node: yaml.Node | None, item: Any, model: type[BaseModel]) -> str:
    path = [str(part) for part in item["loc"]]
    line, keys = _locate(node, path)
    keys = [part if len(part) <= _KEY_MOST else f"{part[:8]}…" for part in keys]
    where = f"{source}:{line}" if line else source
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        message = "this key is not known here" + nearest(path[-1], _known_at(_schema(model), path[:-1]))
    elif item["type"] in ("literal_error", "enum") and isinstance(item["input"], str):
        message += nearest(
            item["input"], str(item["ctx"]["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        )
    return f"{where}: {'.'.join(keys or path[:1])}: {message}" if path else f"{where}: {message}"


def _locate(node: yaml.Node | None, path: list[str]) -> tuple[int, list[str]]:
    """The line of a key, and the path without the parts that only name a variant of a union."""
    line, keys = 0, []
    for part in path:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == part:
                    node, line = value, key.start_mark.line + 1
                    keys.append(part)
                    break
        elif isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
            node = node.value[int(part)]
            line = node.start_mark.line + 1
            keys.append(part)
    return line, keys


@lru_cache(maxsize=8)
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema(by_alias=True)


def _known_at(schema: dict[str, Any], path: list[str]) -> set[str]:
    """The keys that may stand at a place."""
    places = [*_variants(schema, schema)]
    for part in path:
        inner = [place["properties"][part] for place in places if part in place.get("properties", {})]
        inner += [
            place["additionalProperties"] for place in places if isinstance(place.get("additionalProperties"), dict)
        ]
        inner += [place["items"] for place in places if part.isdigit() and "items" in place]
        if inner:  # else the part only names a variant of a union
            places = [variant for place in inner for variant in _variants(schema, place)]
    return {name for place in places for name in place.get("properties", {})}


def _variants(schema: dict[str, Any], place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a place may be, references and unions resolved."""
    if "$ref" in place:
        yield from _variants(schema, schema["$defs"][place["$ref"].rpartition("/")[2]])
    choices = [*place.get("anyOf", ()), *place.get("oneOf", ()), *place.get("allOf", ())]
    for choice in choices:
        yield from _variants(schema, choice)
    if not choices and "$ref" not in place:
        yield place
