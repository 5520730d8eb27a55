"""`/dashboard`: the page, and what it shows. Operators see all; a tenant's key sees its own tenant and nothing else."""

from __future__ import annotations

import asyncio
import csv
import gzip
import hashlib
import io
import mimetypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from gateway.api.guards import Viewer
from gateway.dashboard.why import why
from gateway.ledger import DAY, Ledger, LedgerConfig, span_of
from gateway.overview import Views
from gateway.stores import contract
from gateway.stores.sqlite_ledger import GROUPS_MOST, KEYS, SPANS

GROUPS = (*KEYS, "time")
MOST_ROWS = 10_000
_PAGE = {"index.html", "app.js", "charts.js", "style.css", "icon.svg"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Only what this gateway serves; Plotly writes style elements."""
_FRESH = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """A range of time and whose it is, as a request names them."""

    start: float
    end: float
    step: int | None
    tenant: str


def _asked(
    request: Request,
    since: Annotated[float | None, Query(alias="from", ge=0, le=1e11)] = None,
    to: Annotated[float | None, Query(ge=0, le=1e11)] = None,
    last: Annotated[float, Query(gt=0, le=3660 * DAY)] = DAY,
    tenant: str = "",
    step: int | None = None,
) -> Asked:
    """`from` and `to`, or the `last` seconds; `step`: a minute, hour, day or week, else as fine as makes sense."""
    end = time.time() if to is None else to
    start = end - last if since is None else since
    if start >= end:
        raise HTTPException(422, "from must be before to")
    if step is not None and step not in SPANS:
        raise HTTPException(422, f"step is one of {', '.join(map(str, SPANS))}")
    return Asked(start, end, step, _viewer(request).of(tenant))


Range = Annotated[Asked, Depends(_asked)]
Format = Literal["json", "csv"]


class Which(BaseModel):
    """Which rows; `before` and `after` are row numbers."""

    model_config = ConfigDict(extra="forbid")

    tenant: str = ""
    before: int = Field(default=0, ge=0, le=2**62)
    after: int = Field(default=0, ge=0, le=2**62)
    limit: int = Field(default=50, ge=1, le=MOST_ROWS)
    cache: str = ""
    model: str = ""
    request: str = ""
    key: str = ""
    user: str = ""
    part: str = ""
    format: Format = "json"


def page() -> APIRouter:
    """The page itself, which holds no figures and is for everybody."""
    api = APIRouter()

    @api.get("/dashboard")
    async def index(request: Request) -> Response:
        return await _file("index.html", request)

    @api.get("/dashboard/static/{name}")
    async def static(name: str, request: Request) -> Response:
        if name != "plotly.min.js" and name not in _PAGE:
            raise HTTPException(404, "there is no such file")
        return await _file(name, request)

    return api


class Figures:
    """The ledger's figures as JSON and CSV. Times are seconds since the epoch, money is dollars."""

    def __init__(self, ledger: Ledger, keep: LedgerConfig, views: Views) -> None:
        self._ledger, self._keep, self._views = ledger, keep, views

    def router(self, prefix: str, viewer: Callable[[Request], Viewer]) -> APIRouter:
        """Everything under a prefix, for whom `viewer` lets in."""
        api = APIRouter(prefix=prefix, dependencies=[Depends(_seen_by(viewer))])
        for path, answer in (
            ("/me", self.me), ("/totals", self.totals), ("/quantiles", self.quantiles), ("/entries", self.entries),
            ("/requests", self.requests), ("/requests/{number}", self.request), ("/budgets", self.budgets),
            ("/state", self.state),
        ):  # fmt: skip
            api.add_api_route(path, answer, methods=["GET"], response_model=None)
        return api

    async def me(self, request: Request) -> dict[str, Any]:
        """Who looks, and what is kept for how long."""
        who, there = _viewer(request), self._ledger.store is not None
        return {"admin": who.admin, "tenant": who.tenant, "ledger": there, "keep": self._keep.keep()}

    async def totals(
        self,
        part: Range,
        by: Annotated[str, Query(pattern=f"^({'|'.join(GROUPS)})?(,({'|'.join(GROUPS)}))*$")] = "",
        format: Format = "json",
    ) -> Any:
        """Sums of requests, tokens and money; `by`: names to group by, with commas between."""
        names = list(dict.fromkeys(name for name in by.split(",") if name))
        query = self._query(part, names)
        found = await self._read("totals", query)
        if len(found) > GROUPS_MOST:
            raise HTTPException(422, f"these are more than {GROUPS_MOST:,} groups; choose a tenant or a shorter range")
        rows = [_dollars(row) for row in found if row["requests"] is not None]
        if format == "csv":
            return await _csv(rows, f"hitherto-{'-'.join(names) or 'totals'}.csv")
        return await _json({**_about(query), "rows": rows})

    async def quantiles(self, part: Range, by: Annotated[str, Query(pattern="^(time|tenant)?$")] = "") -> Response:
        """Seconds to the first byte (p50, p95) of stored answers, of answers with a cached prefix, and of others."""
        query = self._query(part, [by] if by else [])
        return await _json({**_about(query), "rows": await self._read("quantiles", query)})

    async def entries(self, part: Range, limit: Annotated[int, Query(ge=1, le=100)] = 10) -> Response:
        """The stored answers that saved most."""
        query = replace(self._query(part), span=86400)  # what an answer saved is kept by day
        rows = await self._read("entries", query, limit)
        for row in rows:
            row["saved"] /= 1e9
            row["question"] = await self._views.question(row["entry"], row["tenant"])
        return await _json({**_about(query), "rows": rows})

    async def requests(
        self, which: Annotated[Which, Query()], request: Request,
    ) -> Any:  # fmt: skip
        """Single rows, newest first; `before` and `after` are row numbers."""
        told = {"cache": which.cache, "asked": which.model, "request": which.request, "key": which.key,
                "user": which.user, "part": which.part}  # fmt: skip
        conditions = {name: value for name, value in told.items() if value}
        tenant = _viewer(request).of(which.tenant)
        found = await self._read("rows", tenant, which.before, which.after, which.limit, conditions)
        rows = [_row(row) for row in found]
        return await _csv(rows, "hitherto-requests.csv") if which.format == "csv" else await _json({"rows": rows})

    async def request(self, number: Annotated[int, Path(ge=0, le=2**62)], request: Request) -> dict[str, Any]:
        """A row, why it hit or missed, and what else belongs to its request."""
        found = await self._read("row", number, _viewer(request).of(""))
        if not found:
            raise HTTPException(404, f"there is no row {number}, or no more")
        row, *parts = found
        question = await self._views.question(row["entry"], row["tenant"]) if row["entry"] else None
        told = [{**_row(part), "why": why(part)} for part in parts]
        return {**_row(row), "why": why(row), "entry_question": question, "parts": told}

    async def budgets(self, request: Request, tenant: str = "") -> list[dict[str, Any]]:
        """Budgets, those that are nearest to their end first."""
        found = await self._views.budgets(_viewer(request).of(tenant))
        return sorted(found, key=lambda one: -(one["spent"] + one["held"]) / max(one["limit"], 1e-9))

    async def state(self, request: Request) -> dict[str, Any]:
        """How the gateway stands; for operators only."""
        if not _viewer(request).admin:
            raise HTTPException(403, "how the gateway stands is for operators")
        return await self._views.state()

    def _query(self, part: Asked, by: Sequence[str] = ()) -> contract.Query:
        span = part.step or span_of(part.start, part.end, time.time(), self._keep)
        return contract.Query(part.start, part.end, span, part.tenant, tuple(by))

    async def _read(self, call: str, *arguments: Any) -> Any:
        if self._ledger.store is None:
            raise HTTPException(404, "no ledger is kept here (ledger: false, or its file cannot be used; see /ready)")
        return await self._ledger.ask(getattr(self._ledger.store, call), *arguments)


def _seen_by(viewer: Callable[[Request], Viewer]) -> Callable[[Request], None]:
    def look(request: Request) -> None:
        request.state.viewer = viewer(request)

    return look


def _viewer(request: Request) -> Viewer:
    found: Viewer = request.state.viewer
    return found


def _about(query: contract.Query) -> dict[str, Any]:
    """With the first moment that is in it: whole steps are summed up."""
    span = query.span
    last = contract.floored(query.end - 1e-6, span) + span
    return {"from": contract.floored(query.start, span), "to": min(time.time(), last), "step": span}


def _dollars(row: dict[str, Any]) -> dict[str, Any]:
    """Money as dollars, and what all of it would have cost cold."""
    money = ("cost", "lookup", "saved_exact", "saved_semantic", "saved_prefix", "extra")
    cold = row["cost"] + row["saved_exact"] + row["saved_semantic"] + row["saved_prefix"]
    return {**row, **{name: row[name] / 1e9 for name in money}, "cold": (cold - row["extra"]) / 1e9}


def _row(row: dict[str, Any]) -> dict[str, Any]:
    money = ("cost", "lookup", "saved_answer", "saved_prefix")
    return {**row, **{name: None if row[name] is None else row[name] / 1e9 for name in money}}


async def _csv(rows: Sequence[dict[str, Any]], name: str) -> Response:
    def written() -> str:
        text = io.StringIO()
        if rows:
            writer = csv.DictWriter(text, list(rows[0]))
            writer.writeheader()
            writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
        return text.getvalue()

    head = {"content-disposition": f'attachment; filename="{name}"', **_FRESH}
    return Response(await asyncio.to_thread(written), media_type="text/csv; charset=utf-8", headers=head)


async def _json(value: object) -> Response:
    """Written beside the event loop: thousands of rows take a while."""
    return Response(await asyncio.to_thread(orjson.dumps, value), media_type="application/json", headers=_FRESH)


def _cell(value: Any) -> Any:
    """A spreadsheet takes text that begins like this for a formula, and callers choose what some cells say."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


async def _file(name: str, request: Request) -> Response:
    body, packed, mark = await asyncio.to_thread(_content, name)
    headers = {"etag": mark, "vary": "accept-encoding", **_HEADERS}
    if request.headers.get("if-none-match") == mark:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["content-encoding"] = packed, "gzip"
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Response(body, media_type=kind, headers=headers)


@lru_cache(maxsize=16)
def _content(name: str) -> tuple[bytes, bytes, str]:
    """A file as it is and compressed, and its mark."""
    folder = files("plotly") / "package_data" if name == "plotly.min.js" else files("gateway.dashboard")
    body = (folder / name).read_bytes()
    return body, gzip.compress(body, 6, mtime=0), f'"{hashlib.blake2b(body, digest_size=8).hexdigest()}"'
