"""The chart of deploy/helm: rendered and linted by Helm's own code, its objects checked against Kubernetes' schemas."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python.chart import lint
from helm_python.errors import HelmError

from store.load_settings import load_settings
from tools.chart import CHART, HEADER, rendered

KUBERNETES = "1.31"
#: Values that differ from the defaults in every part of the chart.
OTHER: dict[str, Any] = {
    "image": {"tag": "x"},
    "imagePullSecrets": [{"name": "registry"}],
    "secrets": {"environmentOptional": False},
    "env": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4318"}],
    "data": {"claim": False},
    "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
    "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
    "front": {"replicas": 1, "nodeSelector": {"a": "b"}, "metricsPort": 0},
    "trainer": {"ranks": 8, "gpus": 8, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
    "generator": {"gpus": 1, "affinity": {"nodeAffinity": {}}},
    "serviceAccount": {"name": "weft", "automountToken": True},
    "networkPolicy": {"from": [{"podSelector": {"matchLabels": {"app": "ingress"}}}]},
}
MONITORED = {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}}


def objects(values: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(rendered(values)))


def pods(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from (one["spec"]["template"]["spec"] for one in found if one["kind"] in ("Deployment", "Job"))


def named(found: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (one,) = [one for one in found if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return one


@pytest.mark.parametrize("values", [{}, OTHER, MONITORED], ids=["defaults", "other", "monitored"])
def test_helm_and_kubernetes_find_nothing_wrong(values: dict[str, Any]) -> None:
    report = lint(CHART, values, strict=True)
    assert not report["errors"]
    assert [found["error"] for found in report["messages"]] == ["icon is recommended"]
    for one in objects(values):
        if one["kind"] != "PodMonitor":  # a kind of Prometheus' operator, not of Kubernetes
            kubernetes_validate.validate(one, KUBERNETES, strict=True)


def test_the_file_for_clusters_without_helm_is_the_chart() -> None:
    assert (CHART.parent / "kubernetes.yaml").read_text() == HEADER + rendered()


@pytest.mark.parametrize("values", [{}, OTHER], ids=["defaults", "other"])
def test_every_container_is_confined(values: dict[str, Any]) -> None:
    for pod in pods(objects(values)):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"]
            assert not rights["allowPrivilegeEscalation"]
            assert rights["capabilities"] == {"drop": ["ALL"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert not [
                one for one in container["env"] if "PASSWORD" in one["name"] or "://weft:" in one.get("value", "")
            ]


def test_the_settings_are_good_and_pods_outlive_their_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = objects()
    config = tmp_path / "weft.toml"
    config.write_text(named(found, "ConfigMap", "weft")["data"]["weft.toml"])
    api = named(found, "Deployment", "weft-api")["spec"]["template"]["spec"]
    for variable in api["containers"][0]["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "redis://redis/0"))
    monkeypatch.setenv("WEFT_DATABASE_URL", "postgresql+psycopg://w:w@db/weft")
    settings = load_settings(config)
    assert api["terminationGracePeriodSeconds"] > settings.drain_s
    assert (settings.metrics_port, settings.trainer.ranks, settings.logs.format) == (9100, 1, "json")
    assert settings.front.trusted_proxies == ast.literal_eval(
        str(yaml.safe_load((CHART / "values.yaml").read_text())["trustedProxies"])
    )


def test_gpus_ranks_and_a_store() -> None:
    found = objects(OTHER)
    trainer = named(found, "Deployment", "weft-trainer")["spec"]["template"]["spec"]
    (container,) = trainer["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {"name": "WEFT_TRAINER__RANKS", "value": "8"} in container["env"]
    assert trainer["volumes"][0] == {"name": "data", "emptyDir": {"sizeLimit": "50Gi"}}
    assert not [one for one in found if one["kind"] == "PersistentVolumeClaim"]
    with pytest.raises(HelmError, match=r"trainer.gpus is 2 and trainer.ranks is 8"):
        rendered({"trainer": {"ranks": 8, "gpus": 2}})


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"trainer": {"replica": 3}}, "replica"),
        ({"front": {"replicas": -1}}, "replicas"),
        ({"settings": ""}, "settings"),
        ({"secrets": {"databaseUrl": {"name": "weft", "key": ""}}}, "key"),
    ],
)
def test_a_mistake_in_the_values_is_refused_by_its_name(values: dict[str, Any], what: str) -> None:
    with pytest.raises(HelmError, match=what):
        rendered(values)


def test_one_replica_may_be_evicted_and_metrics_may_be_closed() -> None:
    found = objects(OTHER)
    budgets = {one["metadata"]["name"] for one in found if one["kind"] == "PodDisruptionBudget"}
    assert budgets == {"weft-trainer", "weft-generator"}
    (rule,) = named(found, "NetworkPolicy", "weft-api")["spec"]["ingress"]
    assert rule["from"] == OTHER["networkPolicy"]["from"]
    assert named(found, "NetworkPolicy", "weft-workers")["spec"]["ingress"] == []
