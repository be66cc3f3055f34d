"""Weights from a Hugging Face folder: one safetensors file, or shards with an index."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from twostroke.errors import ModelError
from twostroke.model.spec import ModelSpec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
FLOATS = ("F64", "F32", "F16", "BF16")

GLOBAL_NAMES = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight"}
GLOBAL_NAMES |= {"head": "lm_head.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
for _part in ("q", "k", "v", "o"):
    LAYER_NAMES[_part] = f"self_attn.{_part}_proj.weight"
    LAYER_NAMES[f"{_part}_bias"] = f"self_attn.{_part}_proj.bias"
for _part in ("gate", "up", "down"):
    LAYER_NAMES[_part] = f"mlp.{_part}_proj.weight"
    LAYER_NAMES[f"{_part}_bias"] = f"mlp.{_part}_proj.bias"


def hf_name(canonical: str) -> str:
    """The Hugging Face name of one of our weights: `layers.3.q` → `model.layers.3.self_attn…`."""
    if canonical in GLOBAL_NAMES:
        return GLOBAL_NAMES[canonical]
    _, layer, name = canonical.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[name]}"


class SafetensorsWeights:
    """Opens each file once; the tied head is never asked for, even if a file stores it."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self._folder = folder
        self._spec = spec
        self._open_files: dict[Path, Any] = {}
        self._source, self._files = self._find_files()
        self._refuse_unknown_tensors()

    def shape(self, name: str) -> tuple[int, ...] | None:
        stored = self._stored_name(name)
        return None if stored is None else tuple(self._header(stored).get_shape())

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored = self._stored_name(name)
        if stored is None:
            raise ModelError(
                f"{self._source}: lists no tensor {hf_name(name)!r}. The model is incomplete or "
                "its config.json belongs to another one; download the folder again."
            )
        path = self._files[stored]
        found = self._header(stored).get_dtype()
        if found not in FLOATS:
            raise ModelError(
                f"{path}: the tensor {stored!r} is of type {found}, expected one of "
                f"{', '.join(FLOATS)}. Use the unquantised model, or a GGUF of it."
            )
        tensor: torch.Tensor = self._open(path).get_tensor(stored)
        return tensor.to(dtype, copy=True)  # what the library gives may be the mapped file itself

    def _find_files(self) -> tuple[Path, dict[str, Path]]:
        """What lists the tensors, and the file that holds each of them."""
        single, index = self._folder / SINGLE, self._folder / INDEX
        if not single.exists() and index.exists():
            return index, self._read_index(index)
        if not single.exists():
            single = self._only_file()
        return single, dict.fromkeys(self._open(single).keys(), single)

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
        try:
            content = json.loads(index.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise ModelError(
                f"{index}: cannot be read as JSON ({error}). Download it again."
            ) from None
        shards = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(shards, dict) or not all(isinstance(v, str) for v in shards.values()):
            raise ModelError(
                f"{index}: has no 'weight_map' from tensors to files. Download it again."
            )
        for shard in sorted(set(shards.values())):
            if Path(shard).name != shard:
                raise ModelError(f"{index}: {shard!r} is not the name of a file in its folder.")
            if not (self._folder / shard).is_file():
                raise ModelError(
                    f"{self._folder / shard}: this shard is named in {INDEX} but is not there. "
                    "Download it into the folder."
                )
        return {name: self._folder / shard for name, shard in shards.items()}

    def _open(self, path: Path) -> Any:
        if path not in self._open_files:
            try:
                self._open_files[path] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path}: cannot be read as safetensors ({error}). The file is truncated or "
                    "damaged; download it again."
                ) from None
        return self._open_files[path]

    def _header(self, stored: str) -> Any:
        """Shape and type of a tensor; nothing of its data is read."""
        path = self._files[stored]
        try:
            return self._open(path).get_slice(stored)
        except SafetensorError:
            raise ModelError(
                f"{path}: does not hold the tensor {stored!r}, though {self._source.name} says "
                "so. Index and shards are not of one model; download the folder again."
            ) from None

    def _stored_name(self, name: str) -> str | None:
        """Checkpoints of the bare model go without the prefix `model.`."""
        full = hf_name(name)
        for candidate in (full, full.removeprefix("model.")):
            if candidate in self._files:
                return candidate
        return None

    def _refuse_unknown_tensors(self) -> None:
        """A tensor of a layer we run that has no place in the spec would be left out silently."""
        known = {hf_name(name).removeprefix("model.") for name in self._spec.weight_shapes()}
        for stored, path in self._files.items():
            name = stored.removeprefix("model.")
            layer = re.match(r"layers\.(\d+)\.", name)
            if layer is None or int(layer[1]) >= self._spec.num_layers:
                continue
            if name not in known and not name.endswith("rotary_emb.inv_freq"):
                raise ModelError(
                    f"{path}: the tensor {stored!r} has no place in the model that config.json "
                    "describes. Use the config.json and the unquantised weights of one model."
                )
