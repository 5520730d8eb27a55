"""What is masked, and what is not."""

from __future__ import annotations

import pytest

from policies.redaction import SORTS, masked

KEY = b"tenant"


@pytest.mark.parametrize(
    ("text", "mark"),
    [
        ("write to jane.doe+x@mail.example.co.uk please", "email"),
        ("pay with 4111 1111 1111 1111 today", "card"),
        ("pay with 4111-1111-1111-1111.", "card"),
        ("card 378282246310005", "card"),
        ("call +49 (30) 901820 now", "phone"),
        ("call (415) 555-2671", "phone"),
        ("call 030 1234567", "phone"),
        ("my key is sk-proj-abcdefghijklmnopqrstuvwx", "key"),
        ("AKIAIOSFODNN7EXAMPLE leaked", "key"),
        ("token ghp_abcdefghijklmnopqrstuvwxyz0123456789", "key"),
        ("Authorization: Bearer abcdef0123456789abcdef", "key"),
        ('api_key = "correct horse battery"', "key"),
        ("password: hunter2hunter2", "key"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "key"),
        ('{"password": "hunter2hunter"}', "key"),
        ("DB_PASSWORD=abcd1234", "key"),
        ("client_secret: xyzw1234", "key"),
        ("Authorization: Basic dXNlcjpwYXNzd29yZA==", "key"),
        ("postgres://user:pw@host/db", "key"),
        ("4111 1111 1111 1111 12/27", "card"),
        ("order 12 4111 1111 1111 1111", "card"),
        ("4111.1111.1111.1111", "card"),
        ("01 23 45 67 89", "phone"),
        ("0171 / 1234567", "phone"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc", "key"),
    ],
)
def test_what_is_masked(text: str, mark: str) -> None:
    out = masked(text, SORTS, KEY)
    assert f"<{mark}:" in out
    assert out.count("<") == 1, out


@pytest.mark.parametrize(
    "text",
    [
        "What is 1234567890123456 + 1?",  # 16 digits, but no card
        "In 2024 there were 12,500 cases; 3.14159265358979 is pi",
        "ISO 8601: 2024-10-12T10:20:30Z",
        "version 1.22.333.4444 of 10.0.0.1",
        "a@b, not an address; @handle neither",
        "keyboard and token economics: a password manager",
        "order 415-55",
    ],
)
def test_what_is_left_alone(text: str) -> None:
    assert masked(text, SORTS, KEY) == text


def test_the_same_value_has_the_same_mask_and_another_one_another() -> None:
    def mask(text: str, key: bytes = KEY) -> str:
        return masked(text, SORTS, key)

    assert mask("a@x.org") == mask("A@X.org") != mask("b@x.org")
    assert mask("a@x.org") != mask("a@x.org", b"other tenant")
    assert mask("+49 30 901820") == mask("+49-30-901820")


def test_only_what_is_asked_for_is_masked() -> None:
    assert masked("a@x.org +49 30 901820", ["phones"], KEY).startswith("a@x.org <phone:")
    assert masked("a@x.org", [], KEY) == "a@x.org"


@pytest.mark.parametrize(
    "text",
    ["a" * 200_000, "+1" + "1" * 5000 + "x", "eyJaaaaaaaa-" * 20_000, "0" * 100_000, "password:" * 20_000,
     "a.b-" * 50_000 + "@", "(0" * 50_000, "-----BEGIN PRIVATE KEY-----" * 2000, "x@" + "a." * 50_000,
     "://" * 50_000 + "a:" * 500, "bearer " * 20_000],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_no_text_takes_for_ever(text: str) -> None:
    """Patterns that go back and forth over these took minutes to years."""
    masked(text, SORTS, KEY)
