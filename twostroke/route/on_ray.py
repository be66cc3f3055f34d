"""`RayCluster`: engines as actors of a Ray cluster.

Ray chooses the node of an engine, and starts the engine again when the engine or its node dies.
This is the only module that imports ray.

    server ── placement group, actor ─▶ Ray ─▶ a worker process on some node: `EngineActor`
    server ◀── messages of engine/wire.py, over ZeroMQ ──▶ the engine in the worker process
    engine ◀── KV blocks, over shared memory or ZeroMQ ──▶ engine

For each run of an engine the server listens at a new address and calls the actor's method `run`
with this address. The engine's first message has the address at which the engine listens. When the
worker process dies, the call of `run` fails, Ray starts the actor in another worker process, and
the server calls `run` again.
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

CONNECT_S = 5.0  # time limit for a connection to the cluster's head
POLL_S = 0.2  # a thread that waits for Ray checks in these intervals whether to stop waiting
ACTOR_START_S = 300.0  # time limit for the start of a worker process, with its imports
KILL_REPORT_S = 10.0  # after this time a killed worker counts as ended even if Ray is silent


class RayCluster:
    """A cluster that engines run on."""

    def __init__(
        self, address: str, placement_timeout_s: float = 60.0, builder: str = DEFAULT_BUILDER
    ) -> None:
        """`address`: HOST:PORT of the cluster's head, or "auto" for the cluster of which this
        machine is a node. `placement_timeout_s`: how long an engine may wait for free resources."""
        if address.startswith("ray://"):
            raise ConfigError(
                f"--ray {address} is an address for Ray Client, which is not supported. Run the "
                "server on a node of the cluster, and give HOST:PORT of the cluster's head (the "
                'default port is 6379) or "auto"'
            )
        _check_reachable(address)
        try:
            ray.init(address=address, namespace="twostroke", logging_level="warning")
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise ConfigError(
                f"--ray {address}: {_first_line(error)}; start a cluster with `ray start --head`, "
                "and join it on this machine with `ray start --address HOST:PORT`"
            ) from None
        self.host: str = ray.util.get_node_ip_address()
        self.placement_timeout_s, self.builder = placement_timeout_s, builder

    def launcher(self, engine: PooledEngine) -> RayLauncher:
        return RayLauncher(self, engine)

    def check_capacity(self, config: EngineConfig, num_engines: int) -> None:
        """Do nothing: Ray checks the resources when it places an engine."""

    def close(self) -> None:
        ray.shutdown()

    def nodes(self) -> list[dict[str, float]]:
        """Return the resources of each node that is alive."""
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def adapt(self, engines: Sequence[PooledEngine]) -> list[PooledEngine]:
        """Return the engines with settings for this cluster. On CPUs an engine gets `threads`
        cores; if `threads` is not set, all engines get the same number of cores. `engines_on_host`,
        by which the memory of a node is divided, becomes the number of engines that fit on a
        node."""
        nodes = self.nodes()
        for engine in engines:
            device = engine.config.device
            if device.startswith("cuda:"):
                raise ConfigError(f"--device {device}: Ray chooses the GPU; give --device cuda")
        if any(_needs_gpus(engine.config, nodes) for engine in engines):
            return [
                engine._replace(config=replace(engine.config, engines_on_host=1))
                for engine in engines
            ]
        cores = [int(node.get("CPU", 0)) for node in nodes]
        default_threads = _max_cores(cores, len(engines))
        adapted = []
        for engine in engines:
            threads = engine.config.threads or default_threads
            if not threads:
                raise ConfigError(
                    f"--ray: {len(engines)} engines need at least one CPU each, and the cluster's "
                    f"{len(nodes)} nodes have {sum(cores)}; ask for fewer engines or add nodes"
                )
            on_host = max(1, max(cores) // threads)
            config = replace(engine.config, threads=threads, engines_on_host=on_host)
            adapted.append(engine._replace(config=config))
        return adapted

    def bundle(self, engine: PooledEngine) -> dict[str, float]:
        """Return the resources that one engine needs on a node, as a bundle for Ray."""
        config = engine.config
        cores, gpus = max(config.threads or 1, config.threads_batch or 1), {}
        if _needs_gpus(config, self.nodes()):
            cores, gpus = 1, {"GPU": float(config.tensor_parallel_size)}
        return {"CPU": float(cores), **gpus, **engine.resources}

    def no_room_message(self, name: str, bundle: dict[str, float]) -> str:
        """Return the error for an engine that could not be placed in time."""
        needed = " and ".join(f"{count:g} {resource}" for resource, count in bundle.items())
        free = ray.available_resources()
        available = ", ".join(f"{free.get(resource, 0):g} {resource}" for resource in bundle)
        return (
            f"the Ray cluster had no room for {name} within {self.placement_timeout_s:.0f} s: the "
            f"engine needs {needed} on one node, and {available} are free on {len(self.nodes())} "
            "nodes; add nodes, ask for fewer engines or --threads, or raise --ray-timeout-s if new "
            "nodes are starting"
        )


class RayLauncher:
    """The placement group and the actor of one engine. Ray starts the actor again when it dies."""

    def __init__(self, cluster: RayCluster, engine: PooledEngine) -> None:
        self.cluster, self._engine = cluster, engine
        self.secret = engine.config.engine_secret
        self.start_timeout_s = engine.config.start_timeout_s
        self._group: Any = None
        self._actor: Any = None
        self._closed, self._lock = Event(), Lock()

    def launch(self) -> RayEngineRun:
        return RayEngineRun(self)

    async def close(self) -> None:
        self._closed.set()
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        with self._lock, contextlib.suppress(RayError, ValueError):
            if self._actor is not None:
                ray.kill(self._actor, no_restart=True)
            if self._group is not None:
                remove_placement_group(self._group)
            self._actor = self._group = None

    def actor(self, ending: Event) -> Any:
        """Return the actor; create it at the first call. Raise `EngineError` if the cluster has no
        room for the actor. Called in a thread."""
        with self._lock:
            if self._closed.is_set():
                raise EngineError("its placement group was removed")
            if self._actor is None:
                name, config = self._engine.name, self._engine.config
                bundle = self.cluster.bundle(self._engine)
                self._group = placement_group([bundle], name=f"twostroke {name}")
                if not self._wait_for_placement(ending):
                    remove_placement_group(self._group)
                    self._group = None
                    raise EngineError(self.cluster.no_room_message(name, bundle))
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

    def give_up(self, actor: Any) -> EngineError:
        """Kill an actor that does not start, so that the next run creates a new actor. Return the
        error to raise."""
        with self._lock:
            if self._actor is actor:
                self._actor = None
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor, no_restart=True)
        return EngineError(
            f"the Ray actor of {self._engine.name} has not started within {ACTOR_START_S:g} s; "
            "`ray status` shows whether its node is alive, and Ray's logs on that node "
            "(/tmp/ray/session_latest/logs) show why the worker process does not start"
        )

    def _wait_for_placement(self, ending: Event) -> bool:
        deadline_s = monotonic() + self.cluster.placement_timeout_s
        while monotonic() < deadline_s and not ending.is_set() and not self._closed.is_set():
            if self._group.wait(POLL_S):
                return True
        return False


class RayEngineRun:
    """One run of an engine: a call of its actor's `run`."""

    def __init__(self, launcher: RayLauncher) -> None:
        self._launcher = launcher
        self.endpoint = f"tcp://{launcher.cluster.host}:*"
        self.secret = launcher.secret
        self.start_timeout_s = launcher.start_timeout_s  # counted from the start of the actor
        self.stopped = False  # always, because Ray does not report stopped processes
        self.running = False  # True when Ray has placed and started the actor
        self._send_to = ""  # the server's address, for the engine's messages
        self._end_reason = ""
        self._ending, self._ended = Event(), Event()
        self._ending_s = 0.0
        self._actor: Any = None

    def set_parent_endpoint(self, endpoint: str) -> None:
        self._send_to = endpoint

    def wait(self) -> None:
        try:
            self._actor = self._launcher.actor(self._ending)
            if self._wait_until_up():
                running = self._actor.run.remote(self._send_to)
                self.running = True
                if self._wait_for(running):
                    self._end_reason = f"its engine ended with exit code {ray.get(running)}"
            self._end_reason = self._end_reason or "it was killed"
        except EngineError as error:
            self._end_reason = str(error)
        except ActorUnavailableError:
            self._end_reason = "its Ray actor died"  # the text of the error is too long to show
        except RayActorError as error:  # the actor could not be created
            self._end_reason = f"its Ray actor could not start: {_last_line(error)}"
        except RayTaskError as error:
            self._end_reason = str(error.cause)
        except Exception as error:
            self._end_reason = f"Ray failed: {_first_line(error)}"
        self._ended.set()

    def _wait_until_up(self) -> bool:
        """Wait until Ray has started the actor, for the first time or after a death. Return False
        if `end` was called meanwhile. Raise `EngineError` after `ACTOR_START_S`."""
        began_s = monotonic()
        while not self._ending.is_set():
            up = self._actor.__ray_ready__.remote()
            if not self._wait_for(up, began_s):
                if self._ending.is_set():
                    return False
                raise self._launcher.give_up(self._actor)
            try:
                return bool(ray.get(up))
            except ActorUnavailableError:
                self._ending.wait(POLL_S)
        return False

    def _wait_for(self, ref: Any, began_s: float = math.inf) -> bool:
        """Wait for a result of Ray. Return False if `ACTOR_START_S` have passed since `began_s`, or
        if `end` was called and Ray has not reported the end of the worker."""
        while not ray.wait([ref], timeout=POLL_S)[0]:
            now = monotonic()
            if self._ending.is_set() and now - self._ending_s > KILL_REPORT_S:
                return False
            if now - began_s > ACTOR_START_S:
                return False
        return True

    def how_it_ended(self) -> str:
        return self._end_reason

    def end(self) -> None:
        if self._ending.is_set() or self._ended.is_set():
            return
        self._ending_s = monotonic()
        self._ending.set()
        if self._actor is not None:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(self._actor, no_restart=False)

    def clean_up(self) -> None:
        """Do nothing: a run has no files. `RayLauncher.close` removes the actor."""


class EngineActor:
    """The Ray actor that runs an engine in its worker process."""

    def __init__(self, name: str, config: dict[str, Any], builder: str, version: str) -> None:
        """`version`: the server's version. The engine must have the same version, because other
        versions may have other messages."""
        self._name, self._config, self._builder = name, config, builder
        self._version = version

    def run(self, send_to: str) -> int:
        """Build the engine and run it until a `Shutdown` message; return the exit code."""
        log_lines.configure()
        if self._version != __version__:
            raise EngineError(
                f"{self._name} runs twostroke {__version__}, but the server runs {self._version}; "
                "install the same version on all nodes"
            )
        host: str = ray.util.get_node_ip_address()
        # The worker sees only the GPUs that Ray has assigned to it, so the first index is 0.
        config = EngineConfig(**self._config | {"kv_host": host, "engine_index": 0})
        host_name = f"{self._name} on node {host}"
        code = run_engine(
            config,
            self._builder,
            send_to,
            listen_at=f"tcp://{host}:*",
            host_name=host_name,
            secret=config.engine_secret,
        )
        if code:  # the next engine must begin in a fresh worker
            os._exit(code)
        return code


def _check_reachable(address: str) -> None:
    """Raise `ConfigError` if the address does not accept connections. Ray would retry for minutes
    before it fails."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f'--ray {address}: expected HOST:PORT of the cluster\'s head, or "auto"')
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--ray {address}: no connection to this address ({error}); start a cluster with `ray "
            "start --head --port 6379`, and give the address that the command prints"
        ) from None


def _needs_gpus(config: EngineConfig, nodes: Sequence[dict[str, float]]) -> bool:
    has_gpus = any(node.get("GPU", 0) >= 1 for node in nodes)
    return config.device.startswith("cuda") or (config.device == "auto" and has_gpus)


def _max_cores(cores: Sequence[int], num_engines: int) -> int:
    """Return the largest number of cores that each engine can have; 0 if there are fewer cores than
    engines. An engine cannot span nodes. `cores`: the cores of each node."""
    for num_cores in range(max(cores, default=0), 0, -1):
        if sum(on_node // num_cores for on_node in cores) >= num_engines:
            return num_cores
    return 0


def _first_line(error: Exception) -> str:
    return _lines(error)[0]


def _last_line(error: Exception) -> str:
    return _lines(error)[-1]


def _lines(error: Exception) -> list[str]:
    lines = [line.strip()[:300] for line in str(error).splitlines() if line.strip()]
    return lines or [type(error).__name__]
