"""Weights from a Hugging Face folder: one safetensors file, or shards with an index."""

from __future__ import annotations

import json
import logging
import math
import mmap
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from twostroke.errors import ModelError
from twostroke.model.describe.hf_names import LLAMA_NAMES
from twostroke.model.describe.hf_packed import PackedConfig
from twostroke.model.describe.hf_w8a8 import W8Config
from twostroke.model.describe.spec import ModelSpec
from twostroke.model.describe.tensor_names import SpecVariants, TensorNames
from twostroke.model.describe.tensor_parallel import WHOLE, Part
from twostroke.model.fields import listed_names, read_json, shown
from twostroke.model.find.on_disk import release_pages
from twostroke.model.gguf.block_types import BlockType
from twostroke.model.gguf.dequant import Bytes, dequantize
from twostroke.model.weights import ALL_ROWS, Floats, PackedMatrix, not_finite_error
from twostroke.model.weights.packed_checkpoints import ENDINGS, Module, kernel_group
from twostroke.model.weights.packed_format import PackedFormat, StoredCodes
from twostroke.model.weights.w8a8_checkpoints import (
    STATIC_SCALES,
    W8_SCALES,
    W8_TYPES,
    dequantize_w8,
    row_scales,
    scales_per_row,
    w8_is_finite,
)

log = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Ignored tensors: they follow from the config, or are the copy of a tied head.
HARMLESS = ("rotary_emb.inv_freq", "lm_head.weight", ".masked_bias")
MASK = re.compile(r"\.(attn|attention)\.bias$")  # the causal mask in older checkpoints
FLOATS = ("F64", "F32", "F16", "BF16")
# MXFP4: a tensor of blocks, [..., out, in / 32, 16 bytes], and a tensor of their scales.
BLOCKS, SCALES, BLOCK = "_blocks", "_scales", 32
# A pattern in a tensor's name → the fields of config.json that decide whether the tensor exists.
# Boolean fields are found by trying their other value instead (`SpecVariants`).
DECIDING = {
    r"experts|\bmlp\b|_moe\b": "num_experts, num_local_experts, n_routed_experts, "
    "mlp_only_layers, decoder_sparse_step, first_k_dense_replace",
    r"shared": "n_shared_experts",
    r"\.q_a_": "q_lora_rank",
    f"({BLOCKS}|{SCALES})$": "quantization_config",
}
# Prefixes of the language model's tensors: longer in models with images, none in some checkpoints.
PREFIX = re.compile(
    r"^(language_model\.model\.|model\.language_model\.|language_model\.|model\.|transformer\.|gpt_neox\.)"
)


class Stored(NamedTuple):
    """A tensor in its file."""

    type: str  # one of FLOATS, W8_TYPES, I32 or U8
    shape: tuple[int, ...]
    data: Bytes


class _File:
    """A mapped safetensors file, checked by the library."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="np"), path.open("rb") as file:
            self._buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._data: Bytes = np.frombuffer(self._buffer, np.uint8)
        self._start = 8 + int.from_bytes(self._buffer[:8], "little")
        self.entries: dict[str, Any] = json.loads(self._buffer[8 : self._start])
        self.entries.pop("__metadata__", None)

    def stored(self, name: str) -> Stored:
        entry = self.entries[name]
        first, end = self._place(name)
        return Stored(entry["dtype"], tuple(entry["shape"]), self._data[first:end])

    def release(self, name: str) -> None:
        release_pages(self._buffer, *self._place(name))

    def _place(self, name: str) -> tuple[int, int]:
        first, end = self.entries[name]["data_offsets"]
        return self._start + first, self._start + end


class SafetensorsWeights:
    """The weights of a folder. Each file is opened once.

    `path` lists the tensors: the only file, or the index of the shards. A stored copy of a tied
    head is never read.
    """

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        names: TensorNames = LLAMA_NAMES,
        quantized: W8Config | PackedConfig | None = None,
        variants: SpecVariants = tuple,
    ) -> None:
        self._folder = folder
        self._spec = spec
        self.quantized = quantized
        self._open_files: dict[Path, _File] = {}
        self.path, self._files = self._find_files()
        self._names = names.resolve(self._files)
        self._places = self._names.places(spec)
        # If two tensors differ only in the prefix, the longer name counts.
        self._stored = {_without_prefix(name): name for name in sorted(self._files, key=len)}
        self._refuse_unknown_tensors(variants)

    def shape(self, name: str) -> tuple[int, ...] | None:
        stored = self._stored_name(name)
        module = self._module(name)
        if stored is None and module is None:
            return None
        if stored is None and module is not None:
            module.check()
            return self._places[name].weight_shape(module.shape)
        assert stored is not None
        shape = self._entry(stored).shape
        if stored.endswith(BLOCKS):
            self._check_blocks(stored)
            shape = (*shape[:-2], BLOCK * shape[-2])
        return self._places[name].weight_shape(shape)

    def is_changed(self, name: str) -> bool:
        """Return whether reading the weight reorders, offsets or dequantises the stored numbers."""
        place = self._places[name]
        moved = self._names.offset(name) != 0.0 or place.order is not None or place.transposed
        return moved or self.stored_type(name) is not None or self.is_quantized(name)

    @property
    def _w8_type(self) -> str | None:
        """The type of the tensors in fp8 or int8; None for another quantisation."""
        return W8_TYPES[self.quantized.type] if isinstance(self.quantized, W8Config) else None

    def is_quantized(self, name: str) -> bool:
        """Return whether the weight is stored quantised."""
        return self.w8_scales(name) > 0 or self._module(name) is not None

    def stored(self, name: str) -> Stored:
        """Return a read-only view of the mapped file, for a weight that is not `is_changed`."""
        found, place = self._tensor(name), self._places[name]
        shape, data = place.weight_shape(found.shape), place.expert_bytes(found.data)
        if place.other_rows:
            row_bytes = data.size // place.expert_shape(found.shape)[0]
            first = place.first_row * row_bytes
            data = data[first : first + shape[0] * row_bytes]
        return Stored(found.type, shape, data)

    def _tensor(self, name: str) -> Stored:
        """Return the whole tensor that holds the weight."""
        stored = self._stored_name(name)
        if stored is None:
            raise ModelError(
                f"{self.path}: lists no tensor {self._names.tensor(name)!r}. The model is "
                "incomplete or its config.json belongs to another model; download the folder again."
            )
        found = self._entry(stored)
        place = self._places[name]
        if found.type == self._w8_type and place.dims == 2 and not place.transposed:
            return found
        if found.type not in FLOATS:
            raise ModelError(
                f"{self._files[stored]}: the tensor {stored!r} is of type {found.type}, expected "
                f"one of {', '.join(FLOATS)}. Use the unquantised model, or a GGUF of it."
            )
        return found

    def fused_with(self, name: str) -> Sequence[str]:
        return self._places[name].weights

    def floats(self, name: str, rows: slice = ALL_ROWS) -> Floats:
        packed, module = self.packed(name, rows), self._module(name)
        if packed is not None:
            return dequantize(packed.rows, packed.type, packed.shape)
        if module is not None:
            return module.floats(self._rows_of(module, name, rows))
        type, whole, data = self._tensor(name)
        if isinstance(self.quantized, W8Config) and type == self._w8_type:
            return dequantize_w8(*self.w8(name, (rows,)), self.quantized.type)
        place = self._places[name]
        shape, data = place.expert_shape(whole), place.expert_bytes(data)
        lines: Any = data.reshape(shape[0], -1)
        if place.transposed:
            lines = data.view(f"V{data.size // math.prod(shape)}").reshape(shape).T
        stored = np.ascontiguousarray(place.select_rows(lines, rows)).view(np.uint8)
        part = (len(stored), *place.weight_shape(whole)[1:])
        if type == "F64":
            values = np.frombuffer(stored, "<f8").astype(np.float32).reshape(part)
        else:
            values = dequantize(stored.reshape(-1), BlockType(type), part)
        offset = self._names.offset(name)
        return values + np.float32(offset) if offset else values

    def w8_scales(self, name: str) -> int:
        """Return how many scales a row of a matrix in fp8 or int8 has; 0 for any other weight."""
        stored = self._stored_name(name)
        if not isinstance(self.quantized, W8Config) or stored is None:
            return 0
        if self._entry(stored).type != self._w8_type:
            return 0
        where, scale = self._w8_scale(name)
        shape = self._entry(stored).shape
        return scales_per_row(where, scale.type, scale.shape, shape, self.quantized.block)

    def w8(self, name: str, part: Part = WHOLE) -> tuple[Bytes, Floats]:
        """Return the bytes of a matrix in fp8 or int8 or of a part, and scales, [rows, groups]."""
        found, place, groups = self._tensor(name), self._places[name], self.w8_scales(name)
        assert isinstance(self.quantized, W8Config)
        rows, columns = (*part, ALL_ROWS, ALL_ROWS)[:2]
        where, scale = self._w8_scale(name)
        all_scales = row_scales(
            scale.data, scale.type, scale.shape, found.shape[0], self.quantized.block
        )
        bits = place.select_rows(found.data.reshape(found.shape), rows)[:, columns]
        scales = place.select_rows(all_scales, rows)
        if not w8_is_finite(bits, self.quantized.type):
            raise not_finite_error(self, name)
        if not np.isfinite(scales).all():
            raise ModelError(f"{where} holds NaN or infinity. Download the model again.")
        if groups > 1:
            first, end, _ = columns.indices(found.shape[1])
            size = found.shape[1] // groups
            if first % size or end % size:
                raise ModelError(
                    f"{self.label(name)} has blocks of {size} columns, which the ranks would cut. "
                    "Lower tensor_parallel_size."
                )
            scales = scales[:, first // size : end // size]
        return np.ascontiguousarray(bits), scales.copy()

    def _w8_scale(self, name: str) -> tuple[str, Stored]:
        """Return the scales of a matrix in fp8 or int8, with a label for messages."""
        stored = self._stored_name(name) or ""
        for scale in (stored + ending for ending in W8_SCALES):
            if scale in self._files:
                return f"{self._files[scale]}: the tensor {scale!r}", self._entry(scale)
        names = " or ".join(repr(stored + ending) for ending in W8_SCALES)
        raise ModelError(
            f"{self.label(name)} is in {self.quantized.name if self.quantized else 'fp8'}, and its "
            f"scales are missing ({names}). The model is incomplete; download the folder again."
        )

    # ── 4 or 8 bits ──────────────────────────────────────────────────────────────────────

    def packed_format(self, name: str) -> PackedFormat | None:
        """Return the format for a matrix of 4 or 8 bits; None for another matrix, or if its groups
        do not consist of neighbours."""
        module = self._module(name)
        if module is None or not module.is_ordered():
            return None
        group = kernel_group(module.group)
        return PackedFormat(module.config.bits, group, module.config.zeros) if group else None

    def codes(self, name: str, part: Part = WHOLE) -> StoredCodes:
        """Return the codes of a matrix with a `packed_format`, or of a part of it."""
        module, rows, columns = self._module(name), *(*part, ALL_ROWS, ALL_ROWS)[:2]
        assert module is not None
        codes, scales, zeros = module.read(self._rows_of(module, name, rows))
        size, own = module.group, kernel_group(module.group)
        first, end, _ = columns.indices(module.shape[1])
        if first % own or end % own:
            raise ModelError(
                f"{self.label(name)} has groups of {size} columns, which the ranks would cut. "
                "Lower tensor_parallel_size."
            )
        groups = slice(first // own, end // own)
        scales = scales.repeat(size // own, axis=1)[:, groups]
        zeros = None if zeros is None else zeros.repeat(size // own, axis=1)[:, groups]
        return StoredCodes(module.config.bits, codes[:, first:end], scales, zeros)

    def _rows_of(self, module: Module, name: str, rows: slice) -> npt.NDArray[np.intp]:
        """Return the row numbers of a weight in its tensor."""
        numbers: npt.NDArray[np.intp] = self._places[name].select_rows(
            np.arange(module.shape[0]), rows
        )
        return numbers

    def _module(self, name: str) -> Module | None:
        """Return the tensors of a matrix of 4 or 8 bits; None for a dense matrix."""
        stem = self._names.tensor(name).removesuffix(".weight")
        if not isinstance(self.quantized, PackedConfig) or self._places[name].dims != 2:
            return None
        endings = ENDINGS[self.quantized.layout]

        def find(ending: str) -> tuple[str, Stored] | None:
            stored = self._stored.get(_without_prefix(stem + ending))
            if stored is None:
                return None
            return f"{self._files[stored]}: the tensor {stored!r}", self._entry(stored)

        codes = find(endings.codes)
        if codes is None or self._stored_name(name) is not None:
            return None
        beside = (find(ending) for ending in (endings.scales, endings.zeros, endings.groups))
        return Module(self.quantized, codes, *beside)

    def stored_type(self, name: str) -> BlockType | None:
        return BlockType.MXFP4 if self._names.tensor(name).endswith(BLOCKS) else None

    def packed(self, name: str, rows: slice = ALL_ROWS) -> PackedMatrix | None:
        """Return MXFP4 rows in GGUF's layout: the scale first, and two values 16 apart in a byte.

        Checkpoints have two neighbours in a byte.
        """
        stored = self._stored_name(name)
        if stored is None or self.stored_type(name) is None:
            return None
        place, blocks, scales = (
            self._places[name],
            self._entry(stored),
            self._entry(_scales(stored)),
        )
        lines = (
            place.expert_bytes(part.data).reshape(-1, *part.shape[2:]) for part in (blocks, scales)
        )
        own, own_scales = (place.select_rows(part, rows) for part in lines)
        codes = np.stack([own & 15, own >> 4], axis=-1).reshape(*own.shape[:-1], BLOCK)
        both = codes[..., : BLOCK // 2] | codes[..., BLOCK // 2 :] << 4
        packed = np.concatenate([own_scales[..., None], both], axis=-1)
        shape = len(own), BLOCK * own.shape[1]
        return PackedMatrix(BlockType.MXFP4, shape, packed.reshape(shape[0], -1))

    def label(self, name: str) -> str:
        stored = self._stored_name(name) or self._names.tensor(name)
        module = self._module(name)
        if module is not None:
            return module.codes[0]
        scales = f" (its scales are {_scales(stored)!r})" if stored.endswith(BLOCKS) else ""
        return f"{self._files.get(stored, self.path)}: the tensor {stored!r}{scales}"

    def release(self, name: str) -> None:
        stored = self._stored_name(name)
        tensors = set() if stored is None else {stored, _scales(stored)}
        if isinstance(self.quantized, PackedConfig):
            stem = self._names.tensor(name).removesuffix(".weight")
            codes = self._stored.get(_without_prefix(stem + ENDINGS[self.quantized.layout].codes))
            tensors |= {codes} if codes else set()
        for tensor in tensors:
            self._open(self._files[tensor]).release(tensor)

    def _find_files(self) -> tuple[Path, dict[str, Path]]:
        """Return the file that lists the tensors, and the file of each tensor."""
        single, index = self._folder / SINGLE, self._folder / INDEX
        if not single.exists() and index.exists():
            return index, self._read_index(index)
        if not single.exists():
            single = self._only_file()
        return single, dict.fromkeys(self._open(single).entries, single)

    def _only_file(self) -> Path:
        found = sorted(self._folder.glob("*.safetensors"))
        if not found:
            raise ModelError(
                f"{self._folder}: no *.safetensors there. A model folder holds config.json and "
                f"{SINGLE}, or shards with {INDEX}."
            )
        if len(found) > 1:
            raise ModelError(
                f"{self._folder}: {len(found)} *.safetensors but no {INDEX}, which says what is "
                "in each. Download it into the folder."
            )
        return found[0]

    def _read_index(self, index: Path) -> dict[str, Path]:
        shards = read_json(index).get("weight_map")
        named = isinstance(shards, dict) and all(isinstance(v, str) for v in shards.values())
        if not shards or not named:
            raise ModelError(
                f"{index}: has no 'weight_map' from tensors to files. Download it again."
            )
        for shard in sorted(set(shards.values())):
            if Path(shard).name != shard or len(shard) > 255 or not shard.isprintable():
                raise ModelError(
                    f"{index}: weight_map: {shown(shard)} is not the name of a file in its folder."
                )
            if not (self._folder / shard).is_file():
                raise ModelError(
                    f"{self._folder / shard}: this shard is named in {INDEX} but is not there. "
                    "Download it into the folder."
                )
        return {name: self._folder / shard for name, shard in shards.items()}

    def _open(self, path: Path) -> _File:
        if path not in self._open_files:
            try:
                self._open_files[path] = _File(path)
            except (SafetensorError, OSError, ValueError, RecursionError) as error:
                raise ModelError(
                    f"{path}: cannot be read as safetensors ({error}). The file is truncated or "
                    "damaged; download it again."
                ) from None
        return self._open_files[path]

    def _entry(self, stored: str) -> Stored:
        """Return a tensor's entry. Its data is mapped and not read."""
        path = self._files[stored]
        try:
            return self._open(path).stored(stored)
        except KeyError:
            raise ModelError(
                f"{path}: does not hold the tensor {stored!r}, though {self.path.name} says "
                "so. Index and shards belong to different models; download the folder again."
            ) from None

    def _check_blocks(self, stored: str) -> None:
        """Refuse blocks that are not MXFP4 or have no scales."""
        scales = _scales(stored)
        if scales not in self._files:
            raise ModelError(
                f"{self.path}: lists no tensor {scales!r}, the scales of {stored!r}. The model is "
                "incomplete; download the folder again."
            )
        found, beside = self._entry(stored), self._entry(scales)
        if {found.type, beside.type} != {"U8"} or found.shape != (*beside.shape, BLOCK // 2):
            raise ModelError(
                f"{self._files[stored]}: the tensors {stored!r} and {scales!r} are "
                f"{found.type} {found.shape} and {beside.type} {beside.shape}; expected are blocks "
                f"of {BLOCK // 2} bytes (U8) and a scale for each of them (U8)."
            )

    def _is_of_module(self, tensor: str, known: Collection[str]) -> bool:
        assert isinstance(self.quantized, PackedConfig)
        *endings, others = ENDINGS[self.quantized.layout]
        return any(
            tensor.endswith(ending) and f"{tensor.removesuffix(ending)}.weight" in known
            for ending in (*endings, *others)
        )

    def _stored_name(self, name: str) -> str | None:
        return self._stored.get(_without_prefix(self._names.tensor(name)))

    def _refuse_unknown_tensors(self, variants: SpecVariants) -> None:
        """Refuse a tensor of a layer in the spec that the spec does not contain.

        Unknown tensors outside these layers are ignored with a warning.
        """
        known = {_without_prefix(place.tensor) for place in self._places.values()}
        known |= {_scales(tensor) for tensor in known}
        unused, num_layers = [], 0
        before, after = _without_prefix(self._names.layer_prefix).split("{n}")
        in_layer = re.compile(rf"{re.escape(before)}(\d{{1,9}}){re.escape(after)}")
        for stored, path in self._files.items():
            name = _without_prefix(stored)
            layer = in_layer.match(name)
            if name in known or name.endswith(HARMLESS) or MASK.search(name):
                continue
            if isinstance(self.quantized, PackedConfig) and self._is_of_module(name, known):
                continue
            if isinstance(self.quantized, W8Config) and (
                name.removesuffix("_inv").removesuffix("_scale") in known
                or name.endswith(STATIC_SCALES)
            ):
                continue
            if name.endswith((".bias", "_zero_point")) and not self._entry(stored).data.any():
                continue  # zeros change nothing
            if layer is not None and int(layer[1]) < self._spec.num_layers:
                decides = self._deciding(name, variants)
                raise ModelError(
                    f"{path}: the tensor {shown(stored)} has no place in the model that "
                    f"config.json describes (see {decides}). Use the config.json and the "
                    "unquantised weights of one model."
                )
            unused.append(stored)
            num_layers = max(num_layers, 1 + int(layer[1]) if layer else 0)
        if num_layers:
            log.warning(
                "%s: config.json says num_hidden_layers = %d, but there are tensors of %d layers",
                self.path,
                self._spec.num_layers,
                num_layers,
            )
        if unused:
            count, names = len(unused), listed_names(unused)
            log.warning("%s: %d tensors are not used: %s", self.path, count, names)

    def _deciding(self, tensor: str, variants: SpecVariants) -> str:
        """Return the fields of config.json that decide whether a layer has such a tensor."""
        found = ["model_type"]
        for field, spec, names in variants():
            places = names.resolve(self._files).places(spec).values()
            if any(_without_prefix(place.tensor) == tensor for place in places):
                found.append(field)
        found += [fields for pattern, fields in DECIDING.items() if re.search(pattern, tensor)]
        return ", ".join(found)


def _scales(tensor: str) -> str:
    """Return the name of a block tensor's scales; any other name unchanged."""
    return tensor.removesuffix(BLOCKS) + SCALES if tensor.endswith(BLOCKS) else tensor


def _without_prefix(tensor: str) -> str:
    return PREFIX.sub("", tensor)
