"""GGUF models in several files, written by the `gguf` package and read by us."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.model.gguf.gguf_files import (
    SPEC,
    Edit,
    add_sizes,
    random_weights,
    save,
    setting,
    write_model,
)
from tests.specs import changed
from twostroke import LLM, SamplingParams
from twostroke.errors import ModelError
from twostroke.model.describe.gguf_names import NAMES
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.gguf.gguf_file import GGUFFile
from twostroke.model.weights.gguf import GGUFWeights


def write_split(
    folder: Path, name: str = "m", spec: ModelSpec = SPEC, edit: Edit = print
) -> list[Path]:
    """The model of `write_model` in parts of at most eight tensors."""
    folder.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(folder / f"{name}.gguf", spec.family, split_max_tensors=8)
    add_sizes(writer, spec)
    for weight, values in random_weights(spec).items():
        writer.add_tensor(NAMES.tensor(weight), values)
    if edit is not print:
        edit(writer)
    save(writer)
    parts = sorted(folder.glob(f"{name}-*.gguf"))
    assert len(parts) == -(-len(random_weights(spec)) // 8)
    return parts


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as error:
        GGUFFile.open(path)
    return str(error.value)


def test_parts_hold_the_tensors_and_the_metadata_of_the_whole(tmp_path: Path) -> None:
    whole, parts = write_model(tmp_path / "whole.gguf"), write_split(tmp_path)
    assert len(parts) == 3
    split = GGUFFile.open(parts[0])
    assert split.path == parts[0]
    assert split.tensors.keys() == whole.tensors.keys()
    assert {info.file_index for info in split.tensors.values()} == {0, 1, 2}
    for name, info in whole.tensors.items():
        found = split.tensors[name]
        assert (found.shape, found.type, found.num_bytes) == (info.shape, info.type, info.num_bytes)
        assert split.raw(name) == whole.raw(name)
        split.release(name)
        assert split.raw(name) == whole.raw(name)
        assert name.encode() in split.path_of(name).read_bytes()
    told = {k: v for k, v in split.metadata.items() if not k.startswith("split.")}
    assert told == whole.metadata


def test_a_split_model_writes_what_the_whole_writes(tmp_path: Path) -> None:
    write_model(tmp_path / "whole.gguf")
    parts = write_split(tmp_path / "split")
    params = SamplingParams(temperature=0.0, max_tokens=8)
    prompt = [[5, 7, 11]]

    def written(model: Path) -> list[int]:
        llm = LLM(str(model), skip_tokenizer_init=True, num_gpu_blocks_override=8)
        return list(llm.generate(prompt, params)[0].outputs[0].token_ids)

    expected = written(tmp_path / "whole.gguf")
    assert len(expected) == 8
    assert written(parts[1]) == expected
    assert written(tmp_path / "split") == expected


def test_a_message_about_a_tensor_names_the_part_that_holds_it(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    file = GGUFFile.open(parts[0])
    weights = GGUFWeights(file, SPEC)
    last = max(file.tensors.values(), key=lambda info: info.file_index)
    name = next(n for n in SPEC.weight_shapes() if NAMES.tensor(n) == last.name)
    assert weights.label(name) == f"{parts[2]}: the tensor {last.name!r}"
    np.testing.assert_array_equal(weights.floats("final_norm"), random_weights(SPEC)["final_norm"])


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    parts[1].unlink()
    assert refusal(parts[0]).startswith(f"{parts[1]}: there is no such file, which is one of 3")


def test_a_part_that_is_cut_short_is_named(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    parts[2].write_bytes(parts[2].read_bytes()[:-64])
    assert refusal(parts[0]).startswith(f"{parts[2]}: the file is truncated")


def test_a_first_part_under_another_name_says_how_it_is_called(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    for name in ("renamed.gguf", "m-00001-of-00004.gguf"):
        shutil.copy(parts[0], tmp_path / name)
        assert f"{name}: is one of 3 parts" in refusal(tmp_path / name)
        assert "NAME-00001-of-00003.gguf" in refusal(tmp_path / name)
    message = refusal(parts[1])  # `model/find/hub.py` goes to the first by itself
    assert f"{parts[1]}: is one of 3 parts" in message


def test_parts_in_another_order_are_told(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    shutil.copy(parts[1], parts[2])
    assert refusal(parts[0]).startswith(f"{parts[2]}: split.no is 1, where 2 was expected")


def test_a_part_of_another_model_is_told(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    larger = write_split(tmp_path, "larger", changed(SPEC, windows=(None,) * 4))
    shutil.copy(larger[1], parts[1])
    assert refusal(parts[0]).startswith(f"{parts[1]}: split.count is {len(larger)}, where 3 was")


def test_as_many_tensors_as_were_announced_must_be_there(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        del writer.tensors[-1][NAMES.tensor("final_norm")]

    parts = write_split(tmp_path, edit=edit)
    few = GGUFFile.open(parts[0]).metadata["split.tensors.count"]
    assert few == len(random_weights(SPEC)) - 1
    other = write_split(tmp_path, "other")
    for n in (0, 1):
        other[n].replace(parts[n])
    assert f"split.tensors.count is {few}, where {few + 1} was expected" in refusal(parts[0])


def test_a_tensor_that_two_parts_hold_is_told(tmp_path: Path) -> None:
    parts = write_split(tmp_path)
    held = GGUFFile.open(parts[0]).tensors
    other, own = "blk.0.attn_q.weight", "blk.1.attn_q.weight"
    assert held[other].file_index < held[own].file_index
    path = parts[held[own].file_index]
    path.write_bytes(path.read_bytes().replace(own.encode(), other.encode()))
    assert refusal(parts[0]).startswith(
        f"{path}: holds the tensor {other!r}, which {parts[0].name}"
    )


def test_absurd_counts_are_refused(tmp_path: Path) -> None:
    for value in (-1, 1 << 30, 2000):
        path = tmp_path / "m-00001-of-02000.gguf"
        write = setting("count", value, family="split") if value > 0 else negative
        with pytest.raises(ModelError, match=r"split\.count must be a number|no part 1 of 2000"):
            write_model(path, edit=write)


def negative(writer: gguf.GGUFWriter) -> None:
    writer.add_int32("split.count", -1)
