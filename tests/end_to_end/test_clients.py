"""Clients that are slow, send too much, or do not read: they cost little, and nobody else notices."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import orjson
import pytest

from backends.fake import FakeServer, Script
from tests.conftest import Gateway, eventually

CONFIG = """
backends: {{up: {{kind: openai, url: "{url}"}}}}
models: {{m: {{try: [up]}}}}
cache: {{semantic: false}}
body_limit: 100KiB
clients: {{header_bytes: 8KiB, header_time: 3s, body_time: 3s, write_time: 1s, connections: 60}}
redact: {{mask: [emails]}}
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, upstream: FakeServer) -> Iterator[Gateway]:
    running = Gateway(tmp_path_factory.mktemp("clients"), CONFIG.format(url=upstream.url))
    yield running
    assert running.stop() == 0


@pytest.fixture(autouse=True)
def _fresh(fresh: None) -> None:
    """Each test has an upstream that has seen nothing."""


def connected(gateway: Gateway) -> socket.socket:
    host, port = gateway.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def said(connection: socket.socket) -> bytes:
    """Everything until the other side closes."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def test_headers_that_trickle_in_are_given_up(gateway: Gateway) -> None:
    with connected(gateway) as slow:
        began = time.monotonic()
        slow.send(b"GET /health HTTP/1.1\r\nx: ")
        slow.settimeout(0.05)
        reply = None
        while reply is None and time.monotonic() - began < 20:
            try:
                reply = slow.recv(65536)
            except TimeoutError:
                slow.send(b"x")
        assert reply is not None and b"408 Request Timeout" in reply
    with connected(gateway) as silent:
        assert b"408" in said(silent), "one that says nothing is closed, too"


def test_a_second_request_on_a_connection_has_its_own_time(gateway: Gateway) -> None:
    with connected(gateway) as connection:
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            reply = b""
            while b'"ok"' not in reply:
                reply += connection.recv(65536)
            assert b"200 OK" in reply
            time.sleep(4.0)
        connection.sendall(b"GET /health HTTP/1.1\r\nhost")
        assert b"408" in said(connection)


def test_trailers_are_no_headers(gateway: Gateway, upstream: FakeServer) -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "with trailers"}]}'
    chunk = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    with connected(gateway) as connection:
        request = HEAD + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n" + chunk
        connection.sendall(request + b"x-end-user: bob\r\nauthorization: Bearer stolen\r\n\r\n")
        assert b"200 OK" in said(connection)
    assert "x-end-user" not in upstream.app.seen[0].headers
    with connected(gateway) as endless:
        try:
            endless.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk)
            for _ in range(1000):
                endless.sendall((b"t: " + b"a" * 1000 + b"\r\n") * 20)
        except OSError:
            return
    raise AssertionError("nobody stopped it")


def test_a_second_request_that_comes_too_early_does_not_break_into_an_answer(
    gateway: Gateway, upstream: FakeServer
) -> None:
    upstream.app.script = Script(text="one two three four", chunk_delay=0.7)
    body = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "slowly"}]}'
    with connected(gateway) as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body + b"GET /health HTT")
        reply = b""
        while b"[DONE]" not in reply:
            part = connection.recv(65536)
            assert part, reply
            reply += part
        assert b"408" not in reply
        connection.sendall(b"P/1.1\r\nhost: x\r\n\r\n")
        while b'"ok"' not in reply:
            reply += connection.recv(65536)


def test_a_request_that_begins_behind_another_and_stops_is_given_up(gateway: Gateway) -> None:
    with connected(gateway) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + HEAD + b"content-length: 10\r\n\r\n")
        began = time.monotonic()
        assert b'"ok"' in said(connection)
        assert time.monotonic() - began < 20


@pytest.mark.parametrize("size", [9_000, 300_000])
def test_headers_that_are_too_long_are_refused(gateway: Gateway, size: int) -> None:
    with connected(gateway) as greedy:
        try:
            greedy.sendall(b"GET /health HTTP/1.1\r\nx: " + b"a" * size + b"\r\n\r\n")
            reply = said(greedy)
        except OSError:  # it was cut off while it was still sending
            reply = b"431"
        assert b"431" in reply
    with connected(gateway) as endless:
        try:
            endless.sendall(b"GET / HTTP/1.1\r\n")
            for _ in range(1000):
                endless.sendall(b"x: " + b"a" * 100_000 + b"\r\n")
        except OSError:
            return
    raise AssertionError("nobody stopped it")


def test_a_body_that_stops_coming_is_given_up(gateway: Gateway, upstream: FakeServer) -> None:
    with connected(gateway) as slow:
        slow.sendall(HEAD + b'content-length: 1000\r\n\r\n{"model": "m"')
        slow.settimeout(20)
        reply = slow.recv(65536)
        assert b"408" in reply.split(b"\r\n")[0] and b"the request body did not come in time" in reply
    assert upstream.app.seen == []


def test_a_body_that_is_too_large_is_refused(gateway: Gateway) -> None:
    reply = gateway.chat("x" * 200_000)
    assert reply.status_code == 413 and reply.json()["error"]["code"] == "request_too_large"


def test_a_client_that_does_not_read_is_dropped_and_the_upstream_let_go(gateway: Gateway, upstream: FakeServer) -> None:
    upstream.app.script = Script(text="word " * 20 + "x" * 200_000, endless=True, chunk_delay=0.0)
    with connected(gateway) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "tell me all"}]}'
        deaf.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert eventually(lambda: upstream.app.seen and upstream.app.seen[0].gone, 15)


@pytest.mark.parametrize(
    ("path", "stream", "last"),
    [
        ("/v1/chat/completions", False, b'"total_tokens"'),
        ("/v1/chat/completions", True, b"data: [DONE]\n\n"),
        ("/v1/messages", True, b'"message_stop"}\n\n'),
    ],
)
def test_who_hangs_up_on_the_last_byte_has_not_left(gateway: Gateway, path: str, stream: bool, last: bytes) -> None:
    told = len(gateway.log)
    for number in range(60):
        messages = [{"role": "user", "content": f"quick {path} {stream} {number}"}]
        body = orjson.dumps({"model": "m", "max_tokens": 9, "stream": stream, "messages": messages})
        with connected(gateway) as hasty:
            head = HEAD.replace(b"/v1/chat/completions", path.encode())
            hasty.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            reply = b""
            while last not in reply or not (stream or _whole(reply)):
                part = hasty.recv(65536)
                assert part, reply
                reply += part
    assert eventually(lambda: gateway.log[told:].count('"status":200') == 60)
    assert "client_gone" not in gateway.log[told:]


def _whole(reply: bytes) -> bool:
    head, _, body = reply.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    return length is not None and len(body) == int(length[1])


def test_there_is_a_most_of_connections(gateway: Gateway) -> None:
    crowd = []
    try:
        for _ in range(70):
            crowd.append(connected(gateway))
        assert any(b"503" in said(one) for one in crowd[60:]), "too many"
    finally:
        for one in crowd:
            one.close()
    assert eventually(lambda: gateway.client.get("/health").status_code == 200)


def test_the_log_masks_what_it_is_told_to(gateway: Gateway) -> None:
    reply = gateway.chat("hi", model="jane@example.org")
    assert reply.status_code == 404 and "jane@example.org" in reply.text
    assert eventually(lambda: "<email:" in gateway.log) and "jane@" not in gateway.log


def certificate(folder: Path) -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-days", "2",
               "-out", str(cert), "-subj", "/CN=x", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_https_on_both_sides(tmp_path: Path, upstream: FakeServer) -> None:
    """A gateway with a certificate, behind another one that trusts just that."""
    cert, key = certificate(tmp_path)
    config = f'backends: {{up: {{kind: openai, url: "{upstream.url}"}}}}\nmodels: {{m: {{try: [up]}}}}\n'
    config += f"cache: {{semantic: false}}\ntls: {{cert: {cert}, key: {key}}}\n"
    inner = Gateway(tmp_path / "inner", config)
    try:
        assert inner.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(cert))
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        assert httpx.post(f"{inner.url}/v1/chat/completions", json=body, verify=trusting).status_code == 200
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.post(f"{inner.url}/v1/chat/completions", json=body)
        for tls, status in ((f"{{ca: {cert}}}", 200), ("{}", 502)):
            outer = Gateway(tmp_path / f"outer{status}", f"""
backends: {{up: {{kind: openai, url: "{inner.url}/v1", tls: {tls}}}}}
models: {{m: {{try: [up], retry: {{attempts: 1}}}}}}
cache: {{semantic: false}}
""")  # fmt: skip
            assert outer.chat("through two").status_code == status
            outer.stop()
    finally:
        inner.stop()
