"""The engine process: `python -m backends.engine CONFIG.json`-style arguments come from its supervisor.

Usage: python -m backends.engine --name NAME --data DIR --listen unix:PATH|HOST:PORT --config JSON [--with-parent]
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from backends.engine.config import EngineConfig


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m backends.engine")
    parser.add_argument("--name", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--listen", required=True, help="unix:PATH or HOST:PORT")
    parser.add_argument("--config", required=True, help="the backend's settings as JSON")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input closes")
    arguments = parser.parse_args()
    if arguments.with_parent:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        config = EngineConfig.model_validate_json(arguments.config)
    except ValidationError as error:
        _fail(f"engine {arguments.name}: {error}")
    serve(arguments.name, config, arguments.data, arguments.listen, arguments.with_parent)


def serve(name: str, config: EngineConfig, data: Path, listen: str, supervised: bool = False) -> None:
    """Load the model and serve it until a signal comes. Exits with a line for the operator when it cannot.

    `supervised`: somebody starts it again when it ends.
    """
    # Read by OpenMP when torch is loaded. Its threads wait for work by spinning: without a limit they bring a machine
    # with other things to do to a standstill, without any spinning each of a step's 300 products is woken for.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2500")
    thread = ThreadPoolExecutor(1, "engine")
    logging.basicConfig(level=logging.INFO, format=f"engine {name}: %(message)s")
    try:
        import uvicorn

        from backends.engine.epoch import Epoch
        from backends.engine.load import load
        from backends.engine.lower import build_tiers
        from backends.engine.server import EngineServer

        tiers = build_tiers(config.kv, data)
        epoch = Epoch.of(data, name)
        say = logging.getLogger("hitherto.engine").info
        loaded = thread.submit(load, config, data, say, epoch.read()).result()
    except (ValueError, OSError, ImportError) as error:
        _fail(f"engine {name}: {error}")

    reloading = threading.Event()

    def reload() -> None:
        reloading.set()
        http.should_exit = True  # requests under way are finished; the supervisor starts the next one

    server = EngineServer(loaded, config, name, thread, tiers, reload if supervised else None)
    where = _address(listen)
    options: dict[str, Any] = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": 30}
    # Not uvicorn.run, which at its end removes the socket's path, whoever may have made it by then. Idle connections
    # are kept for longer than the gateway's client pools them, or a request could meet a closing one.
    http = uvicorn.Server(uvicorn.Config(server, timeout_keep_alive=75, **options, **where))
    http.run()
    if reloading.is_set():  # not before: what the old model still answers belongs to the old number
        epoch.raise_by_one()


def _fail(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


def _address(listen: str) -> dict[str, Any]:
    if listen.startswith("unix:"):
        return {"uds": listen.removeprefix("unix:")}
    host, _, port = listen.rpartition(":")
    return {"host": host or "127.0.0.1", "port": int(port)}


def _end_with_parent() -> None:
    """A pipe from the parent is closed by the system whatever way the parent ends; then nobody needs this process."""
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
