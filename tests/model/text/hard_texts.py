"""Texts that tell one way to cut words from another."""

from __future__ import annotations

import random

PIECES = [
    # words, cases, contractions
    *("hello", "World", "HTTPServer", "camelCase", "iPhone", "ÉCOLE", "École", "straße", "ǅungla"),
    *(
        "don't",
        "I'LL",
        "we've",
        "she'd",
        "it's",
        "'tis",
        "o'clock",
        "y'all're",
        "DON'T",
        "x'S",
        "'",
    ),
    # scripts
    *("Привет", "мир", "Γειά", "ἀρχῇ", "שלום", "مرحبا", "۔،", "नमस्ते", "हिन्दी।", "বাংলা", "தமிழ்"),
    *(
        "ไทยนี้",
        "ລາວ",
        "ខ្មែរ",
        "မြန်မာ",
        "한국어",
        "ㅋㅋㅋ",
        "ㄅㄆㄇ",
        "漢字",
        "中文，句子。",
        "ひらがな",
    ),
    *("カタカナ", "ｶﾀｶﾅ", "日本語テスト", "「引用」", "ქართული", "Հայերեն", "አማርኛ", "ᏣᎳᎩ", "𐐀𐐨"),
    # marks that combine, and their composed forms
    *("e\u0301", "é", "n\u0303o", "a\u0308\u0304", "\u0301", "ﬁ", "Å", "Å", "ﷺ", "ｆｕｌｌ"),
    # emoji
    *("😀", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "❤️", "☃", "🏴\U000e0067\U000e0062\U000e007f"),
    # digits
    *("0", "7", "42", "123", "1234", "12345", "123456", "1234567", "3.14159", "1,000,000", "0x1F"),
    *("١٢٣", "१२३४", "²³", "½", "Ⅻ", "１２３４", "2024-01-31", "1e-9", "a1b22c333d4444", "12th"),
    # white space
    *(" ", "  ", "   ", "    ", "     ", "         ", "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\r\n"),
    *(
        "\r",
        "\r\n\r\n",
        " \n",
        "\n ",
        " \n ",
        "\t\n",
        "\u00a0",
        "\u3000",
        "\u2009",
        "\u200b",
        "\ufeff",
    ),
    *("\u2028", "\x0b", "\x0c", "\x85"),
    # control characters
    *("\x00", "\x01", "\x07", "\x1b[0m", "\x7f", "\ufffd", "\ue000", "\U0010fffd", "\u202e"),
    # signs
    *(
        "!",
        "?!",
        "...",
        "…",
        "--",
        "—",
        "==",
        "!=",
        "->",
        "=>",
        "<=",
        "&&",
        "||",
        "++",
        "$",
        "€",
        "£9",
    ),
    *(
        "%",
        "@user",
        "#tag",
        "~",
        "^",
        "`",
        "``",
        "``code``",
        "\\",
        "\\n",
        "/",
        "//",
        "/*",
        "*/",
        "<|x|>",
    ),
    *(
        "(",
        ")",
        "[]",
        "{}",
        "(a)",
        "[b]",
        "{c}",
        "<d>",
        '"quote"',
        "'q'",
        "«»",
        "“”",
        "‘’",
        ";",
        ":)",
    ),
    *(
        "<sentinel:12>",
        "IMGIMGABCDZ",
        "_",
        "__init__",
        "a_b",
        "a-b",
        "a.b",
        "a/b",
        "a|b",
        "×",
        "÷",
        "√",
    ),
    # code
    *(
        "def f(x):",
        "    return x",
        "\tif (a&&b){",
        "}\n\n",
        "#include <stdio.h>",
        "x+=1;",
        "a[i]->b",
    ),
    *(
        "https://example.com/a?b=c&d=1#e",
        "user@mail.org",
        "C:\\dir\\file.txt",
        "foo::bar<T>()",
        "$(ls)",
    ),
]
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n",
    "Füße, Käse & Öl: 1.234,56 € am 31.12.2024 – „prima“!",
    "昨日、東京で3,000人が参加した。とても楽しかったです！",
    "안녕하세요! 오늘은 2024년 1월 31일입니다.",
    "Все счастливые семьи похожи друг на друга,\nкаждая несчастливая…",
    "हिन्दी में १२३ और 456। क्या हाल है?",
    "I'm sure they'll say it isn't what we'd've DONE'S\t\tok",
    '{"a": [1, 2, 3], "b": {"c": null}}\r\n\r\n  <div class="x">&nbsp;</div>',
    "",
]


def hard_texts(count: int = 600) -> list[str]:
    """The same ones each time: every piece alone, then pieces in random company."""
    rng = random.Random(20)
    texts = [*TEXTS, *PIECES]
    while len(texts) < count:
        between = rng.choice(["", "", " ", " ", "  ", "\n"])
        texts.append(between.join(rng.choices(PIECES, k=rng.randint(2, 7))))
    return texts
