"""Tenants' files: what they say, what is wrong with them, and what happens when they change."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway import keys
from gateway.api.auth import KeyAuth
from gateway.config import Settings, load
from gateway.errors import UnknownKey
from gateway.metrics import Metrics
from gateway.reload import Registry
from gateway.settings_file import ConfigError
from gateway.tenants import hash_key, load_file
from tests.conftest import ROOT, eventually

CONFIG = """
tenants: tenants/
backends: {up: {kind: openai, url: "http://127.0.0.1:1/v1"}, other: {kind: openai, url: "http://127.0.0.1:2/v1"}}
models: {fast: {try: [up]}, slow: {try: [other]}, gpt-*: {try: [up]}}
cache: {ttl: 2h, semantic: {threshold: 0.9}}
limits: {requests_per_minute: 1000}
"""
KEY = "hk-secret"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "hitherto.yaml").write_text(CONFIG)
    (tmp_path / "tenants").mkdir()
    write(tmp_path, "acme", f"tenant: acme\nkeys: ['{hash_key(KEY)}']\nmodels: [fast, gpt-*]\n")
    return load(tmp_path / "hitherto.yaml")


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / "tenants" / f"{name}.yaml"
    path.write_text(text)
    return path


def registry(settings: Settings) -> Registry:
    return Registry(settings, Metrics())


def shown(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_what_a_file_does_not_say_is_as_in_the_gateways_configuration(tmp_path: Path, settings: Settings) -> None:
    text = (
        "tenant: acme\ncache: {ttl: 5m, semantic: {alias_margin: 0}, volatile: {now: 1s}}\n"
        "limits: {tokens_per_minute: 7, per_user: {concurrency: 1}, per_model: {gpt-*: {requests_per_day: 3}}}\n"
    )
    policy = load_file(write(tmp_path, "acme", text), settings.surroundings()).tenant.policy
    assert (policy.rules.ttl, policy.rules.threshold, policy.rules.grey) == (300.0, 0.9, 0.0)
    assert policy.rules.volatile["now"] == 1.0 and policy.rules.volatile["weather"] == 600.0
    assert policy.limited and policy.limits.requests_per_minute is None, "its own limits replace the gateway's"
    assert policy.models == ("*",)
    plain = load_file(write(tmp_path, "plain", "tenant: plain\n"), settings.surroundings()).tenant.policy
    assert plain.limits.requests_per_minute == 1000 and plain.rules.ttl == 7200.0


def test_a_request_meets_the_limits_of_tenant_user_and_model(tmp_path: Path, settings: Settings) -> None:
    text = (
        "tenant: acme\nlimits: {requests_per_minute: 9, per_user: {concurrency: 1}, "
        "per_model: {gpt-*: {requests_per_day: 3}}}\nuser_from: header:X-End-User\n"
    )
    tenant = load_file(write(tmp_path, "acme", text), settings.surroundings()).tenant
    user = tenant.user({"x-end-user": "ann"}, {"user": "bob"})
    assert user == "ann"
    found = [(limit.subject, limit.kind, limit.limit) for limit in tenant.limits(user, "gpt-5")]
    assert found == [
        ("acme", "requests", 9),
        ("acme|user|ann", "concurrency", 1),
        ("acme|model|gpt-*", "requests", 3),
    ]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("tenant: acme\nlimitz: {}\n", 2, "limitz: this key is not known here (did you mean 'limits'?)"),
        ("tenant: acme\nlimits: {request_per_minute: 5}\n", 2, "did you mean 'requests_per_minute'?"),
        ("tenant: acme\ncache:\n  semantic:\n    treshold: 1\n", 4, "did you mean 'threshold'?"),
        (
            "tenant: acme\nlimits:\n  per_model:\n    fast: {tokens_per_minut: 5}\n",
            4,
            "did you mean 'tokens_per_minute'?",
        ),
        ("tenant: acme\nmodels: [fsat]\n", 0, "nothing is routed that 'fsat' names (did you mean 'fast'?)"),
        ("tenant: acme\nroutes: {fast: {try: [upp]}}\n", 0, "no backend 'upp' (known: other, up) (did you mean 'up'?)"),
        ("tenant: acme\nroutes: {a: b, b: a}\n", 0, "the aliases go in a circle: a → b → a"),
        ("tenant: acme\nroutes: {a: fsat}\n", 0, "there is no model 'fsat' (did you mean 'fast'?)"),
        ("tenant: acme\nbudget: {per_day: 5 USD, when_spent: rejct}\n", 2, "did you mean 'reject'?"),
        ("tenant: acme\nbudget: {per_day: 5 USD, when_spent: {downgrade: slwo}}\n", 0, "did you mean 'slow'?"),
        ("tenant: acme\nbudget: {per_day: 5}\n", 2, "like 500 USD"),
        ("tenant: acme\nkeys: [hk-secret]\n", 2, "sha256: and 64 hexadecimal digits"),
        ("tenant: acme\nkeys: [{hash: 'sha256:" + "0" * 64 + "', expires: 2030-01-01}]\n", 2, "keys.0.expires"),
        ("tenant: acme\ncache: {volatile: {wether: 1m}}\n", 2, "did you mean 'weather'?"),
        ("tenant: acme\ncache: {semantic: {deadline: 1s}}\n", 0, "the deadline is the gateway's"),
        ("tenant: acme\ncache: {size: 1GiB}\n", 2, "this key is not known here"),
        ("tenant: ../acme\n", 1, "String should match pattern"),
        ("tenant: acme\ntenant: other\n", 0, "line 2: tenant: this key stands there twice"),
        ("keys: []\n", 0, "tenant: Field required"),
        ("tenant: acme\nuser_from: cookie\n", 2, "user_from"),
        ("tenant: acme\nredact: {mask: [mails]}\n", 2, "did you mean 'emails'?"),
    ],
)
def test_what_is_wrong_is_told_with_file_line_key_and_the_nearest_word(
    tmp_path: Path, settings: Settings, text: str, line: int, words: str
) -> None:
    path = write(tmp_path, "acme", text)
    with pytest.raises(ConfigError) as caught:
        load_file(path, settings.surroundings())
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{path}:{line}: " if line else f"{path}:")
    assert "hk-secret" not in str(caught.value)


def test_two_files_must_not_claim_the_same_name_or_key(tmp_path: Path, settings: Settings) -> None:
    write(tmp_path, "b", "tenant: acme\n")
    with pytest.raises(ConfigError, match=r"b.yaml: tenant: 'acme' is also in .*acme.yaml"):
        registry(settings)
    write(tmp_path, "b", f"tenant: b\nkeys: ['{hash_key(KEY)}']\n")
    with pytest.raises(ConfigError, match=r"b.yaml: keys: the key .* is also in .*acme.yaml") as caught:
        registry(settings)
    assert hash_key(KEY) not in str(caught.value)


def test_keys_are_found_by_any_of_the_usual_headers_and_expire(tmp_path: Path, settings: Settings) -> None:
    now = datetime.now(UTC)
    old, new = (f"{{hash: '{hash_key(name)}', expires: {(now + delta).isoformat()}}}"
                for name, delta in (("old", -timedelta(1)), ("new", timedelta(1))))  # fmt: skip
    write(tmp_path, "b", f"tenant: b\nkeys: [{old}, {new}]\n")
    auth = KeyAuth(registry(settings))
    for headers in (shown(KEY), {"x-api-key": KEY}, {"api-key": KEY}, {"authorization": f"bearer  {KEY} "}):
        tenant = auth.tenant(headers)
        assert tenant.name == "acme" and tenant.credentials == {} and len(tenant.key) == 12
    assert auth.tenant(shown("new")).name == "b"
    with pytest.raises(UnknownKey, match="expired at"):
        auth.tenant(shown("old"))
    for headers in ({}, shown("unknown"), {"authorization": KEY}, {"authorization": "Basic xyz"}, shown("")):
        with pytest.raises(UnknownKey):
            auth.tenant(headers)


async def test_a_change_is_in_force_in_one_step_and_told_as_a_difference(tmp_path: Path, settings: Settings) -> None:
    known = registry(settings)
    before = known.tenants
    write(tmp_path, "acme", f"tenant: acme\nkeys: ['{hash_key(KEY)}']\nmodels: [fast]\nlimits: {{concurrency: 3}}\n")
    write(tmp_path, "fresh", "tenant: fresh\n")
    changes = await known.reload()
    assert changes == [
        "fresh: new",
        "acme: limits.concurrency: – → 3",
        *[line for line in changes if line.startswith("acme: limits.") and "concurrency: –" not in line],
        "acme: models: ('fast', 'gpt-*') → ('fast',)",
    ]
    assert before.by_name["acme"].policy.models == ("fast", "gpt-*"), "a request keeps what it began with"
    assert known.tenants.by_name["acme"].policy.models == ("fast",)
    (tmp_path / "tenants/fresh.yaml").unlink()
    assert await known.reload() == ["fresh: gone"]
    assert await known.reload() == []


async def test_keys_in_a_difference_are_shown_by_their_ids_only(tmp_path: Path, settings: Settings) -> None:
    known = registry(settings)
    write(tmp_path, "acme", f"tenant: acme\nkeys: ['{hash_key('k2')}']\nmodels: [fast, gpt-*]\n")
    (change,) = await known.reload()
    ids = [hash_key(key).removeprefix("sha256:")[:12] for key in (KEY, "k2")]
    assert change == f"acme: keys: [{ids[0]}] → [{ids[1]}]"


async def test_a_broken_file_leaves_the_last_good_one_in_force_and_the_others_go_on(
    tmp_path: Path, settings: Settings
) -> None:
    known = registry(settings)
    path = write(tmp_path, "acme", "tenant: acme\nmodels: [nonsense]\n")
    write(tmp_path, "fresh", "tenant: fresh\n")
    write(tmp_path, "thief", f"tenant: thief\nkeys: ['{hash_key(KEY)}']\n")
    assert await known.reload() == ["fresh: new"]
    assert known.tenants.find(KEY)[0].name == "acme"  # type: ignore[index]
    assert (
        set(known.wrong) == {str(path), str(tmp_path / "tenants/thief.yaml")} and "nonsense" in known.wrong[str(path)]
    )
    write(tmp_path, "acme", "tenant: acme\nmodels: [fast]\n")
    changes = await known.reload()
    assert any("models" in line for line in changes) and "thief: new" in changes and known.wrong == {}
    (tmp_path / "tenants").rename(tmp_path / "away")
    await known.reload()
    assert known.tenants.find(KEY) is not None and len(known.wrong) == 1, (
        "nobody loses a tenant for a folder that is away"
    )


async def test_a_newcomer_does_not_take_what_another_has(tmp_path: Path, settings: Settings) -> None:
    known = registry(settings)
    for text in (f"tenant: aaa\nkeys: ['{hash_key(KEY)}', '{hash_key('more')}']\n", "tenant: acme\n"):
        path = write(tmp_path, "aaa", text)  # before acme.yaml in every order but that of who came first
        assert await known.reload() == []
        assert known.tenants.find(KEY)[0].name == "acme" and list(known.wrong) == [str(path)]  # type: ignore[index]


@pytest.mark.parametrize(
    "text",
    ["tenant: b\nkeys: [{expires: 2026-02-30}]\n", "? [a, b]\n: 1\n", "[" * 2000, "a: &a [*a]\n", "\x00", "tenant: [b"],
)
async def test_no_file_however_odd_keeps_others_from_being_read(tmp_path: Path, settings: Settings, text: str) -> None:
    known = registry(settings)
    write(tmp_path, "b", text)
    write(tmp_path, "acme", "tenant: acme\nkeys: []\n")
    await known.reload()
    assert known.tenants.find(KEY) is None, "a revoked key is refused"
    assert list(known.wrong) == [str(tmp_path / "tenants/b.yaml")]


async def test_a_process_that_takes_anothers_place_starts_with_what_is_right(
    tmp_path: Path, settings: Settings
) -> None:
    write(tmp_path, "b", "tenant: b\nmodles: []\n")
    with pytest.raises(ConfigError):
        registry(settings)
    known = Registry(settings, Metrics(), patient=True)
    assert list(known.tenants.by_name) == ["acme"] and len(known.wrong) == 1


def test_a_pasted_secret_is_not_echoed(tmp_path: Path, settings: Settings) -> None:
    secret = "hk-" + "s3cret" * 8
    with pytest.raises(ConfigError) as caught:
        load_file(write(tmp_path, "b", f"tenant: b\nkeys: [{{{secret}: 1}}]\n"), settings.surroundings())
    assert secret not in str(caught.value)


def test_a_key_is_revoked_although_another_file_is_broken(tmp_path: Path, settings: Settings) -> None:
    write(tmp_path, "b", "tenant: b\nmodles: []\n")
    gone = hitherto(tmp_path, "keys", "revoke", hash_key(KEY).removeprefix("sha256:")[:12])
    assert gone.returncode == 0 and "modles" in gone.stderr


def test_the_stricter_redaction_holds(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "hitherto.yaml").write_text(CONFIG + "redact: {text: false, mask: [keys]}\n")
    around = load(tmp_path / "hitherto.yaml").surroundings()
    policy = load_file(write(tmp_path, "b", "tenant: b\nredact: {mask: [emails]}\n"), around).tenant.policy
    assert policy.redaction.text is False and policy.redaction.mask == ("keys", "emails")
    assert not policy.rules.semantic


async def test_a_templates_file_is_watched_too(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "tenants/support.txt").write_text("Be kind.")
    write(tmp_path, "acme", "tenant: acme\ntemplates: {support: {system_file: support.txt}}\n")
    known = registry(settings)
    (tmp_path / "tenants/support.txt").write_text("Be brief and kind.")
    assert await known.reload() == ["acme: templates.support.system: Be kind. → Be brief and kind."]


async def test_changes_are_noticed_by_themselves(tmp_path: Path, settings: Settings) -> None:
    known = registry(settings)
    await known.open()
    try:
        await asyncio.sleep(0.3)
        scratch = tmp_path / "new"
        scratch.write_text("tenant: acme\nmodels: [slow]\n")
        os.replace(scratch, tmp_path / "tenants/acme.yaml")  # as editors and operators' tools do
        assert await asyncio.to_thread(eventually, lambda: known.tenants.by_name["acme"].policy.models == ("slow",), 5)
    finally:
        await known.close()


def hitherto(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway.cli", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_keys_are_made_listed_and_revoked_and_comments_stay(tmp_path: Path, settings: Settings) -> None:
    path = write(tmp_path, "acme", f"# our best customer\ntenant: acme\nkeys:\n  - '{hash_key(KEY)}'  # the first\n")
    made = hitherto(tmp_path, "keys", "new", "acme", "--name", "ci", "--expires", "90d")
    key = made.stdout.strip()
    assert made.returncode == 0 and key.startswith("hk-") and len(key) > 40 and "tenants/acme.yaml" in made.stderr
    text = path.read_text()
    assert key not in text and hash_key(key) in text and "# our best customer" in text and "# the first" in text
    listing = hitherto(tmp_path, "keys", "list").stdout
    identity = hash_key(key).removeprefix("sha256:")[:12]
    assert identity in listing and "ci" in listing and key not in listing
    assert registry(settings).tenants.find(key)[0].name == "acme"  # type: ignore[index]
    gone = hitherto(tmp_path, "keys", "revoke", identity[:8])
    assert gone.returncode == 0 and "acme: the key is revoked" in gone.stdout
    assert registry(settings).tenants.find(key) is None and registry(settings).tenants.find(KEY) is not None
    assert "# our best customer" in path.read_text()


def test_a_first_key_makes_the_tenants_file(tmp_path: Path, settings: Settings) -> None:
    key = hitherto(tmp_path, "keys", "new", "globex").stdout.strip()
    assert (tmp_path / "tenants/globex.yaml").read_text() == f"tenant: globex\nkeys:\n- {hash_key(key)}\n"
    assert registry(settings).tenants.find(key)[0].name == "globex"  # type: ignore[index]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("keys", "revoke", "ffffffffffff"), "0 keys begin with 'ffffffffffff'"),
        (("keys", "new", "../x"), "tenant"),
        (("keys", "new", "x", "--expires", "soon"), "a duration needs a number"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, settings: Settings, arguments: tuple[str, ...], words: str) -> None:
    result = hitherto(tmp_path, *arguments)
    assert result.returncode == 2 and words in result.stderr and "Traceback" not in result.stderr


def test_check_knows_both_kinds_of_file_and_folders(tmp_path: Path, settings: Settings) -> None:
    good = hitherto(tmp_path, "check", "hitherto.yaml", "tenants", "tenants/acme.yaml")
    assert good.returncode == 0, good.stderr
    assert good.stdout.splitlines() == [
        "hitherto.yaml: fine, with 1 tenants",
        "tenants: fine (1 tenants)",
        "tenants/acme.yaml: fine (tenant acme, 1 keys)",
    ]
    write(tmp_path, "bad", "tenant: bad\nmodles: [fast]\n")
    bad = hitherto(tmp_path, "check", "hitherto.yaml", "tenants/bad.yaml")
    assert bad.returncode == 2
    assert bad.stderr.count("bad.yaml:2: modles: this key is not known here (did you mean 'models'?)") == 2


def test_a_key_is_written_only_into_a_file_that_is_right_then(tmp_path: Path, settings: Settings) -> None:
    path = write(tmp_path, "acme", "tenant: acme\nmodels: [nonsense]\n")
    before = path.read_text()
    with pytest.raises(ConfigError, match="nonsense"):
        keys.new(settings, "acme", "", None)
    assert path.read_text() == before
    assert sorted(file.name for file in path.parent.iterdir()) == [".lock", "acme.yaml"]


def test_settings_go_to_worker_processes_whole(tmp_path: Path) -> None:
    text: Any = """
prices: {m: {input: 1 USD/M, output: 2.5 USD/M}}
backends: {a: {kind: openai, url: "http://x/v1"}, v: {kind: vllm, replicas: ["http://y/v1"]}, c: {kind: anthropic}}
models:
  m:
    {try: [{backend: a, weight: 2, lacks: [tools]}, v], hedge: 2s, retry: {attempts: 3}, timeout: {total: 9s}}
  alias: m
budget: {per_day: 5 USD, when_spent: {downgrade: m}}
limits: {per_model: {m: {tokens_per_day: 5}}}
breakers: {a: false, "*": {pause: 1s}}
prompt_cache: on
tls: {cert: /c, key: /k}
"""
    (tmp_path / "h.yaml").write_text(text)
    settings = load(tmp_path / "h.yaml")
    again = Settings.model_validate_json(settings.model_dump_json(by_alias=True))
    assert again == settings and again.routes() == settings.routes()
    assert settings.prompt_cache.mode == "on" and settings.breaker_of()["a"] is None
    assert settings.routes()["alias"].targets[0].model == "m"
