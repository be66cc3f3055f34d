"""Pre-tokenizers of byte-level vocabularies, which split a text into words before merging: one for
each name in GGUF headers (`tokenizer.ggml.pre`).

They split a text like the model's own tokenizer or, if that is unknown, like llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import tokenizers
from tokenizers import pre_tokenizers

# Parts of many patterns.
_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"  # the last blank stays with the next word
_SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"  # up to the end of their line
_WORD: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"  # with the one character before it
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

LLAMA3_PATTERN: Final = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_BLANKS}"
QWEN2_PATTERN: Final = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS}|{_BLANKS}"  # digits one by one


def _cased(numbers: str, contraction: str = "", upper: str = _UPPER, lower: str = _LOWER) -> str:
    """Return a pattern that splits words where lower case turns into upper case."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{upper}*{lower}+{contraction}|{before}{upper}+{lower}*{contraction}"
    return rf"{words}|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"


GPT4O_PATTERN: Final = _cased(r"\p{N}{1,3}", _CONTRACTION + "?")
GPT2_PATTERN: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT_PATTERN: Final = r"\p{N}"
# Groups of three from the end of a run of digits, which an earlier pattern has split off. (The time
# of the usual pattern grows with the square of the length: 15 s for 40,000 digits.)
_THREES: Final = r"\A\d{1,2}(?=(?>(?:\d{3})+)\z)|\d{3}"
BLOOM_PATTERN: Final = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

_NOT_HAN: Final = r"&&[^\p{Han}]]"
_KIMI_WORDS: Final = _cased(
    r"\p{N}{1,3}", _CONTRACTION + "?", _UPPER[:-1] + _NOT_HAN, _LOWER[:-1] + _NOT_HAN
).replace("[\\r\\n/]*", "[\\r\\n]*")

# Letters that have a case, from the list in DeepSeek's first tokenizers:
_DEEPSEEK_LETTERS: Final = (
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 "
    "388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA "
    "1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 "
    "1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB "
    "1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D "
    "212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A "
    "FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
    "1E900-1E943 "
)
_HAN_AND_KANA: Final = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_WIDE_SCRIPTS: Final = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_ASCII_SIGN: Final = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


def _deepseek3(signs_and_ends: str) -> str:
    word = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    return rf"{_ASCII_SIGN}[A-Za-z]+|{word}| ?[\p{{P}}\p{{S}}]+{signs_and_ends}|\s+(?!\S)|\s+"


DEEPSEEK3: Final = (r"\p{N}{1,3}", _HAN_AND_KANA, _deepseek3(r"[\r\n]*|\s*[\r\n]+"))


def _class_of(ranges: str) -> str:
    """Return the characters of a class: for `41-5A B5` the characters A to Z and µ."""
    return "".join(
        "-".join(f"\\x{{{number}}}" for number in one.split("-")) for one in ranges.split()
    )


@dataclass(frozen=True)
class PreTokenizer:
    patterns: tuple[str, ...]  # applied in order, each to the pieces of the previous pattern
    ignore_merges: bool = False  # a word that is a token is not merged
    adds_bos: bool = False  # default of the header's add_bos_token
    nfc: bool = False  # normalise to composed characters first


GPT2, DIGITS_GPT2 = PreTokenizer((GPT2_PATTERN,)), PreTokenizer((DIGIT_PATTERN, GPT2_PATTERN))
LLAMA3 = PreTokenizer((LLAMA3_PATTERN,), ignore_merges=True, adds_bos=True)
LLAMA3_MERGED = PreTokenizer((LLAMA3_PATTERN,))
GLM4 = PreTokenizer((LLAMA3_PATTERN,), ignore_merges=True)
QWEN2, DIGITS_LLAMA3 = PreTokenizer((QWEN2_PATTERN,), nfc=True), PreTokenizer((QWEN2_PATTERN,))
GPT4O = PreTokenizer((GPT4O_PATTERN,))
BLOOM = PreTokenizer((BLOOM_PATTERN,))
BAILING = PreTokenizer(
    (rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",)
)

PRE_TOKENIZERS: Final[dict[str, PreTokenizer]] = {
    # llama.cpp's default, for a header without a name: punctuation apart, then GPT-2's pattern,
    # then digits apart from the space before them and in groups of three.
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", GPT2_PATTERN, r"\p{N}+", r"[0-9]{3}")),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4"), GPT2),
    **dict.fromkeys(("mpt", "olmo", "jais", "trillion", "granite-docling"), GPT2),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell"), DIGITS_GPT2),
    **dict.fromkeys(("exaone", "minerva-7b", "mellum2"), DIGITS_GPT2),
    "falcon": PreTokenizer((r"[\p{P}$+<=>^~|`]+", GPT2_PATTERN, r"[0-9]{3}")),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"), LLAMA3),
    **dict.fromkeys(("pixtral", "midm-2.0", "lfm2"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), LLAMA3_MERGED),
    **dict.fromkeys(("glm4", "glm5"), GLM4),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}+")), ignore_merges=True
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
    "qwen35": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",
        ),
        nfc=True,
    ),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "megrez", "grok-2"), DIGITS_LLAMA3),
    "kormo": DIGITS_LLAMA3,
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}|{_SIGNS}|{_BLANKS}",)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", QWEN2_PATTERN)),
    "seed-coder": PreTokenizer(
        (rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",)
    ),
    "exaone-moe": PreTokenizer(
        (
            _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), BAILING),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), GPT4O),
    "tekken": PreTokenizer((_cased(r"\p{N}"),), ignore_merges=True, adds_bos=True),
    "kimi-k2": PreTokenizer((rf"[\p{{Han}}]+|{_KIMI_WORDS}",)),
    "superbpe": PreTokenizer((r"\p{N}+", _THREES)),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), BLOOM),
    "viking": PreTokenizer((BLOOM_PATTERN, DIGIT_PATTERN)),
    "chameleon": PreTokenizer(
        (
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            DIGIT_PATTERN,
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2_PATTERN,
        ),
        adds_bos=True,
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_class_of(_DEEPSEEK_LETTERS)}]+",
            rf"\s?[{_class_of('21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002')}]+",
            r"(?<!\s)\s+$",  # not `\s+$`, which reads a long run from each of its blanks
            _WIDE_SCRIPTS,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _WIDE_SCRIPTS, DIGIT_PATTERN)
    ),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), PreTokenizer(DEEPSEEK3)
    ),
    "spark2_5": PreTokenizer((*DEEPSEEK3[:2], _deepseek3(r"|[\r\n]"), DIGIT_PATTERN)),
    "youtu": PreTokenizer(
        (
            "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
            "\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _HAN_AND_KANA,
            _cased(DIGIT_PATTERN, _CONTRACTION + "?"),
        ),
        ignore_merges=True,
    ),
}


def pre_tokenizer_of(kind: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """Return the step that splits a text into words in the byte-level alphabet."""
    last_is_gpt2 = kind.patterns[-1] == GPT2_PATTERN  # built into the step `ByteLevel`
    steps: list[pre_tokenizers.PreTokenizer] = []
    for pattern in kind.patterns[:-1] if last_is_gpt2 else kind.patterns:
        if pattern == DIGIT_PATTERN:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        else:
            steps.append(pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=last_is_gpt2))
    return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
