"""The reasons why tests of vLLM do not pass, and the tables of docs/COMPATIBILITY.md."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

# Patterns of the paths of modules that are not run.
CANNOT_RUN = {
    "^multimodal/|_vlm.py$|_multimodal": "images, audio and video: models here read text",
    "^pooling/": "embeddings, scores and classes: models here write text",
    "^speech_to_text/": "speech: models here read text",
    "^unit_tests/test_remote_vllm_server": (
        "it tests the helper that starts vLLM's server for the tests"
    ),
}

NO_THINKING = "the model writes no reasoning"
NO_CALLS = "the model calls a tool only if it is forced to"
SAYS_ELSE = "the model: other texts, other numbers of tokens, an immediate end"
SCALE_OUT = (
    "`--enable-scale-out`, `vllm launch render`: prompts and answers are made in separate processes"
)
WORDS = "the text of an error; its status is the same"

# Patterns of "module::test" and of its output, with a reason. The first match counts.
REASONS: list[tuple[str, str, str]] = [
    # missing
    ("^cohere/", "", "Cohere's API"),
    (
        "^generate/generative_scoring",
        "",
        "`/generative_scoring` (`logprob_token_ids` returns the same information)",
    ),
    (
        "^generate/structured_decisions|^openai/decisions",
        "",
        "`/v1/systemone`, `/v1/decisions`: decisions between given answers",
    ),
    ("^scale_out/", "", SCALE_OUT),
    ("lora|test_models", "", "adapters"),
    ("test_pause_", "", "`/pause`, `/resume`, for trainers that change the weights"),
    ("test_weight_checker", "", "checksums of weights, for trainers that change them"),
    ("test_sleep_mode", "", "metrics of sleep, and waking in parts: the whole engine wakes"),
    ("sagemaker.*(handler_overrides|middleware)", "", "third-party code in the server"),
    ("sagemaker.*sessions", "", "SageMaker's sessions"),
    ("test_v2_endpoint_accepts", "", "`/v2/embed`: embeddings"),
    ("run_batch.*(embed|score|transcription|translation)", "", "embeddings, scores and speech"),
    (
        "test_completions_invalid_input",
        "",
        "an invalid line gets an error as its result; the exit status is 0",
    ),
    ("run_batch.*reasoning", "", NO_THINKING),
    ("", "--watermark-config", "`--watermark-config`"),
    ("", "--enable-prompt-embeds", "`--enable-prompt-embeds`: prompts as embeddings"),
    ("", "--worker-extension-cls", "`--worker-extension-cls`: third-party code in the engine"),
    ("", "--speculative-config", "`--speculative-config` with a draft model"),
    ("", "--tool-server", "`--tool-server`: tools that the server runs itself"),
    ("", "--enable-return-routed-experts", "`--enable-return-routed-experts`"),
    ("", "--weight-transfer-config", "`--weight-transfer-config`: weights from a trainer"),
    ("", "kv_transfer_params", "`kv_transfer_params`: KV blocks from another engine"),
    ("", "use_beam_search", "`use_beam_search`"),
    ("", "enable_response_messages", "`enable_response_messages`: the rendered prompt"),
    # different
    ("test_anthropic_tool_call$|test_chat_completion_with_tool_use", "", NO_CALLS),
    ("test_function_tool_use.*auto", "", NO_CALLS),
    ("test_function_tool_use", "", NO_THINKING),
    ("responses/test_function_call|^tool_parsers/", "", NO_CALLS),
    ("test_include_reasoning|test_reasoning_item|reasoning_tokens|test_thinking", "", NO_THINKING),
    (
        "test_anthropic_streaming_cache_usage",
        "",
        "at the start of a stream, as at its end, `input_tokens` does not include cached tokens",
    ),
    (
        "test_single_chat_session|test_orca_metrics.*test_single_completion",
        "Usa",
        "`usage` always has `prompt_tokens_details`; in vLLM only with "
        "`--enable-prompt-tokens-details`",
    ),
    (
        "test_named_tool_use",
        "no len",
        "`content` is null if there is a tool call, as in OpenAI's API",
    ),
    ("test_metrics_exist.*multimodal", "", "images"),
    ("test_metrics_exist_run_batch", "", "embeddings, scores and speech"),
    ("TestGPTOSSChat|test_namespace_tool_separator", "", NO_CALLS),
    (
        "test_openapi_stateless",
        "_nodeid",
        "schemathesis and this pytest do not work together; `schemathesis_run` sends such requests",
    ),
    ("test_long_seed|test_empty_prompt", "", WORDS),
    ("test_translategemma", "", "the model: it does not translate, and reads no images"),
    (
        "test_request_cancellation",
        "",
        "the model: its context has 8,192 tokens, and the test needs 10,100",
    ),
    (
        "test_more_than_one_prompt_logprobs|test_structured_outputs_|test_response_format_json"
        "|test_complex_message_content|test_completion_streaming|test_parallel_"
        "|test_single_completion|test_comparison_with_prompt_logprobs"
        "|responses/test_basic|responses/test_stateful|responses/test_structured",
        "",
        SAYS_ELSE,
    ),
]

BEGIN, END = "<!-- vllm_tests begin -->", "<!-- vllm_tests end -->"
COUNTED = ("passed", "different", "missing")
TITLES = {
    "missing": ("### Missing", "what is missing"),
    "different": ("### Different", "why"),
    "cannot run": ("### Cannot be run", "why"),
}


def write_page(page: Path, result: dict[str, Any], not_run: list[str]) -> list[str]:
    """Write the tables of the page. Return the tests without a known reason."""
    found = [
        (module, name, outcome, said)
        for module, run in result["modules"].items()
        for name, (outcome, said) in run["tests"].items()
    ]
    unknown = []
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for module, name, outcome, said in found:
        if outcome not in (*TITLES, "not finished", "not collected"):
            continue
        reason = said if outcome == "cannot run" else _reason(f"{module}::{name}", said)
        if reason is None:
            unknown.append(f"{module}::{name} ({outcome}): {said}")
        groups.setdefault((outcome, reason or "not looked into"), []).append((module, name))
    lines = _counts(found)
    for outcome, (title, column) in TITLES.items():
        rows = [(reason, tests) for (kind, reason), tests in groups.items() if kind == outcome]
        if rows:
            lines += [
                "",
                title,
                "",
                f"| {'how many' if outcome == 'cannot run' else 'tests'} | in | {column} |",
                "|---|---|---|",
            ]
            rows.sort(key=lambda row: -len(row[1]))
            lines += [f"| {len(tests)} | {_where(tests, found)} | {why} |" for why, tests in rows]
    if not_run:
        lines += ["", "### Not run yet", "", ", ".join(f"`{module}`" for module in not_run)]
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text("\n".join([before + BEGIN, "", *lines, "", END + after]))
    return unknown


def _counts(found: list[tuple[str, str, str, str]]) -> list[str]:
    """Return the rows of the table of counts, by folder and in total."""
    by_folder: dict[str, Counter[str]] = {}
    for module, _, outcome, _ in found:
        by_folder.setdefault(f"`{module.partition('/')[0]}`", Counter())[outcome] += 1
    by_folder = {name: one for name, one in by_folder.items() if any(one[c] for c in COUNTED)}
    total = sum(by_folder.values(), Counter[str]())
    lines = [f"| | {' | '.join(COUNTED)} |", "|---|---|---|---|"]
    for name, counts in [*by_folder.items(), ("all", total)]:
        lines.append(f"| {name} | {' | '.join(str(counts[c]) for c in COUNTED)} |")
    return lines


def _reason(test: str, said: str) -> str | None:
    for in_test, in_said, reason in REASONS:
        if re.search(in_test, test) and re.search(in_said, said):
            return reason
    return None


def _where(tests: list[tuple[str, str]], found: list[tuple[str, str, str, str]]) -> str:
    """Return the modules, with the names of tests unless all tests of a module are meant."""
    counted = Counter(module for module, _, outcome, _ in found if outcome in COUNTED)
    by_module: dict[str, list[str]] = {}
    whole = Counter(module.partition("/")[0] for module, name in tests if not name)
    parts = [f"{count} modules of `{folder}`" for folder, count in whole.items()]
    for module, name in tests:
        if name:
            by_module.setdefault(module, []).append(name)
    for module, names in by_module.items():
        short = sorted({name.partition("[")[0].rpartition("::")[2] for name in names})
        is_all = len(names) >= counted[module]
        parts.append(f"`{module}`" + ("" if is_all else f": {', '.join(f'`{s}`' for s in short)}"))
    return "; ".join(parts)
