"""Requests that schemathesis generates from /openapi.json. The server must answer valid requests,
and no request may cause a server error.

    python -m tests.clients.schemathesis_run http://HOST:PORT [--examples N] [--json FILE]

The script needs schemathesis. A server with a tiny model is best: `python -m
tests.clients.tiny_server`.

For each operation, N requests that the schema allows must get 200, or 404 for an unknown name in
the path. N requests that the schema forbids follow. No request may get a 5xx. A schema has no rules
between fields, so valid requests are repaired first (`repaired`). Only the schemas of OpenAI's and
vLLM's APIs have the limits of fields; for other APIs only a 5xx is a fault.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.config import GenerationConfig

# Fields in which random texts, schemas or templates are mostly invalid.
DROPPED = {
    *("structured_outputs", "response_format", "text", "tools", "tool_choice", "chat_template"),
    *("chat_template_kwargs", "documents", "reasoning", "include", "bad_words", "logit_bias"),
    *("allowed_token_ids", "truncation", "previous_response_id", "conversation", "background"),
    *("continue_final_message", "max_tool_calls", "context_management", "best_of", "stop"),
}
LIMITED = {
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/input_tokens"),
    *("/tokenize", "/detokenize"),
}
HELLO = [{"role": "user", "content": "the fox"}]


def repaired(body: Any, fields: set[str]) -> Any:
    """Return a body that follows the rules between the fields of a request."""
    if not isinstance(body, dict):
        return body
    body = {name: value for name, value in body.items() if name not in DROPPED}
    short = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "min_tokens": 0}
    body |= {name: value for name, value in {**short, "n": 1}.items() if name in fields}
    if "messages" in fields and "prompt" in fields:  # /tokenize needs one of the two
        body |= {"messages": HELLO, "prompt": None}
    elif "messages" in fields:
        body["messages"] = HELLO
    elif "input" in fields:
        body |= {"input": "the fox", "prompt": None}
    elif "prompt" in fields:
        body["prompt"] = "the fox"
    if not body.get("stream"):
        body.pop("stream_options", None)
    if not body.get("logprobs"):
        body.pop("logprob_token_ids", None)
        body.pop("top_logprobs", None)
    if body.get("truncate_prompt_tokens") == 0:
        body["truncate_prompt_tokens"] = 1
    return body


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--examples", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    schema = schemathesis.openapi.from_url(f"{args.url}/openapi.json")
    operations, faults = {}, []
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            statuses, found = _send(operation, mode, args)
            operations[f"{operation.label} {mode.value}"] = dict(sorted(statuses.items()))
            faults += found
            print(
                f"{operation.label:32} {mode.value:9} {dict(sorted(statuses.items()))}", flush=True
            )
    sent = sum(sum(counts.values()) for counts in operations.values())
    print(f"{sent} requests, {len(faults)} faults")
    for fault in faults[:20]:
        print(json.dumps(fault)[:600])
    if args.json is not None:
        found = {"requests": sent, "faults": faults, "statuses": operations}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return bool(faults)


def _send(operation: Any, mode: GenerationMode, args: Any) -> tuple[Counter[str], list[Any]]:
    statuses: Counter[str] = Counter()
    faults: list[Any] = []
    fields = _fields(operation)
    config = GenerationConfig(modes=[mode])
    try:
        strategy = operation.as_strategy(generation_mode=mode, generation_config=config)
    except TypeError:
        strategy = operation.as_strategy(generation_mode=mode)

    @seed(args.seed)
    @settings(
        max_examples=args.examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def send(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and fields:
            case.body = repaired(case.body, fields)
        try:
            answer = case.call(timeout=60)
        except (requests.exceptions.InvalidHeader, UnicodeError, ValueError):
            return  # HTTP cannot send the request
        statuses[str(answer.status_code)] += 1
        allowed = {200, 404} if "{" in operation.path else {200}
        valid = mode is GenerationMode.POSITIVE and (not fields or operation.path in LIMITED)
        refused = valid and answer.status_code not in allowed
        if refused or answer.status_code >= 500:
            body = case.body if fields else None
            faults.append(
                {
                    "operation": operation.label,
                    "mode": mode.value,
                    "status": answer.status_code,
                    "body": json.dumps(body, default=repr)[:2000],
                    "answer": answer.text[:500],
                }
            )

    try:
        send()
    except Exception as error:
        if (
            "Unsatisfiable" not in type(error).__name__
            and "unsatisfiable" not in str(error).lower()
        ):
            raise
    return statuses, faults


def _fields(operation: Any) -> set[str]:
    """Return the fields of an operation's body; none if it has no body."""
    raw = operation.definition.raw
    content = raw.get("requestBody", {}).get("content", {})
    reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    if not reference:
        return set()
    schemas = operation.schema.raw_schema["components"]["schemas"]
    return set(schemas[reference.rpartition("/")[2]]["properties"])


if __name__ == "__main__":
    sys.exit(main())
