"""Our tokenizers encode as those they were rebuilt from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.model.text.cuts import GPT4O_CUT, LLAMA3_CUT, QWEN2_CUT, TEKKEN_CUT
from tests.model.text.vocabularies import (
    SPECIAL_TOKENS,
    TRICKY_TEXTS,
    byte_level_metadata,
    corpus,
    sentencepiece_metadata,
    sentencepiece_model,
    train_byte_level,
)
from tests.tiny import tiny_folder
from twostroke.errors import ModelError, RequestError
from twostroke.model.text.chat_template import ChatTemplate
from twostroke.model.text.tokenizer import LONG, Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# llama.cpp's of a header that names none, as it writes them.
DEFAULT_CUTS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


def reference_pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in ("gpt-2", "exaone4"):
        return gpt2
    if pre == "default":
        steps = [pre_tokenizers.Split(tokenizers.Regex(cut), "isolated") for cut in DEFAULT_CUTS]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*steps, last])
    if pre in ("smollm", "refact", "command-r", "starcoder"):
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    cuts = {"qwen2": QWEN2_CUT, "stablelm2": QWEN2_CUT, "gpt-4o": GPT4O_CUT, "tekken": TEKKEN_CUT}
    cut = tokenizers.Regex(cuts.get(pre, LLAMA3_CUT))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(cut, "isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def byte_level_tokenizer(pre: str = "gpt-2", **header: Any) -> Tokenizer:
    metadata = byte_level_metadata(train_byte_level(reference_pre_tokenizer(pre)), pre)
    return Tokenizer.from_gguf(metadata | {f"tokenizer.ggml.{k}": v for k, v in header.items()})


PRES = ["gpt-2", "default", "llama-bpe", "llama3", "qwen2", "smollm", "dbrx", "gpt-4o"]
PRES += ["tekken", "stablelm2", "refact", "glm4"]


@pytest.mark.parametrize("pre", PRES)
def test_a_byte_level_header_encodes_as_the_tokenizer_it_came_from(pre: str) -> None:
    trained = train_byte_level(reference_pre_tokenizer(pre))
    if pre.startswith("llama") or pre == "tekken":
        trained.model.ignore_merges = True
    if pre == "qwen2":
        trained.normalizer = tokenizers.normalizers.NFC()
    rebuilt = Tokenizer.from_gguf(byte_level_metadata(trained, pre))
    for text in (*TRICKY_TEXTS, *corpus()[:50], "<|im_start|>user\nHi<|im_end|>\n"):
        assert rebuilt.encode(text, add_special_tokens=False) == trained.encode(text).ids


def cut(pre: str, text: str = "in 12345") -> list[str]:
    words = byte_level_tokenizer(pre)._backend.pre_tokenizer.pre_tokenize_str(text)
    return [word for word, _ in words]


def test_digits_are_cut_as_each_kind_says() -> None:
    assert cut("gpt-2") == ["in", "Ġ12345"]
    assert cut("smollm") == ["in", "Ġ", "1", "2", "3", "4", "5"]
    assert cut("llama-bpe") == ["in", "Ġ", "123", "45"]
    assert cut("dbrx") == cut("gpt-4o") == cut("llama-bpe")
    assert cut("glm4") == cut("chatglm-bpe") == cut("smaug-bpe") == cut("dbrx")
    assert cut("tekken") == cut("stablelm2") == cut("qwen2")
    assert cut("command-r") == cut("starcoder") == cut("refact") == cut("smollm")
    assert cut("exaone4") == cut("gpt-2")
    assert cut("qwen2") == ["in", "Ġ", "1", "2", "3", "4", "5"]
    assert cut("default") == ["in", "Ġ", "123", "45"]


def test_a_header_that_names_no_pre_tokenizer_is_cut_as_by_llama_cpp() -> None:
    """`llama-server`'s /tokenize gave the same ids for 10,000 fuzzed texts."""
    assert cut("default", "I'm (x) + a_b") == [
        *("I", "'", "m", "Ġ", "(", "x", ")", "Ġ", "+", "Ġa", "_", "b")
    ]
    trained = train_byte_level(reference_pre_tokenizer("default"))
    named, unnamed = (byte_level_metadata(trained, "default") for _ in range(2))
    del unnamed["tokenizer.ggml.pre"]
    for text in TRICKY_TEXTS:
        expected = Tokenizer.from_gguf(named).encode(text)
        assert Tokenizer.from_gguf(unnamed).encode(text) == expected


@pytest.mark.parametrize("add_space_prefix", [True, False])
def test_a_llama_header_encodes_as_sentencepiece(add_space_prefix: bool) -> None:
    reference = sentencepiece_model(add_space_prefix)
    rebuilt = Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix))
    for text in (*TRICKY_TEXTS, *corpus()[:200]):
        ids = rebuilt.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text), text
        assert rebuilt.decode(ids) == reference.decode(ids)


def test_a_llama_header_begins_with_bos_unless_it_says_otherwise() -> None:
    metadata = sentencepiece_metadata()
    assert Tokenizer.from_gguf(metadata).encode("the")[0] == 1
    without = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.add_bos_token": False})
    assert without.encode("the") == without.encode("the", add_special_tokens=False)
    both = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.add_eos_token": True})
    assert both.encode("the") == [1, *without.encode("the"), 2]


def test_bos_and_eos_of_a_byte_level_header_follow_its_flags() -> None:
    plain = byte_level_tokenizer().encode("the")
    assert byte_level_tokenizer(add_bos_token=True).encode("the") == [1, *plain]
    assert byte_level_tokenizer(add_eos_token=True).encode("the") == [*plain, 2]


def test_a_user_defined_token_is_found_whole_and_shown() -> None:
    metadata = byte_level_metadata(train_byte_level(reference_pre_tokenizer("gpt-2")), "gpt-2")
    metadata["tokenizer.ggml.tokens"].append("<think> ")
    metadata["tokenizer.ggml.token_type"].append(4)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("<think> ") == [tokenizer.vocab_size - 1]
    assert tokenizer.decode([tokenizer.vocab_size - 1]) == "<think> "


def test_the_default_model_has_the_vocabulary_of_smollm() -> None:
    from tests.support import default_model_path
    from twostroke.model.gguf.gguf_file import GGUFFile

    metadata = GGUFFile.open(default_model_path()).metadata
    assert metadata["tokenizer.ggml.model"] == "gpt2"
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_id, tokenizer.bos_token) == (1, "<|im_start|>")
    assert (tokenizer.eos_id, tokenizer.eos_token) == (2, "<|im_end|>")
    assert tokenizer.stop_ids == {0, 2}
    assert tokenizer.encode("Hello 2024<|im_end|>") == [19556, 216, 34, 32, 34, 36, 2]
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    chat = template.render([{"role": "user", "content": "Hi"}])
    ids = tokenizer.encode(chat, add_special_tokens=False)
    assert ids.count(1) == 3  # system, user, assistant: one each, none of them added
    assert tokenizer.decode(ids, skip_special_tokens=False) == chat
    for text in TRICKY_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_stops_are_what_the_header_names_and_special_ends_of_a_turn() -> None:
    assert byte_level_tokenizer().stop_ids == {0, 2}
    assert byte_level_tokenizer(eot_token_id=5, eom_token_id=6).stop_ids == {0, 2, 5, 6}


def test_an_end_of_turn_that_is_plain_text_stops_nothing() -> None:
    metadata = byte_level_metadata(train_byte_level(reference_pre_tokenizer("gpt-2")), "gpt-2")
    metadata["tokenizer.ggml.tokens"] += ["<|eot_id|>", "<end_of_turn>"]
    metadata["tokenizer.ggml.token_type"] += [1, 3]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.stop_ids == {0, 2, tokenizer.vocab_size - 1}


def test_the_end_of_a_text_is_special_whatever_its_type_and_nothing_else_is() -> None:
    metadata = byte_level_metadata(train_byte_level(reference_pre_tokenizer("gpt-2")), "gpt-2")
    sign = metadata["tokenizer.ggml.tokens"].index("!")
    metadata["tokenizer.ggml.token_type"][2] = 1
    metadata |= {f"tokenizer.ggml.{kind}_token_id": sign for kind in ("unknown", "padding")}
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("!<|im_end|>") == [sign, 2]
    assert tokenizer.decode([sign, 2]) == "!"


def test_one_token_is_written_so_that_people_can_read_it() -> None:
    tokenizer = byte_level_tokenizer()
    by_bytes = {tokenizer.token_bytes(n): n for n in range(tokenizer.vocab_size)}
    assert tokenizer.token_text(by_bytes[b"the"]) == "the"
    assert tokenizer.token_text(by_bytes[b" "]) == " "
    assert tokenizer.token_text(by_bytes[b"\xe2"]) == "bytes:\\xe2"
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.token_text(99_999) == "<token 99999>"
    assert tokenizer.token_bytes(99_999) == b""
    llama = Tokenizer.from_gguf(sentencepiece_metadata())
    assert llama.token_text(llama.encode("the")[1]) == " the"


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        byte_level_tokenizer().encode("a\ud800b")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": "t5"}, r"'t5'.*'gpt2', 'llama'.*--tokenizer"),
        ({"model": None}, r"None.*Supported.*--tokenizer"),
        ({"pre": "qwen-2"}, r"'qwen-2'.*mean 'qwen2'.*llama-bpe.*--tokenizer"),
        ({"tokens": []}, r"no tokenizer\.ggml\.tokens.*--tokenizer"),
        ({"token_type": [1]}, r"token_type; it has 1"),
        ({"merges": ["nospace"]}, r"tokenizer\.ggml\.merges"),
        ({"merges": ["not there"]}, r"do not fit together"),
        ({"eos_token_id": 10**6}, r"eos_token_id must be a whole number .* not 1000000"),
    ],
)
def test_headers_we_cannot_read_are_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        byte_level_tokenizer(**change)


def test_a_llama_header_without_scores_is_refused() -> None:
    metadata = sentencepiece_metadata()
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(ModelError, match=r"scores; it has none"):
        Tokenizer.from_gguf(metadata)


def test_of_several_templates_in_a_header_the_default_is_used() -> None:
    named = {"tokenizer.chat_template.tool_use": "tools", "tokenizer.chat_templates": ["tool_use"]}
    metadata = sentencepiece_metadata() | named
    assert Tokenizer.from_gguf(metadata).chat_template == "tools"
    metadata["tokenizer.chat_template"] = "plain"
    assert Tokenizer.from_gguf(metadata).chat_template == "plain"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    backend = train_byte_level(reference_pre_tokenizer("llama-bpe"))
    bos, eos = SPECIAL_TOKENS[1:]
    backend.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], special_tokens=[(bos, 1)]
    )
    backend.enable_truncation(4)
    saved = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
    saved.chat_template = "{{ bos_token }}" + CHATML.replace("<|im_start|>", "")
    saved.save_pretrained(tmp_path)
    return tmp_path


def write(folder: Path, name: str, **settings: Any) -> None:
    (folder / name).write_text(json.dumps(settings))


def change_settings(folder: Path, **settings: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_a_folder_encodes_as_transformers(folder: Path) -> None:
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == len(reference)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (1, 2)
    for text in (*TRICKY_TEXTS, "<|im_start|>user\nHi<|im_end|>"):
        ids = reference.encode(text, truncation=False)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_a_chat_begins_once(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    messages = [{"role": "user", "content": "Hi there"}]
    template = ChatTemplate(tokenizer.chat_template or "", tokenizer.bos_token, tokenizer.eos_token)
    chat = template.render(messages)
    ids = tokenizer.encode(chat, add_special_tokens=False)
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = reference.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, truncation=False
    )
    assert ids == expected
    assert ids.count(1) == 1
    assert tokenizer.encode(chat).count(1) == 2  # what the caller must not do


def test_a_template_of_its_own_file_comes_before_the_settings(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    assert Tokenizer.from_folder(folder).chat_template is None
    change_settings(folder, chat_template="inline")
    assert Tokenizer.from_folder(folder).chat_template == "inline"
    several = [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    change_settings(folder, chat_template=several)
    assert Tokenizer.from_folder(folder).chat_template == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(folder).chat_template == "file"


def test_every_file_of_a_folder_may_name_stops(folder: Path) -> None:
    assert Tokenizer.from_folder(folder).stop_ids == {0, 2}
    write(folder, "config.json", eos_token_id=7, bos_token_id=9)
    write(folder, "generation_config.json", eos_token_id=[8, 2])
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.stop_ids == {0, 2, 7, 8}
    assert tokenizer.bos_id == 1  # the tokenizer's own word comes first
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    bare = Tokenizer.from_folder(folder)
    assert (bare.bos_id, bare.eos_id) == (9, 8)


def test_a_tokenizer_that_has_no_bos_has_none(folder: Path) -> None:
    write(folder, "config.json", bos_token_id=0)
    change_settings(folder, bos_token=None)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.bos_id is None
    assert tokenizer.bos_token == ""


def test_settings_can_make_a_token_special_and_add_one(folder: Path) -> None:
    size = Tokenizer.from_folder(folder).vocab_size
    the = Tokenizer.from_folder(folder).encode("the")[-1]
    new = {"content": "<|eot_id|>", "special": True, "normalized": False, "lstrip": False}
    change_settings(
        folder,
        added_tokens_decoder={str(size): new},
        additional_special_tokens=["the", "<|not_in_the_vocabulary|>"],
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == size + 1
    assert tokenizer.encode("<|eot_id|>") == [1, size]
    assert size in tokenizer.stop_ids
    assert tokenizer.decode([the]) == ""
    assert tokenizer.decode([the], skip_special_tokens=False) == "the"


def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json.*--tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read as a tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_nothing_here_imports_torch_or_transformers() -> None:
    import subprocess
    import sys

    code = (
        "import sys, twostroke.model.text.tokenizer, twostroke.model.text.chat_template\n"
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_long_texts_become_the_same_ids_and_back(tmp_path: Path) -> None:
    """They go through the tokenizer as a batch, short ones do not."""
    tokenizer = Tokenizer.from_folder(tiny_folder(tmp_path / "tiny"))
    text = "a small model says größer 🙂 " * 1000
    assert len(text) > LONG
    ids = tokenizer.encode(text)
    assert ids == tokenizer._backend.encode(text).ids
    assert len(ids) > LONG
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)
    with pytest.raises(RequestError, match="surrogate"):
        tokenizer.encode(text + "\ud800")
