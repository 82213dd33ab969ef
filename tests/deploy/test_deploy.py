"""The files of deploy/ agree with each other and with the programs they start."""

from __future__ import annotations

import configparser
import ipaddress
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from fastapi.routing import APIRoute
from packaging.requirements import Requirement

from api.cli import weftd
from api.routes.server import probes as probe_routes
from store.load_settings import load_settings
from workers.model.native import build

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
KUBERNETES: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def pods() -> Iterator[dict[str, Any]]:
    yield from (item["spec"]["template"]["spec"] for item in KUBERNETES if "template" in item.get("spec", {}))


def containers() -> list[dict[str, Any]]:
    return [container for pod in pods() for container in pod["containers"]]


def commands() -> list[list[str]]:
    compose = [service["command"] for service in COMPOSE["services"].values() if "command" in service]
    return [command for command in compose + [c["command"] for c in containers()] if command[0] == "weftd"]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_every_command_exists_with_its_options(command: list[str]) -> None:
    found: click.Command = weftd
    rest = command[1:]
    context = click.Context(weftd)
    while isinstance(found, click.Group):
        inner = found.get_command(context, rest[0])
        assert inner is not None, command
        found, rest = inner, rest[1:]
    made = found.make_context("weftd", rest, resilient_parsing=False)
    assert made.params["config"] is not None


def test_compose_names_only_what_it_has() -> None:
    services = COMPOSE["services"]
    assert {"migrate", "api-1", "api-2", "trainer", "generator", "jobs-worker", "jobs-beat"} <= services.keys()
    for name, service in services.items():
        assert service.get("depends_on", {}).keys() <= services.keys(), name
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).is_file(), volume
    conditions = {d: how["condition"] for d, how in services["api-1"]["depends_on"].items()}
    assert conditions == {"migrate": "service_completed_successfully", "redis": "service_healthy"}
    assert set(services["migrate"]["depends_on"]) == {"postgres"}


def test_with_a_store_every_part_of_weft_has_its_address_and_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_store = yaml.safe_load((DEPLOY / "compose.s3.yaml").read_text())["services"]
    assert with_store.keys() == {name for name, found in COMPOSE["services"].items() if found["image"] == "weft"}
    environment: dict[str, str] = with_store["api-1"]["environment"]
    assert all(found["environment"] == environment for found in with_store.values())
    assert all(found["volumes"] == [{"type": "volume", "target": "/data"}] for found in with_store.values())
    for name, value in (COMPOSE["services"]["api-1"]["environment"] | environment).items():
        monkeypatch.setenv(name, re.sub(r"\$\{\w+:-(\w[\w-]*)\}", r"\1", value))
    settings = load_settings(DEPLOY / "weft.toml")
    assert (settings.blob_url, settings.server_secret is not None) == ("s3://weft/production", True)
    stores = [c["envFrom"] for c in containers()]
    assert stores == [[{"secretRef": {"name": "weft-store", "optional": True}}]] * len(stores)


def test_grace_periods_are_longer_than_the_drain() -> None:
    settings = load_settings(DEPLOY / "weft.toml")
    grace_s = int(COMPOSE["services"]["api-1"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > settings.drain_s
    (jobs,) = (pod["terminationGracePeriodSeconds"] for pod in pods() if "beat" in str(pod))
    assert COMPOSE["services"]["jobs-worker"]["stop_grace_period"] == f"{jobs}s"
    assert all(pod["terminationGracePeriodSeconds"] > settings.drain_s for pod in pods() if "api" in str(pod)[:900])


def test_the_settings_are_good_and_complete_with_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = COMPOSE["services"]["api-1"]["environment"]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings = load_settings(DEPLOY / "weft.toml")
    assert settings.redis_url == environment["WEFT_REDIS_URL"]
    assert settings.database_url.startswith("postgresql+psycopg://")
    assert settings.jobs.driver == "celery"
    assert str(settings.data_dir) == "/data"


def test_probes_ask_for_routes_that_exist() -> None:
    paths = {route.path for route in probe_routes.router.routes if isinstance(route, APIRoute)}
    probes = [container[kind] for container in containers() for kind in container if kind.endswith("Probe")]
    asked = {probe["httpGet"]["path"] for probe in probes}
    assert asked == {"/healthz", "/readyz"} <= paths
    assert "/readyz" in str(COMPOSE["services"]["api-1"]["healthcheck"])


def test_pods_mount_what_they_declare() -> None:
    for pod in pods():
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert container["securityContext"]["runAsNonRoot"]


def test_the_image_has_every_package_and_no_root() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]}
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "tools"}
    assert {"api", "store", "weft_server"} <= rooms
    assert rooms | {"client_sdk", "setup.py", "pyproject.toml"} <= copied
    assert "USER 1000" in lines
    ahead = f"RUN XDG_CACHE_HOME=/opt/weft/{build._AHEAD.parent.relative_to(ROOT)} python -m workers.model.native.build"
    assert "WORKDIR /opt/weft" in lines
    assert any(line.startswith(ahead) for line in lines)


@pytest.mark.parametrize("dockerfile", sorted(DEPLOY.rglob("Dockerfile*")), ids=lambda path: path.parent.name)
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    program = Path(sys.executable).parent / "hadolint"
    ran = subprocess.run([str(program), str(dockerfile)], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "")


@pytest.mark.parametrize("file", ["Makefile", "deploy/Dockerfile"])
def test_every_kernel_is_compiled_ahead(file: str) -> None:
    [patterns] = re.findall(r"python -m workers.model.native.build ([^|&\n]+)", (ROOT / file).read_text())
    named = [path for pattern in patterns.split() for path in ROOT.glob(pattern)]
    assert sorted(named) == sorted((ROOT / "workers").rglob("*.c"))


@pytest.mark.parametrize("package", ["", "client_sdk"])
def test_make_setup_installs_the_build_requirements_of_a_package(package: str) -> None:
    """Because pip does not when it builds without an environment of its own."""
    needed = tomllib.loads((ROOT / package / "pyproject.toml").read_text())["build-system"]["requires"]
    assert {f"'{name}'" for name in needed} <= set((ROOT / "Makefile").read_text().split())


def test_the_packages_of_the_servers_are_compiled_ahead() -> None:
    """In the image and under the unit a server may not write beside its sources: else each start would compile them."""
    [served] = re.findall(r"^SERVED := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    rooms = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"bench", "tests", "tools"}
    assert set(served.split()) == rooms | {"client_sdk/weft"}
    for line in ("\t@$(BIN)/python -m compileall -q $(SERVED)", " && python -m compileall -q ."):
        assert line in (ROOT / ("Makefile" if "BIN" in line else "deploy/Dockerfile")).read_text().splitlines()


def test_the_unit_restarts_at_once_and_never_gives_up() -> None:
    """Clients do not give up either. Only wrong settings, exit code 2, keep it down: no restart mends them."""
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(DEPLOY / "weftd.service")
    assert unit["Unit"]["StartLimitIntervalSec"] == "0"
    found = {name: unit["Service"][name] for name in ("Restart", "RestartSec", "RestartPreventExitStatus")}
    assert found == {"Restart": "on-failure", "RestartSec": "100ms", "RestartPreventExitStatus": "2"}


def test_proxies_are_trusted_where_they_come_from() -> None:
    """Compose trusts the gateway of its own network; Kubernetes trusts what the servers' environment names."""
    settings = load_settings(DEPLOY / "weft.toml")
    (network,) = COMPOSE["networks"]["default"]["ipam"]["config"]
    assert settings.front.trusted_proxies == [network["gateway"]]
    assert ipaddress.ip_address(network["gateway"]) in ipaddress.ip_network(network["subnet"])
    for container in containers():
        named = {variable["name"]: variable.get("value") for variable in container["env"]}
        for trusted in json.loads(named["WEFT_FRONT__TRUSTED_PROXIES"] or ""):
            ipaddress.ip_network(trusted)


def test_the_versions_of_starlette_and_uvicorn_that_weft_relies_on_are_required() -> None:
    """Older Starlettes put the Host header into paths; older Uvicorns trust no networks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {Requirement(line).name: Requirement(line).specifier for line in project["dependencies"]}
    assert "1.9" not in required["starlette"]
    assert "0.30" not in required["uvicorn"]
