"""`/dashboard`: the page, and what it shows. Operators see all; a tenant's key sees its own tenant and nothing else."""

# No annotations from __future__: FastAPI reads those of `figures`, which name what is local there.

import csv
import gzip
import hashlib
import io
import mimetypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response

from gateway.api.guards import Viewer
from gateway.dashboard.why import why
from gateway.ledger import DAY, Ledger, LedgerConfig, span_of
from gateway.overview import Views
from gateway.stores import contract
from gateway.stores.sqlite_ledger import KEYS

GROUPS = (*KEYS, "time")
MOST_ROWS = 10_000
_PAGE = {"index.html", "app.js", "charts.js", "style.css", "icon.svg"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Only what this gateway serves; Plotly writes style elements."""
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
    span: int
    tenant: str

    def query(self, by: Sequence[str] = ()) -> contract.Query:
        return contract.Query(self.start, self.end, self.span, self.tenant, tuple(by))

    def about(self) -> dict[str, Any]:
        """With the first moment that is in it: whole steps are summed up."""
        return {"from": int(self.start) // self.span * self.span, "to": self.end, "step": self.span}


def page() -> APIRouter:
    """The page itself, which holds no figures and is for everybody."""
    api = APIRouter()

    @api.get("/dashboard")
    async def index(request: Request) -> Response:
        return _file("index.html", request)

    @api.get("/dashboard/static/{name}")
    async def static(name: str, request: Request) -> Response:
        if name != "plotly.min.js" and name not in _PAGE:
            raise HTTPException(404, "there is no such file")
        return _file(name, request)

    return api


def figures(
    prefix: str, ledger: Ledger, keep: LedgerConfig, views: Views, viewer: Callable[[Request], Viewer]
) -> APIRouter:
    """The ledger's figures as JSON and CSV. Times are seconds since the epoch, money is dollars."""
    api = APIRouter(prefix=prefix)
    Looking = Annotated[Viewer, Depends(viewer)]

    def asked(
        who: Looking,
        since: Annotated[float | None, Query(alias="from")] = None,
        to: float | None = None,
        last: Annotated[float, Query(gt=0, le=3660 * DAY)] = DAY,
        tenant: str = "",
        step: int | None = None,
    ) -> Asked:
        """`from` and `to`, or the `last` seconds; `step`: 60, 3600 or 86400, else as fine as makes sense."""
        now = time.time()
        end = now if to is None else to
        start = end - last if since is None else since
        if start >= end:
            raise HTTPException(422, "from must be before to")
        if step not in (None, 60, 3600, 86400):
            raise HTTPException(422, "step is 60, 3600 or 86400")
        return Asked(start, end, step or span_of(start, end, now, keep), who.of(tenant))

    Range = Annotated[Asked, Depends(asked)]

    async def read(call: str, *arguments: Any) -> Any:
        if ledger.store is None:
            raise HTTPException(404, "no ledger is kept here (ledger: false, or its file cannot be used; see /ready)")
        return await ledger.ask(getattr(ledger.store, call), *arguments)

    @api.get("/me")
    async def me(who: Looking) -> dict[str, Any]:
        """Who looks, and what is kept for how long."""
        return {"admin": who.admin, "tenant": who.tenant, "ledger": ledger.store is not None, "keep": keep.keep()}

    @api.get("/totals", response_model=None)
    async def totals(
        part: Range,
        by: Annotated[str, Query(pattern=f"^({'|'.join(GROUPS)})?(,({'|'.join(GROUPS)}))*$")] = "",
        format: Annotated[str, Query(pattern="^(json|csv)$")] = "json",
    ) -> Any:
        """Sums of requests, tokens and money; `by`: names to group by, with commas between."""
        names = [name for name in by.split(",") if name]
        rows = [_dollars(row) for row in await read("totals", part.query(names)) if row["requests"] is not None]
        if format == "csv":
            return _csv(rows, f"hitherto-{by.replace(',', '-') or 'totals'}.csv")
        return {**part.about(), "rows": rows}

    @api.get("/quantiles")
    async def quantiles(part: Range, by: Annotated[str, Query(pattern="^(time|tenant)?$")] = "") -> dict[str, Any]:
        """Seconds to the first byte (p50, p95) of stored answers, of answers with a cached prefix, and of others."""
        return {**part.about(), "rows": await read("quantiles", part.query([by] if by else []))}

    @api.get("/entries")
    async def entries(part: Range, limit: Annotated[int, Query(ge=1, le=100)] = 10) -> dict[str, Any]:
        """The stored answers that saved most."""
        rows = await read("entries", part.query(), limit)
        for row in rows:
            row["saved"] /= 1e9
            row["question"] = await views.question(row["entry"], row["tenant"])
        return {**part.about(), "rows": rows}

    @api.get("/requests", response_model=None)
    async def requests(
        who: Looking,
        tenant: str = "",
        before: int = 0,
        after: int = 0,
        limit: Annotated[int, Query(ge=1, le=MOST_ROWS)] = 50,
        cache: str = "",
        model: str = "",
        request: str = "",
        key: str = "",
        user: str = "",
        part: str = "",
        format: Annotated[str, Query(pattern="^(json|csv)$")] = "json",
    ) -> Any:
        """Single rows, newest first; `before` and `after` are row numbers."""
        told = {"cache": cache, "asked": model, "request": request, "key": key, "user": user, "part": part}
        conditions = {name: value for name, value in told.items() if value}
        rows = await read("rows", who.of(tenant), before, after, limit, conditions)
        rows = [_row(row) for row in rows]
        return _csv(rows, "hitherto-requests.csv") if format == "csv" else {"rows": rows}

    @api.get("/requests/{number}")
    async def one(number: int, who: Looking) -> dict[str, Any]:
        """A row, why it hit or missed, and what else belongs to its request."""
        found = await read("row", number, who.of(""))
        if not found:
            raise HTTPException(404, f"there is no row {number}, or no more")
        row, *parts = found
        question = await views.question(row["entry"], row["tenant"]) if row["entry"] else None
        return {**_row(row), "why": why(row), "entry_question": question,
                "parts": [{**_row(part), "why": why(part)} for part in parts]}  # fmt: skip

    @api.get("/budgets")
    async def budgets(who: Looking, tenant: str = "") -> list[dict[str, Any]]:
        """Budgets, those that are nearest to their end first."""
        found = await views.budgets(who.of(tenant))
        return sorted(found, key=lambda one: -(one["spent"] + one["held"]) / max(one["limit"], 1e-9))

    @api.get("/state")
    async def state(who: Looking) -> dict[str, Any]:
        """How the gateway stands; for operators only."""
        if not who.admin:
            raise HTTPException(403, "how the gateway stands is for operators")
        return await views.state()

    return api


def _dollars(row: dict[str, Any]) -> dict[str, Any]:
    """Money as dollars, and what all of it would have cost cold."""
    money = ("cost", "lookup", "saved_exact", "saved_semantic", "saved_prefix")
    cold = row["cost"] + row["saved_exact"] + row["saved_semantic"] + row["saved_prefix"]
    return {**row, **{name: row[name] / 1e9 for name in money}, "cold": cold / 1e9}


def _row(row: dict[str, Any]) -> dict[str, Any]:
    money = ("cost", "lookup", "saved_answer", "saved_prefix")
    return {**row, **{name: None if row[name] is None else row[name] / 1e9 for name in money}}


def _csv(rows: Sequence[dict[str, Any]], name: str) -> Response:
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    head = {"content-disposition": f'attachment; filename="{name}"'}
    return Response(text.getvalue(), media_type="text/csv; charset=utf-8", headers=head)


def _cell(value: Any) -> Any:
    """A spreadsheet takes text that begins like this for a formula, and callers choose what some cells say."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _file(name: str, request: Request) -> Response:
    body, packed, mark = _content(name)
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
