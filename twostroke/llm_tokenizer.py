"""`LLMTokenizer`: the model's tokenizer, under the names of transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twostroke.engine.input_processor import InputProcessor
from twostroke.model.text.tokenizer import Tokenizer


class Encoding(dict[str, Any]):
    """What calling a tokenizer gives: `input_ids` and `attention_mask`, as keys and attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class LLMTokenizer:
    def __init__(self, tokenizer: Tokenizer, input_processor: InputProcessor) -> None:
        self._tokenizer, self._input_processor = tokenizer, input_processor
        self.eos_token_id, self.bos_token_id = tokenizer.eos_id, tokenizer.bos_id
        self.eos_token, self.bos_token = tokenizer.eos_token, tokenizer.bos_token
        self.vocab_size = tokenizer.vocab_size
        self.chat_template = input_processor.chat_template

    @classmethod
    def of(cls, input_processor: InputProcessor) -> LLMTokenizer | None:
        """None if none is loaded."""
        tokenizer = input_processor.tokenizer
        return None if tokenizer is None else cls(tokenizer, input_processor)

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> Encoding:
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        rows = [self.encode(one, add_special_tokens) for one in text]
        return Encoding(input_ids=rows, attention_mask=[[1] * len(row) for row in rows])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """The text of a conversation (a list of messages), or with `tokenize` its token ids; of a
        list of conversations, a list. `variables` are the template's own."""
        if conversation and not isinstance(conversation[0], dict):
            how = (tools, chat_template, add_generation_prompt, continue_final_message, tokenize)
            return [self.apply_chat_template(one, *how, **variables) for one in conversation]
        processor = self._input_processor
        text = processor.chat_text(
            conversation,
            add_generation_prompt,
            tools,
            variables=variables,
            continue_final_message=continue_final_message,
            run=processor.template_runner(chat_template),
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text
