"""Small vocabularies, trained in a moment, and GGUF headers that hold them."""

from __future__ import annotations

import io
import json
import random
from functools import cache
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

WORDS = """
the of and to in that was his with for it is I'll don't we've they're it's he'd I'm YOU'RE
write written writing writer read reader reading token tokens stream streams streaming
größer Straße café naïve señor быстрый текст слово 東京 日本語 中文 文字 한국어 नमस्ते
12 345 6789 2024 3.14159 1,000,000 foo_bar fooBar self.x ==> != -- ... !? @home #tag $5 😀 👍🏽
""".split()  # noqa: SIM905

TRICKY_TEXTS = [
    "",
    " ",
    "   ",
    "Hello world",
    " Hello  world ",
    "I'll say it's THEY'RE don't we've I'M he'd 'twas ''s",
    "1 12 123 1234 12345678 3.14159 1,000,000 ½ ²³ ٣٤٥",
    "tabs\t\tand\nnewlines\n\n\nand \r\n windows\r\n\r\n",
    "trailing spaces   \n   leading   ",
    "def f(x):\n    return x**2  # (a comment)\n\n\n",
    "東京は日本の首都です。中文，测试！한국어 시험",
    "emoji 😀👍🏽👨‍👩‍👧 flags 🇩🇪 and ☃",
    "größer Straße naïve e\u0301 cafe\u0301 \u00a0nbsp\u2003em\u200bzero",
    "!!!??? ... --- === ==> <= >= http://example.com/a?b=c&d=%20",
    "नमस्ते दुनिया สวัสดีชาวโลก مرحبا بالعالم \U0001f9d1\U0001f3ff\u200d\U0001f680 \U00012000",
    "mixed<0x41>bytes ▁mark �",
]


@cache
def corpus() -> tuple[str, ...]:
    choose = random.Random(7)
    lines = (choose.choices(WORDS, k=choose.randrange(4, 16)) for _ in range(600))
    return tuple(choose.choice([" ", " ", "  ", ", "]).join(line) + "." for line in lines)


def train_byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def byte_level_metadata(tokenizer: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    """The GGUF header of a byte-level tokenizer whose first tokens are SPECIAL_TOKENS."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL_TOKENS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


@cache
def sentencepiece_model(add_dummy_prefix: bool = True) -> sentencepiece.SentencePieceProcessor:
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=trained,
        model_type="bpe",
        vocab_size=600,
        character_coverage=0.98,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=add_dummy_prefix,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())


GEMMA_TURNS = ["<start_of_turn>", "<end_of_turn>"]
GEMMA_SYMBOLS = [*GEMMA_TURNS, "<h1>", "</h1>", "\t\t"]
GEMMA_SYMBOLS += ["\n" * n for n in range(1, 5)] + ["▁" * n for n in range(2, 6)]
GEMMA_TEMPLATE = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}\
{% endif %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""


@cache
def gemma_model() -> sentencepiece.SentencePieceProcessor:
    """As Gemma's: other numbers for the first tokens, no space before a text, tokens that are found
    before anything is merged."""
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()),
        model_writer=trained,
        model_type="bpe",
        vocab_size=600,
        character_coverage=0.98,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        user_defined_symbols=GEMMA_SYMBOLS,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())


def gemma_metadata(spaces: bool = False) -> dict[str, Any]:
    """`spaces`: later conversions write user-defined tokens with spaces in the place of `▁`."""
    model = gemma_model()
    ids = range(model.get_piece_size())
    tokens = [model.id_to_piece(n) for n in ids]
    special = {"<unk>": 2} | dict.fromkeys(["<pad>", "<eos>", "<bos>", *GEMMA_TURNS], 3)
    types = [
        special.get(token, 4 if token in GEMMA_SYMBOLS else 6 if model.is_byte(n) else 1)
        for n, token in enumerate(tokens)
    ]
    if spaces:
        tokens = [
            token.replace("▁", " ") if kind == 4 else token
            for token, kind in zip(tokens, types, strict=True)
        ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [model.get_score(n) for n in ids],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.eot_token_id": tokens.index("<end_of_turn>"),
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": GEMMA_TEMPLATE,
    }


def sentencepiece_metadata(add_dummy_prefix: bool = True) -> dict[str, Any]:
    model = sentencepiece_model(add_dummy_prefix)
    ids = range(model.get_piece_size())

    def token_type(n: int) -> int:
        kinds = ((2, model.is_unknown), (3, model.is_control), (6, model.is_byte))
        return next((kind for kind, holds in kinds if holds(n)), 1)

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(n) for n in ids],
        "tokenizer.ggml.scores": [model.get_score(n) for n in ids],
        "tokenizer.ggml.token_type": [token_type(n) for n in ids],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": add_dummy_prefix,
    }
