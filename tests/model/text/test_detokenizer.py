"""Pieces of text, joined, are the text of the whole."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.model.text.vocabularies import (
    TRICKY_TEXTS,
    byte_level_metadata,
    sentencepiece_metadata,
    train_byte_level,
)
from twostroke.model.text.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    PieceDetokenizer,
    WindowDetokenizer,
    byte_level_bytes,
)
from twostroke.model.text.tokenizer import Tokenizer


@cache
def byte_level() -> Tokenizer:
    trained = train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    return Tokenizer.from_gguf(byte_level_metadata(trained, "gpt-2"))


@cache
def sentencepiece_with_prefix() -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata(add_dummy_prefix=True))


@cache
def sentencepiece_without_prefix() -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata(add_dummy_prefix=False))


@cache
def default_model() -> Tokenizer:
    from tests.support import default_model_path
    from twostroke.model.gguf.gguf_file import GGUFFile

    return Tokenizer.from_gguf(GGUFFile.open(default_model_path()).metadata)


EVERY_VOCABULARY = pytest.mark.parametrize(
    "make",
    [byte_level, sentencepiece_with_prefix, sentencepiece_without_prefix, default_model],
    ids=lambda make: make.__name__,
)


def streamed(detokenizer: Detokenizer, ids: Sequence[int], at_once: int = 1) -> str:
    pieces = [detokenizer.push(ids[n : n + at_once]) for n in range(0, len(ids), at_once)]
    return "".join(pieces) + detokenizer.flush()


@EVERY_VOCABULARY
@pytest.mark.parametrize("skip", [True, False])
def test_random_ids_give_the_text_of_the_whole(make: Callable[[], Tokenizer], skip: bool) -> None:
    tokenizer = make()
    choose = random.Random(3)
    common = min(400, tokenizer.vocab_size)  # specials, bytes and short pieces have low ids
    for trial in range(400):
        top = common if trial % 2 else tokenizer.vocab_size
        ids = [choose.randrange(top) for _ in range(choose.randrange(1, 40))]
        text = streamed(tokenizer.detokenizer(skip), ids, at_once=choose.randrange(1, 4))
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@EVERY_VOCABULARY
def test_texts_come_back_as_they_were(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    for text in TRICKY_TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if make in (sentencepiece_with_prefix, sentencepiece_without_prefix):
            text = text.replace("▁", " ")  # the mark itself cannot be told from a space
        assert streamed(tokenizer.detokenizer(), ids) == text


@EVERY_VOCABULARY
def test_no_piece_holds_half_a_character(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    detokenizer = tokenizer.detokenizer()
    ids = tokenizer.encode("𒀀 𒀁 😀 𐍈 ok", add_special_tokens=False)
    pieces = [detokenizer.push([n]) for n in ids]
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert "" in pieces  # at least one id was not yet a character


def test_a_text_that_ends_within_a_character_ends_with_a_replacement() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("ok \U00012000", add_special_tokens=False)
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(ids[:-1]) == "ok "
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"


def test_byte_streams_break_where_tokenizers_breaks_them() -> None:
    tokenizer = byte_level()
    id_of_byte = {tokenizer.token_bytes(n): n for n in range(3, 259)}
    choose = random.Random(11)
    tempting = [0x41, 0x80, 0xBF, 0xC2, 0xE0, 0xA0, 0xED, 0xE2, 0x82, 0xF0, 0x9F, 0xF4, 0x90, 0xFF]
    for _ in range(2000):
        raw = choose.choices(tempting, k=choose.randrange(1, 9))
        ids = [id_of_byte[bytes([byte])] for byte in raw]
        assert streamed(tokenizer.detokenizer(), ids) == tokenizer.decode(ids)


def test_one_bad_byte_spoils_its_whole_run_as_in_tokenizers() -> None:
    tokenizer = sentencepiece_with_prefix()
    euro = tokenizer.encode("\U00012000", add_special_tokens=False)[1:]  # after the mark
    bad = next(n for n in range(300) if tokenizer.token_bytes(n) == b"\xff")
    word = tokenizer.encode("the", add_special_tokens=False)
    assert streamed(tokenizer.detokenizer(), euro + word) == "\U00012000 the"
    assert streamed(tokenizer.detokenizer(), [*euro, bad, *word]) == "�" * 5 + " the"
    assert tokenizer.decode([*euro, bad, *word]) == "�" * 5 + " the"


def test_a_space_at_the_beginning_is_kept_only_where_a_text_goes_on() -> None:
    tokenizer = sentencepiece_with_prefix()
    prompt, answer = (tokenizer.encode(text, add_special_tokens=False) for text in ("the", "of"))
    assert streamed(tokenizer.detokenizer(), answer) == "of"
    assert streamed(tokenizer.detokenizer(preceding_ids=prompt), answer) == " of"
    assert (
        streamed(tokenizer.detokenizer(preceding_ids=[1]), answer) == "of"
    )  # only <s>, which is unseen
    assert tokenizer.decode(prompt + answer) == "the of"


def test_special_tokens_are_skipped_or_shown() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("the end"), 2]
    assert streamed(tokenizer.detokenizer(), ids) == "the end"
    assert streamed(tokenizer.detokenizer(skip_special_tokens=False), ids) == "the end<|im_end|>"


def test_ids_beyond_the_vocabulary_add_nothing() -> None:
    for make in (byte_level, sentencepiece_with_prefix):
        tokenizer = make()
        ids = tokenizer.encode("the", add_special_tokens=False)
        assert streamed(tokenizer.detokenizer(), [*ids, 1_000_000]) == "the"


def other_decoders() -> list[tokenizers.Tokenizer]:
    words = {"▁the": 0, "▁of": 1, "s": 2, ".": 3, "▁": 4, "##s": 5, "end</w>": 6, "<s>": 7}
    made = []
    for decoder in (decoders.Metaspace(), decoders.WordPiece(), decoders.BPEDecoder(), None):
        backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="."))
        backend.add_special_tokens(["<s>"])
        if decoder is not None:
            backend.decoder = decoder
        made.append(backend)
    return made


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("backend", other_decoders(), ids=lambda backend: repr(backend.decoder)[:9])
def test_any_other_decoder_is_asked_itself(backend: tokenizers.Tokenizer, skip: bool) -> None:
    tokenizer = Tokenizer(backend)
    assert isinstance(tokenizer.detokenizer(), WindowDetokenizer)
    choose = random.Random(5)
    for _ in range(200):
        ids = [choose.randrange(8) for _ in range(choose.randrange(1, 12))]
        assert streamed(tokenizer.detokenizer(skip), ids) == tokenizer.decode(ids, skip)


def test_a_window_holds_half_a_character_and_goes_on_after_a_prompt() -> None:
    backend = tokenizers.Tokenizer(
        models.WordLevel({"<0xE2>": 0, "<0x82>": 1, "<0xAC>": 2, "▁the": 3}, unk_token="▁the")
    )
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer = Tokenizer(backend)
    detokenizer = tokenizer.detokenizer(preceding_ids=[3])
    assert [detokenizer.push([n]) for n in (3, 0, 1, 2)] == [" the", "", "", "€"]
    assert detokenizer.push([3, 0]) == " the"
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"


def test_the_table_is_used_where_it_can_be() -> None:
    assert isinstance(byte_level().detokenizer(), ByteDetokenizer)
    assert isinstance(sentencepiece_with_prefix().detokenizer(), PieceDetokenizer)


def test_the_byte_level_alphabet_is_that_of_tokenizers() -> None:
    assert {byte_level_bytes(c) for c in pre_tokenizers.ByteLevel.alphabet()} == {
        bytes([byte]) for byte in range(256)
    }
    assert byte_level_bytes("Ġhello") == b" hello"
    assert byte_level_bytes("two words") == b"two words"  # the space is outside the alphabet


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    for make in (byte_level, sentencepiece_with_prefix):
        tokenizer = make()
        ids = tokenizer.encode("the writer reads the written text " * 2000)[:10_000]
        detokenizer = tokenizer.detokenizer()
        first, before = detokenizer.push(ids[:100]), pickle.dumps(vars(detokenizer))
        assert first
        for n in ids[100:]:
            detokenizer.push([n])
        assert pickle.dumps(vars(detokenizer)) == before, "nothing is kept to be looked at again"
