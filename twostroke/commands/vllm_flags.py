"""The flags of `vllm serve` that `serve` accepts or refuses by name but does not list in its help.

The tables have all flags of vLLM 0.33 that are not options of `serve`, and flags of earlier
versions that published start commands still have. `foreign.py` explains the tables.
"""

from __future__ import annotations

import argparse
from dataclasses import fields

from twostroke.commands import llama_flags
from twostroke.commands.flags import json_object, merged
from twostroke.commands.foreign import (
    DROPPED,
    ForeignOption,
    ForeignTables,
    Restrictions,
    Table,
    add_hidden,
    add_speculation,
    add_tables,
    negations,
    table,
)
from twostroke.commands.parser import Parser
from twostroke.config import RECOMMENDED
from twostroke.request import SamplingParams

ONE_MACHINE = "all engines of a server run on one machine, behind one address"
NO_CONTEXT_SPLIT = "ranks split attention heads, not contexts"
NO_PIPELINE = "layers are not spread over devices; --tensor-parallel-size splits every layer"

REFUSED: Table = table(
    {
        "weights are used as the files store them, or as --quantization rounds them; leave the "
        "option out": "--quantization-config= --quantization-param-path= "
        "--calculate-kv-scales --kv-cache-dtype-skip-layers=+ --override-attention-dtype=",
        f"{ONE_MACHINE}; start one server on each machine, behind a proxy": "--master-addr= "
        "--master-port= -r= --node-rank= --data-parallel-rank= -dpn= --data-parallel-start-rank= "
        "-dpr= --data-parallel-size-local= -dpl= --data-parallel-address= -dpa= "
        "--data-parallel-rpc-port= -dpp= --data-parallel-hybrid-lb -dph "
        "--data-parallel-external-lb -dpe --data-parallel-multi-port-external-lb -dpm --headless",
        "answers do not contain the experts of a token; leave the option out": (
            "--enable-return-routed-experts --aux-output-config="
        ),
        "drafts never change the distribution of the tokens; leave the option out": (
            "--spec-decoding-acceptance-method="
        ),
        "LoRA adapters are not supported yet; merge the adapter into the model": "--enable-lora "
        "--lora-modules=+ --default-mm-loras= --enable-prompt-adapter --prompt-adapters=+",
        "weights stay on the device; --kv-cache-memory-bytes and a smaller --dtype make room": ""
        "--cpu-offload-params=+ --sleep-mode-offload-cudagraph --sleep-preserve-parameter-names=+",
        "engines do not exchange weights or events; leave the option out": (
            "--kv-events-config= --ec-transfer-config= "
            "--weight-transfer-config= --ec-manager-config="
        ),
        "the server does not load plugins; leave the option out": "--middleware= "
        "--tool-parser-plugin= --reasoning-parser-plugin= --logits-processors=+ "
        "--logits-processor-pattern= --io-processor-plugin= --scheduler-cls= --tool-server= "
        "--worker-cls= --worker-extension-cls= --model-class-overrides=",
        "models read and write text only; leave the option out": "--mm-encoder-only "
        "--enable-mm-embeds --allowed-local-media-path= --allowed-media-domains=+ "
        "--trust-request-mm-kwargs",
        "the server only generates text: no embeddings, scores, classes or diffusion": (
            "--pooler-config= --override-pooler-config= --enable-prompt-embeds --diffusion-config= "
            "-dc= --engram-config="
        ),
        "config.json is read from the model's folder; --hf-overrides replaces single settings": (
            "--hf-config-path="
        ),
        "--revision also selects the tokenizer's revision; --tokenizer FOLDER selects another": (
            "--tokenizer-revision="
        ),
        "there are no routes for scaling out; leave the option out": "--enable-scale-out",
        "client certificates are not checked, and the system selects ciphers; use a proxy": (
            "--ssl-ca-certs= --enable-ssl-refresh --ssl-ciphers="
        ),
        "--allowed-origins is the only setting of CORS; cookies are never allowed": (
            "--allow-credentials"
        ),
        "prompts and answers are never logged; leave the option out": "--enable-log-outputs",
        "use --skip-tokenizer-init to run without a tokenizer": "--tokens-only",
        "HTTP is the only protocol": "--grpc --grpc-port=",
        "answers do not list the tokens that sampling kept; use logprobs": "--return-sampling-mask",
        "a request cannot force output tokens; use prompt_logprobs to score a text": (
            "--enable-trace-replay"
        ),
        "watermarks are not supported": "--watermark-config=",
        "the fingerprint consists of version, model and device": "--fingerprint-value=",
        "--max-queue limits the queue in requests": "--max-num-queued-tokens=",
    }
)

IGNORED: Table = table(
    {
        "code from a model's repository is never run; supported families do not need it": (
            "--trust-remote-code --code-revision="
        ),
        "all ranks are processes on this machine": (
            "--distributed-executor-backend= --distributed-timeout-seconds= "
            "--cpu-distributed-timeout-seconds= --data-parallel-backend= -dpb= --worker-use-ray "
            "--ray-workers-use-nsight --max-parallel-loading-workers= --aggregate-engine-logging "
            "--cp-kv-cache-interleave-size= --dcp-kv-cache-interleave-size= --dcp-comm-backend= "
            "--dcp-q-replicate --disable-nccl-for-dp-synchronization --numa-bind "
            "--numa-bind-nodes=+ --numa-bind-cpus=+ --data-parallel-supervisor-port= "
            "--dp-supervisor-probe-interval-s= "
            "--dp-supervisor-probe-timeout-s= --dp-supervisor-probe-failure-threshold= "
            "--dp-sync-interval= --enable-hc-sp --enable-batch-sharded-sampling "
            "--enable-shm-tensor-arena --enable-nccl-comm-suspend"
        ),
        "experts are split between ranks like other weights, and are not moved": ""
        "--enable-expert-parallel -ep --enable-eplb --eplb-config= "
        "--enable-ep-weight-filter --all2all-backend= --enable-elastic-ep "
        "--elastic-ep-max-dp-size= --expert-placement-strategy= --enable-dbo "
        "--dbo-decode-token-threshold= --dbo-prefill-token-threshold= --moe-backend= "
        "--num-redundant-experts= --eplb-window-size= --eplb-step-interval= "
        "--eplb-log-balancedness",
        "LoRA adapters are not supported yet": "--max-loras= --max-lora-rank= --max-cpu-loras= "
        "--lora-dtype= --lora-extra-vocab-size= --long-lora-scaling-factors= --fully-sharded-loras "
        "--lora-target-modules=+ --specialize-active-lora --enable-tower-connector-lora "
        "--lora-cache-dir= --max-prompt-adapters= --max-prompt-adapter-token= "
        "--enable-mixed-moe-lora-format --enable-moe-shared-loras --max-lora-cls-labels=",
        "weights are not offloaded, and KV blocks are offloaded in one way": ""
        "--offload-backend= --offload-group-size= --offload-num-in-group= "
        "--offload-prefetch-step= --offload-params=+ "
        "--kv-offloading-backend= --swap-space= --enable-cumem-allocator --sleep-mode-backend=",
        "models are not compiled, and CUDA graphs hold decode batches": "--compilation-config= "
        "-cc= --compilation-level= -O=? --optimization-level= --cuda-graph-sizes=+ "
        "--max-seq-len-to-capture= --kernel-config= --enable-flashinfer-autotune "
        "--ir-op-priority= --linear-backend= --monokernel --jit-monitor-mode= "
        "--jit-monitor-verbose "
        "--additional-config= --use-fp64-gumbel --sparse-indexer-topk-backend=",
        "each device has one attention backend": "--attention-backend= --attention-config= -ac= "
        "--gdn-prefill-backend= --kda-prefill-backend= --kda-decode-backend= "
        "--kv-sharing-fast-prefill --disable-cascade-attn --enable-flash-late-interaction "
        "--swa-bounded-replay --disable-sliding-window",
        "layer states have one layout and one kernel": ""
        "--mamba-config= --mamba-backend= --mamba-cache-dtype= "
        "--mamba-ssm-cache-dtype= --mamba-block-size= --mamba-cache-mode= "
        "--mamba-cache-philox-rounds= --enable-mamba-cache-stochastic-rounding "
        "--mamba-ssu-algorithm= --enable-mamba-shared-prefix-checkpoint --replayssm-buffer-len= "
        "--use-replayssm",
        "models read text only, and requests with other content are "
        "refused": "--limit-mm-per-prompt= "
        "--media-io-kwargs= --mm-processor-kwargs= --mm-processor-cache-gb= "
        "--mm-processor-cache-type= --mm-shm-cache-max-object-size-mb= --mm-encoder-tp-mode= "
        "--mm-encoder-attn-backend= --mm-encoder-attn-dtype= --mm-tensor-ipc= "
        "--interleave-mm-strings --skip-mm-profiling --video-pruning-rate= "
        "--video-pruning-method= --disable-mm-preprocessor-cache --enable-mm-processor-stats "
        "--disable-chunked-mm-input --mm-hasher-algorithm= --mm-encoder-fp8-scale-path= "
        "--mm-encoder-fp8-scale-save-path= --mm-encoder-fp8-scale-save-margin= "
        "--mm-processor-device= --mm-ipc-gpu-memory-gb= --mm-device-do-normalize",
        "llguidance is the only backend of structured outputs": "--guided-decoding-backend= "
        "--guided-decoding-disable-fallback --guided-decoding-disable-any-whitespace "
        "--guided-decoding-disable-additional-properties",
        "weight files are memory-mapped and read once": "--safetensors-load-strategy= "
        "--safetensors-prefetch-num-threads= --safetensors-prefetch-block-size= "
        "--model-loader-extra-config= --ignore-patterns=+ --pt-load-map-location= "
        "--use-tqdm-on-load --allow-deprecated-quantization",
        "prompts share the tokens of a step in order of arrival": "--max-num-partial-prefills= "
        "--max-long-partial-prefills= --long-prefill-token-threshold= "
        "--long-prefill-token-threshold-adaptive --scheduler-delay-factor= "
        "--scheduler-reserve-full-isl --watermark= --prefill-schedule-interval= "
        "--max-num-scheduled-tokens=",
        "the engine decides how far it plans ahead": "--async-scheduling "
        "--multi-step-stream-outputs --num-scheduler-steps= --num-lookahead-slots= "
        "--stream-interval=",
        "there is one KV cache manager": "--prefix-caching-hash-algo= "
        "--disable-hybrid-kv-cache-manager --prefix-cache-retention-interval= "
        "--prefix-match-unit= --use-v2-block-manager --preemption-mode=",
        "POST /start_profile is always available; `twostroke profile` calls "
        "it": "--profiler-config=",
        "use --nvtx to name steps and the parts of layers": "--enable-layerwise-nvtx-tracing",
        "/metrics has one set of names, and a trace has one span per request": ""
        "--collect-detailed-traces=+ "
        "--show-hidden-metrics-for-version= --kv-cache-metrics "
        "--kv-cache-metrics-sample= --cudagraph-metrics --enable-mfu-metrics "
        "--enable-logging-iteration-details --custom-histogram-buckets= "
        "--per-request-spec-decode-metrics=",
        "HTTP and the engine have one process each; the server restarts an engine that dies or "
        "hangs (--engine-hang-timeout-s)": (
            "--api-server-count= -asc= --disable-frontend-multiprocessing --renderer-num-workers= "
            "--enable-fault-tolerance --fault-tolerance-config= --watchdog-config="
        ),
        "--max-header-bytes limits a request's head in bytes": "--h11-max-header-count=",
        "logs go to stderr": "--logging-config= --log-config-file= --log-error-stack "
        "--enable-log-deltas --disable-access-log-for-endpoints=",
        "/docs needs no network": "--enable-offline-docs",
        "there are no routes of Cohere's API, and a request itself switches thinking on or off": ""
        "--cohere-is-reasoning-model --cohere-format= "
        "--anthropic-disabled-thinking-effort=",
        "--enable-log-requests logs requests": "--no-disable-uvicorn-access-log",
        "usage always says how many prompt tokens were cached": "--no-enable-prompt-tokens-details",
        "--reasoning-parser selects the parser": "--enable-reasoning --reasoning-config=",
        "/docs and /openapi.json are available and need the key": "--disable-fastapi-docs "
        "--no-disable-fastapi-docs",
    }
)

REDUNDANT: Table = table(
    {
        "requests are logged only with --enable-log-requests": "--disable-log-requests "
        "--disable-uvicorn-access-log --max-log-len=",
        "/load is always available": "--enable-server-load-tracking "
        "--no-enable-server-load-tracking",
        "/sleep is available in development mode (VLLM_SERVER_DEV_MODE=1)": "--enable-sleep-mode "
        "--no-enable-sleep-mode",
        "usage always says how many prompt tokens were cached": "--enable-prompt-tokens-details",
        "gloo or NCCL does the all-reduce": "--disable-custom-all-reduce "
        "--no-disable-custom-all-reduce",
        "models read and write text only": "--language-model-only --no-language-model-only",
        "an invalid setting always stops the start": "--fail-on-environ-validation "
        "--no-fail-on-environ-validation",
    }
)
REDUNDANT |= {flag: why for flag, why in negations(REFUSED, IGNORED).items() if flag not in IGNORED}

RESTRICTED: Restrictions = {
    "--model-impl": (("auto", "vllm"), "every model runs on twostroke's decoder"),
    "--runner": (("auto", "generate"), "the server generates text"),
    "--task": (("auto", "generate"), f"the server generates text ({DROPPED})"),
    "--convert": (("auto", "none"), "the server generates text"),
    "--logprobs-mode": (
        ("raw_logprobs",),
        "log-probabilities are computed before penalties and temperature",
    ),
    "--pipeline-parallel-size -pp": (("1",), NO_PIPELINE),
    "--decode-context-parallel-size -dcp": (("1",), NO_CONTEXT_SPLIT),
    "--prefill-context-parallel-size -pcp": (("1",), NO_CONTEXT_SPLIT),
    "--nnodes": (("1",), "all ranks run on one machine"),
    "--cpu-offload-gb": (("0", "0.0"), "weights stay on the device"),
    "--ssl-cert-reqs": (("0",), "client certificates are not checked; use a proxy"),
    "--allowed-methods": (('["*"]', "*"), "GET and POST are allowed"),
    "--allowed-headers": (('["*"]', "*"), "all headers are allowed"),
    "--tool-strict-level": (("auto",), "tool_choice guarantees the format of a call"),
    "--fingerprint-mode": (
        ("full", "hash"),
        "the fingerprint consists of version, model and device",
    ),
    "--sse-keep-alive-interval": (
        ("0",),
        "nothing is sent between tokens; set a longer read timeout in the proxy",
    ),
}

# Flags in the tables that vLLM 0.33 no longer has.
_OF_EARLIER_VERSIONS = (
    "--quantization-param-path --calculate-kv-scales --override-attention-dtype "
    "--spec-decoding-acceptance-method "
    "--enable-prompt-adapter --prompt-adapters --logits-processor-pattern "
    "--override-pooler-config --worker-use-ray --lora-extra-vocab-size "
    "--long-lora-scaling-factors --lora-cache-dir --max-prompt-adapters "
    "--max-prompt-adapter-token --swap-space --compilation-level --cuda-graph-sizes "
    "--max-seq-len-to-capture --mamba-config --disable-mm-preprocessor-cache "
    "--enable-mm-processor-stats --guided-decoding-backend --guided-decoding-disable-fallback "
    "--guided-decoding-disable-any-whitespace --guided-decoding-disable-additional-properties "
    "--max-num-partial-prefills --max-long-partial-prefills --scheduler-delay-factor "
    "--multi-step-stream-outputs --num-scheduler-steps --num-lookahead-slots "
    "--use-v2-block-manager --preemption-mode --disable-frontend-multiprocessing "
    "--enable-reasoning --num-redundant-experts --eplb-window-size --eplb-step-interval "
    "--eplb-log-balancedness"
)
OF_EARLIER_VERSIONS = frozenset(_OF_EARLIER_VERSIONS.split())

# Options with another name → the setting, and the reader of the value.
RENAMED = {
    "--device-memory-utilization": ("gpu_memory_utilization", float),
    "--max-num-active-seqs": ("max_num_seqs", int),
    "--max-num-queued-reqs": ("max_queue", int),
    "--h11-max-incomplete-event-size": ("max_header_bytes", int),
}
# Options of speculative decoding → the key of --speculative-config.
SPECULATION = {
    "--spec-method": "method",
    "--spec-model": "model",
    "--speculative-model": "model",
    "--speculative-draft-tensor-parallel-size": "draft_tensor_parallel_size",
    "--spec-tokens": "num_speculative_tokens",
    "--num-speculative-tokens": "num_speculative_tokens",
    "--ngram-prompt-lookup-max": "prompt_lookup_max",
    "--ngram-prompt-lookup-min": "prompt_lookup_min",
}
FILE_FORMATS = {
    "--tokenizer-mode": ("auto", "hf", "slow", "mistral"),
    "--config-format": ("auto", "hf", "mistral"),
}
HUB_VARIABLES = {
    "--hf-token": "HF_TOKEN",
    "-hft": "HF_TOKEN",
    "--download-dir": "HF_HUB_CACHE",
    "--offline": "HF_HUB_OFFLINE",
}
# Default sampling without the recommendation of the model's makers.
NEUTRAL = {
    field.name: field.default for field in fields(SamplingParams) if field.name in RECOMMENDED
}


class _RenamedVllmOption(ForeignOption):
    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        name, read = RENAMED[flag]
        try:
            setattr(args, name, read(value))
        except ValueError:
            parser.problem(f"{flag} {value}: expected a number")


class _SpeculationKey(ForeignOption):
    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        add_speculation(parser, args, SPECULATION[flag], flag, value)


class _FileFormat(ForeignOption):
    """The format of a model's files. Mistral's repositories have Hugging Face's files too."""

    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        if value not in FILE_FORMATS[flag]:
            parser.problem(f"{flag} {value}: expected one of {', '.join(FILE_FORMATS[flag])}")
        elif value == "mistral":
            parser.note(f"{flag} mistral", "the model's Hugging Face files are read")


class _GenerationConfig(ForeignOption):
    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        if value == "vllm":  # ignore the recommendation of the model's makers
            before = getattr(args, "override_generation_config", {})
            args.override_generation_config = {**NEUTRAL, **before}
        elif value != "auto":
            parser.problem(
                f"{flag} {value}: expected auto or vllm; put generation_config.json into the "
                "model's folder, or give its values to --override-generation-config"
            )


class _HubVariable(ForeignOption):
    """An environment variable that huggingface_hub reads."""

    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        name = HUB_VARIABLES[flag]
        if name == "HF_HUB_OFFLINE":
            value = "1"
        if value:  # --hf-token without a value means the token of `hf auth login`
            args.environment = {**getattr(args, "environment", {}), name: value}


class _RopeTheta(ForeignOption):
    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        try:
            theta = float(value)
        except ValueError:
            parser.problem(f"{flag} {value}: expected a number")
            return
        args.hf_overrides = merged(getattr(args, "hf_overrides", None) or {}, {"rope_theta": theta})


class _Inverse(ForeignOption):
    """The opposite of a switch whose name begins with enable or disable, as in vLLM."""

    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        negated = f"--no-{_opposite(flag)[2:]}"
        action = parser._option_string_actions[negated]
        # A switch of twostroke reads its value from its name. The log names a foreign switch.
        action(parser, args, [], flag if isinstance(action, ForeignOption) else negated)


def _opposite(flag: str) -> str:
    enables = flag.startswith("--enable-")
    return (
        flag.replace("--enable-", "--disable-")
        if enables
        else flag.replace("--disable-", "--enable-")
    )


class _DeviceIds(ForeignOption):
    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        if value.isdigit():
            args.device = f"cuda:{value}"
        else:
            parser.problem(
                f"{flag} {value}: expected one number; CUDA_VISIBLE_DEVICES names several"
            )


class _KVTransferConfig(ForeignOption):
    """vLLM's OffloadingConnector is `--kv-offloading-size`."""

    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        try:
            config = json_object(value)
            extra = config.get("kv_connector_extra_config") or {}
            size = extra.get("cpu_bytes_to_use")
        except (argparse.ArgumentTypeError, AttributeError):
            config, size = {}, None
        is_offloading = config.get("kv_connector") == "OffloadingConnector"
        if not is_offloading or not isinstance(size, int | float):
            parser.problem(
                f"{flag} {value}: the OffloadingConnector with cpu_bytes_to_use is supported, and "
                "is the same as --kv-offloading-size GiB; --prefill-engines and --decode-engines "
                "transfer KV blocks between the engines of one server"
            )
            return
        args.kv_offloading_size = size / 2**30


class _LogLevel(ForeignOption):
    def apply(self, parser: Parser, args: argparse.Namespace, flag: str, value: str) -> None:
        level = value.lower()
        args.uvicorn_log_level = "debug" if level == "notset" else level


def add_foreign_arguments(parser: Parser) -> None:
    """Add the options of vLLM and llama-server that the help leaves out."""
    llama = llama_flags
    tables = ForeignTables(
        refused={**llama.REFUSED, **REFUSED},
        ignored={**llama.IGNORED, **IGNORED, **llama.REDUNDANT, **REDUNDANT},
        restricted={**llama.RESTRICTED, **RESTRICTED},
        dropped=OF_EARLIER_VERSIONS,
    )
    add_tables(parser, tables)
    add_hidden(parser, RENAMED, _RenamedVllmOption)
    add_hidden(parser, SPECULATION, _SpeculationKey)
    add_hidden(parser, FILE_FORMATS, _FileFormat)
    add_hidden(parser, ["--generation-config"], _GenerationConfig)
    add_hidden(parser, ["--hf-token", "-hft"], _HubVariable, nargs="?")
    add_hidden(parser, ["--download-dir"], _HubVariable)
    add_hidden(parser, ["--offline"], _HubVariable, nargs=0)
    add_hidden(parser, ["--device-ids"], _DeviceIds)
    add_hidden(parser, ["--log-level"], _LogLevel)
    add_hidden(parser, ["--kv-transfer-config"], _KVTransferConfig)
    add_hidden(parser, ["--rope-theta"], _RopeTheta)
    llama_flags.add_llama_arguments(parser)
    switches = [flag[5:] for flag in parser._option_string_actions if flag.startswith("--no-")]
    named = [f"--{name}" for name in switches if name.startswith(("enable-", "disable-"))]
    add_hidden(parser, map(_opposite, named), _Inverse, nargs=0)
