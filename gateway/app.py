"""The only wiring: settings → parts → application. The lifespan opens them in order and closes them in reverse."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sqlite3
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from backends import asgi
from backends.build import build
from backends.protocol import Backend, reveal
from gateway import errors
from gateway.admission import Admission
from gateway.api import admin, chat, dashboard, embeddings, feedback, health, models, passthrough
from gateway.api.auth import AdminKey, Auth, KeyAuth, OpenAuth, TransparentAuth
from gateway.api.endpoint import BODY_MOST, Door, Endpoint
from gateway.api.guards import operators, viewing
from gateway.books import Books
from gateway.cache.answers import Answers
from gateway.cache.config import LOOKUP_DEADLINE
from gateway.cache.control import Control
from gateway.config import Settings, is_loopback
from gateway.dispatch import Dispatch
from gateway.ledger import Ledger, LedgerConfig
from gateway.metrics import Metrics
from gateway.overview import Views
from gateway.pipeline import Pipeline
from gateway.places import Places
from gateway.prices import Prices
from gateway.reload import Registry
from gateway.settings_file import ConfigError
from gateway.stores.contract import AnswerStore, CounterStore, LedgerStore
from gateway.stores.sqlite import SQLiteAnswers
from gateway.stores.sqlite_counters import LocalCounters
from gateway.stores.sqlite_ledger import SQLiteLedger
from gateway.telemetry import Telemetry
from gateway.tenant import Tenant
from gateway.warming import Warmer
from policies import routing
from policies.redaction import masked

if TYPE_CHECKING:
    from gateway.cache.semantic import Semantic

log = logging.getLogger("hitherto")


class Application:
    """The gateway: the hot routes by themselves, everything else through FastAPI.

    FastAPI's ten layers of middleware cost as much as an exact hit (docs/performance.md).
    """

    def __init__(self, hot: Mapping[tuple[str, str], Endpoint], rest: FastAPI, limit: int) -> None:
        """`limit`: bytes of a request body."""
        self._hot, self._rest, self._limit = hot, rest, limit

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] != "http":
            await self._rest(scope, receive, send)
        elif (endpoint := self._hot.get((scope["method"], scope["path"]))) is not None:
            await endpoint(scope, receive, send)
        else:
            await self._rest(scope, asgi.bounded(receive, self._limit), send)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a gateway is made of."""

    settings: Settings
    metrics: Metrics
    notes: dict[str, str]
    backends: dict[str, Backend]
    places: Places
    dispatch: Dispatch
    registry: Registry | None
    auth: Auth
    counters: CounterStore
    ledger: Ledger
    admission: Admission
    answers: Answers
    pipeline: Pipeline
    control: Control
    warmer: Warmer
    telemetry: Telemetry | None

    def told(self) -> dict[str, str]:
        """What an operator should know although requests are served."""
        return _notes(self.notes, self.registry, self.counters, self.places)

    def tenants(self) -> Iterable[Tenant]:
        return _tenants(self.auth, self.registry)


def create_app(settings: Settings, processes: int = 1) -> Application:
    """The gateway as an ASGI application; `processes`: how many there are on the same data folder."""
    settings.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    parts = _parts(settings, processes)
    app = FastAPI(title="Hitherto", lifespan=_lifespan(parts), docs_url=None, redoc_url=None, openapi_url=None)
    _add_routes(app, parts)
    limit = int(settings.body_limit)
    mask = partial(_masked, parts.dispatch, settings)
    door = Door(parts.auth, parts.admission, parts.metrics, limit, mask, parts.telemetry, settings.log.bodies)
    relay = passthrough.Passthrough(parts.dispatch, door)
    app.router.routes.append(Route("/v1/{path:path}", relay))
    app.add_exception_handler(Exception, _refuse)
    app.add_exception_handler(HTTPException, _not_found)
    for kind in errors.known():
        app.add_exception_handler(kind, _refuse)
    hot: dict[tuple[str, str], Endpoint] = {
        ("POST", "/v1/chat/completions"): chat.ChatEndpoint(parts.pipeline, door),
        ("POST", "/v1/feedback"): feedback.FeedbackEndpoint(parts.control, door),
        ("POST", "/v1/embeddings"): embeddings.EmbeddingsEndpoint(parts.answers, parts.dispatch, relay),
    }
    return Application(hot, app, limit)


def _parts(settings: Settings, processes: int) -> _Parts:
    metrics, notes = Metrics(), dict[str, str]()
    backends = _backends(settings)
    places = Places(settings.breaker_of(), metrics)
    dispatch = Dispatch(backends, settings.routes(), _salt_key(settings.data), metrics, places)
    registry = Registry(settings, metrics, patient=processes > 1) if settings.tenants else None
    auth = _auth(settings, registry)
    counters = _counters(settings, processes)
    ledger = Ledger(_ledger_store(settings, notes), metrics)
    admission = Admission(counters, Books(Prices(settings.prices), ledger, metrics), dispatch)
    store = _answer_store(settings, notes)
    semantic = settings.cache.semantic
    deadline = semantic.deadline if semantic else LOOKUP_DEADLINE
    shared = processes > 1 or bool(settings.redis)
    answers = Answers(store, int(settings.cache.size), deadline, metrics, shared=shared)
    pipeline = Pipeline(answers, dispatch, admission)
    warmer = Warmer(partial(_tenants, auth, registry), dispatch)
    if registry is not None:
        registry.noted = partial(ledger.note, "tenants' files", "reload")
    return _Parts(settings, metrics, notes, backends, places, dispatch, registry, auth, counters, ledger, admission,
                  answers, pipeline, Control(answers, pipeline), warmer, _telemetry(settings, notes))  # fmt: skip


def _lifespan(parts: _Parts) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        answers, semantic = parts.answers, parts.settings.cache.semantic
        async with AsyncExitStack() as stack:
            for backend in parts.backends.values():
                stack.push_async_callback(backend.stop)
                await backend.start()
            if parts.telemetry is not None:
                stack.push_async_callback(asyncio.to_thread, parts.telemetry.close)
            for part in (parts.counters, parts.ledger):
                stack.push_async_callback(part.close)
                await part.open()
            if parts.registry is not None:
                stack.push_async_callback(parts.registry.close)
                await parts.registry.open()
            stack.push_async_callback(answers.close)
            if semantic:
                tier = await _semantic_tier(parts.settings, semantic.threshold, parts.notes)
                if tier is not None:
                    answers.use(tier)
            await answers.open()
            stack.push_async_callback(parts.pipeline.close)
            stack.push_async_callback(parts.warmer.close)
            await parts.warmer.open()
            yield

    return lifespan


def _add_routes(app: FastAPI, parts: _Parts) -> None:
    """Everything but the hot routes."""
    settings, answers, ledger = parts.settings, parts.answers, parts.ledger
    app.include_router(health.router(parts.backends, parts.told, parts.metrics))
    key, loopback = AdminKey(reveal(settings.admin.key) if settings.admin.key else ""), is_loopback(settings.host)
    views = Views(answers, parts.admission, parts.tenants, parts.places, parts.backends, parts.registry, parts.told)
    keep = settings.ledger or LedgerConfig()
    app.include_router(dashboard.page())
    figures = dashboard.Figures(ledger, keep, views)
    app.include_router(figures.router("/dashboard/api", viewing(key, parts.auth, loopback)))
    if key.is_set or loopback:
        api = admin.router(key, ledger.note)
        admin.prefix_routes(api, parts.backends, parts.warmer)
        admin.tenant_routes(api, parts.registry, parts.places, parts.admission, ledger)
        admin.cache_routes(api, parts.control, parts.auth, parts.tenants, settings.policy().rules)
        app.include_router(api)
        app.include_router(figures.router("/admin/usage", operators(key)))
    if not settings.transparent:
        app.include_router(models.router(parts.dispatch, parts.auth))


def _backends(settings: Settings) -> dict[str, Backend]:
    found = {}
    for name, config in settings.backends.items():
        try:
            found[name] = build(name, config, settings.data, routing.ranked)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"backends.{name}.tls: {error}") from error
    return found


def _auth(settings: Settings, registry: Registry | None) -> Auth:
    if registry is not None:
        return KeyAuth(registry)
    return TransparentAuth(settings.policy()) if settings.transparent else OpenAuth(settings.policy())


def _tenants(auth: Auth, registry: Registry | None) -> Iterable[Tenant]:
    """Those with files, or the open one."""
    if registry is not None:
        return registry.tenants.by_name.values()
    return [auth.open] if isinstance(auth, OpenAuth) else []


def _counters(settings: Settings, processes: int) -> CounterStore:
    local = LocalCounters(settings.data / "money.sqlite", processes)
    if not settings.redis:
        return local
    from gateway.stores.redis_counters import RedisCounters  # needs the package redis

    return RedisCounters(settings.redis, local)


def _masked(dispatch: Dispatch, settings: Settings, tenant: Tenant, text: str) -> str:
    """A text as it may be logged: without what the gateway's or the tenant's rules keep out of it."""
    sorts = {*settings.redact.mask, *tenant.policy.redaction.mask}
    return masked(text[: 4 * BODY_MOST], sorts, dispatch.salt(tenant.name).encode()) if sorts else text


def _notes(
    notes: Mapping[str, str], registry: Registry | None, counters: CounterStore, places: Places
) -> dict[str, str]:
    """What an operator should know although requests are served."""
    found = dict(notes)
    if registry is not None and registry.wrong:
        files = ", ".join(sorted(Path(path).name for path in registry.wrong))
        found["tenants"] = f"not in force, because broken: {files}; GET /admin/tenants says why"
    if counters.estimated:
        found["limits"] = "Redis does not answer: each gateway counts limits and budgets by itself"
    for state in places.states():
        if state["state"] not in ("closed", "none"):
            found[f"breaker {state['place']}"] = f"{state['state']}: {state['last_failure']}"
    return found


async def _semantic_tier(settings: Settings, threshold: float | None, notes: dict[str, str]) -> Semantic | None:
    """The semantic tier, or None and a note: the gateway serves exact answers without it."""

    def load() -> Semantic:
        from gateway.cache.semantic import load as load_semantic  # needs numpy and faiss

        return load_semantic(settings.embedder, threshold)

    try:
        return await asyncio.to_thread(load)
    except ImportError as error:
        notes["semantic"] = f"off: {error}; install hitherto[semantic]"
    except Exception as error:
        notes["semantic"] = f"off: {error}"
    log.warning("the semantic tier is %s", notes["semantic"])
    return None


def _answer_store(settings: Settings, notes: dict[str, str]) -> AnswerStore:
    """The store; one that cannot be used is set aside, since answers can be computed again and clients cannot wait."""
    if settings.redis:
        from gateway.stores.redis import RedisAnswers  # needs the package redis

        return RedisAnswers(settings.redis)
    path = settings.data / "answers.sqlite"
    try:
        return SQLiteAnswers(path)
    except sqlite3.OperationalError as error:  # locked, full, not writable: the file itself may be fine
        notes["store"] = f"answers are kept until the next restart only: {path}: {error}"
    except sqlite3.DatabaseError as error:
        aside = path.with_name(f"{path.name}.broken-{int(time.time())}")
        path.rename(aside)
        notes["store"] = f"{path.name} could not be read ({error}) and was set aside as {aside.name}"
    log.error(notes["store"])
    try:
        return SQLiteAnswers(path)
    except sqlite3.DatabaseError:
        return SQLiteAnswers(Path(tempfile.mkdtemp(prefix="hitherto-")) / path.name)


def _telemetry(settings: Settings, notes: dict[str, str]) -> Telemetry | None:
    if settings.otel is None:
        return None
    try:
        return Telemetry(settings.otel)
    except ImportError as error:
        notes["otel"] = f"off: {error}; install hitherto[otel]"
        log.error(notes["otel"])
        return None


def _ledger_store(settings: Settings, notes: dict[str, str]) -> LedgerStore | None:
    """The ledger's file. One that cannot be used is left alone, not set aside: it may be the only account of what was
    spent; requests are served without it, and operators are told."""
    if not settings.ledger:
        return None
    path = settings.data / "ledger.sqlite"
    try:
        return SQLiteLedger(path, settings.ledger.keep())
    except sqlite3.Error as error:
        notes["ledger"] = f"nothing is booked: {path}: {error}"
        log.error(notes["ledger"])
        return None


def _salt_key(data: Path) -> bytes:
    """The secret behind the tenants' KV salts: made once, kept in the data folder, readable by its owner only."""
    path = data / "salt.key"
    if not path.exists():
        descriptor, scratch = tempfile.mkstemp(dir=data)  # mode 0600
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(32))
        try:
            os.link(scratch, path)  # whole or not at all, and only one of several processes wins
        except FileExistsError:
            pass
        os.unlink(scratch)
    return path.read_bytes()


async def _refuse(request: Request, error: Exception) -> Response:
    refusal = errors.refusal(error)
    if refusal.status == 500:
        log.error("an unforeseen error", exc_info=error)
    headers = {name.decode(): value.decode() for name, value in refusal.headers()}
    return Response(refusal.body(), refusal.status, headers, "application/json")


async def _not_found(request: Request, error: Exception) -> Response:
    """Paths and methods that do not exist, in the API's error shape too."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    refusal = errors.Refusal(error.status_code, "invalid_request_error", message)
    return Response(refusal.body(), refusal.status, dict(error.headers or {}), "application/json")
