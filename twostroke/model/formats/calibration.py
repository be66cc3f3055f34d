"""The calibration text: windows of tokens that measure the importance of a matrix's inputs.

The unquantised model reads the windows once (`torch/importance.py`). Rounding then weights the
error of a weight by the mean square of its input. This module does not import torch.
"""

from __future__ import annotations

import codecs
import json
from itertools import chain
from pathlib import Path

from twostroke.config import EngineConfig
from twostroke.errors import ConfigError
from twostroke.model.formats.w8a8_weights import DENSE, linear_groups
from twostroke.model.load import OpenedModel
from twostroke.model.text.model_text import open_tokenizer
from twostroke.model.weights.safetensors import SafetensorsWeights

MAX_WINDOWS = 8
WINDOW_TOKENS = 512
READ_BYTES = 1 << 20  # of the file, from its beginning


def calibration_windows(config: EngineConfig, model: OpenedModel, max_len: int) -> list[list[int]]:
    """Return windows of one length, spread evenly over the text. Raise `ConfigError` if the model
    or the file cannot be used."""
    _check_model(model)
    tokenizer = open_tokenizer(config, model.files)
    if tokenizer is None:
        raise ConfigError("calibration reads a text, and there is no tokenizer; leave it out")
    path, size = Path(config.calibration or ""), min(WINDOW_TOKENS, max_len)
    begin = tokenizer.encode("")[:1]  # BOS, if the model has it
    ids = tokenizer.encode(read_text(path), add_special_tokens=False)
    step = size - len(begin)
    cut = [begin + ids[at : at + step] for at in range(0, len(ids) - step + 1, step)]
    if not cut:
        raise ConfigError(
            f"calibration: {path} has {len(ids)} tokens, too few to calibrate with; give a text of "
            f"at least {step}, better {MAX_WINDOWS * step}, such as the model will read"
        )
    if max(ids) >= model.spec.vocab_size:
        raise ConfigError(
            f"calibration: the tokenizer gives the id {max(ids)}, but the model has only "
            f"{model.spec.vocab_size} ids; use the model's own tokenizer"
        )
    count = min(MAX_WINDOWS, len(cut))
    return [cut[n * len(cut) // count] for n in range(count)]


def read_text(path: Path) -> str:
    """Return the beginning of a text file, or the "text" of each line of a .jsonl file."""
    try:
        with path.open("rb") as file:
            data = file.read(READ_BYTES)
            if path.suffix == ".jsonl":
                data += file.readline()
    except OSError as error:
        raise ConfigError(f"calibration: {path} cannot be read: {error.strerror}") from None
    try:
        # Incremental, because the last character may be incomplete.
        text = codecs.getincrementaldecoder("utf-8")().decode(data)
        if "\0" in text:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"calibration: {path} is not text in UTF-8; give a text file, or a .jsonl whose lines "
            'have a "text"'
        ) from None
    if path.suffix == ".jsonl":
        text = "\n\n".join(_texts(path, text))
    if not text.strip():
        raise ConfigError(f"calibration: {path} is empty; give a text such as the model will read")
    return text


def _texts(path: Path, lines: str) -> list[str]:
    texts = []
    for number, line in enumerate(lines.split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise ConfigError(
                f'calibration: line {number} of {path} is not a JSON object with a "text"; a text '
                "file without the ending .jsonl is read as plain text"
            )
        texts.append(text)
    return texts


def _check_model(model: OpenedModel) -> None:
    if model.spec.has_experts:
        raise ConfigError("calibration does not support experts yet; leave it out")
    source = model.weights
    known = source.quantized if isinstance(source, SafetensorsWeights) else None
    if known is not None:
        raise ConfigError(
            f"calibration is for weights that are rounded at load, and {model.files.path} is "
            f"quantised already ({known.name}); leave it out, or use the unquantised model"
        )
    for name in chain.from_iterable(linear_groups(model.spec)):
        stored = source.stored_type(name)
        if stored not in DENSE:
            raise ConfigError(
                f"calibration is for weights that are rounded at load, and {source.label(name)} is "
                f"quantised already ({stored}); leave it out, or use the unquantised model"
            )
