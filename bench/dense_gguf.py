"""Converts a GGUF file to a GGUF file with 16-bit weights, which `--quantization` can round.

    python -m bench.dense_gguf SOURCE.gguf TARGET.gguf [--dither]

Values become float16. Rounding them to the blocks they came from loses nothing; `--dither` adds
noise of up to half a step to the values of Q4_1, so that the values lie between the steps, like the
weights of a model that was never in 4 bits. Needs the package `gguf`.
"""

from __future__ import annotations

import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

OF_THE_WRITER = ("GGUF.", "general.architecture", "general.file_type", "general.quantization")


def main(source: str, target: str, dither: str = "") -> None:
    random = np.random.default_rng(0)
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith(OF_THE_WRITER):
            continue
        kind, inner = field.types[0], field.types[-1]
        of_items = inner if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=of_items)
    for tensor in reader.tensors:
        dense = tensor.tensor_type in (GGMLQuantizationType.F32, GGMLQuantizationType.F16)
        values = np.asarray(tensor.data)
        if not dense:
            values = dequantize(values, tensor.tensor_type)
            if dither and tensor.tensor_type == GGMLQuantizationType.Q4_1:
                blocks = np.asarray(tensor.data).reshape(-1, 20)  # the step comes first
                steps = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
                noise = random.uniform(-0.5, 0.5, (len(blocks), 32)) * steps
                values = values + noise.reshape(values.shape)
            values = values.astype(np.float16)
        writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[3:] not in ([], ["--dither"]):
        sys.exit(__doc__)
    main(*sys.argv[1:])
