"""Reads the settings of a server from the command line, the `--config` file and the environment."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

from twostroke import environment, log_lines
from twostroke.commands.config_file import file_words
from twostroke.commands.flags import chosen_settings, engine_config, resolve_model, settings
from twostroke.commands.parser import Parser
from twostroke.commands.serve_flags import normalize_options
from twostroke.commands.serve_plan import apply_plan
from twostroke.config import EngineConfig
from twostroke.errors import ConfigError
from twostroke.route.pool_settings import PoolSettings
from twostroke.serve.settings import ServeSettings

ALL_INTERFACES = "0.0.0.0"
LOAD_FORMATS = {  # vLLM's load formats → twostroke's
    "hf": "auto",
    "mistral": "auto",
    "fastsafetensors": "safetensors",
    "instanttensor": "safetensors",
    "ipc_cache": "auto",
    "runai_streamer": "safetensors",
}
# Options whose settings have another name.
SETTING_OF_OPTION = {
    "api_key": "api_keys",
    "admin_api_key": "admin_api_keys",
    "served_model_name": "served_model_names",
    "allowed_origins": "cors_origins",
    "default_chat_template_kwargs": "chat_template_kwargs",
    "enable_log_requests": "access_log",
    "enable_force_include_usage": "force_include_usage",
    "shutdown_timeout": "drain_s",
}


def resolve_settings(
    args: argparse.Namespace,
) -> tuple[EngineConfig, ServeSettings, argparse.Namespace]:
    """Return all settings, from the command line, the file and the environment. Report all errors
    at once, and end the program if there are any."""
    args = with_file(args)
    apply_plan(args)
    config = engine_config(args)
    server = serve_settings(args)
    args.pools = pool_settings(args)
    args.parser.finish()
    assert config is not None
    assert server is not None
    return config, server, args


def start_logging(args: argparse.Namespace, settings: ServeSettings) -> None:
    """Configure logging. The first line names the options without effect."""
    os.environ.update(getattr(args, "environment", {}))  # for huggingface_hub
    log_lines.configure(settings.uvicorn_log_level)
    if notice := args.parser.notice():
        logging.getLogger(log_lines.WORK).info(notice)


def with_file(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options of the file of `--config`, overridden by the command line."""
    parser: Parser = args.parser
    on_line = vars(_resolved(args))
    if "config" not in on_line:
        return argparse.Namespace(**on_line)
    words = file_words(Path(on_line["config"]), parser)
    in_file = vars(_resolved(parser.parse_args(normalize_options(words))))
    return argparse.Namespace(**{**in_file, **on_line})


def serve_settings(args: argparse.Namespace) -> ServeSettings | None:
    """Return the settings of the server; None if they have an error. Without a key and without
    `--host` the server listens on this machine only."""
    renamed = {SETTING_OF_OPTION.get(name, name): value for name, value in vars(args).items()}
    values = chosen_settings(argparse.Namespace(**renamed), ServeSettings)
    values.setdefault("api_keys", environment.server_api_keys())
    values.setdefault("admin_api_keys", environment.admin_api_keys())
    values.setdefault("dev_mode", environment.dev_mode())
    for flag, name in (("--api-key", "api_keys"), ("--admin-api-key", "admin_api_keys")):
        if not all(values[name]):  # the message must not contain a key
            args.parser.problem(f"{flag}: a key is empty; give one, or leave the option out")
            return None
    values["cors_origins"] = [origin for part in values.get("cors_origins", ()) for origin in part]
    try:
        _resolve_traces(values)
    except ConfigError as error:
        args.parser.problem(str(error))
        return None
    values["log_stats"] = not renamed.get("disable_log_stats", False)
    values.setdefault("host", ALL_INTERFACES if values["api_keys"] else "127.0.0.1")
    flags = {setting: flag for flag, setting in SETTING_OF_OPTION.items()}
    return settings(args.parser, ServeSettings, values, flags)


def _resolve_traces(values: dict[str, Any]) -> None:
    """Decide whether the server exports traces. If the packages for traces are missing,
    `--otlp-traces-endpoint` is an error, but OTEL variables only cause a message, because they may
    be set for every program of a machine."""
    has_flag = "otlp_traces_endpoint" in values
    if not has_flag and not environment.asks_for_traces():
        return
    from twostroke.serve.monitor.tracing import missing

    problem = missing()
    if problem and has_flag:
        raise ConfigError(f"--otlp-traces-endpoint: {problem}")
    if problem:
        print(f"traces are not exported, though OTEL variables ask: {problem}", file=sys.stderr)
    else:
        values.setdefault("otlp_traces_endpoint", "")


def pool_settings(args: argparse.Namespace) -> PoolSettings | None:
    """Return the settings for several engines; None if they have an error."""
    return settings(args.parser, PoolSettings, chosen_settings(args, PoolSettings))


def _resolved(args: argparse.Namespace) -> argparse.Namespace:
    """Resolve the options of the model, and convert vLLM's load formats and `max_new_tokens`."""
    resolve_model(args)
    if hasattr(args, "hf_file") and hasattr(args, "model"):
        args.model = f"{args.model.partition(':')[0]}:{args.hf_file}"
    if hasattr(args, "load_format"):
        args.load_format = LOAD_FORMATS.get(args.load_format, args.load_format)
    if isinstance(override := getattr(args, "override_generation_config", None), dict):
        args.override_generation_config = _without_output_limit(args, override)
    return args


def _without_output_limit(args: argparse.Namespace, override: dict[str, Any]) -> dict[str, Any]:
    """Return the override without null values and without vLLM's `max_new_tokens`, which sets
    `max_output_tokens`."""
    kept = {name: value for name, value in override.items() if value is not None}
    limit = kept.pop("max_new_tokens", None)
    if limit is not None and (type(limit) is not int or limit < 1):
        args.parser.problem(
            f"--override-generation-config: max_new_tokens must be a whole number of at least 1, "
            f"not {limit!r}"
        )
    elif limit is not None and not hasattr(args, "max_output_tokens"):
        args.max_output_tokens = limit
    return kept
