"""`Scaling`: pools that grow and shrink while they serve.

    grow      launch ─▶ ready ─▶ a member like any other
    shrink    a member gets no new requests ─▶ its requests end, or after `drain_timeout_s` continue
              in other engines from their last token ─▶ its process ends

Members leave only when all new engines are up. If a new engine cannot start, the pools do not
change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple, Protocol

from twostroke.engine.child import Child
from twostroke.engine.spawn import Launcher
from twostroke.engine.wire import Ready
from twostroke.errors import ConfigError, RequestError
from twostroke.route.member import Member
from twostroke.route.pool_settings import MAX_ENGINES, EnginePlacement, PooledEngine
from twostroke.route.router import Role

POLL_S = 0.05  # how often a draining engine is checked

log = logging.getLogger(__name__)


class StartedEngine(NamedTuple):
    engine: PooledEngine
    launcher: Launcher
    child: Child
    ready: Ready


class PoolOwner(Protocol):
    """The client that has the engines."""

    members: list[Member]

    def join(self, started: Sequence[StartedEngine]) -> None:
        """Add started engines to the members."""

    def num_requests_of(self, member: Member) -> int:
        """Return the number of requests that a member runs, or whose blocks it offers."""

    def move_requests_from(self, member: Member) -> None:
        """Continue the requests of a member in other engines."""

    def remove(self, member: Member) -> None: ...


async def start_engines(
    engines: Sequence[PooledEngine],
    placement: EnginePlacement,
    hang_timeout_s: float,
    meanwhile: Callable[[], None] | None = None,
    members: Sequence[Member] = (),
) -> list[StartedEngine]:
    """Start all engines. If an engine fails to start, end all of them and raise its error.
    `meanwhile`: a function to run in a thread during the start. `members`: the running engines."""
    launchers = [placement.launcher(engine) for engine in engines]
    children: list[Child] = []
    starting: list[asyncio.Task[Ready]] = []
    try:
        for launcher in launchers:
            children.append(Child(launcher.launch(), hang_timeout_s))
            starting.append(asyncio.create_task(children[-1].start()))
        if meanwhile is not None:
            await asyncio.to_thread(meanwhile)
        all_ready = await asyncio.gather(*starting)
        if engines[0].role is not Role.BOTH:
            layouts = {member.name: member.info.kv_layout for member in members}
            pairs = zip(engines, all_ready, strict=True)
            check_layouts(layouts | {engine.name: ready.info.kv_layout for engine, ready in pairs})
    except BaseException:
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        for child in children:
            await child.kill_and_close()
        for launcher in launchers:
            await launcher.close()
        raise
    started = zip(engines, launchers, children, all_ready, strict=True)
    return [StartedEngine(*each) for each in started]


def check_layouts(layouts: Mapping[str, str]) -> None:
    """Raise `ConfigError` if engines keep their blocks in different layouts. `layouts`: the layout
    of each engine, by its name."""
    (first, wanted), *others = layouts.items()
    for name, layout in others:
        if layout != wanted:
            raise ConfigError(
                f"KV blocks cannot travel between {first} and {name}: one keeps {wanted}, the "
                f"other {layout}; give both the same model, block_size, dtype, kv_cache_dtype, "
                "kernels and kind of device"
            )


class Scaling:
    def __init__(
        self,
        owner: PoolOwner,
        engines: Sequence[PooledEngine],
        placement: EnginePlacement,
        hang_timeout_s: float,
    ) -> None:
        """`engines`: the engines at the start. New engines copy the first of their pool."""
        self._owner, self._placement, self._hang_timeout_s = owner, placement, hang_timeout_s
        self._first = {engine.role: engine for engine in reversed(engines)}
        self._indices = {engine.name: engine.config.engine_index for engine in engines}
        self._task: asyncio.Task[None] | None = None

    @property
    def active(self) -> bool:
        return self._task is not None and not self._task.done()

    def counts(self) -> dict[Role, int]:
        staying = [member for member in self._owner.members if not member.leaving]
        return {
            role: sum(member.state.role is role for member in staying)
            for role in Role
            if role in self._first
        }

    async def scale(self, counts: Mapping[Role, int], drain_timeout_s: float) -> None:
        """Change the pools. If the caller is cancelled, the change continues."""
        if self.active:
            raise RequestError("the pools are being changed already; GET /pools tells when it ends")
        for role, wanted in counts.items():
            self._check(role, wanted)
        self._task = asyncio.create_task(self._scale(counts, drain_timeout_s))
        self._task.add_done_callback(_log_failure)  # in case the caller was cancelled
        await asyncio.shield(self._task)

    def _check(self, role: Role, count: int) -> None:
        if role not in self._first:
            pools = " and ".join(map(pool_name, self._first))
            raise RequestError(f"{pool_name(role)}: there is no such pool here, only {pools}")
        if not 1 <= count <= MAX_ENGINES:
            raise RequestError(f"{pool_name(role)} must be from 1 to {MAX_ENGINES}, not {count}")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._task

    async def _scale(self, counts: Mapping[Role, int], drain_timeout_s: float) -> None:
        now = self.counts()
        new: list[PooledEngine] = []
        for role, wanted in counts.items():
            for _ in range(wanted - now[role]):
                new.append(self._new(role, new))
        if new:
            for engine in new:
                num_engines = len(self._owner.members) + len(new)
                self._placement.check_capacity(engine.config, num_engines)
            members, timeout_s = self._owner.members, self._hang_timeout_s
            self._owner.join(await start_engines(new, self._placement, timeout_s, members=members))
            log.info("%s joined", ", ".join(engine.name for engine in new))
        leaving = [
            member for role in counts for member in self._to_leave(role, now[role] - counts[role])
        ]
        await asyncio.gather(*(self._remove(member, drain_timeout_s) for member in leaving))

    def _new(self, role: Role, others: Sequence[PooledEngine]) -> PooledEngine:
        """Return one more engine, with an unused name and index. `others`: other new engines."""
        taken = {member.name for member in self._owner.members} | {new.name for new in others}
        name = next(name for n in count() if (name := f"{role}-{n}") not in taken)
        indices = {self._indices[used] for used in taken}
        self._indices[name] = next(n for n in count() if n not in indices)
        config = replace(self._first[role].config, engine_index=self._indices[name])
        return self._first[role]._replace(name=name, config=config)

    def _to_leave(self, role: Role, count: int) -> list[Member]:
        """Choose members of a pool to remove: first members that do not run, then the newest."""
        pool = [each for each in self._owner.members if each.state.role is role]
        pool = [member for member in reversed(pool) if not member.leaving]
        pool.sort(key=lambda member: (not member.given_up, member.healthy))
        return pool[: max(0, count)]

    async def _remove(self, member: Member, drain_timeout_s: float) -> None:
        owner = self._owner
        member.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_timeout_s):
                while owner.num_requests_of(member) and not member.given_up:
                    await asyncio.sleep(POLL_S)
        owner.move_requests_from(member)
        owner.remove(member)
        await member.stop()
        log.info("%s has left", member.name)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("the pools stay as they were: %s", error)


def pool_name(role: Role) -> str:
    """Return the name of a pool in settings and messages."""
    return "data_parallel_size" if role is Role.BOTH else str(role)
