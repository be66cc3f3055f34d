"""`RayCluster`: engines as actors of a Ray cluster.

Ray chooses the node of an engine, and starts the engine again when it or its node dies. This is the
only module that imports ray.

    server ── placement group, actor ─▶ Ray ─▶ a worker process of some node: `EngineActor`
    server ◀── messages of engine/wire.py, over ZeroMQ ──▶ the engine in it
    engine ◀── KV blocks, over shared memory or ZeroMQ ──▶ engine

The server listens at an address of its own for each life of an engine, and asks the actor to `run`
one; the engine's first message says where it listens. When the worker dies, that call fails, Ray
starts the actor in another, and the server asks it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, replace
from threading import Event, Lock
from time import monotonic
from typing import Any

from twostroke import __version__, log_lines
from twostroke.config import EngineConfig
from twostroke.engine.process import run_engine
from twostroke.engine.spawn import DEFAULT_BUILDER
from twostroke.errors import ConfigError, EngineError
from twostroke.route.pool_settings import PooledEngine

try:
    import ray
    from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError(
        f"--ray needs Ray, which cannot be imported ({error}); install it with "
        "pip install 'twostroke[cluster]'"
    ) from None

CONNECT_S = 5.0  # for the address to answer at all
POLL_S = 0.2  # how often a thread that waits for Ray checks whether it must still wait
ACTOR_START_S = 300.0  # for Ray to start a worker process, and for its imports
KILLED_S = 10.0  # without news from Ray, after which a killed worker counts as ended


class RayCluster:
    """A cluster that engines run on."""

    def __init__(
        self, address: str, patience_s: float = 60.0, builder: str = DEFAULT_BUILDER
    ) -> None:
        """`address`: "auto" for the cluster that this machine is a node of, or HOST:PORT of its
        head. `patience_s`: how long an engine may wait for room."""
        if address.startswith("ray://"):
            raise ConfigError(
                f"--ray {address} is an address of Ray's client; the server is to be on a node of "
                'the cluster: give HOST:PORT of its head (6379 unless set otherwise), or "auto"'
            )
        _check_answers(address)
        try:
            ray.init(address=address, namespace="twostroke", logging_level="warning")
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise ConfigError(
                f"--ray {address}: {_first_line(error)}; start a cluster with `ray start --head`, "
                "and join it on this machine with `ray start --address HOST:PORT`"
            ) from None
        self.host: str = ray.util.get_node_ip_address()
        self.patience_s, self.builder = patience_s, builder

    def launcher(self, engine: PooledEngine) -> RayLauncher:
        return RayLauncher(self, engine)

    def check_capacity(self, config: EngineConfig, num_engines: int) -> None:
        """Not checked: Ray finds out when it places an engine."""

    def close(self) -> None:
        ray.shutdown()

    def nodes(self) -> list[dict[str, float]]:
        """The resources of each node that is alive."""
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def placed(self, engines: Sequence[PooledEngine]) -> list[PooledEngine]:
        """Adapt the engines to the cluster: each gets as many threads as cores, and its share of a
        node's memory. `threads`, if given, is the number of cores of an engine."""
        nodes = self.nodes()
        for one in engines:
            if one.config.device.startswith("cuda:"):
                raise ConfigError(f"--device {one.config.device}: Ray chooses the GPU; give cuda")
        if any(_wants_gpus(engine.config, nodes) for engine in engines):
            return [e._replace(config=replace(e.config, engines_on_host=1)) for e in engines]
        cores = [int(node.get("CPU", 0)) for node in nodes]
        alike = _cores_each(cores, len(engines))
        adapted = []
        for engine in engines:
            threads = engine.config.threads or alike
            if not threads:
                raise ConfigError(
                    f"--ray: {len(engines)} engines want at least one CPU each, and the cluster's "
                    f"{len(nodes)} nodes have {sum(cores)}; ask for fewer engines or add nodes"
                )
            on_host = max(1, max(cores) // threads)
            config = replace(engine.config, threads=threads, engines_on_host=on_host)
            adapted.append(engine._replace(config=config))
        return adapted

    def bundle(self, engine: PooledEngine) -> dict[str, float]:
        """The resources that one engine takes of a node."""
        config = engine.config
        cores, gpus = max(config.threads or 1, config.threads_batch or 1), {}
        if _wants_gpus(config, self.nodes()):
            cores, gpus = 1, {"GPU": float(config.tensor_parallel_size)}
        return {"CPU": float(cores), **gpus, **engine.resources}

    def no_room(self, name: str, bundle: dict[str, float]) -> str:
        wanted = " and ".join(f"{count:g} {resource}" for resource, count in bundle.items())
        free = ray.available_resources()
        available = ", ".join(f"{free.get(name, 0):g} {name}" for name in bundle)
        return (
            f"the Ray cluster had no room for {name} within {self.patience_s:.0f} s: it takes "
            f"{wanted} of one node, and {available} are free on {len(self.nodes())} nodes; add "
            "nodes, ask for fewer engines or --threads, or raise --ray-timeout-s if nodes are on "
            "their way"
        )


class RayLauncher:
    """The place of one engine: a placement group with an actor that Ray starts again."""

    def __init__(self, cluster: RayCluster, engine: PooledEngine) -> None:
        self.cluster, self._engine = cluster, engine
        self.secret = engine.config.engine_secret
        self.start_timeout_s = engine.config.start_timeout_s
        self._group: Any = None
        self._actor: Any = None
        self._closed, self._lock = Event(), Lock()

    def launch(self) -> RayLaunched:
        return RayLaunched(self)

    async def close(self) -> None:
        self._closed.set()
        await asyncio.to_thread(self._give_back)

    def _give_back(self) -> None:
        with self._lock, contextlib.suppress(RayError, ValueError):
            if self._actor is not None:
                ray.kill(self._actor, no_restart=True)
            if self._group is not None:
                remove_placement_group(self._group)
            self._actor = self._group = None

    def actor(self, ending: Event) -> Any:
        """Return the actor; place it first if needed. Called in a thread. Raises `EngineError`."""
        with self._lock:
            if self._closed.is_set():
                raise EngineError("its place was given back")
            if self._actor is None:
                name, config = self._engine.name, self._engine.config
                bundle = self.cluster.bundle(self._engine)
                self._group = placement_group([bundle], name=f"twostroke {name}")
                if not self._placed(ending):
                    remove_placement_group(self._group)
                    self._group = None
                    raise EngineError(self.cluster.no_room(name, bundle))
                strategy = PlacementGroupSchedulingStrategy(self._group, 0)
                self._actor = (
                    ray.remote(EngineActor)
                    .options(
                        name=f"{name} of {os.getpid()} on {self.cluster.host}",
                        num_cpus=bundle["CPU"],
                        num_gpus=bundle.get("GPU", 0),
                        scheduling_strategy=strategy,
                        max_restarts=-1,  # the server gives up after several deaths in a row
                        max_task_retries=0,  # the server decides what is sent again
                    )
                    .remote(name, asdict(config), self.cluster.builder, __version__)
                )
            return self._actor

    def did_not_start(self, actor: Any) -> EngineError:
        """Give up an actor that does not start: the next life gets a new one. Return the error."""
        with self._lock:
            if self._actor is actor:
                self._actor = None
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor, no_restart=True)
        return EngineError(
            f"the Ray actor of {self._engine.name} has not started within {ACTOR_START_S:g} s; "
            "`ray status` shows whether its node lives, and the logs of Ray on that node "
            "(/tmp/ray/session_latest/logs) show what its worker waits for"
        )

    def _placed(self, ending: Event) -> bool:
        until = monotonic() + self.cluster.patience_s
        while monotonic() < until and not ending.is_set() and not self._closed.is_set():
            if self._group.wait(POLL_S):
                return True
        return False


class RayLaunched:
    """One life of an engine: a call of its actor's `run`."""

    def __init__(self, launcher: RayLauncher) -> None:
        self._launcher = launcher
        self.endpoint = f"tcp://{launcher.cluster.host}:*"
        self.secret = launcher.secret
        self.start_timeout_s = launcher.start_timeout_s  # once Ray has started the actor
        self.stopped = False  # unknown
        self.running = False  # Ray may have to make room or start a node first
        self._send_to, self._how = "", ""
        self._ending, self._ended = Event(), Event()
        self._ending_s = 0.0
        self._actor: Any = None

    def listening(self, endpoint: str) -> None:
        self._send_to = endpoint

    def wait(self) -> None:
        try:
            self._actor = self._launcher.actor(self._ending)
            if self._wait_until_up():
                running = self._actor.run.remote(self._send_to)
                self.running = True
                if self._wait_for(running):
                    self._how = f"its engine ended with exit code {ray.get(running)}"
            self._how = self._how or "it was killed"
        except EngineError as error:
            self._how = str(error)
        except ActorUnavailableError:
            self._how = "its Ray actor died"  # the error is a page of advice
        except RayActorError as error:  # it could not be made
            self._how = f"its Ray actor could not start: {_last_line(error)}"
        except RayTaskError as error:
            self._how = str(error.cause)
        except Exception as error:
            self._how = f"Ray failed: {_first_line(error)}"
        self._ended.set()

    def _wait_until_up(self) -> bool:
        """Wait until Ray has started the actor, or started it again; False: it was killed. Raises
        `EngineError` if that takes too long."""
        begun_s = monotonic()
        while not self._ending.is_set():
            up = self._actor.__ray_ready__.remote()
            if not self._wait_for(up, begun_s):
                if self._ending.is_set():
                    return False
                raise self._launcher.did_not_start(self._actor)
            try:
                return bool(ray.get(up))
            except ActorUnavailableError:
                self._ending.wait(POLL_S)
        return False

    def _wait_for(self, ref: Any, begun_s: float = math.inf) -> bool:
        """Wait for a result; False: it has not come within `ACTOR_START_S` of `begun_s`, or the
        worker was killed and Ray has not reported it."""
        while not ray.wait([ref], timeout=POLL_S)[0]:
            now = monotonic()
            if self._ending.is_set() and now - self._ending_s > KILLED_S:
                return False
            if now - begun_s > ACTOR_START_S:
                return False
        return True

    def how_it_ended(self) -> str:
        return self._how

    def end(self) -> None:
        if self._ending.is_set() or self._ended.is_set():
            return
        self._ending_s = monotonic()
        self._ending.set()
        if self._actor is not None:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(self._actor, no_restart=False)

    def clean_up(self) -> None: ...


class EngineActor:
    """The engine, in the worker that Ray chose."""

    def __init__(self, name: str, config: dict[str, Any], builder: str, version: str) -> None:
        """`version`: the server's; messages of other versions may differ."""
        self._name, self._config, self._builder = name, config, builder
        self._version = version

    def run(self, send_to: str) -> int:
        """Build the engine and serve until it is told to end."""
        log_lines.configure()
        if self._version != __version__:
            raise EngineError(
                f"{self._name} has twostroke {__version__}, and the server {self._version}; "
                "install the same on all nodes"
            )
        host: str = ray.util.get_node_ip_address()
        # Ray hides the other GPUs of the node from this worker.
        config = EngineConfig(**self._config | {"kv_host": host, "engine_index": 0})
        where = f"{self._name} on node {host}"
        code = run_engine(
            config,
            self._builder,
            send_to,
            listen_at=f"tcp://{host}:*",
            where=where,
            secret=config.engine_secret,
        )
        if code:  # the next engine must begin in a fresh worker
            os._exit(code)
        return code


def _check_answers(address: str) -> None:
    """Raise `ConfigError` if nothing answers; Ray itself would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f'--ray {address}: expected HOST:PORT of the cluster\'s head, or "auto"')
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--ray {address}: nothing answers there ({error}); start a cluster with `ray start "
            "--head --port 6379`, and give the address that it prints"
        ) from None


def _wants_gpus(config: EngineConfig, nodes: Sequence[dict[str, float]]) -> bool:
    there = any(node.get("GPU", 0) >= 1 for node in nodes)
    return config.device.startswith("cuda") or (config.device == "auto" and there)


def _cores_each(cores: Sequence[int], num_engines: int) -> int:
    """Return the most cores that every engine can have, each on one node; 0: too few cores."""
    for each in range(max(cores, default=0), 0, -1):
        if sum(node // each for node in cores) >= num_engines:
            return each
    return 0


def _first_line(error: Exception) -> str:
    return _lines(error)[0]


def _last_line(error: Exception) -> str:
    return _lines(error)[-1]


def _lines(error: Exception) -> list[str]:
    lines = [line.strip()[:300] for line in str(error).splitlines() if line.strip()]
    return lines or [type(error).__name__]
