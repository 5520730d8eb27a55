"""What deploy/ has for Prometheus and Grafana, against a real Prometheus that looks at a real gateway."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import yaml

from backends.fake import FakeServer, Script
from gateway.metrics import Metrics
from tests.conftest import ROOT, Gateway, eventually
from tests.tools import tool

PROMETHEUS = ROOT / "deploy/prometheus"
GRAFANA = ROOT / "deploy/grafana/hitherto.json"
CONFIG = """
backends: {{up: {{kind: openai, url: "{url}"}}}}
models: {{m: {{try: [up], retry: {{attempts: 1}}}}}}
cache: {{semantic: false}}
prices: {{m: {{input: 10 USD/M, cached: 1 USD/M, output: 100 USD/M}}}}
"""
NOBODY = "127.0.0.1:1"
"""A second target, which is down."""
GRAFANAS = {"$__rate_interval": "5m", "$__range": "1h", "$tenant": ".*", "$model": ".*"}
"""What Grafana puts in place of its variables."""
NAME = re.compile(r"[a-zA-Z_:]*hitherto_[a-zA-Z0-9_:]+")


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running one."""

    client: httpx.Client
    process: subprocess.Popen[bytes]

    def ask(self, path: str, **parameters: str) -> Any:
        reply = self.client.get(f"/api/v1/{path}", params=parameters)
        assert reply.status_code == 200, f"{parameters}: {reply.text}"
        return reply.json()["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series that an expression has now."""
        return list(self.ask("query", query=expression)["result"])

    def value(self, expression: str) -> float | None:
        """The value of an expression that has one series; None: it has none."""
        found = self.query(expression)
        assert len(found) < 2, found
        return float(found[0]["value"][1]) if found else None


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, upstream: FakeServer) -> Iterator[Gateway]:
    running = Gateway(tmp_path_factory.mktemp("watched"), CONFIG.format(url=upstream.url))
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory, gateway: Gateway) -> Iterator[Prometheus]:
    """One with the configuration and the rules that we ship, only in more of a hurry."""
    binary, folder = tool("prometheus"), tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "200ms"}
    config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [_target(gateway), NOBODY]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [binary, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log, cwd=folder)
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=30, trust_env=False) as client:
            assert eventually(lambda: _is_ready(client), 30), (folder / "log").read_text()
            yield Prometheus(client, process)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _target(gateway: Gateway) -> str:
    return gateway.url.removeprefix("http://")


def _is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def busy(gateway: Gateway, prometheus: Prometheus, upstream: FakeServer) -> Gateway:
    """A gateway that Prometheus has seen missing, hitting, streaming and failing.

    In two turns, since a rate is told only of what moved after it was first seen.
    """
    for turn in range(2):
        for content in (f"one {turn}", f"two {turn}", f"one {turn}", f"one {turn}"):
            assert gateway.chat(content).status_code == 200
        assert "[DONE]" in gateway.chat(f"a stream {turn}", stream=True).text
        upstream.app.scripts = [Script(status=500)]
        assert gateway.chat(f"failing {turn}").status_code >= 500
        hits = gateway.metric("hitherto_requests_total", cache="exact")
        assert hits == 2 * (turn + 1)
        assert eventually(lambda hits=hits: prometheus.value('sum(hitherto_requests_total{cache="exact"})') == hits)
    return gateway


def promtool(*arguments: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [tool("promtool"), *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("command", "name"),
    [("check config", "prometheus.yml"), ("check rules", "rules.yml"), ("test rules", "rules_test.yml")],
)
def test_the_configuration_and_the_rules_are_right(command: str, name: str) -> None:
    done = promtool(*command.split(), str(PROMETHEUS / name))
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_says_how_bad_it_is_and_what_to_do_and_is_tested() -> None:
    tests = (PROMETHEUS / "rules_test.yml").read_text()
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) > 8
    for rule in alerts:
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
        assert rule["annotations"].keys() == {"summary", "description"}, rule["alert"]
        assert rule["alert"] in tests, rule["alert"]


def test_what_a_gateway_tells_follows_the_conventions(busy: Gateway) -> None:
    done = promtool("check", "metrics", given=busy.client.get("/metrics").text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_prometheus_sees_requests_and_money(busy: Gateway, prometheus: Prometheus) -> None:
    def up() -> dict[str, str]:
        return {one["metric"]["instance"]: one["value"][1] for one in prometheus.query('up{job="hitherto"}')}

    assert eventually(lambda: up() == {_target(busy): "1", NOBODY: "0"}, 20), up()
    seen = {one["metric"]["cache"] for one in prometheus.query("hitherto_requests_total")}
    assert {"exact", "miss"} <= seen
    for name in ("hitherto_cost_usd_total", "hitherto_saved_usd_total"):
        assert busy.metric(name) > 0
        assert eventually(lambda n=name: prometheus.value(f"sum({n})") == pytest.approx(busy.metric(n)), 20), name


def test_the_rules_tell_of_that_traffic(busy: Gateway, prometheus: Prometheus) -> None:
    def told(expression: str) -> bool:
        return (prometheus.value(expression) or 0) > 0

    for expression in (
        "job:hitherto_hits:ratio_rate5m",
        'job_tenant:hitherto_hits:ratio_rate5m{tenant="open"}',
        "job:hitherto_errors:ratio_rate5m",
        'job_kind:hitherto_ttft_seconds:p95_5m{kind="hit"}',
        'job_kind:hitherto_ttft_seconds:p95_5m{kind="prefix"}',  # the upstream says that it had some of each prompt
        "job:hitherto_overhead_seconds:p99_5m",
        "job:hitherto_cost_usd:increase1h",
        'job_by:hitherto_saved_usd:increase1h{by="exact"}',
        "job:hitherto_saved_usd:ratio_increase1h",
    ):
        assert eventually(lambda expression=expression: told(expression), 15), expression
    groups = prometheus.ask("rules")["groups"]
    states = {rule["name"]: (rule["health"], rule.get("lastError")) for group in groups for rule in group["rules"]}
    assert set(states.values()) == {("ok", None)}, states


def test_the_alert_for_a_gateway_that_is_down_begins(prometheus: Prometheus) -> None:
    def down() -> set[str]:
        alerts = prometheus.ask("alerts")["alerts"]
        return {one["labels"].get("instance", "") for one in alerts if one["labels"]["alertname"] == "HithertoDown"}

    assert eventually(lambda: down() == {NOBODY}, 20), down()


def test_every_expression_is_valid_and_asks_for_what_there_is(prometheus: Prometheus) -> None:
    labels, recorded = _labels_of_series(), {rule["record"] for rule in rules() if "record" in rule}
    expressions = [rule["expr"] for rule in rules()] + [query["expr"] for query in queries()]
    assert len(expressions) > 60
    for expression in expressions:
        prometheus.query(filled(expression))
        for name in NAME.findall(expression):
            assert name in labels or name in recorded, f"{name}: {expression}"
        for name, matchers in re.findall(r"(hitherto_\w+)\{([^}]*)\}", expression):
            asked = set(re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"', matchers)) - {"job", "instance"}
            assert name not in labels or asked <= labels[name], f"{asked}: {expression}"


def test_the_dashboards_queries_group_by_labels_that_there_are() -> None:
    labels = _labels_of_series()
    for query in queries():
        names = NAME.findall(query["expr"])
        grouped = {label.strip() for by in re.findall(r"by \(([^)]*)\)", query["expr"]) for label in by.split(",")}
        shown = set(re.findall(r"\{\{(\w+)\}\}", query["legendFormat"]))
        known = set.intersection(*(labels[name] for name in names))
        assert shown <= grouped and grouped - {"le"} <= known, query


def test_the_dashboard_shows_the_traffic(busy: Gateway, prometheus: Prometheus) -> None:
    """Panels without a figure are those of what this gateway has not: an engine, hedges, faults."""
    without = {
        "KV by tier",
        "Blocks that gave way",
        "Time of a load",
        "Reused prefixes computed once more",
        "Hedges",
    }

    def empty() -> set[str]:
        return {
            panel["title"]
            for panel in panels()
            if not all(prometheus.query(filled(query["expr"])) for query in panel["targets"])
        }

    assert eventually(lambda: empty() == without, 20), empty()


def test_the_dashboard_can_be_imported(prometheus: Prometheus) -> None:
    board = json.loads(GRAFANA.read_text())
    assert board["schemaVersion"] == 39 and board["id"] is None and board["time"]["from"] == "now-24h"
    assert [one["name"] for one in board["__inputs"]] == ["DS_PROMETHEUS"]
    everywhere = [*panels(), *queries(), *board["templating"]["list"]]
    assert all(one["datasource"] == {"type": "prometheus", "uid": "${DS_PROMETHEUS}"} for one in everywhere)
    kinds = {one["id"] for one in board["__requires"] if one["type"] == "panel"}
    assert {panel["type"] for panel in panels()} == kinds
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    cells = [cell for panel in board["panels"] for cell in _cells(panel["gridPos"])]
    assert len(set(cells)) == len(cells), "panels lie on one another"
    assert max(x for x, _ in cells) < 24
    for variable in board["templating"]["list"]:
        asked = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
        assert asked is not None and asked[2] == variable["name"]
        assert eventually(
            lambda asked=asked: prometheus.ask(f"label/{asked[2]}/values", **{"match[]": filled(asked[1])})
        )


def _cells(place: dict[str, int]) -> Iterator[tuple[int, int]]:
    for x in range(place["x"], place["x"] + place["w"]):
        for y in range(place["y"], place["y"] + place["h"]):
            yield x, y


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(GRAFANA.read_text())["panels"] if panel["type"] != "row"]


def queries() -> list[dict[str, Any]]:
    return [query for panel in panels() for query in panel["targets"]]


def filled(expression: str) -> str:
    """An expression as Grafana would send it."""
    for name, value in GRAFANAS.items():
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def _labels_of_series() -> dict[str, set[str]]:
    """Every series that a gateway has, and its labels."""
    found: dict[str, set[str]] = {}
    metrics = Metrics()
    known = {one.describe()[0].name: set(one._labelnames) for one in vars(metrics).values() if hasattr(one, "describe")}
    for family in metrics.registry.collect():
        for suffix in {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",)):
            found[family.name + suffix] = known[family.name]
    return found
