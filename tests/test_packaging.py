"""The files of the sdist, the README on PyPI, and the flags, routes and ports in deploy/."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli import reading
from twostroke import __version__
from twostroke.serve.settings import ServeSettings

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()
pytestmark = pytest.mark.skipif(
    not (ROOT / "docs" / "images").is_dir(), reason="of the repository, not of an unpacked sdist"
)
MANIFESTS = ("cpu.yaml", "gpu.yaml")
USER = 10001


def read(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


def settings_of(words: list[str]) -> ServeSettings:
    """Read words like `twostroke`, which refuses an unknown flag."""
    assert words[0] == "serve"
    found = reading.read(*words[1:])
    assert not found.problems
    assert found.settings is not None
    return found.settings


def manifest(name: str) -> dict[str, Any]:
    parts = yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text())
    return {part["kind"]: part for part in parts}


# ── the distributions ───────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> tarfile.TarFile:
    pytest.importorskip("scikit_build_core")
    folder = tmp_path_factory.mktemp("sdist")
    build = "import sys; sys.path.insert(0, 'native'); import backend; backend.build_sdist"
    said = subprocess.run(
        [sys.executable, "-c", f"{build}({str(folder)!r})"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    return tarfile.open(folder / f"twostroke-{__version__}.tar.gz")


def test_the_sdist_has_what_belongs_to_it_and_no_strays(sdist: tarfile.TarFile) -> None:
    sizes = {one.name.partition("/")[2]: one.size for one in sdist.getmembers() if one.isfile()}
    tops = {name.partition("/")[0] for name in sizes}
    folders = {"bench", "deploy", "docs", "native", "tests", "twostroke"}
    files = {
        ".dockerignore",
        ".gitignore",
        "CHANGELOG.md",
        "LICENSE",
        "PKG-INFO",
        "README.md",
        "pyproject.toml",
    }
    assert tops == folders | files
    endings = {Path(name).suffix for name in sizes}
    source = {".py", ".pyi", ".typed", ".html", ".cpp", ".h", ".txt", ".sh", ".md", ".toml", ""}
    assert endings <= source | {".json", ".jsonl", ".mjs", ".yml", ".yaml", ".service", ".svg"} | {
        ".css",
        ".js",
    }
    assert not [name for name in sizes if "__pycache__" in name or "/." in name]
    assert not [name for name in sizes if name.startswith("docs/images")]
    assert {
        "twostroke/py.typed",
        "twostroke/serve/dashboard/dash.html",
        "native/CMakeLists.txt",
    } <= set(sizes)
    here = {str(path.relative_to(ROOT)) for path in (ROOT / "twostroke").rglob("*.py")}
    static = (ROOT / "twostroke/serve/static").rglob("*.*")
    assert here | {str(path.relative_to(ROOT)) for path in static} <= set(sizes)
    assert sum(sizes.values()) < 11e6


def test_on_pypi_every_link_of_the_readme_is_absolute_and_leads_to_a_file(
    sdist: tarfile.TarFile,
) -> None:
    info = sdist.extractfile(f"twostroke-{__version__}/PKG-INFO")
    assert info is not None
    text = info.read().decode()
    repository = PROJECT["project"]["urls"]["Repository"]
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", text)
    ours = [path for _, path in links if path.startswith(repository)]
    assert len(ours) > 10
    assert all(path.startswith(("https://", "#")) for _, path in links)
    for image, path in links:
        kind, _, file = path.removeprefix(f"{repository}/").partition("/main/")
        assert kind == ("raw" if image else "blob"), path
        assert (ROOT / file.partition("#")[0]).exists(), path
    for name in ("Classifier: Typing :: Typed", "Project-URL: Changelog", "License-File: LICENSE"):
        assert name in text


def test_the_readme_as_it_is_on_pypi_leaves_other_links_alone() -> None:
    spec = importlib.util.spec_from_file_location("pypi_readme", ROOT / "native/pypi_readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "[a](docs/A.md#b) ![c](d.png) [e](https://f) [g](#h)"
    assert module.absolute(text, "R") == (
        "[a](R/blob/main/docs/A.md#b) ![c](R/raw/main/d.png) [e](https://f) [g](#h)"
    )


def test_the_version_is_one() -> None:
    assert PROJECT["project"]["version"] == __version__
    assert f"\n## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_wheels_are_built_for_the_pythons_that_the_project_takes() -> None:
    config = PROJECT["tool"]["cibuildwheel"]
    least = PROJECT["project"]["requires-python"].removeprefix(">=3.")
    assert f"cp3{least}-manylinux_*" in config["build"]
    assert config["config-settings"] == {"wheel.cmake": "true"}
    program, *words = shlex.split(config["test-command"])
    assert program in PROJECT["project"]["scripts"]
    assert reading.PARSER.parse_args(words).prompt == ["hi"]


# ── deploy/ ─────────────────────────────────────────────────────────────────────────────────────


def test_the_image_serves_where_it_says_as_nobody_in_particular() -> None:
    commands = re.findall(r"^(\s*)CMD (\[.*\])$", DOCKERFILE, re.M)
    (health,), (start,) = (
        [json.loads(words) for indent, words in commands if bool(indent) == inner]
        for inner in (True, False)
    )
    settings = settings_of(start)
    assert (settings.host, str(settings.port)) == (
        "0.0.0.0",
        re.findall(r"EXPOSE (\d+)", DOCKERFILE)[0],
    )
    assert f"http://127.0.0.1:{settings.port}/health" in health[-1]
    compile(health[-1], "HEALTHCHECK", "exec")
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.M)
    for name in ("cpu", "cuda", "cluster"):
        (stage,) = [one for one in stages if f" AS {name}\n" in one]
        assert stage.rstrip().endswith(f"USER {USER}")
    assert f"--uid {USER}" in DOCKERFILE


def test_what_an_image_is_built_from_is_let_through() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    wanted = {*PROJECT["tool"]["scikit-build"]["wheel"]["packages"], "native", "pyproject.toml"}
    assert wanted | {*PROJECT["project"]["license-files"], "README.md"} == kept


def test_the_compose_file_starts_and_watches_the_server() -> None:
    services = read("compose.yaml")["services"]
    server = services["twostroke"]
    settings = settings_of(
        [word.replace("${MODEL:-default}", "default") for word in server["command"]]
    )
    assert settings.open_metrics
    assert settings.drain_s < int(server["stop_grace_period"].removesuffix("s"))
    assert (DEPLOY / server["build"]["context"]).resolve() == ROOT
    assert (ROOT / server["build"]["dockerfile"]).is_file()
    gpu = read("compose.gpu.yaml")["services"]["twostroke"]
    for target in (server["build"]["target"], gpu["build"]["target"]):
        assert f" AS {target}\n" in DOCKERFILE
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            known = source in read("compose.yaml")["volumes"]
            assert known or (DEPLOY / source).exists(), volume
    scraped = read("monitoring/prometheus.compose.yml")["scrape_configs"][0]["static_configs"]
    assert scraped == [{"targets": [f"twostroke:{settings.port}"]}]
    source = read("monitoring/grafana/datasources/prometheus.yaml")["datasources"][0]
    assert source["url"] == "http://prometheus:9090"
    folder = read("monitoring/grafana/dashboards/twostroke.yaml")["providers"][0]["options"]["path"]
    assert any(f":{folder}/grafana.json:" in one for one in services["grafana"]["volumes"])


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_starts_the_server_and_asks_it_what_it_answers(name: str) -> None:
    parts = manifest(name)
    pod = parts["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    settings = settings_of(container["args"])
    assert settings.open_metrics
    assert settings.host == "0.0.0.0"
    assert settings.drain_s + 5 < pod["terminationGracePeriodSeconds"]
    assert container["ports"] == [{"name": "http", "containerPort": settings.port}]
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert "livenessProbe" not in container, "an engine that is started again is no reason to kill"
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == USER
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert set(mounts) == {one["name"] for one in pod["volumes"]}
    assert f"VOLUME {mounts['models']}\n" in DOCKERFILE
    labels = parts["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert parts["Service"]["spec"]["selector"] == labels
    assert parts["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    monitor = manifest("podmonitor.yaml")["PodMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"] == labels


# Fields of a RayCluster (ray.io/v1) that its resource definition has, and those it must have.
RAY_CLUSTER = {
    "headGroupSpec!", "workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling",
    "autoscalerOptions", "headServiceAnnotations", "suspend",
}  # fmt: skip
RAY_HEAD = {"serviceType", "headService", "enableIngress", "rayStartParams!", "template!"}
RAY_WORKERS = {
    "groupName!", "replicas", "minReplicas!", "maxReplicas!", "numOfHosts", "rayStartParams!",
    "template!", "scaleStrategy",
}  # fmt: skip
RAY_AUTOSCALER = {
    "resources", "image", "imagePullPolicy", "env", "envFrom", "volumeMounts", "securityContext",
    "idleTimeoutSeconds", "upscalingMode",
}  # fmt: skip


def assert_fields(given: dict[str, Any], known: set[str]) -> None:
    assert given.keys() <= {name.rstrip("!") for name in known}
    assert {name.rstrip("!") for name in known if name.endswith("!")} <= given.keys()


def test_the_ray_manifest_has_nodes_for_every_engine_and_a_server_that_joins_them() -> None:
    parts = manifest("ray.yaml")
    cluster, server = parts["RayCluster"], parts["Deployment"]
    assert cluster["apiVersion"] == "ray.io/v1"
    spec = cluster["spec"]
    assert_fields(spec, RAY_CLUSTER)
    assert_fields(spec["headGroupSpec"], RAY_HEAD)
    assert_fields(spec["autoscalerOptions"], RAY_AUTOSCALER)
    assert f'"ray[default]=={spec["rayVersion"]}"' in DOCKERFILE
    pod = server["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert settings_of(container["args"]).host == "0.0.0.0"
    args = [word.partition("=") for word in container["args"]]
    given = {name.removeprefix("--"): value for name, _, value in args}
    assert f"--address {cluster['metadata']['name']}-head-svc:6379" in container["command"][2]
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    assert set(groups) == {"prefill", "decode"}
    for phase, group in groups.items():
        assert_fields(group, RAY_WORKERS)
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["replicas"] == int(given[f"{phase}-engines"])
        # Quoted twice: once for the shell that KubeRay starts Ray with.
        has = json.loads(json.loads(group["rayStartParams"]["resources"]))
        assert has == json.loads(given[f"{phase}-resources"])
    for group in (spec["headGroupSpec"], *groups.values()):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        (node,) = group["template"]["spec"]["containers"]
        assert node["image"] == container["image"] == "twostroke:cluster"
        assert group["template"]["spec"]["securityContext"]["runAsUser"] == USER
    cores = groups["decode"]["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"]
    assert cores == given["threads"]


def test_the_unit_starts_the_server_with_its_settings() -> None:
    unit = (DEPLOY / "systemd" / "twostroke.service").read_text()
    (words,) = re.findall(r"^ExecStart=(.*)$", unit, re.M)
    program, *args = words.split()
    assert Path(program).name in PROJECT["project"]["scripts"]
    settings = DEPLOY / "systemd" / "serve.yaml"
    args = [str(settings) if word == "/etc/twostroke/serve.yaml" else word for word in args]
    served = settings_of(args)
    assert served.host == "127.0.0.1"
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)
    assert served.drain_s < int(stop_s)
    commented = re.findall(r"^# ([\w-]+: .*)$", settings.read_text(), re.M)
    assert commented
    for line in commented:
        ((flag, value),) = yaml.safe_load(line).items()
        settings_of(["serve", f"--{flag}", str(value)])
