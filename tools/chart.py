"""Render the chart of deploy/helm as Helm does, without a cluster. `python -m tools.chart > deploy/kubernetes.yaml`
writes what `kubectl apply -f` takes where there is no Helm: the chart with its defaults. A test compares them.

Helm's own code renders (helm-python-sdk, of the extra `dev`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helm_python.chart import Chart

CHART = Path(__file__).resolve().parents[1] / "deploy" / "helm"
HEADER = """\
# deploy/helm with its defaults, for clusters without Helm, made by `python -m tools.chart`: change the chart instead.
# It expects a secret `weft` (database-url, redis-url), a PostgreSQL, a Redis, and a storage class that many pods may
# write to. deploy/helm/values.yaml has all else: GPUs, an object store instead of the shared folder, networks.
"""


def rendered(values: dict[str, Any] | None = None) -> str:
    """All objects of the chart as one YAML document. Raises HelmError for values that the chart refuses."""
    made = Chart.load(CHART).render(values or {}, name="weft", namespace="default", revision=1)
    found = [made[path].strip().removeprefix("---").strip() for path in sorted(made) if path.endswith(".yaml")]
    return "\n---\n".join(text for text in found if text) + "\n"


if __name__ == "__main__":
    print(HEADER + rendered(), end="")
