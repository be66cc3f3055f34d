"""The disk tier on real folders: what was stored comes back, and nothing else does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from twostroke.errors import ConfigError
from twostroke.kv.prefix import block_key, seed_digest
from twostroke.kv.tiers import disk
from twostroke.kv.tiers.disk import DiskFolder, DiskRead, DiskTier
from twostroke.kv.tiers.disk_settings import DiskSettings, disk_bytes, read_disk_cache
from twostroke.kv.tiers.piece_file import PieceLayout, identity_of
from twostroke.kv.tiers.tier import Load, MissingPieceError, Store
from twostroke.kv.transfer import DamagedError, HostBlocks, TransferError

SIZES, SPAN, TOKENS = (1000, 24), 2, bytes(range(32))
ROOT = Path(__file__).parents[2]


def layout(model: str = "a") -> PieceLayout:
    return PieceLayout(identity_of(model), len(TOKENS), SIZES, SPAN)


class Memory(HostBlocks):
    """Blocks of two groups; block n of group g is filled with one byte."""

    def __init__(self, filled: bool = True) -> None:
        self.bytes = [bytearray(20 * size) for size in SIZES]
        super().__init__([memoryview(one) for one in self.bytes], SIZES, 16)
        for group, size in enumerate(SIZES):
            for n in range(20 if filled else 0):
                self.write(group, n, bytes([100 * group + n]) * size)


def open_tier(path: Path, memory: Memory, model: str = "a", pieces: int = 100) -> DiskTier:
    folder = DiskFolder(str(path), layout(model), pieces * layout().file_bytes)
    return DiskTier(folder, memory)


def store(tier: DiskTier, digest: bytes, first: int = 1, tokens: bytes = TOKENS) -> bool:
    blocks = [[first, first + 1], [first + 2, first + 3]]
    tier.store(Store(tier.name_of(digest), tokens, blocks))
    while not (ended := tier.finished()):
        tier.wait(1.0)
    return ended[0].ok


def fetch(tier: DiskTier, digest: bytes, tokens: bytes = TOKENS) -> DiskRead:
    """Fetch the second block of each group to block 9, and the first of group 0 to block 8."""
    targets = ((0, 1, 9), (0, 0, 8), (1, 1, 9))
    read = tier.fetch([Load(tier.name_of(digest), 0, tokens, targets)])
    while not read.poll():
        tier.wait(1.0)
    return read


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*/*.kv"))


def test_a_piece_comes_back_in_the_next_process(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, Memory())
    assert store(tier, b"digest", first=3)
    tier.close(1.0)
    memory = Memory(filled=False)
    again = open_tier(tmp_path, memory)
    assert again.names() == [again.name_of(b"digest")]
    read = fetch(again, b"digest")
    assert read.num_bytes == layout().file_bytes
    assert memory.read(0, 8) == bytes([3]) * 1000
    assert memory.read(0, 9) == bytes([4]) * 1000
    assert memory.read(1, 9) == bytes([106]) * 24
    assert not any(memory.read(1, 8)), "a block that was not wanted is written"
    again.close(1.0)


def damage(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], type[TransferError]]] = {
    "header": (lambda file: damage(file, 3), DamagedError),
    "a byte of a block": (lambda file: damage(file, 500), DamagedError),
    "cut": (lambda file: os.truncate(file, 100), DamagedError),
    "empty": (lambda file: os.truncate(file, 0), DamagedError),
    "gone": (Path.unlink, MissingPieceError),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_or_vanished_file_is_a_miss_and_goes(what: str, tmp_path: Path) -> None:
    memory = Memory()
    tier = open_tier(tmp_path, memory)
    assert store(tier, b"digest")
    apply, error = DAMAGES[what]
    apply(files(tmp_path)[0])
    before = [bytes(one) for one in memory.bytes]
    with pytest.raises(error):
        fetch(tier, b"digest")
    assert [bytes(one) for one in memory.bytes] == before, "a damaged piece was written"
    assert not files(tmp_path)
    tier.close(1.0)


def test_equal_names_with_other_tokens_are_a_miss(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, Memory())
    assert store(tier, b"digest")
    with pytest.raises(DamagedError, match="other tokens"):
        fetch(tier, b"digest", tokens=TOKENS[::-1])
    tier.close(1.0)


def test_an_abandoned_fetch_writes_nothing(tmp_path: Path) -> None:
    memory = Memory()
    tier = open_tier(tmp_path, memory)
    assert store(tier, b"digest")
    read = DiskRead([Load(tier.name_of(b"digest"), 0, TOKENS, ())])
    read.abandon()
    read.deliver(1, lambda: pytest.fail("blocks are written after the end of their fetch"))
    assert read.num_bytes == 0
    tier.close(1.0)


def test_a_cancelled_store_reads_nothing(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, Memory())
    cancelled = Store(tier.name_of(b"digest"), TOKENS, [[1, 2], [1, 2]])
    cancelled.cancel()
    tier.store(cancelled)
    while not (ended := tier.finished()):
        tier.wait(1.0)
    assert not ended[0].ok
    assert not files(tmp_path)
    tier.close(1.0)


def test_files_of_another_model_are_not_read_and_go_first(tmp_path: Path) -> None:
    one = open_tier(tmp_path, Memory(), "a", pieces=3)
    for n in range(3):
        assert store(one, b"%d" % n)
    one.close(1.0)
    other = open_tier(tmp_path, Memory(), "b", pieces=3)
    assert other.names() == []
    assert other.name_of(b"1") != one.name_of(b"1")
    for n in range(2):
        assert store(other, b"%d" % n)
    assert len(files(tmp_path)) == 3, "the folder has grown beyond its size"
    assert len(list(other.folder.own.glob("*.kv"))) == 2
    other.close(1.0)


def test_the_order_of_use_is_kept_in_the_folder(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, Memory())
    names = [tier.name_of(b"%d" % n) for n in range(4)]
    for n in range(4):
        assert store(tier, b"%d" % n)
    tier.touch([names[2], names[0]])
    tier.close(5.0)
    again = open_tier(tmp_path, Memory())
    assert again.names() == [names[1], names[3], names[2], names[0]]
    again.close(1.0)
    smaller = open_tier(tmp_path, Memory(), pieces=2)
    assert smaller.names() == [names[2], names[0]]
    assert len(files(tmp_path)) == 2
    smaller.close(1.0)


def test_names_depend_on_the_salt_and_on_a_key_of_the_folder(tmp_path: Path) -> None:
    digests = [block_key(seed_digest("salt", salt), [1, 2]).digest for salt in ("", "tenant")]
    tiers = [open_tier(tmp_path / name, Memory()) for name in ("one", "two")]
    names = {tier.name_of(digest) for tier in tiers for digest in digests}
    assert len(names) == 4
    for digest in digests:
        assert all(digest not in name for name in names)
    assert (tmp_path / "one" / "key").stat().st_mode & 0o777 == 0o600
    for tier in tiers:
        assert store(tier, digests[0])
        assert files(tier.folder.path)[0].stat().st_mode & 0o777 == 0o600
        tier.close(1.0)


def test_left_over_temporary_files_and_foreign_files_are_removed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, Memory())
    assert store(tier, b"digest")
    own = tier.folder.own
    tier.close(1.0)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, used = own / f".tmp-{ended.pid}-1", own / f".tmp-{os.getpid()}-1"
    short, odd = own / ("ab" * 20 + ".kv"), own / "odd.kv"
    for path in (left, used, short, odd):
        path.write_bytes(b"x")
    again = open_tier(tmp_path, Memory())
    assert again.names() == [again.name_of(b"digest")]
    assert [path.exists() for path in (left, used, short, odd)] == [False, True, False, False]
    again.close(1.0)


def test_a_full_disk_loses_a_store_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(tmp_path, Memory())

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.os, "pwrite", full)
    assert not store(tier, b"digest")
    monkeypatch.undo()
    assert "No space left on device" in caplog.text
    assert [path.name for path in tier.folder.own.iterdir()] == []
    assert store(tier, b"digest")
    tier.close(1.0)


WRITER = """
import sys
from pathlib import Path
from tests.kv.test_disk_tier import Memory, Store, TOKENS, open_tier
tier = open_tier(Path(sys.argv[1]), Memory())
for n in range(100_000):
    tier.store(Store(tier.name_of(b"%d" % n), TOKENS, [[n % 8, 9], [n % 8, 9]]))
    while not tier.finished():
        tier.wait(1.0)
    if n == 5:
        print("writing", flush=True)
"""


@pytest.mark.parametrize(
    "rounds",
    [1, pytest.param(8, marks=pytest.mark.full), pytest.param(50, marks=pytest.mark.long)],
)
def test_a_kill_while_writing_leaves_only_whole_pieces(rounds: int, tmp_path: Path) -> None:
    """Each round continues in the same folder."""
    for _ in range(rounds):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"writing\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        memory = Memory()
        tier = open_tier(tmp_path, memory, pieces=100_000)
        assert len(tier.names()) >= 6
        assert not list(tmp_path.glob("*/.tmp-*"))
        for name in tier.names():
            read = tier.fetch([Load(name, 0, TOKENS, ((0, 1, 15),))])
            while not read.poll():
                tier.wait(1.0)
        assert memory.read(0, 15) == bytes([9]) * 1000
        tier.close(1.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/a/b", DiskSettings("/a/b", None)),
        ("/a/b:20GiB", DiskSettings("/a/b", 20 << 30)),
        ("/a/b:512M", DiskSettings("/a/b", 512 << 20)),
        ("/a:b", DiskSettings("/a:b", None)),
        ("/a:b:1k", DiskSettings("/a:b", 1024)),
    ],
)
def test_the_setting_is_a_folder_and_a_size(text: str, expected: DiskSettings) -> None:
    assert read_disk_cache(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "needs a folder"),
        (":5G", "needs a folder"),
        ("/a:0", "the size is 0"),
        ("/a:-5G", "'-5G' is not a size"),
        ("/a:5X", "'5X' is not a size"),
    ],
)
def test_wrong_settings_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_disk_cache(text)


def test_a_size_beyond_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"1000000\.0 GiB were given.*lower the size"):
        disk_bytes(DiskSettings(str(tmp_path / "new"), 10**6 << 30))
    assert disk_bytes(DiskSettings(str(tmp_path / "new"), None)) > 0


def test_a_size_below_one_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hold no prefix"):
        DiskTier(DiskFolder(str(tmp_path), layout(), 100), Memory())


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"")
    for path in (file, file / "below", Path("/proc/kv")):
        with pytest.raises(ConfigError, match=r"kv_disk_cache: the folder .* cannot be used"):
            DiskFolder(str(path), layout(), 1 << 20)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "key").write_bytes(b"short")
    with pytest.raises(ConfigError, match="is not a key"):
        DiskFolder(str(tmp_path / "bad"), layout(), 1 << 20)
