"""Small GGUF files for the tests, made by the `gguf` package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.specs import make_spec
from tests.tiny import merged
from twostroke.model.describe.gguf_config import ARCHITECTURES
from twostroke.model.describe.gguf_names import FUSED_NAMES, NAMES
from twostroke.model.describe.spec import ExpertsSpec, ModelSpec, RopeSpec
from twostroke.model.gguf.block_types import LAYOUTS, BlockType
from twostroke.model.gguf.gguf_file import GGUFFile

SPEC = make_spec(
    family="llama",
    vocab_size=48,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    windows=(None,) * 2,
    rope=RopeSpec(theta=10000.0, dim=16),
    norm_eps=2.0**-17,  # exact in the file's float32
    max_context=128,
)
Edit = Callable[[gguf.GGUFWriter], None]

# Where the types whose blocks are made of random bits have their scales: in half precision, but for
# MXFP4 and IQ1_M (`put_scales`).
SCALES_AT = {
    BlockType.Q2_K: (80, 82),
    BlockType.Q3_K: (108,),
    BlockType.Q4_K: (0, 2),
    BlockType.Q5_K: (0, 2),
    BlockType.Q6_K: (208,),
    BlockType.IQ4_NL: (0,),
    BlockType.IQ4_XS: (0,),
    BlockType.MXFP4: (0,),
    BlockType.IQ3_S: (0,),
    BlockType.IQ3_XXS: (0,),
    BlockType.IQ2_XXS: (0,),
    BlockType.IQ2_XS: (0,),
    BlockType.IQ2_S: (0,),
    BlockType.IQ1_S: (0,),
    BlockType.IQ1_M: (48,),
    BlockType.TQ1_0: (52,),
    BlockType.TQ2_0: (64,),
}


def add_sizes(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_context)
    writer.add_embedding_length(spec.hidden_size)
    mlp = spec.layers[0].mlp
    one = mlp.expert if isinstance(mlp, ExpertsSpec) else mlp
    writer.add_feed_forward_length(one.intermediate_size)
    writer.add_head_count(spec.layers[0].attention.num_heads)
    writer.add_head_count_kv(spec.layers[0].attention.num_kv_heads)
    writer.add_layer_norm_rms_eps(spec.norm_eps)


def write_model(path: Path, spec: ModelSpec = SPEC, edit: Edit = lambda writer: None) -> GGUFFile:
    """A model of that spec with random float32 weights; `edit` adds what a test is about."""
    writer = gguf.GGUFWriter(path, spec.family)
    add_sizes(writer, spec)
    known = ARCHITECTURES[spec.family].names if spec.family in ARCHITECTURES else NAMES
    names = NAMES if spec.family == "phi2" else FUSED_NAMES if callable(known) else known
    for name, values in merged(names, spec, random_weights(spec)).items():
        writer.add_tensor(name, values)
    edit(writer)
    save(writer)
    return GGUFFile.open(path)


def save(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_weights(spec: ModelSpec) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = spec.weight_shapes().items()
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes}


def setting(key: str, value: Any, family: str = "llama") -> Edit:
    def edit(writer: gguf.GGUFWriter) -> None:
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add |= {str: writer.add_string, list: writer.add_array}
        writer.kv_data[0].pop(f"{family}.{key}", None)
        add[type(value)](f"{family}.{key}", value)

    return edit


def extra_tensor(name: str, values: np.ndarray) -> Edit:
    return lambda writer: writer.add_tensor(name, values)


def random_blocks(block_type: BlockType, num_blocks: int) -> np.ndarray:
    """Blocks as a quantiser would leave them: any bits, but finite scales."""
    random = np.random.default_rng(1)
    blocks = random.integers(0, 256, (num_blocks, LAYOUTS[block_type].num_bytes), np.uint8)
    for at in SCALES_AT[block_type]:
        put_scales(blocks, block_type, at, random.standard_normal(num_blocks))
    return blocks


def put_scales(blocks: np.ndarray, block_type: BlockType, at: int, scales: np.ndarray) -> None:
    """Write each block's scale, one of those that the type has, at its place."""
    fp16 = np.ascontiguousarray(scales, "<f2")
    if block_type == BlockType.MXFP4:  # an exponent alone
        blocks[..., 0] = np.clip(np.frexp(np.abs(scales))[1] + 127, 0, 252)
    elif block_type == BlockType.IQ1_M:  # a nibble in each of four half words
        for n in range(4):
            nibble = (fp16.view("<u2") >> 4 * n & 15).astype(np.uint8)
            blocks[..., at + 2 * n + 1] = blocks[..., at + 2 * n + 1] & 15 | nibble << 4
    else:
        blocks[..., at : at + 2] = fp16.view(np.uint8).reshape(*fp16.shape, 2)


def packed_rows(block_type: BlockType, num_rows: int, row_length: int) -> np.ndarray:
    if block_type in SCALES_AT:
        num_blocks = num_rows * row_length // LAYOUTS[block_type].elements
        return random_blocks(block_type, num_blocks).reshape(num_rows, -1)
    values = np.random.default_rng(2).standard_normal((num_rows, row_length)).astype(np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType[block_type])
    return packed.view(np.uint8)
