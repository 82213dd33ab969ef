"""The dashboard and the alerts of deploy/monitoring: checked by Prometheus' own tool, and asked of a real Prometheus
that scrapes a real server and a real replica. Tests that need it are skipped where it is not installed
(`apt-get install prometheus`)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
import yaml

from tests.e2e.conftest import BASE_MODEL, Weftd, own_weftd as own_weftd
from tests.e2e.data import supervised
from tests.e2e.production import production_of
from tests.servers import OwnRedis, PostgresServer, at_end, free_port

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]
]
TESTED = ("alerts.test.yaml", "alerts.days.test.yaml")
CASES: list[dict[str, Any]] = [case for file in TESTED for case in yaml.safe_load((FOLDER / file).read_text())["tests"]]
#: Queries of these metrics have an answer only after something has gone wrong, or after a day.
RARE = re.compile(r"oldest_age|refused|rate_limited|budget_denied|webhook|restarts|ledger_drift")
NAME = re.compile(r"\b(?:weft|process)_\w+")


def queries() -> list[str]:
    """The queries of the dashboard, as Grafana would send them."""
    targets = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    return [target["expr"].replace("$job", "weft").replace("$__rate_interval", "30s") for target in targets]


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (apt-get install prometheus)")
    return found


def test_every_alert_has_a_case_that_fires_and_a_line_for_people() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names))
    checks = [check for case in CASES for check in case["alert_rule_test"]]
    assert {check["alertname"] for check in checks if check.get("exp_alerts")} == set(names)
    assert {rule["labels"]["severity"] for rule in RULES} == {"page", "ticket"}
    page = (ROOT / "docs" / "operating.md").read_text()
    assert re.findall(r"^\| `(Weft\w+)` \|", page, re.MULTILINE) == names


def test_panels_have_titles_and_queries() -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert len({panel["title"] for panel in panels}) == len(panels)
    assert all(panel["targets"] and panel["datasource"]["uid"] == "${datasource}" for panel in panels)
    assert not any("machine" in query or "org" in query for query in queries())


@pytest.mark.parametrize("arguments", [("check", "rules", "alerts.yaml"), ("test", "rules", *TESTED)])
def test_prometheus_tool_says_that_the_rules_are_good(arguments: tuple[str, ...]) -> None:
    ran = subprocess.run([tool("promtool"), *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr


class Prometheus:
    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1")

    def query(self, query: str) -> list[dict[str, Any]]:
        answered = self._http.get("query", params={"query": query})
        if answered.status_code == 503:  # not ready yet
            answered.raise_for_status()
        answer = answered.json()
        assert answer["status"] == "success", (query, answer)
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        groups = self._http.get("rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def until(self, query: str, within_s: float = 60) -> None:
        """Ask until the query has an answer."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if self.query(query):
                    return
            time.sleep(0.2)
        raise AssertionError(f"no answer to {query}")


@contextmanager
def prometheus(folder: Path, *ports: int) -> Iterator[Prometheus]:
    program, port = tool("prometheus"), free_port()
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "1s"}
    config["rule_files"] = [str(FOLDER / "alerts.yaml")]
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"127.0.0.1:{found}" for found in ports]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [program, f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'series'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    with at_end('kill -9 "$1"', str(process.pid)):
        yield Prometheus(f"http://127.0.0.1:{port}")
    process.wait()


@pytest.fixture
def replica(tmp_path: Path, postgres: PostgresServer, migrated_postgres: str) -> Iterator[int]:
    """Start one server of a service of several, without workers; its metrics port."""
    redis, port = OwnRedis(), free_port()
    with production_of(tmp_path, postgres, migrated_postgres, redis.url) as made:
        made.config.write_text(f"metrics_port = {port}\n" + made.config.read_text())
        made.serve(1)
        yield port
    redis.stop()


@pytest.mark.server
def test_every_query_is_answered_by_a_real_prometheus(
    own_weftd: Callable[..., Weftd], replica: int, tmp_path: Path
) -> None:
    tool("prometheus")
    port, config = free_port(), tmp_path / "own.toml"
    config.write_text(f"metrics_port = {port}\n")
    server = own_weftd("--config", str(config))
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key())
    run = service.create_lora_training_client(BASE_MODEL, rank=4).result()
    told = {number: httpx.get(f"http://127.0.0.1:{number}/metrics").text for number in (port, replica)}
    known = set(re.findall(r"^# TYPE (\S+)", "".join(told.values()), re.MULTILINE))
    asked = [*queries(), *(rule["expr"] for rule in RULES)]
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for query in asked for name in NAME.findall(query)}
    assert names <= known, names - known
    assert {"weft_leads", "weft_worker_restarts_total", "process_open_fds"} <= names

    with prometheus(tmp_path, port, replica) as found:
        found.until("count(up == 1) == 2")
        sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
        for _ in range(3):
            run.forward_backward(supervised(), "cross_entropy").result()
            sampler.sample(tinker.ModelInput.from_ints([1, 2]), 1, tinker.SamplingParams(max_tokens=2)).result()
            time.sleep(1)
        found.until('sum(rate(weft_ops_ended_total{kind="sample"}[30s])) > 0')
        found.until("sum(rate(weft_generator_slot_steps_total[30s])) > 0")
        empty = [query for query in queries() if not found.query(query) and not RARE.search(query)]
        assert not empty
        loaded = found.rules()
        assert {rule["name"] for rule in loaded} == {rule["alert"] for rule in RULES}
        assert {rule["health"] for rule in loaded if rule["lastEvaluation"] > "0002"} == {"ok"}, loaded
        for rule in RULES:
            found.query(rule["expr"])
        firing = {rule["name"] for rule in loaded if rule["state"] == "firing"}
        assert firing <= {"WeftDiskFills", "WeftDiskFull"}  # the disk of the machine that runs the tests
    assert server.stop() == 0
