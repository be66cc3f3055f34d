"""`twostroke plan --kuberay FILE`: writes the numbers of a plan into a copy of the KubeRay manifest
(`deploy/kubernetes/ray.yaml`). Everything else in the file stays as it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twostroke.errors import ConfigError

PHASES = ("prefill", "decode")
NEEDED = "a copy of deploy/kubernetes/ray.yaml"


def check_manifest(path: str | None) -> None:
    """Raise `ConfigError` if the file is not a manifest with pools, before the plan is made."""
    if path is not None:
        with_counts(_read(path), dict.fromkeys(PHASES, 1), path)


def write_manifest(path: str, plan: dict[str, Any]) -> None:
    layout = plan["forecast"]["layout"]
    counts = {phase: layout[f"{phase}_engines"] for phase in PHASES}
    if not all(counts.values()):
        raise ConfigError(
            f"--kuberay {path}: the plan has no pools ({layout['name']}), and the manifest has a "
            "group of nodes for each phase; plan with --prefill-engines and --decode-engines"
        )
    text = with_counts(_read(path), counts, path)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--kuberay {path} cannot be written: {error.strerror}") from None


def with_counts(manifest: str, counts: dict[str, int], path: str) -> str:
    """Return the manifest with these numbers of engines: the replicas of the group of each phase,
    its maximum if that is lower, and the server's options."""
    for phase, count in counts.items():
        group = re.search(
            rf"(?ms)^ *- groupName: {phase}$.*?(?=^ *- groupName: |^---|\Z)", manifest
        )
        numbers = group and re.search(r"(?m)^ *maxReplicas: (\d+)$", group[0])
        option = rf"(?m)^( *- --{phase}-engines=)\d+"
        if group is None or numbers is None or not re.search(option, manifest):
            raise ConfigError(
                f"--kuberay {path} is not {NEEDED}: it has no group {phase} with replicas and "
                f"maxReplicas, or no argument --{phase}-engines=N"
            )
        maximum = max(count, int(numbers[1]))
        changed = re.sub(r"(?m)^( *replicas: )\d+$", rf"\g<1>{count}", group[0])
        changed = re.sub(r"(?m)^( *minReplicas: )(\d+)$", _at_most(count), changed)
        changed = re.sub(r"(?m)^( *maxReplicas: )\d+$", rf"\g<1>{maximum}", changed)
        manifest = manifest[: group.start()] + changed + manifest[group.end() :]
        manifest = re.sub(option, rf"\g<1>{count}", manifest)
    return manifest


def _at_most(count: int) -> Callable[[re.Match[str]], str]:
    return lambda found: f"{found[1]}{min(count, int(found[2]))}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--kuberay {path} cannot be read ({error}); give the path of {NEEDED}"
        ) from None
