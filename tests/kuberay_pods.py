"""`python -m tests.kuberay_pods deploy/kubernetes/ray.yaml`: converts each pod template of the
RayCluster to a Pod, for tools that have only the schemas of Kubernetes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml


def as_pods(parts: list[Any]) -> list[Any]:
    found = []
    for part in parts:
        if part["kind"] != "RayCluster":
            found.append(part)
            continue
        spec = part["spec"]
        for n, group in enumerate([spec["headGroupSpec"], *spec["workerGroupSpecs"]]):
            template = group["template"]
            named = {"name": f"node-{n}", **template["metadata"]}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": named, "spec": template["spec"]}
            found.append(pod)
    return found


if __name__ == "__main__":
    read = list(yaml.safe_load_all(Path(sys.argv[1]).read_text(encoding="utf-8")))
    yaml.safe_dump_all(as_pods(read), sys.stdout)
