"""GGUF files, written by the `gguf` package and read by us."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.model.gguf.gguf_files import SPEC, packed_rows, random_weights, save, write_model
from twostroke.errors import ModelError
from twostroke.model.describe.gguf_config import spec_from_gguf
from twostroke.model.gguf.block_types import LAYOUTS, BlockType
from twostroke.model.gguf.dequant import ELEMENTS_PER_SLICE, dequantize
from twostroke.model.gguf.gguf_file import GGUFFile

# Block types


@pytest.mark.parametrize("block_type", list(BlockType))
def test_every_block_type_gives_the_values_the_reference_gives(
    tmp_path: Path, block_type: BlockType
) -> None:
    raw_type = gguf.GGMLQuantizationType[block_type]
    packed = packed_rows(block_type, num_rows=6, row_length=512)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("first", np.ones(7, np.float32))  # so that the next one needs padding
    writer.add_tensor("t", packed, raw_dtype=raw_type)
    save(writer)

    file = GGUFFile.open(tmp_path / "m.gguf")
    info = file.tensors["t"]
    values = dequantize(file.raw("t"), info.type, info.shape)

    assert info.type == block_type
    assert info.shape == (6, 512)
    assert info.num_bytes == packed.size
    expected = gguf.quants.dequantize(packed, raw_type)
    assert np.isfinite(expected).all()
    assert expected.std() > 0.1
    assert values.tobytes() == expected.reshape(6, 512).tobytes()


@pytest.mark.parametrize("block_type", [BlockType.BF16, BlockType.Q4_1, BlockType.Q6_K])
def test_a_tensor_larger_than_a_slice_is_the_same_as_its_rows_one_by_one(
    block_type: BlockType,
) -> None:
    num_rows = ELEMENTS_PER_SLICE // 512 + 3
    packed = packed_rows(block_type, num_rows, 512)
    whole = dequantize(packed, block_type, (num_rows, 512))
    rows = [dequantize(row, block_type, (512,)) for row in packed]
    np.testing.assert_array_equal(whole, np.stack(rows))


def test_bytes_that_do_not_fit_the_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="19 bytes are not"):
        dequantize(np.zeros(19, np.uint8), BlockType.Q4_0, (32,))


def test_block_sizes_are_those_of_the_format() -> None:
    for block_type, layout in LAYOUTS.items():
        assert layout == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block_type]]


# Header


def test_metadata_comes_as_plain_python_values(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    values: dict[str, tuple[str, Any]] = {
        "t.u8": ("add_uint8", 255),
        "t.i8": ("add_int8", -3),
        "t.u16": ("add_uint16", 65535),
        "t.i16": ("add_int16", -300),
        "t.u32": ("add_uint32", 2**32 - 1),
        "t.i32": ("add_int32", -(2**31)),
        "t.u64": ("add_uint64", 2**64 - 1),
        "t.i64": ("add_int64", -(2**63)),
        "t.f32": ("add_float32", 0.5),
        "t.f64": ("add_float64", 0.1),
        "t.bool": ("add_bool", True),
        "t.text": ("add_string", "naïve ⚙"),
        "t.strings": ("add_array", ["a", "", "ü"]),
        "t.ints": ("add_array", [1, -2, 3]),
        "t.floats": ("add_array", [0.5, -0.25]),
        "t.bools": ("add_array", [True, False]),
    }
    for key, (method, value) in values.items():
        getattr(writer, method)(key, value)
    save(writer)
    metadata = GGUFFile.open(tmp_path / "m.gguf").metadata
    assert metadata.pop("general.architecture") == "llama"
    assert metadata == {key: value for key, (_, value) in values.items()}
    assert metadata["t.bool"] is True


def test_nested_arrays_are_read(tmp_path: Path) -> None:
    inner = [struct.pack("<IQ2H", 2, 2, a, b) for a, b in ((1, 2), (3, 4))]
    path = write_raw(tmp_path, pair("t.n", 9, struct.pack("<IQ", 9, 2) + b"".join(inner)))
    assert GGUFFile.open(path).metadata == {"t.n": [[1, 2], [3, 4]]}


def test_raw_is_a_view_of_the_file_that_cannot_be_written(tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf")
    raw = file.raw("output_norm.weight")
    values = np.frombuffer(raw, "<f4")
    np.testing.assert_array_equal(values, random_weights(SPEC)["final_norm"])
    assert raw.readonly
    assert not values.flags.writeable
    assert not values.flags.owndata


def test_another_alignment_is_honoured(tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", edit=lambda writer: writer.add_custom_alignment(256))
    assert all(info.offset % 256 == 0 for info in file.tensors.values())
    values = np.frombuffer(file.raw("output_norm.weight"), "<f4")
    np.testing.assert_array_equal(values, random_weights(SPEC)["final_norm"])


def test_version_2_is_read(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf")
    content = bytearray((tmp_path / "m.gguf").read_bytes())
    content[4:8] = struct.pack("<I", 2)
    (tmp_path / "m.gguf").write_bytes(content)
    assert spec_from_gguf(GGUFFile.open(tmp_path / "m.gguf")) == SPEC


def test_a_vocabulary_of_150_000_entries_is_read(tmp_path: Path) -> None:
    words = [f"token-{n}" for n in range(150_000)]
    path = tmp_path / "m.gguf"
    write_model(path, edit=lambda writer: writer.add_token_list(words))
    assert GGUFFile.open(path).metadata["tokenizer.ggml.tokens"] == words


# Files that are not what they should be


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], block_type: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", block_type, offset)


def write_raw(
    folder: Path, *pairs: bytes, tensors: tuple[bytes, ...] = (), data: bytes = b""
) -> Path:
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    header += b"".join(pairs) + b"".join(tensors)
    path = folder / "raw.gguf"
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf: there is no such file"):
        GGUFFile.open(tmp_path / "none.gguf")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a folder, not a GGUF file"):
        GGUFFile.open(tmp_path)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04zip", b"{}"])
def test_another_kind_of_file_is_not_a_gguf_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"x\.gguf is not a GGUF file"):
        GGUFFile.open(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (struct.pack("<I", 1), "GGUF version 1 is not supported, only 2 and 3"),
        (struct.pack("<I", 9), "GGUF version 9 is not supported, only 2 and 3"),
        (struct.pack(">I", 3), "is big-endian, which is not supported"),
    ],
)
def test_other_versions_are_refused(tmp_path: Path, version: bytes, message: str) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + version + bytes(64))
    with pytest.raises(ModelError, match=message):
        GGUFFile.open(tmp_path / "x.gguf")


def test_truncated_data_says_how_many_bytes_are_missing(tmp_path: Path) -> None:
    path = write_raw(tmp_path, tensors=(tensor("t", [64]),), data=bytes(256))
    assert GGUFFile.open(path).tensors["t"].num_bytes == 256
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"100 bytes are missing.*Download it again"):
        GGUFFile.open(path)


def test_a_header_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = write_raw(
        tmp_path,
        pair("a.number", 4, struct.pack("<I", 1)),
        pair("a.text", 8, text("hello")),
        pair("a.words", 9, struct.pack("<IQ", 8, 2) + text("one") + text("two")),
        tensors=(tensor("t", [32, 2]),),
        data=bytes(256),
    )
    content = path.read_bytes()
    for length in range(4, len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"truncated.*Download it again"):
            GGUFFile.open(path)


HUGE = 2**63


@pytest.mark.parametrize(
    ("pairs", "tensors", "message"),
    [
        ((struct.pack("<Q", HUGE),), (), "ends within its header|announces"),
        ((pair("a.t", 8, struct.pack("<Q", HUGE)),), (), "ends within its header"),
        ((pair("a.t", 9, struct.pack("<IQ", 8, HUGE)),), (), f"announces {HUGE} strings of 'a.t'"),
        ((pair("a.t", 9, struct.pack("<IQ", 4, HUGE)),), (), f"announces {HUGE} values of 'a.t'"),
        ((pair("a.t", 9, struct.pack("<IQ", 9, HUGE)),), (), f"announces {HUGE} arrays of 'a.t'"),
        ((pair("a.t", 9, struct.pack("<IQ", 9, 1) * 9),), (), "nests arrays deeper than 4"),
        ((pair("a.t", 77, b""),), (), "'a.t' has the unknown value type 77"),
        ((pair("a.t", 0, b"1"), pair("a.t", 0, b"1")), (), "key 'a.t' appears twice"),
        ((struct.pack("<Q", 2) + b"\xff\xfe" + bytes(99),), (), "metadata key is not UTF-8"),
        ((), (tensor("t", [1]), tensor("t", [1])), "tensor 't' appears twice"),
        ((), (tensor("t", [2, 0]),), "'t' has an empty dimension"),
        ((), (tensor("t", [1] * 5),), "'t' has 5 dimensions, expected 1 to 4"),
        ((), (tensor("t", [40], block_type=2),), "rows of 40 values, which do not fill blocks"),
        ((), (tensor("t", [1], offset=5),), "'t' does not begin at a multiple of 32"),
        ((), (tensor("t", [HUGE, HUGE]),), "bytes are missing"),
        ((), (tensor("t", [1], offset=HUGE),), "bytes are missing"),
        ((pair("general.alignment", 4, bytes(4)),), (), "alignment must be a power of two"),
    ],
)
def test_a_hostile_header_is_refused_at_once(
    tmp_path: Path, pairs: tuple[bytes, ...], tensors: tuple[bytes, ...], message: str
) -> None:
    path = write_raw(tmp_path, *pairs, tensors=tensors, data=bytes(64))
    with pytest.raises(ModelError, match=message):
        GGUFFile.open(path)


def test_absurd_counts_are_refused_at_once(tmp_path: Path) -> None:
    for counts in ((HUGE, 0), (0, HUGE)):
        path = tmp_path / "x.gguf"
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + bytes(64))
        with pytest.raises(ModelError, match=f"announces {HUGE}"):
            GGUFFile.open(path)


@pytest.mark.parametrize(("number", "name"), [(9, "Q8_1"), (40, "NVFP4"), (99, "number 99")])
def test_an_unknown_block_type_is_named_beside_the_supported(
    tmp_path: Path, number: int, name: str
) -> None:
    path = write_raw(tmp_path, tensors=(tensor("blk.0.x", [256], number),), data=bytes(512))
    message = rf"'blk.0.x' is of block type {name}, .* Supported: F32, F16, BF16, Q4_0"
    with pytest.raises(ModelError, match=message):
        GGUFFile.open(path)
