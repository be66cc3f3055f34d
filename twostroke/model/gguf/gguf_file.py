"""A reader of GGUF files: metadata, the list of tensors, and their bytes.

It imports neither numpy nor torch, because the HTTP process reads its vocabulary with it.

A file is a header (magic, version, counts), key–value metadata, one entry per tensor, padding, and
the tensors' bytes. All lengths come from the file, so each is checked against the remaining bytes
before use. A model may be split into several files: the first has the metadata, and each has some
tensors.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from twostroke.errors import ModelError
from twostroke.model.fields import shown
from twostroke.model.find.on_disk import SPLIT_NAME, release_pages, split_files
from twostroke.model.gguf.block_types import LAYOUTS, BlockType, num_bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
# Limits beyond any known model. Without them a file of some megabytes could become many millions of
# Python objects. A large vocabulary has about 10⁶ values (tokens, types, scores and merges).
MAX_PAIRS = MAX_TENSORS = 1 << 16
MAX_VALUES = 1 << 23  # in all arrays together
MAX_NAME_BYTES = 1024  # of a metadata key or a tensor's name
MAX_ARRAY_DEPTH = 4  # arrays of arrays are legal, though no known model has any
MAX_NESTED = 1 << 12  # arrays inside arrays

# The number of a type in the file → its name. Names of unsupported types are for the message.
TYPE_NAMES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0"}
TYPE_NAMES |= {9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"}
TYPE_NAMES |= {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S"}
TYPE_NAMES |= {22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"}
TYPE_NAMES |= {29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"}

# Metadata value types: number in the file → struct code. Strings and arrays are read separately.
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING = 8
ARRAY = 9
SMALLEST_STRING = 8  # its length alone
SMALLEST_ARRAY = 12  # element type and count
SMALLEST_PAIR = SMALLEST_STRING + 4 + 1
SMALLEST_TENSOR = SMALLEST_STRING + 4 + 8 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """An entry of the list of tensors.

    The last dimension of `shape` is contiguous, as in torch. `offset` counts from byte 0 of the
    file. `file_index` is the file's number in a split model.
    """

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int
    num_bytes: int
    file_index: int = 0


class _OpenFile(NamedTuple):
    """A file of a model."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    buffer: mmap.mmap


class GGUFFile:
    """An open GGUF model of one or several files.

    Only the headers have been read. The tensors' bytes stay on disk. `path` and `metadata` are the
    first file's.
    """

    def __init__(self, files: list[_OpenFile]) -> None:
        self.path, self.metadata = files[0].path, files[0].metadata
        self.tensors = {name: info for file in files for name, info in file.tensors.items()}
        self._paths = [file.path for file in files]
        self._buffers = [file.buffer for file in files]
        self._data = [memoryview(file.buffer) for file in files]

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Open a model. `path`: the only file, or the first file of a split model."""
        first = _read(path, 0)
        count = _split_field(first, "split.count", 1)
        return cls([first] if count <= 1 else _read_split(first, count))

    def path_of(self, name: str) -> Path:
        """Return the file that holds a tensor; the first file for an unknown tensor."""
        info = self.tensors.get(name)
        return self.path if info is None else self._paths[info.file_index]

    def raw(self, name: str) -> memoryview:
        """Return the bytes of a tensor as a read-only view of the mapped file."""
        info = self.tensors[name]
        return self._data[info.file_index][info.offset : info.offset + info.num_bytes]

    def release(self, name: str) -> None:
        """Release the memory of a tensor's pages until the next read."""
        info = self.tensors[name]
        release_pages(self._buffers[info.file_index], info.offset, info.offset + info.num_bytes)


def _read(path: Path, file_index: int) -> _OpenFile:
    buffer = _map(path)
    metadata, tensors = _Header(path, buffer, file_index).read()
    return _OpenFile(path, metadata, tensors, buffer)


def _read_split(first: _OpenFile, count: int) -> list[_OpenFile]:
    """Return all files of a split model, checked to belong together."""
    match = SPLIT_NAME.fullmatch(first.path.name)
    if match is None or int(match[3]) != count or int(match[2]) != 1:
        raise ModelError(
            f"{first.path}: is one of {count} parts of a split GGUF (split.count), which are found "
            f"by their names: the first must have the name NAME-00001-of-{count:05}.gguf, and the "
            "other parts must be in its folder. Give each file the name it was published under."
        )
    paths = [first.path.with_name(name) for name in split_files(first.path.name)]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ModelError(
            f"{first.path.with_name(missing[0])}: there is no such file, which is one of {count} "
            f"parts of a split GGUF ({len(missing)} of them missing). Download it into the folder."
        )
    parts = [first, *(_read(path, n) for n, path in enumerate(paths[1:], 1))]
    num_tensors = _split_field(first, "split.tensors.count", None)
    owner: dict[str, Path] = {}
    for number, part in enumerate(parts):
        expected = {"split.no": number, "split.count": count, "split.tensors.count": num_tensors}
        for key, value in expected.items():
            found = _split_field(part, key, None)
            if found != value:
                raise ModelError(
                    f"{part.path}: {key} is {found}, where {value} was expected for part "
                    f"{number + 1} of {first.path.name}. The parts belong to different models; "
                    "download them again."
                )
        arch = part.metadata.get("general.architecture", first.metadata.get("general.architecture"))
        if arch != first.metadata.get("general.architecture"):
            raise ModelError(
                f"{part.path}: has the architecture {shown(arch)}, and {first.path.name} has "
                "another. The parts belong to different models; download them again."
            )
        for name in part.tensors:
            if name in owner:
                raise ModelError(
                    f"{part.path}: holds the tensor {name!r}, which {owner[name].name} holds, too. "
                    "The parts belong to different models; download them again."
                )
            owner[name] = part.path
    if num_tensors is not None and len(owner) != num_tensors:
        raise ModelError(
            f"{first.path}: announces {num_tensors} tensors (split.tensors.count), but its {count} "
            f"parts hold {len(owner)}. The parts belong to different models; download them again."
        )
    return parts


def _split_field(part: _OpenFile, key: str, default: int | None) -> Any:
    """Return one of the metadata numbers that describe the split."""
    value = part.metadata.get(key, default)
    if value is not None and (type(value) is not int or not 0 <= value <= MAX_TENSORS):
        raise ModelError(
            f"{part.path}: {key} must be a number from 0 to {MAX_TENSORS}, not {shown(value)}. The "
            "file is damaged; download it again."
        )
    return value


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
            if magic != MAGIC:
                raise ModelError(
                    f"{path} is not a GGUF file: it begins with {magic!r}, not {MAGIC!r}. Give "
                    "the path of a .gguf file, or of a folder with config.json and *.safetensors."
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file. Check the path of the model.") from None
    except IsADirectoryError:
        raise ModelError(
            f"{path} is a folder, not a GGUF file. Give the path of the .gguf file in it."
        ) from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}).") from None


class _Header:
    """A parser that reads the header once, from the first byte to the last."""

    def __init__(self, path: Path, buffer: mmap.mmap, file_index: int) -> None:
        self.path = path
        self.file_index = file_index
        self.buffer = buffer
        self.size = len(buffer)
        self.at = len(MAGIC)
        self.values_left = MAX_VALUES
        self.nested_left = MAX_NESTED

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        self._check_version()
        num_tensors = self._count("tensors", SMALLEST_TENSOR, MAX_TENSORS)
        num_pairs = self._count("metadata entries", SMALLEST_PAIR, MAX_PAIRS)
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._name("metadata key")
            if key in metadata:
                self._fail(f"the metadata key {key!r} appears twice")
            metadata[key] = self._value(self._number("I"), key)
        entries = [self._tensor() for _ in range(num_tensors)]
        return metadata, self._place(entries, self._alignment(metadata))

    def _check_version(self) -> None:
        version = self._number("I")
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped in (1, *VERSIONS):
            raise ModelError(
                f"{self.path}: this GGUF file is big-endian, which is not supported. "
                "Use the little-endian file of the same model."
            )
        if version not in VERSIONS:
            known = " and ".join(str(v) for v in VERSIONS)
            raise ModelError(
                f"{self.path}: GGUF version {version} is not supported, only {known}. "
                "Use a conversion of the model in one of these."
            )

    def _value(self, value_type: int, key: str, depth: int = 0) -> Any:
        if value_type == STRING:
            return self._string()
        if value_type == ARRAY:
            return self._array(key, depth)
        return self._number(self._scalar_code(value_type, key))

    def _array(self, key: str, depth: int) -> list[Any]:
        if depth == MAX_ARRAY_DEPTH:
            self._fail(f"the metadata entry {key!r} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        value_type = self._number("I")
        if value_type == STRING:
            return self._strings(self._values(f"strings of {key!r}", SMALLEST_STRING))
        if value_type == ARRAY:
            count = self._count(f"arrays of {key!r}", SMALLEST_ARRAY, self.nested_left)
            self.nested_left -= count
            return [self._array(key, depth + 1) for _ in range(count)]
        code = self._scalar_code(value_type, key)
        width = struct.calcsize(f"<{code}")
        count = self._values(f"values of {key!r}", width)
        start = self._advance(count * width)
        return list(struct.unpack_from(f"<{count}{code}", self.buffer, start))

    def _strings(self, count: int) -> list[str]:
        """Return an array of strings. The loop avoids calls: a vocabulary has 10⁵ strings."""
        buffer, at, size = self.buffer, self.at, self.size
        read_length = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            if at + 8 > size:
                self._truncated()
            (length,) = read_length(buffer, at)
            at += 8
            end = at + length
            if end > size:
                self._truncated()
            strings.append(buffer[at:end].decode("utf-8", "replace"))
            at = end
        self.at = at
        return strings

    def _tensor(self) -> TensorInfo:
        """Return the next tensor entry. Its offset still counts from the start of the data."""
        name = self._name("tensor name")
        num_dims = self._number("I")
        if not 1 <= num_dims <= MAX_DIMS:
            self._fail(f"the tensor {name!r} has {num_dims} dimensions, expected 1 to {MAX_DIMS}")
        dims = [self._number("Q") for _ in range(num_dims)]
        if 0 in dims:
            self._fail(f"the tensor {name!r} has an empty dimension")
        block_type = self._block_type(self._number("I"), name)
        block = LAYOUTS[block_type].elements
        if dims[0] % block:  # dimension 0 is the contiguous one
            self._fail(
                f"the tensor {name!r} has rows of {dims[0]} values, "
                f"which do not fill blocks of {block} ({block_type})"
            )
        offset = self._number("Q")
        shape = tuple(reversed(dims))
        return TensorInfo(name, shape, block_type, offset, num_bytes(block_type, math.prod(shape)))

    def _block_type(self, number: int, tensor: str) -> BlockType:
        name = TYPE_NAMES.get(number, f"number {number}")
        if name not in BlockType.__members__:
            raise ModelError(
                f"{self.path}: the tensor {tensor!r} is of block type {name}, which is not "
                f"supported. Supported: {', '.join(BlockType)}. Use another quantisation of the "
                "model, for example Q4_K_M or Q8_0."
            )
        return BlockType(name)

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
            self._fail(
                f"general.alignment must be a power of two of at least 8, not {shown(alignment)}"
            )
        return alignment

    def _place(self, entries: list[TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """Turn the entries' offsets into file offsets. The file must hold all tensors."""
        data_start = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        needed_bytes = 0
        for entry in entries:
            if entry.name in tensors:
                self._fail(f"the tensor {entry.name!r} appears twice")
            if entry.offset % alignment:
                self._fail(
                    f"the tensor {entry.name!r} does not begin at a multiple of {alignment} "
                    "(general.alignment)"
                )
            offset = data_start + entry.offset
            needed_bytes = max(needed_bytes, offset + entry.num_bytes)
            tensors[entry.name] = replace(entry, offset=offset, file_index=self.file_index)
        if needed_bytes > self.size:
            raise ModelError(
                f"{self.path}: the file is truncated: {needed_bytes - self.size} bytes are "
                f"missing ({self.size} of {needed_bytes} are there). Download it again."
            )
        return tensors

    # The primitives: each reads its bytes and advances.

    def _advance(self, length: int) -> int:
        start = self.at
        if length > self.size - start:
            self._truncated()
        self.at = start + length
        return start

    def _number(self, code: str) -> Any:
        start = self._advance(struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{code}", self.buffer, start)[0]

    def _bytes(self) -> bytes:
        length = self._number("Q")
        start = self._advance(length)
        return self.buffer[start : start + length]

    def _string(self) -> str:
        """Return the next string. Bytes that are not UTF-8 are replaced, because a vocabulary may
        hold parts of characters."""
        return self._bytes().decode("utf-8", "replace")

    def _name(self, what: str) -> str:
        raw = self._bytes()
        if len(raw) > MAX_NAME_BYTES:
            self._fail(f"a {what} has {len(raw)} bytes, expected at most {MAX_NAME_BYTES}")
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self._fail(f"a {what} is not UTF-8: {raw[:40]!r}")

    def _count(self, what: str, smallest_bytes: int, maximum: int) -> int:
        count: int = self._number("Q")
        if count * smallest_bytes > self.size - self.at:
            self._fail(f"it announces {count} {what}, more than the rest of the file can hold")
        if count > maximum:
            self._fail(f"it announces {count} {what}; the limit is {maximum}")
        return count

    def _values(self, what: str, smallest_bytes: int) -> int:
        count = self._count(what, smallest_bytes, self.values_left)
        self.values_left -= count
        return count

    def _scalar_code(self, value_type: int, key: str) -> str:
        if value_type not in SCALARS:
            self._fail(f"the metadata entry {key!r} has the unknown value type {value_type}")
        return SCALARS[value_type]

    def _truncated(self) -> NoReturn:
        self._fail(f"the file ends within its header, after {self.size} bytes")

    def _fail(self, problem: str) -> NoReturn:
        raise ModelError(
            f"{self.path}: the GGUF header is truncated or damaged: {problem}. Download it again."
        )
