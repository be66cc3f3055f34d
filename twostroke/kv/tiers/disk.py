"""`DiskTier`: pieces as files in a folder. They outlive the process, and servers can share them.

    FOLDER/key                      random bytes: the key of the digests that name the pieces
    FOLDER/<identity>/<name>.kv     a piece; see `piece_file.py`

A file is written under a temporary name and then renamed, so that a killed process leaves no
incomplete piece. A missing or damaged file is a miss. If the file system allows it, reads and
writes bypass the page cache (O_DIRECT): the blocks are in the KV cache afterwards, and a second
copy would take memory and time.

One thread writes, removes and touches files in order; several threads read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic, time_ns
from typing import NamedTuple

from twostroke.errors import ConfigError
from twostroke.kv.tiers.piece_file import (
    KEY_BYTES,
    NAME_BYTES,
    SUFFIX,
    PieceBuffer,
    PieceLayout,
    block_in,
)
from twostroke.kv.tiers.tier import (
    Load,
    MissingPieceError,
    Store,
    StoreResult,
    TierBlocks,
    TierSpeed,
)
from twostroke.kv.transfer import DamagedError, TransferError

log = logging.getLogger(__name__)

READERS = 4
TEMPORARY = ".tmp-"
STALE_S = 3600.0  # age at which a temporary file is removed even if its process seems to run
PROBE_BYTES = 8 << 20
LATENCY_S = 0.001
FLUSH_S = 5.0  # maximum time for queued writes at the end of the process
DIRECT = getattr(os, "O_DIRECT", 0)


class _PieceFile(NamedTuple):
    path: str
    num_bytes: int
    mtime_ns: int


class DiskFolder:
    """The folder of a disk tier: its key, and its files at the start."""

    def __init__(self, path: str, layout: PieceLayout, max_bytes: int) -> None:
        self.path, self.layout, self.max_bytes = Path(path), layout, max_bytes
        self.own = self.path / layout.identity.hex()
        try:
            self.own.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.key = self._read_key()
            self.direct = self._check_writable()
        except OSError as error:
            raise ConfigError(
                f"kv_disk_cache: the folder {path} cannot be used ({error.strerror or error}); "
                "give a folder that this user can write to"
            ) from None
        self.others: deque[_PieceFile] = deque()  # pieces of other models, the oldest first
        files = self._list()
        own = [file for file in files if os.path.dirname(file.path) == str(self.own)]
        self.others.extend(sorted(set(files) - set(own), key=lambda file: file.mtime_ns))
        self.names = [bytes.fromhex(_stem(file.path)) for file in self._valid(own)]
        self.others_bytes = sum(file.num_bytes for file in self.others)

    def path_of(self, name: bytes) -> str:
        return f"{self.own}/{name.hex()}{SUFFIX}"

    def _read_key(self) -> bytes:
        """Return the folder's key. The first server that uses the folder writes the key."""
        path = self.path / "key"
        if not path.exists():
            temporary = self.path / f"{TEMPORARY}{os.getpid()}-key-{secrets.token_hex(4)}"
            temporary.write_bytes(secrets.token_bytes(KEY_BYTES))
            temporary.chmod(0o600)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)  # fails if another server was first
            temporary.unlink()
        key = path.read_bytes()
        if len(key) != KEY_BYTES:
            raise ConfigError(
                f"kv_disk_cache: {path} is not a key of a KV cache; give another folder, or "
                "remove the file and the files beside it"
            )
        return key

    def _check_writable(self) -> int:
        """Write a test file. Return O_DIRECT if the file system supports it, otherwise 0."""
        path = self.own / f"{TEMPORARY}{os.getpid()}-test-{secrets.token_hex(4)}"
        for flag in (DIRECT, 0):
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flag, 0o600)
                try:
                    os.pwrite(file, PieceBuffer(self.layout).view[:4096], 0)
                finally:
                    os.close(file)
                return flag
            except OSError:
                if not flag:
                    raise
            finally:
                with contextlib.suppress(OSError):
                    path.unlink()
        return 0

    def _list(self) -> list[_PieceFile]:
        """Return all pieces of all models. Remove temporary files of ended processes."""
        found = []
        for folder in os.scandir(self.path):
            if not folder.is_dir(follow_symlinks=False):
                continue
            for entry in os.scandir(folder.path):
                with contextlib.suppress(OSError):
                    if entry.name.startswith(TEMPORARY):
                        _remove_stale(entry)
                    elif entry.name.endswith(SUFFIX):
                        stat = entry.stat(follow_symlinks=False)
                        found.append(_PieceFile(entry.path, stat.st_size, stat.st_mtime_ns))
        return found

    def _valid(self, files: list[_PieceFile]) -> list[_PieceFile]:
        """Return the files with a valid name and length, the least recently used first. Remove all
        other files, and the oldest files above the size limit."""
        valid = []
        for file in files:
            if file.num_bytes == self.layout.file_bytes and _is_name(_stem(file.path)):
                valid.append(file)
            else:
                _unlink(file.path)
        valid.sort(key=lambda file: file.mtime_ns)
        excess = max(0, len(valid) - self.max_bytes // self.layout.file_bytes)
        for file in valid[:excess]:
            _unlink(file.path)
        return valid[excess:]


def _stem(path: str) -> str:
    return os.path.basename(path).removesuffix(SUFFIX)


def _is_name(text: str) -> bool:
    return len(text) == 2 * NAME_BYTES and set(text) <= set("0123456789abcdef")


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _remove_stale(entry: os.DirEntry[str]) -> None:
    pid = entry.name.removeprefix(TEMPORARY).partition("-")[0]
    age_s = time_ns() / 1e9 - entry.stat(follow_symlinks=False).st_mtime
    if age_s > STALE_S or not (pid.isdigit() and _is_alive(int(pid))):
        _unlink(entry.path)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


class DiskRead:
    """A fetch of pieces by the reading threads."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.num_bytes, self.seconds = 0, 0.0
        self.bad: list[bytes] = []
        self._left = len(loads)
        self._began_s = 0.0  # when the first piece was read
        self._error: TransferError | None = None
        self._ended = False
        self._lock = threading.Lock()

    @property
    def ended(self) -> bool:
        """True if the fetch has failed or was abandoned, so that no piece need be read."""
        return self._ended

    def poll(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._left == 0

    def begin(self) -> None:
        """Record the start of the first read."""
        with self._lock:
            self._began_s = self._began_s or monotonic()

    def deliver(self, num_bytes: int, write: Callable[[], None]) -> None:
        """Write a piece to the blocks, unless the fetch was abandoned."""
        with self._lock:
            if self._ended:
                return
            write()
            self.num_bytes += num_bytes
            self._left -= 1
            self.seconds = monotonic() - self._began_s

    def fail(self, error: TransferError, name: bytes, lost: bool) -> None:
        with self._lock:
            self._ended, self._error = True, self._error or error
            if lost:
                self.bad.append(name)

    def abandon(self) -> None:
        with self._lock:
            self._ended = True


class _Queues:
    """The state that the threads share. The threads do not refer to the tier, so that Python can
    collect an unused tier."""

    def __init__(self, folder: DiskFolder, blocks: TierBlocks) -> None:
        self.folder, self.blocks = folder, blocks
        self.writes: queue.SimpleQueue[Store | tuple[str, Sequence[bytes]] | None]
        self.writes = queue.SimpleQueue()
        self.reads: queue.SimpleQueue[tuple[DiskRead, Load] | None] = queue.SimpleQueue()
        self.finished: deque[StoreResult] = deque()
        self.changed = threading.Event()
        self.num_own = len(folder.names)
        self.num_temporary = 0
        self.writer = f"{os.getpid()}-{secrets.token_hex(4)}"  # in the names of temporary files
        self.warned = False


class DiskTier:
    name = "disk"

    def __init__(self, folder: DiskFolder, blocks: TierBlocks) -> None:
        layout = folder.layout
        self.folder, self.piece_bytes = folder, layout.file_bytes
        self.capacity = folder.max_bytes // layout.file_bytes
        if not self.capacity:
            raise ConfigError(
                f"kv_disk_cache: {folder.max_bytes:,} bytes hold no prefix; a file of "
                f"{layout.file_bytes:,} bytes holds the smallest part; give a larger size"
            )
        self._queues = _Queues(folder, blocks)
        self._threads = [
            threading.Thread(target=work, args=(self._queues,), name=name, daemon=True)
            for work, name in [(_write_all, "twostroke-disk-write")]
            + [(_read_all, f"twostroke-disk-read-{n}") for n in range(READERS)]
        ]
        for thread in self._threads:
            thread.start()
        self.speed = TierSpeed(_probe(folder), LATENCY_S)
        self._close = weakref.finalize(self, _finish, self._queues, self._threads, FLUSH_S)

    def name_of(self, digest: bytes) -> bytes:
        return self.folder.layout.name_of(digest, self.folder.key)

    def names(self) -> list[bytes]:
        return self.folder.names

    def store(self, store: Store) -> None:
        self._queues.writes.put(store)

    def fetch(self, loads: Sequence[Load]) -> DiskRead:
        read = DiskRead(loads)
        for load in loads:
            self._queues.reads.put((read, load))
        return read

    def drop(self, names: Sequence[bytes]) -> None:
        if names:
            self._queues.writes.put(("drop", names))

    def touch(self, names: Sequence[bytes]) -> None:
        self._queues.writes.put(("touch", names))

    def finished(self) -> list[StoreResult]:
        done = self._queues.finished
        return [done.popleft() for _ in range(len(done))]

    def wait(self, timeout_s: float) -> None:
        if self._queues.changed.wait(timeout_s):
            self._queues.changed.clear()

    def close(self, timeout_s: float) -> None:
        if self._close.detach() is not None:
            _finish(self._queues, self._threads, timeout_s)


def _finish(queues: _Queues, threads: Sequence[threading.Thread], timeout_s: float) -> None:
    """End the threads after the queued writes, or after `timeout_s`."""
    queues.writes.put(None)
    for _ in threads[1:]:
        queues.reads.put(None)
    deadline_s = monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - monotonic()))


# ── the writing thread ──────────────────────────────────────────────────────────────────────


def _write_all(queues: _Queues) -> None:
    buffer = PieceBuffer(queues.folder.layout)
    with queues.blocks.pinned(buffer.view):
        _write_until_end(queues, buffer)


def _write_until_end(queues: _Queues, buffer: PieceBuffer) -> None:
    while (work := queues.writes.get()) is not None:
        if isinstance(work, Store):
            queues.finished.append(_write(queues, work, buffer))
            queues.changed.set()
        elif work[0] == "drop":
            for name in work[1]:
                _unlink(queues.folder.path_of(name))
            queues.num_own -= len(work[1])
        else:
            now = time_ns() - len(work[1])
            for n, name in enumerate(work[1]):  # modification times store the order of use
                with contextlib.suppress(OSError):
                    os.utime(queues.folder.path_of(name), ns=(now + n, now + n))


def _write(queues: _Queues, store: Store, buffer: PieceBuffer) -> StoreResult:
    folder, layout = queues.folder, queues.folder.layout
    began_s = monotonic()
    if not store.copy(queues.blocks, buffer.groups):
        return StoreResult(store, False)
    queues.num_temporary += 1
    temporary = f"{folder.own}/{TEMPORARY}{queues.writer}-{queues.num_temporary}"
    try:
        layout.seal(buffer.view, store.name, store.tokens)
        _make_room(queues)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | folder.direct
        file = os.open(temporary, flags, 0o600)
        try:
            written = os.pwrite(file, buffer.view, 0)
            # The system's own times are as coarse as its tick: files of one tick had no order.
            os.utime(file, ns=(now_ns := time_ns(), now_ns))
        finally:
            os.close(file)
        if written != layout.file_bytes:
            raise OSError(28, "no space left on the device")
        os.rename(temporary, folder.path_of(store.name))
    except OSError as error:
        _unlink(temporary)
        if not queues.warned:
            queues.warned = True
            log.warning(
                "the KV cache on disk: a file could not be written to %s (%s); prefixes are "
                "missing there until it can",
                folder.own,
                error.strerror or error,
            )
        return StoreResult(store, False)
    queues.num_own += 1
    return StoreResult(store, True, layout.file_bytes, monotonic() - began_s)


def _make_room(queues: _Queues) -> None:
    """Remove the oldest files of other models, if the folder would be larger than its limit."""
    folder = queues.folder
    own_bytes = (queues.num_own + 1) * folder.layout.file_bytes
    while folder.others and own_bytes + folder.others_bytes > folder.max_bytes:
        file = folder.others.popleft()
        folder.others_bytes -= file.num_bytes
        _unlink(file.path)


# ── the reading threads ─────────────────────────────────────────────────────────────────────


def _read_all(queues: _Queues) -> None:
    buffer = PieceBuffer(queues.folder.layout)
    with queues.blocks.pinned(buffer.view):
        _read_until_end(queues, buffer)


def _read_until_end(queues: _Queues, buffer: PieceBuffer) -> None:
    while (work := queues.reads.get()) is not None:
        read, load = work
        if read.ended:
            continue
        try:
            _read(queues, read, load, buffer)
        except FileNotFoundError:
            error = MissingPieceError("a piece has been removed from the folder")
            read.fail(error, load.name, lost=True)
        except DamagedError as damaged:
            _unlink(queues.folder.path_of(load.name))
            read.fail(damaged, load.name, lost=True)
        except Exception as problem:  # for example an I/O error
            read.fail(TransferError(f"a piece cannot be read ({problem})"), load.name, lost=True)
        queues.changed.set()


def _read(queues: _Queues, read: DiskRead, load: Load, buffer: PieceBuffer) -> None:
    layout, blocks = queues.folder.layout, queues.blocks
    read.begin()
    read_file(queues.folder, queues.folder.path_of(load.name), buffer)
    layout.check(buffer.view, load.name, load.tokens)

    def write() -> None:
        for group, place, number in load.targets:
            data = block_in(buffer.groups, layout.block_bytes, group, place)
            blocks.write(group, number, data)

    read.deliver(layout.file_bytes, write)


def read_file(folder: DiskFolder, path: str, buffer: PieceBuffer) -> None:
    """Read the file of a piece. Raise `DamagedError` if the file is too short."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | folder.direct)
    try:
        if os.preadv(file, [buffer.view], 0) != folder.layout.file_bytes:
            raise DamagedError("the file of a piece is too short")
    finally:
        os.close(file)


def _probe(folder: DiskFolder) -> float:
    """Measure a short sequence of reads by several threads. Return bytes per second."""
    buffers = [PieceBuffer(folder.layout) for _ in range(READERS)]
    path = f"{folder.own}/{TEMPORARY}{os.getpid()}-probe-{secrets.token_hex(4)}"
    count = max(READERS, min(64, PROBE_BYTES // folder.layout.file_bytes))
    paths: queue.SimpleQueue[str] = queue.SimpleQueue()
    try:
        with open(path, "wb", buffering=0) as file:
            file.write(buffers[0].view)
            os.fsync(file.fileno())
        with contextlib.suppress(TransferError):
            for buffer in buffers:  # the system provides their pages now
                read_file(folder, path, buffer)
        for _ in range(count):
            paths.put(path)
        began_s = monotonic()
        threads = [
            threading.Thread(target=_probe_reads, args=(folder, paths, buffer))
            for buffer in buffers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return count * folder.layout.file_bytes / max(1e-6, monotonic() - began_s)
    except OSError as error:
        raise ConfigError(
            f"kv_disk_cache: a file of {folder.layout.file_bytes:,} bytes cannot be written to "
            f"{folder.path} ({error.strerror or error}); give a folder with room"
        ) from None
    finally:
        _unlink(path)


def _probe_reads(folder: DiskFolder, paths: queue.SimpleQueue[str], buffer: PieceBuffer) -> None:
    with contextlib.suppress(queue.Empty, OSError, TransferError):
        while True:
            read_file(folder, paths.get_nowait(), buffer)
