"""Whatever the tokenizer, a grammar's text is what is written."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from tests.model.text.vocabularies import gemma_metadata, sentencepiece_metadata
from tests.tiny import EOS_ID, tokenizer_json
from twostroke.errors import RequestError
from twostroke.model.text.grammar_tokenizer import make_tokenizer
from twostroke.model.text.tokenizer import Tokenizer
from twostroke.request import StructuredOutputs
from twostroke.structured import compile_grammar

TEXTS = ["Hello world", " Hello", "größer\n\n\n  <h1>x </h1>", "中文 😀", "<s></s><start_of_turn>"]


def lower_case() -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(tokenizer_json())
    backend.normalizer = normalizers.Lowercase()
    return Tokenizer(backend, eos_id=EOS_ID)


def without_an_end() -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(tokenizer_json()))


TOKENIZERS = {
    "sentencepiece": lambda: Tokenizer.from_gguf(sentencepiece_metadata()),
    "gemma": lambda: Tokenizer.from_gguf(gemma_metadata()),
    "lower case": lower_case,
    "no end": without_an_end,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_is_written_as_it_is_asked_for(name: str) -> None:
    tokenizer, pick = TOKENIZERS[name](), random.Random(0)
    ends = sorted(tokenizer.stop_ids)
    theirs = make_tokenizer(tokenizer.to_json(), ends)
    special = set(tokenizer._table.special_ids)
    for texts in (*([text] for text in TEXTS), TEXTS):
        matcher = compile_grammar(theirs, StructuredOutputs(choice=texts))
        ids: list[int] = []
        while not matcher.is_stopped():
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
            ids.append(pick.choice(allowed))
            assert matcher.try_consume_tokens(ids[-1:]) == 1, (texts, ids)
        assert not special & set(ids)
        detokenizer = tokenizer.detokenizer(preceding_ids=tokenizer.encode("so:"))
        assert detokenizer.push(ids) + detokenizer.flush() in texts


def test_tokens_whose_text_depends_on_their_neighbours_are_refused() -> None:
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(RequestError, match="depends on its neighbours"):
        make_tokenizer(backend.to_str(), [])
