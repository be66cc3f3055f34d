"""Request fields of other servers that are not in `protocol.py`: vLLM's older and optional fields,
and fields of llama-server, SGLang and OpenRouter.

A table gives each field one of three meanings:

    translated   the field is converted into fields of this server
    ignored      the field has no effect on the answer
    unsupported  the field would change the answer: only its neutral values are accepted

`Body.FOREIGN` is the table of a request type; `body_fields.py` applies it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

import msgspec

from twostroke.serve.error_responses import ApiError

Fields = dict[str, Any]  # a JSON object; values that were not read are `msgspec.Raw`
Apply = Callable[[Fields, Any], None]

MAX_TOKENS: Final = 2**31 - 1  # a max_tokens that means: until the context is full
OFF_BY_DEFAULT: Final[tuple[Any, ...]] = ("", [], {})  # values that switch off any feature
# Unsupported samplers of llama.cpp, with the values that switch them off.
LLAMA_OFF: Final[dict[str, tuple[Any, ...]]] = {
    "mirostat": (0,),
    "typical_p": (1.0,),
    "dry_multiplier": (0.0,),
    "xtc_probability": (0.0,),
    "dynatemp_range": (0.0,),
    "top_n_sigma": (-1.0, 0.0),
    "adaptive_target": (-1.0,),
    "min_keep": (0,),
    "n_cache_reuse": (0,),
    "post_sampling_probs": (False,),
    "lora": ([],),
}
# For each sampler of llama.cpp's field `samplers`: the values that switch it off.
SAMPLER_OFF: Final[dict[str, dict[str, float | int]]] = {
    "temperature": {"temperature": 1.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "penalties": {
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    },
}


@dataclass(frozen=True)
class ForeignField:
    """The meaning of one field. `apply`: None if the field has no effect."""

    type: Any = Any  # the type of its JSON value
    apply: Apply | None = None
    neutral: tuple[Any, ...] | None = None  # the accepted values of an unsupported field
    advice: str = ""
    code: str | None = None  # the code of the error, if clients depend on it

    def translate_into(self, fields: Fields, name: str, value: Any) -> None:
        """Apply a value to the fields of the request; raise `ApiError` if it is unsupported."""
        if self.neutral is not None and not _is_in(value, (*OFF_BY_DEFAULT, *self.neutral)):
            advice = self.advice or "leave it out"
            if self.neutral and not self.advice:
                advice += f", or give {self.neutral[0]!r}, which switches it off"
            raise ApiError(400, f"{name} is not supported; {advice}", param=name, code=self.code)
        if self.apply is not None:
            self.apply(fields, value)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the field in /openapi.json."""
        if self.neutral is not None:
            return {"enum": [None, *OFF_BY_DEFAULT, *self.neutral]}
        return msgspec.json.schema(self.type | None) if self.type is not Any else {}


# The foreign fields of a request type, by name. If two fields have the same meaning, the first one
# counts.
ForeignTable = Mapping[str, ForeignField]


def _is_in(value: Any, values: tuple[Any, ...]) -> bool:
    """Return whether a value is one of `values`: 0 equals 0.0, but not false."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in values
    )


def ignored(type: Any = Any) -> ForeignField:
    return ForeignField(type)


def unsupported(*neutral: Any, advice: str = "", code: str | None = None) -> ForeignField:
    return ForeignField(neutral=neutral, advice=advice, code=code)


def renamed(type: Any, name: str) -> ForeignField:
    """A field that has another name in this server. This server's own field takes precedence."""
    return ForeignField(type, lambda fields, value: _default(fields, name, value))


def inside(type: Any, name: str, key: str) -> ForeignField:
    """A field that becomes the entry `key` of the object `name`. An empty string is ignored."""

    def apply(fields: Fields, value: Any) -> None:
        if value != "":
            _merge(fields, name, {key: value})

    return ForeignField(type, apply)


def _default(fields: Fields, name: str, value: Any) -> None:
    if fields.get(name) is None:
        fields[name] = value


def _merge(fields: Fields, name: str, entries: dict[str, Any]) -> None:
    """Add entries to a field that is an object. Entries of the request take precedence."""
    requested = _value(fields, name)
    if requested is None or isinstance(requested, dict):
        fields[name] = entries | (requested or {})


def _value(fields: Fields, name: str) -> Any:
    value = fields.get(name)
    return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value


# ── translations ────────────────────────────────────────────────────────────────────────────────


def _cache_prompt(fields: Fields, value: bool) -> None:
    if not value:
        fields["cache_salt"] = uuid4().hex  # a unique salt: no cached prefix is found


def _max_tokens(name: str, unlimited: int | None) -> ForeignField:
    """llama.cpp's n_predict. A negative value means no limit (`unlimited`)."""

    def apply(fields: Fields, value: int) -> None:
        _default(fields, name, value if value >= 0 else unlimited)

    return ForeignField(int, apply)


def _thinking(fields: Fields, value: Any) -> None:
    """Translate a boolean, or Anthropic's object: {"type": "enabled", "budget_tokens": …}."""
    budget = None
    if isinstance(value, dict):
        budget, value = value.get("budget_tokens"), value.get("type") != "disabled"
    _merge(fields, "chat_template_kwargs", {"enable_thinking": value, "thinking": value})
    if budget is not None:
        _default(fields, "thinking_token_budget", budget)


def _reasoning(fields: Fields, value: Any) -> None:
    """Translate a boolean, or OpenRouter's object: effort, max_tokens, enabled, exclude."""
    options = value if isinstance(value, dict) else {"enabled": value}
    if options.get("enabled") is not None:
        _thinking(fields, options["enabled"])
    for key, name in (("effort", "reasoning_effort"), ("max_tokens", "thinking_token_budget")):
        if options.get(key) is not None:
            _default(fields, name, options[key])
    if options.get("exclude"):
        _default(fields, "include_reasoning", False)


def _separate_reasoning(fields: Fields, value: bool) -> None:
    if not value:
        _default(fields, "reasoning_format", "none")


def _chat_probabilities(fields: Fields, value: int) -> None:
    if value > 0:
        _default(fields, "logprobs", True)
        _default(fields, "top_logprobs", value)


def _text_probabilities(fields: Fields, value: int) -> None:
    if value > 0:
        _default(fields, "logprobs", value)


def _samplers(fields: Fields, names: list[str]) -> None:
    for sampler, values in SAMPLER_OFF.items():
        if names and sampler not in names:
            fields.update(values)


def _repeat_last_n(fields: Fields, value: int) -> None:
    """Refuse a window for the penalties, because here they apply to the whole text. In the table
    this field must follow `repeat_penalty`."""
    if value == 0:
        fields.update(SAMPLER_OFF["penalties"])
    elif value > 0 and any(
        _value(fields, name) not in (None, off) for name, off in SAMPLER_OFF["penalties"].items()
    ):
        message = "repeat_last_n: penalties apply to the whole text; leave it out, or give -1"
        raise ApiError(400, message, param="repeat_last_n")


# ── tables ──────────────────────────────────────────────────────────────────────────────────────

# Settings of unsupported samplers, of slots, of stops by indentation or time, and of timings (which
# every answer has).
LLAMA_IGNORED: Final[ForeignTable] = {
    name: ignored()
    for name in (
        "mirostat_tau",
        "mirostat_eta",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "xtc_threshold",
        "dynatemp_exponent",
        "adaptive_decay",
        "id_slot",
        "n_indent",
        "t_max_prompt_ms",
        "t_max_predict_ms",
        "n_keep",
        "n_discard",
        "timings_per_token",
        "sse_ping_interval",
    )
}
LLAMA: Final[ForeignTable] = {
    **{name: unsupported(*values) for name, values in LLAMA_OFF.items()},
    **LLAMA_IGNORED,
}
OLLAMA_OPTIONS: Final[ForeignTable] = {  # most of the ignored options are for loading a model
    **LLAMA,
    "tfs_z": unsupported(1.0),
    **{
        name: ignored()
        for name in (
            "num_ctx",
            "num_keep",
            "num_batch",
            "num_gpu",
            "main_gpu",
            "num_thread",
            "numa",
            "low_vram",
            "f16_kv",
            "logits_all",
            "vocab_only",
            "embedding_only",
            "use_mmap",
            "use_mlock",
            "penalize_newline",
        )
    },
}
STRUCTURED: Final[ForeignTable] = {
    "structural_tag": unsupported(advice="give a grammar"),
    "whitespace_pattern": unsupported(),
    "disable_fallback": ignored(bool),
    "disable_any_whitespace": unsupported(False),
}
# For all requests with OpenAI's fields.
_SHARED: Final[ForeignTable] = {
    # vLLM
    "guided_json": inside(str | dict[str, Any], "structured_outputs", "json"),
    "guided_regex": inside(str, "structured_outputs", "regex"),
    "guided_choice": inside(list[str], "structured_outputs", "choice"),
    "guided_grammar": inside(str, "structured_outputs", "grammar"),
    "guided_json_object": inside(bool, "structured_outputs", "json_object"),
    "guided_decoding_backend": ignored(str),
    "guided_whitespace_pattern": unsupported(),
    "use_beam_search": unsupported(False),
    "length_penalty": ignored(float),  # of beam search
    "early_stopping": ignored(bool),
    "logits_processors": unsupported(),
    "kv_transfer_params": unsupported(),
    "repetition_detection": unsupported(),
    "vllm_xargs": unsupported(),
    "mm_processor_kwargs": ignored(),  # for images and audio, which are refused
    "media_io_kwargs": ignored(),
    # llama-server
    "repeat_penalty": renamed(float, "repetition_penalty"),
    "repeat_last_n": ForeignField(int, _repeat_last_n),
    "samplers": ForeignField(list[str], _samplers),
    "grammar": inside(str, "structured_outputs", "grammar"),
    "json_schema": inside(dict[str, Any], "structured_outputs", "json"),
    "cache_prompt": ForeignField(bool, _cache_prompt),
    "return_tokens": ignored(bool),
    "response_fields": ignored(list[str]),
    **LLAMA,
    # SGLang
    "regex": inside(str, "structured_outputs", "regex"),
    "ebnf": inside(str, "structured_outputs", "grammar"),
    "rid": renamed(str, "request_id"),
    "no_stop_trim": renamed(bool, "include_stop_str_in_output"),
    "stop_regex": unsupported(),
    "return_hidden_states": unsupported(False),
    "lora_path": unsupported(),
    "session_params": unsupported(),
    "custom_logit_processor": unsupported(),
    "custom_params": ignored(),
    # OpenRouter, Mistral
    "transforms": unsupported(),
    "top_a": unsupported(0.0),
    "usage": ignored(dict[str, Any]),  # in a stream, `stream_options` switches usage on
    "provider": ignored(),
    "random_seed": renamed(int, "seed"),
    "safe_prompt": unsupported(False),
}
_THINKING: Final[ForeignTable] = {
    "enable_thinking": ForeignField(bool, _thinking),
    "thinking": ForeignField(bool | dict[str, Any], _thinking),
}
CHAT: Final[ForeignTable] = {
    **_SHARED,
    **_THINKING,
    "reasoning": ForeignField(bool | dict[str, Any], _reasoning),
    "thinking_budget": renamed(int, "thinking_token_budget"),
    "thinking_budget_tokens": renamed(int, "thinking_token_budget"),
    "reasoning_budget": renamed(int, "thinking_token_budget"),
    "separate_reasoning": ForeignField(bool, _separate_reasoning),
    "stream_reasoning": unsupported(True),
    "thinking_forced_open": unsupported(False),
    "chat_format": ignored(),
    "parse_tool_calls": unsupported(True, advice='give tool_choice "none" to get no calls'),
    "n_predict": _max_tokens("max_tokens", None),
    "max_output_tokens": renamed(int, "max_completion_tokens"),
    "n_cmpl": renamed(int, "n"),
    "n_probs": ForeignField(int, _chat_probabilities),
    "best_of": unsupported(1),
    # OpenAI's
    "functions": unsupported(advice="use tools"),
    "function_call": unsupported("none", "auto", advice="use tool_choice"),
    "audio": unsupported(advice="this server writes text only"),
    "modalities": unsupported(["text"], advice='give ["text"]'),
    "web_search_options": unsupported(),
}
COMPLETION: Final[ForeignTable] = {
    **_SHARED,
    "n_predict": _max_tokens("max_tokens", MAX_TOKENS),
    "max_completion_tokens": renamed(int, "max_tokens"),
    "n_cmpl": renamed(int, "n"),
    "n_probs": ForeignField(int, _text_probabilities),
    "prompt_embeds": unsupported(advice="send the prompt as a text or token ids"),
    "suffix": unsupported(advice="use /infill"),
}
RESPONSES: Final[ForeignTable] = {
    **_SHARED,
    **_THINKING,
    "reasoning_effort": inside(str, "reasoning", "effort"),
    "n_predict": _max_tokens("max_output_tokens", None),
    "max_tokens": renamed(int, "max_output_tokens"),
    "max_completion_tokens": renamed(int, "max_output_tokens"),
    "n_probs": unsupported(0, advice="include message.output_text.logprobs, and give top_logprobs"),
    "n": unsupported(1),
    "n_cmpl": unsupported(1),
    "conversation": unsupported(advice="continue a response with previous_response_id"),
    "prompt": unsupported(advice="send instructions and input"),
    "context_management": unsupported(advice='set truncation to "auto", or shorten the input'),
    "enable_response_messages": unsupported(False),
}
LLAMA_COMPLETION: Final[ForeignTable] = {
    **LLAMA,
    "grammar": _SHARED["grammar"],  # GBNF
    "json_schema": _SHARED["json_schema"],
    "max_tokens": renamed(int, "n_predict"),
    "max_completion_tokens": renamed(int, "n_predict"),
    "n": renamed(int, "n_cmpl"),
    "logprobs": renamed(int, "n_probs"),
    "repetition_penalty": renamed(float, "repeat_penalty"),
    **{
        name: _SHARED[name]
        for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
    },
}
MESSAGES: Final[ForeignTable] = {
    **{name: _SHARED[name] for name in _SHARED if name.startswith("guided_")},
    "repeat_penalty": _SHARED["repeat_penalty"],
    "cache_prompt": _SHARED["cache_prompt"],
    "enable_thinking": ForeignField(
        bool,
        lambda fields, value: _merge(
            fields, "chat_template_kwargs", {"enable_thinking": value, "thinking": value}
        ),
    ),
    "mcp_servers": unsupported(advice="let the client call them, as tools"),
    "container": unsupported(advice="this server runs no code"),
    "compaction": unsupported(advice="let the client shorten the conversation"),
    # If an error has this code, Anthropic's clients continue without threads.
    "thread": unsupported(
        advice="this server keeps no threads; send the whole conversation",
        code="thread_unsupported_request",
    ),
}
OLLAMA_GENERATE: Final[ForeignTable] = {
    "template": unsupported(
        advice="the model's own template is used; send raw: true and a rendered prompt"
    ),
    "context": unsupported(advice="send the conversation to /api/chat"),
}
TOKENIZE: Final[ForeignTable] = {  # llama-server's names
    "content": renamed(str, "prompt"),
    "add_special": renamed(bool, "add_special_tokens"),
    "parse_special": unsupported(True),
    "with_pieces": unsupported(False, advice="give return_token_strs"),
    "mm_processor_kwargs": ignored(),
}
