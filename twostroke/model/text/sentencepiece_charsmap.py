"""SentencePiece's table of replaced characters, in a tokenizer's step `Precompiled`."""

from __future__ import annotations

import base64
from typing import Any


def longest_in_charsmap(charsmap: Any) -> int:
    """Return the number of characters of the longest replacement.

    The table has the size of a trie, the trie, and texts that end with a zero byte.
    """
    try:
        data = base64.b64decode(charsmap)
    except (TypeError, ValueError):
        return 1  # the library refuses the file
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode("utf-8", "replace")) for text in texts))
