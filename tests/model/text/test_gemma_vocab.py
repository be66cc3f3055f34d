"""Gemma's vocabulary in a GGUF header: the tokens of SentencePiece itself, and its chats."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.model.gguf.gguf_files import write_model
from tests.model.text.vocabularies import GEMMA_SYMBOLS, TRICKY_TEXTS, gemma_metadata, gemma_model
from tests.specs import make_spec
from twostroke.model.text.chat_template import ChatTemplate
from twostroke.model.text.tokenizer import Tokenizer

PIECES = [
    " ",
    "  ",
    "    ",
    "\n",
    "\n\n",
    "\t",
    "a",
    "b",
    "the",
    "writ",
    "größer",
    "▁",
    "東京",
    "<h1>",
]
PIECES += ["<end_of_turn>", "é", "😀", "12", "'s", "<", "\r\n"]


@cache
def texts() -> tuple[str, ...]:
    choose = random.Random(3)
    drawn = ("".join(choose.choices(PIECES, k=choose.randrange(1, 14))) for _ in range(1500))
    runs = ("a" + " " * n + "b" + "\n" * n + "c" for n in range(20))
    return (*TRICKY_TEXTS, *runs, *drawn)


@pytest.fixture(params=[False, True], ids=["marks", "spaces"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.from_gguf(gemma_metadata(request.param))


def test_every_text_has_the_tokens_of_sentencepiece(tokenizer: Tokenizer) -> None:
    for text in texts():
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == gemma_model().encode(text), repr(text)


def joined_by_score(text: str) -> list[str]:
    """SentencePiece's rule written out: find the symbols, then join the best pair while one is."""
    model = gemma_model()
    scores = {model.id_to_piece(n): model.get_score(n) for n in range(model.get_piece_size())}
    symbols, text = [], text.replace(" ", "▁")
    while text:
        found = max((one for one in GEMMA_SYMBOLS if text.startswith(one)), key=len, default="")
        symbols.append((found or text[0], bool(found)))
        text = text[len(found or "x") :]
    while True:
        pairs = [
            (-scores[joined], n)
            for n in range(len(symbols) - 1)
            if not symbols[n][1] and not symbols[n + 1][1]
            if (joined := symbols[n][0] + symbols[n + 1][0]) in scores
        ]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [(symbols[at][0] + symbols[at + 1][0], False)]
    return [
        token
        for piece, _ in symbols
        for token in ([piece] if piece in scores else [f"<0x{n:02X}>" for n in piece.encode()])
    ]


def test_the_rule_written_out_gives_the_same_tokens(tokenizer: Tokenizer) -> None:
    for text in texts()[:400]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert [gemma_model().id_to_piece(n) for n in ids] == joined_by_score(text), repr(text)


def test_tokens_become_the_text_again_whole_and_one_by_one(tokenizer: Tokenizer) -> None:
    for text in texts():
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text.replace("▁", " ")
        stream = tokenizer.detokenizer(skip_special_tokens=False)
        assert "".join(stream.push([n]) for n in ids) + stream.flush() == text.replace("▁", " ")


def test_a_prompt_begins_with_bos_and_turns_end_it(tokenizer: Tokenizer) -> None:
    end = gemma_model().piece_to_id("<end_of_turn>")
    assert tokenizer.encode("a") == [2, gemma_model().piece_to_id("a")]
    assert tokenizer.stop_ids == {1, end}


def test_the_chat_template_of_a_file_renders(tmp_path: Path) -> None:
    metadata = gemma_metadata()

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        kinds: dict[type, Any] = {str: writer.add_string, bool: writer.add_bool}
        kinds |= {int: writer.add_uint32, list: writer.add_array}
        for key, value in metadata.items():
            kinds[type(value)](key, value)

    spec = make_spec(
        family="gemma3",
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        post_norm=True,
        qk_norm="head",
    )
    file = write_model(tmp_path / "gemma.gguf", spec, vocabulary)
    tokenizer = Tokenizer.from_gguf(file.metadata, str(file.path))
    assert tokenizer.chat_template is not None
    messages = [
        {"role": "user", "content": " the  token\n\n"},
        {"role": "assistant", "content": "it is"},
        {"role": "user", "content": "writ"},
    ]
    prompt = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token).render(
        messages
    )
    assert prompt == (
        "<bos><start_of_turn>user\nthe  token<end_of_turn>\n<start_of_turn>model\nit is"
        "<end_of_turn>\n<start_of_turn>user\nwrit<end_of_turn>\n<start_of_turn>model\n"
    )
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    model = gemma_model()
    start, end = (model.piece_to_id(one) for one in ("<start_of_turn>", "<end_of_turn>"))
    assert ids[:2] == [2, start]
    assert (ids.count(start), ids.count(end)) == (4, 3)
