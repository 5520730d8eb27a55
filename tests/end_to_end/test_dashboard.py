"""The dashboard in a real browser: its figures are the ledger's, its controls work, and a tenant sees its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from backends.fake import FakeServer, Script
from tests.conftest import Gateway, eventually, tenant_file
from tests.tools import tool

CONFIG = """
tenants: tenants
admin: {{key: "env:DASHBOARD_TEST_ADMIN"}}
cache: {{semantic: false}}
backends:
  up: {{kind: openai, url: "{url}"}}
models:
  m: {{try: [up]}}
  n: {{try: [up]}}
breakers: {{"*": false}}
prices:
  "*": {{input: 1000 USD/M, cached: 100 USD/M, output: 10000 USD/M}}
"""
KEYS = {"acme": "key-of-acme", "globex": "key-of-globex"}
ADMIN = {"authorization": "Bearer the-admin-key"}
HOSTILE = "<img src=x onerror=document.title='owned'>"
expect.set_options(timeout=20_000)


@pytest.fixture(scope="module")
def gateway(upstream: FakeServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    for tenant, key in KEYS.items():
        tenant_file(folder, tenant, key, "budget: {per_month: 50 USD}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DASHBOARD_TEST_ADMIN", "the-admin-key")
        server = Gateway(folder, CONFIG.format(url=upstream.url))
    upstream.app.script, upstream.app.scripts = Script(), []
    for number in range(12):  # 4 questions, 3 times each
        ask(server, "acme", f"question {number % 4}", temperature=0, stream=number % 2 == 0)
    for number in range(3):
        ask(server, "globex", f"other {number}", model="n", temperature=0)
    ask(server, "acme", HOSTILE, model=HOSTILE, user=HOSTILE)
    ask(server, "acme", HOSTILE, temperature=0)
    ask(server, "acme", HOSTILE, temperature=0)
    listing = "/dashboard/api/requests?limit=100"
    assert eventually(lambda: len(server.client.get(listing, headers=ADMIN).json()["rows"]) == 18)
    yield server
    server.stop()


def ask(gateway: Gateway, tenant: str, question: str, **fields: Any) -> None:
    gateway.chat(question, {"authorization": f"Bearer {KEYS[tenant]}"}, **fields)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = tool("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """One that has no script error, and asks nobody but the gateway."""
    context = browser.new_context(viewport={"width": 1440, "height": 1000}, locale="en-US", accept_downloads=True)
    page, wrong = context.new_page(), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url) if "127.0.0.1" not in request.url
            and not request.url.startswith(("data:", "blob:")) else None)  # fmt: skip
    yield page
    context.close()
    assert not wrong


def opened(page: Page, gateway: Gateway, key: str, query: str = "?range=1h") -> Page:
    page.goto(f"{gateway.url}/dashboard{query}")
    page.locator("#login-key").fill(key)
    page.locator("#login-form button.primary").click()
    expect(page.locator("main")).to_have_attribute("aria-busy", "false")
    return page


def totals(gateway: Gateway, **asked: Any) -> dict[str, Any]:
    reply = gateway.client.get("/dashboard/api/totals", params={"last": 3600, **asked}, headers=ADMIN)
    row: dict[str, Any] = reply.json()["rows"][0]
    return row


def tile(page: Page, name: str) -> str:
    return page.locator(f'[data-tile="{name}"] dd').inner_text()


def dollars(text: str) -> float:
    return float(re.sub(r"[^0-9.-]", "", text))


def test_the_figures_are_those_of_the_ledger(page: Page, gateway: Gateway) -> None:
    opened(page, gateway, "the-admin-key")
    total = totals(gateway)
    assert dollars(tile(page, "spent")) == pytest.approx(total["cost"], abs=0.005)
    assert dollars(tile(page, "saved")) == pytest.approx(total["cold"] - total["cost"], abs=0.005)
    assert dollars(tile(page, "without")) == pytest.approx(total["cold"], abs=0.005)
    assert int(tile(page, "requests")) == total["requests"] == 18
    assert page.locator("#tenant").input_value() == "", "all tenants, and it says so"
    rows = gateway.client.get("/dashboard/api/totals?last=3600&by=cache", headers=ADMIN).json()["rows"]
    by_tier = {row["cache"]: row["requests"] for row in rows}
    assert by_tier["exact"] == 9
    assert "9 stored answers of 17" in page.locator('[data-tile="hit rate"] small').inner_text()
    line = page.locator('#groups tr[data-name="acme"] td')
    mine = gateway.client.get("/dashboard/api/totals?last=3600&tenant=acme", headers=ADMIN).json()["rows"][0]
    assert int(line.nth(1).inner_text()) == mine["requests"]
    assert dollars(line.nth(3).inner_text()) == pytest.approx(mine["cost"], abs=0.005)
    page.locator("#tabs button", has_text="Models").click()
    expect(page.locator('#groups tr[data-name="n"] td').nth(1)).to_have_text("3")
    assert "by=model" in page.url


def test_charts_are_drawn_and_told_as_tables(page: Page, gateway: Gateway) -> None:
    opened(page, gateway, "the-admin-key")
    for name in ("money", "whatif", "hits", "ttft", "tokens"):
        expect(page.locator(f"#{name} .js-plotly-plot .main-svg").first).to_be_visible()
        assert page.locator(f'#{name} [role="img"]').get_attribute("aria-label")
    page.locator("#money summary").click()
    spent = page.locator("#money table tbody tr").first.locator("td").nth(1).inner_text()
    assert dollars(spent) > 0


def test_the_tenant_filter_and_the_range_work_and_stay_in_the_address(page: Page, gateway: Gateway) -> None:
    opened(page, gateway, "the-admin-key")
    page.locator("#tenant").select_option("globex")
    expect(page.locator('[data-tile="requests"] dd')).to_have_text("3")
    expect(page.locator("#requests tbody tr")).to_have_count(3)
    assert "tenant=globex" in page.url
    page.locator("#ranges button", has_text="7d").click()
    expect(page.locator('#ranges button[aria-pressed="true"]')).to_have_text("7d")
    expect(page.locator("#range-text")).to_contain_text("by hour")
    page.reload()
    expect(page.locator('[data-tile="requests"] dd')).to_have_text("3")
    assert "range=7d" in page.url
    page.goto(f"{gateway.url}/dashboard?from=1000000000&to=1000003600")
    expect(page.locator("#empty")).to_be_visible()
    expect(page.locator('[data-tile="requests"] dd')).to_have_text("0")


def test_a_tenants_key_sees_its_tenant_only(page: Page, gateway: Gateway) -> None:
    opened(page, gateway, KEYS["globex"])
    expect(page.locator('[data-tile="requests"] dd')).to_have_text("3")
    expect(page.locator("#scope")).to_have_text("globex")
    expect(page.locator("#tenant-label")).to_be_hidden()
    expect(page.locator("#state")).to_be_hidden()
    expect(page.locator("#budgets .meter")).to_have_count(1)
    assert "acme" not in page.locator("body").inner_text()
    page.goto(f"{gateway.url}/dashboard?range=1h&tenant=acme")
    expect(page.locator('[data-tile="requests"] dd')).to_have_text("3")
    assert "tenant=acme" not in page.url and "acme" not in page.locator("body").inner_text(), "such a link is its own"


def test_a_gateway_that_comes_back_is_found_again(page: Page, gateway: Gateway) -> None:
    page.route("**/dashboard/api/**", lambda route: route.abort())
    page.goto(f"{gateway.url}/dashboard")
    expect(page.locator("#status")).to_contain_text("trying again")
    page.unroute("**/dashboard/api/**")
    expect(page.locator("#login")).to_be_visible()


def test_slow_answers_to_an_older_question_are_thrown_away(page: Page, gateway: Gateway) -> None:
    opened(page, gateway, "the-admin-key")

    def slowly(route: Route) -> None:
        if "tenant=globex" not in route.request.url:
            page.wait_for_timeout(700)
        route.continue_()

    page.route("**/dashboard/api/totals*", slowly)
    page.locator("#ranges button", has_text="7d").click()
    page.locator("#tenant").select_option("globex")
    expect(page.locator('[data-tile="requests"] dd')).to_have_text("3")
    page.wait_for_timeout(2500)
    expect(page.locator('[data-tile="requests"] dd')).to_have_text("3")
    page.unroute("**/dashboard/api/totals*")


def test_a_wrong_key_is_asked_for_again(page: Page, gateway: Gateway) -> None:
    page.goto(f"{gateway.url}/dashboard")
    page.locator("#login-key").fill("no such key")
    page.locator("#login-key").press("Enter")
    expect(page.locator("#login-error")).to_contain_text("not known here")
    assert page.locator("#requests tbody tr").count() == 0


def test_a_request_says_why_it_hit_and_has_an_address(page: Page, gateway: Gateway) -> None:
    opened(page, gateway, "the-admin-key")
    row = page.locator("#requests tbody tr", has=page.locator(".pill.exact")).last
    row.locator("button").press("Enter")
    expect(page.locator("#detail")).to_be_visible()
    expect(page.locator("#detail")).to_contain_text("its stored answer was served")
    address = page.url
    assert "#request=" in address
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).to_be_hidden()
    page.goto("about:blank")
    page.goto(address)
    expect(page.locator("#detail")).to_contain_text("its stored answer was served")


@pytest.mark.parametrize("address", ["?range=1h", "?range=1h#request=1"])
def test_a_request_that_is_opened_while_the_page_loads_is_not_opened_again(
    page: Page, gateway: Gateway, address: str
) -> None:
    """It may have been closed in the meantime, or be another one than the address names."""
    waiting: list[Route] = []
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if re.search(r"/requests/\d+", request.url) else None)
    page.route(re.compile(r"/totals\?.*by=time"), lambda route: waiting.append(route))
    opened(page, gateway, "the-admin-key", address)
    page.locator("#requests tbody tr button").first.click()
    expect(page.locator("#detail")).to_be_visible()
    assert waiting, "the page is still loading"
    for route in waiting:
        route.continue_()
    expect(page.locator("#money .js-plotly-plot .main-svg").first).to_be_visible()
    page.wait_for_timeout(500)
    assert len(asked) == 1
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).to_be_hidden()


def test_new_requests_appear_by_themselves(page: Page, gateway: Gateway) -> None:
    opened(page, gateway, "the-admin-key")
    newest = page.locator("#requests tbody tr").first.get_attribute("data-number")
    ask(gateway, "acme", "question 0", temperature=0)
    expect(page.locator(f'#requests tbody tr[data-number="{int(newest or 0) + 1}"]')).to_be_visible()
    page.locator("#f-cache").select_option("miss")
    expect(page.locator("#requests .pill.exact")).to_have_count(0)


def test_what_callers_say_is_never_markup(page: Page, gateway: Gateway) -> None:
    opened(page, gateway, "the-admin-key")
    expect(page.locator("#requests")).to_contain_text(HOSTILE)
    expect(page.locator("#entries")).to_contain_text(HOSTILE)
    page.locator("#requests tr", has_text=HOSTILE).first.locator("button").click()
    expect(page.locator("#detail")).to_contain_text(HOSTILE)
    assert page.title() == "Hitherto" and page.locator('img[src="x"]').count() == 0


def test_figures_can_be_downloaded(page: Page, gateway: Gateway, tmp_path: Path) -> None:
    opened(page, gateway, "the-admin-key")
    page.locator("#export summary").click()
    with page.expect_download() as download:
        page.locator("button", has_text="By tenant (CSV)").click()
    path = tmp_path / "file.csv"
    download.value.save_as(path)
    assert download.value.suggested_filename == "hitherto-tenant.csv"
    assert {line.split(",")[0] for line in path.read_text().splitlines()} >= {"tenant", "acme", "globex"}


def test_the_keyboard_reaches_everything(page: Page, gateway: Gateway) -> None:
    opened(page, gateway, "the-admin-key")
    page.locator('#tabs [aria-selected="true"]').focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator('#tabs [aria-selected="true"]')).to_have_text("Models")
    expect(page.locator('#tabs [aria-selected="true"]')).to_be_focused()
    unnamed = page.evaluate(
        "() => [...document.querySelectorAll('button, input, select')].filter((one) => !(one.textContent.trim() ||"
        " one.getAttribute('aria-label') || one.labels?.length)).map((one) => one.outerHTML)"
    )
    assert unnamed == []
    assert page.evaluate("() => document.documentElement.lang") == "en"


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(browser: Browser, gateway: Gateway, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    page = opened(context.new_page(), gateway, "the-admin-key")
    expect(page.locator("#tokens .js-plotly-plot .main-svg").first).to_be_visible()
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    background = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    dark = sum(map(int, re.findall(r"\d+", background)[:3])) < 200
    assert dark == (scheme == "dark")
    page.locator("#theme").click()
    assert page.evaluate("() => document.documentElement.dataset.theme") == ("light" if scheme == "dark" else "dark")
    context.close()


def test_a_burst_of_requests_leaves_no_gap(page: Page, gateway: Gateway) -> None:
    opened(page, gateway, "the-admin-key")
    for number in range(60):
        ask(gateway, "acme", f"burst {number % 3}", temperature=0)
    expect(page.locator("#requests tbody tr").nth(70)).to_be_visible()
    numbers = page.eval_on_selector_all("#requests tbody tr", "rows => rows.map(row => Number(row.dataset.number))")
    assert numbers == sorted(set(numbers), reverse=True) and numbers[0] - numbers[-1] == len(numbers) - 1


def test_the_page_itself_is_safe_to_serve(gateway: Gateway) -> None:
    reply = gateway.client.get("/dashboard")
    assert reply.status_code == 200 and "default-src 'none'" in reply.headers["content-security-policy"]
    assert gateway.client.get("/dashboard", headers={"if-none-match": reply.headers["etag"]}).status_code == 304
    script = gateway.client.get("/dashboard/static/plotly.min.js")
    assert script.status_code == 200 and b"plotly.js" in script.content[:2000]
    for name in ("..%2fapp.py", "__init__.py", "why.py", "nothing.js"):
        assert gateway.client.get(f"/dashboard/static/{name}").status_code == 404


def test_without_an_admin_key_only_this_machine_sees_it(upstream: FakeServer, tmp_path: Path) -> None:
    config = f"cache: {{semantic: false}}\nbackends: {{up: {{kind: openai, url: '{upstream.url}'}}}}\n"
    server = Gateway(tmp_path, config + "models: {m: {try: [up]}}\n")
    get = server.client.get
    own = server.url.removeprefix("http://")
    assert get("/dashboard/api/me").json() == {**get("/dashboard/api/me").json(), "admin": True}
    assert get("/dashboard/api/totals", headers={"sec-fetch-site": "same-origin"}).status_code == 200
    for headers in (
        {"sec-fetch-site": "cross-site"},
        {"origin": "http://evil.example"},
        {"host": "evil.example"},  # a name that was made to lead here
        {"host": "evil.example", "origin": "http://evil.example", "sec-fetch-site": "same-origin"},
        {"x-forwarded-for": "203.0.113.9"},  # a proxy in front, so that anybody may ask
        {"forwarded": "for=203.0.113.9"},
    ):
        status = 401 if "forwarded" in "".join(headers) else 403
        assert get("/dashboard/api/totals", headers=headers).status_code == status, headers
        assert get("/admin/breakers", headers=headers).status_code == status, headers
    same = {"origin": f"http://{own}", "sec-fetch-site": "same-origin"}
    assert server.client.post("/admin/cache/purge", json={"all": True}, headers=same).status_code == 200
    server.stop()
