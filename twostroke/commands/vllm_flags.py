"""vLLM's flags that `serve` does not have itself, so that none is ever silently left undone.

All flags of `vllm serve` 0.33 are here or taken, and those of earlier versions that launch lines
still carry. A flag in no table is a misspelling. `foreign.py` says what the tables mean.
"""

from __future__ import annotations

import argparse
from dataclasses import fields

from twostroke.commands import llama_flags
from twostroke.commands.flags import merged
from twostroke.commands.foreign import (
    DROPPED,
    Foreign,
    Only,
    Table,
    add_hidden,
    add_tables,
    negations,
    table,
)
from twostroke.commands.parser import Parser
from twostroke.config import RECOMMENDED
from twostroke.request import SamplingParams

ONE_COPY = "all engines of a server are on one machine, behind one address"
WHOLE_CONTEXT = "ranks split heads, not contexts"
NO_STAGES = "layers are not spread over devices; --tensor-parallel-size splits each of them"

REFUSED: Table = table(
    {
        "weights are used as the files store them, or as --quantization rounds them; leave it "
        "out": "--quantization-config= --quantization-param-path= "
        "--calculate-kv-scales --kv-cache-dtype-skip-layers=+ --override-attention-dtype=",
        f"{ONE_COPY}; start one server for each, behind a proxy": "--master-addr= --master-port= "
        "-r= --node-rank= --data-parallel-rank= -dpn= --data-parallel-start-rank= -dpr= "
        "--data-parallel-size-local= -dpl= --data-parallel-address= -dpa= "
        "--data-parallel-rpc-port= -dpp= --data-parallel-hybrid-lb -dph "
        "--data-parallel-external-lb -dpe --data-parallel-multi-port-external-lb -dpm --headless",
        "answers do not say which experts a token went to; leave it out": (
            "--enable-return-routed-experts --aux-output-config="
        ),
        "speculative decoding is not there yet; leave it out, the answers are the same": (
            "--speculative-config= -sc= --spec-method= --spec-model= --spec-tokens= "
            "--speculative-model= --num-speculative-tokens= "
            "--speculative-draft-tensor-parallel-size= --ngram-prompt-lookup-max= "
            "--ngram-prompt-lookup-min= --spec-decoding-acceptance-method="
        ),
        "LoRA adapters are not there yet; merge the adapter into the model": "--enable-lora "
        "--lora-modules=+ --default-mm-loras= --enable-prompt-adapter --prompt-adapters=+",
        "weights and KV blocks stay on the device; --kv-cache-memory-bytes and a smaller --dtype "
        "make room": "--cpu-offload-params=+ --kv-offloading-size= "
        "--sleep-mode-offload-cudagraph --sleep-preserve-parameter-names=+",
        "KV blocks travel between the engines of one server: --prefill-engines and "
        "--decode-engines; leave it out": "--kv-transfer-config=",
        "weights and events do not travel between engines; leave it out": (
            "--kv-events-config= --ec-transfer-config= "
            "--weight-transfer-config= --ec-manager-config="
        ),
        "code of others is not loaded into the server; leave it out": "--middleware= "
        "--tool-parser-plugin= --reasoning-parser-plugin= --logits-processors=+ "
        "--logits-processor-pattern= --io-processor-plugin= --scheduler-cls= --tool-server= "
        "--worker-cls= --worker-extension-cls= --model-class-overrides=",
        "models read and write text only; leave it out": "--mm-encoder-only --enable-mm-embeds "
        "--allowed-local-media-path= --allowed-media-domains=+ --trust-request-mm-kwargs",
        "the server generates text, token by token: no embeddings, scores, classes or diffusion": (
            "--pooler-config= --override-pooler-config= --enable-prompt-embeds --diffusion-config= "
            "-dc= --engram-config="
        ),
        "config.json is read from the model's folder; --hf-overrides replaces its settings": (
            "--hf-config-path="
        ),
        "--revision holds for the tokenizer, too; give --tokenizer a folder for another": (
            "--tokenizer-revision="
        ),
        "there are no routes for scaling out; leave it out": "--enable-scale-out",
        "client certificates are not checked, and ciphers are the system's; put a proxy in front": (
            "--ssl-ca-certs= --enable-ssl-refresh --ssl-ciphers="
        ),
        "--allowed-origins is all there is of CORS; cookies are never allowed": (
            "--allow-credentials"
        ),
        "no text of a prompt or an answer is ever logged; leave it out": "--enable-log-outputs",
        "--skip-tokenizer-init goes without a tokenizer": "--tokens-only",
        "HTTP is the only protocol": "--grpc --grpc-port=",
        "answers do not list the tokens that sampling kept; logprobs do": "--return-sampling-mask",
        "a request cannot force its tokens; prompt_logprobs judges given ones": (
            "--enable-trace-replay"
        ),
        "texts are not watermarked": "--watermark-config=",
        "the fingerprint is made of version, model and device": "--fingerprint-value=",
        "the queue is limited in requests: --max-queue": "--max-num-queued-tokens=",
    }
)

NOTED: Table = table(
    {
        "code that comes with a model is never run; the supported families need none": (
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
        "experts are split between ranks as other weights are, and stay where they are": ""
        "--enable-expert-parallel -ep --enable-eplb --eplb-config= "
        "--enable-ep-weight-filter --all2all-backend= --enable-elastic-ep "
        "--elastic-ep-max-dp-size= --expert-placement-strategy= --enable-dbo "
        "--dbo-decode-token-threshold= --dbo-prefill-token-threshold= --moe-backend=",
        "there are no adapters": "--max-loras= --max-lora-rank= --max-cpu-loras= --lora-dtype= "
        "--lora-extra-vocab-size= --long-lora-scaling-factors= --fully-sharded-loras "
        "--lora-target-modules=+ --specialize-active-lora --enable-tower-connector-lora "
        "--lora-cache-dir= --max-prompt-adapters= --max-prompt-adapter-token= "
        "--enable-mixed-moe-lora-format --enable-moe-shared-loras --max-lora-cls-labels=",
        "nothing is offloaded": "--offload-backend= --offload-group-size= --offload-num-in-group= "
        "--offload-prefetch-step= --offload-params=+ --kv-offloading-backend= --swap-space= "
        "--enable-cumem-allocator --sleep-mode-backend=",
        "nothing is compiled, and graphs are of decode batches": "--compilation-config= -cc= "
        "--compilation-level= -O=? --optimization-level= --cuda-graph-sizes=+ "
        "--max-seq-len-to-capture= --kernel-config= --enable-flashinfer-autotune "
        "--ir-op-priority= --linear-backend= --monokernel --jit-monitor-mode= "
        "--jit-monitor-verbose "
        "--additional-config= --use-fp64-gumbel --sparse-indexer-topk-backend=",
        "each device has one attention backend": "--attention-backend= --attention-config= -ac= "
        "--gdn-prefill-backend= --kda-prefill-backend= --kda-decode-backend= "
        "--kv-sharing-fast-prefill --disable-cascade-attn --enable-flash-late-interaction "
        "--swa-bounded-replay --disable-sliding-window",
        "states of layers have one layout and one kernel": ""
        "--mamba-config= --mamba-backend= --mamba-cache-dtype= "
        "--mamba-ssm-cache-dtype= --mamba-block-size= --mamba-cache-mode= "
        "--mamba-cache-philox-rounds= --enable-mamba-cache-stochastic-rounding "
        "--mamba-ssu-algorithm= --enable-mamba-shared-prefix-checkpoint --replayssm-buffer-len= "
        "--use-replayssm",
        "models read text only; a request with other content is refused": "--limit-mm-per-prompt= "
        "--media-io-kwargs= --mm-processor-kwargs= --mm-processor-cache-gb= "
        "--mm-processor-cache-type= --mm-shm-cache-max-object-size-mb= --mm-encoder-tp-mode= "
        "--mm-encoder-attn-backend= --mm-encoder-attn-dtype= --mm-tensor-ipc= "
        "--interleave-mm-strings --skip-mm-profiling --video-pruning-rate= "
        "--video-pruning-method= --disable-mm-preprocessor-cache --enable-mm-processor-stats "
        "--disable-chunked-mm-input --mm-hasher-algorithm= --mm-encoder-fp8-scale-path= "
        "--mm-encoder-fp8-scale-save-path= --mm-encoder-fp8-scale-save-margin= "
        "--mm-processor-device= --mm-ipc-gpu-memory-gb= --mm-device-do-normalize",
        "llguidance is the one backend of structured outputs": "--guided-decoding-backend= "
        "--guided-decoding-disable-fallback --guided-decoding-disable-any-whitespace "
        "--guided-decoding-disable-additional-properties",
        "weight files are mapped into memory and read once": "--safetensors-load-strategy= "
        "--safetensors-prefetch-num-threads= --safetensors-prefetch-block-size= "
        "--model-loader-extra-config= --ignore-patterns=+ --pt-load-map-location= "
        "--use-tqdm-on-load --allow-deprecated-quantization",
        "prompts share a step's tokens in their order": "--max-num-partial-prefills= "
        "--max-long-partial-prefills= --long-prefill-token-threshold= "
        "--long-prefill-token-threshold-adaptive --scheduler-delay-factor= "
        "--scheduler-reserve-full-isl --watermark= --prefill-schedule-interval= "
        "--max-num-scheduled-tokens=",
        "the engine decides itself how far it plans ahead": "--async-scheduling "
        "--multi-step-stream-outputs --num-scheduler-steps= --num-lookahead-slots= "
        "--stream-interval=",
        "there is one KV cache manager": "--prefix-caching-hash-algo= "
        "--disable-hybrid-kv-cache-manager --prefix-cache-retention-interval= "
        "--prefix-match-unit= --use-v2-block-manager --preemption-mode=",
        "POST /start_profile is always there; `twostroke profile` calls it": "--profiler-config=",
        "--nvtx names steps and the parts of layers": "--enable-layerwise-nvtx-tracing",
        "/metrics has one set of names, and a trace has one span per request": ""
        "--collect-detailed-traces=+ "
        "--show-hidden-metrics-for-version= --kv-cache-metrics "
        "--kv-cache-metrics-sample= --cudagraph-metrics --enable-mfu-metrics "
        "--enable-logging-iteration-details --custom-histogram-buckets= "
        "--per-request-spec-decode-metrics=",
        "HTTP is one process, the engine another, which is watched (--engine-hang-timeout-s) and "
        "started again if it dies": (
            "--api-server-count= -asc= --disable-frontend-multiprocessing --renderer-num-workers= "
            "--enable-fault-tolerance --fault-tolerance-config= --watchdog-config="
        ),
        "a head is limited in bytes: --max-header-bytes": "--h11-max-header-count=",
        "logs go to stderr": "--logging-config= --log-config-file= --log-error-stack "
        "--enable-log-deltas --disable-access-log-for-endpoints=",
        "/docs needs no network": "--enable-offline-docs",
        "there are no routes of Cohere's API, and thinking is switched by the request": ""
        "--cohere-is-reasoning-model --cohere-format= "
        "--anthropic-disabled-thinking-effort=",
        "requests are logged by --enable-log-requests": "--no-disable-uvicorn-access-log",
        "usage always says how many prompt tokens were cached": "--no-enable-prompt-tokens-details",
        "--reasoning-parser asks for it": "--enable-reasoning --reasoning-config=",
        "/docs and /openapi.json are there, and want the key": "--disable-fastapi-docs "
        "--no-disable-fastapi-docs",
    }
)

ANYWAY: Table = table(
    {
        "requests are logged by --enable-log-requests only": "--disable-log-requests "
        "--disable-uvicorn-access-log --max-log-len=",
        "/load is always there": "--enable-server-load-tracking --no-enable-server-load-tracking",
        "/sleep is there in development mode, with VLLM_SERVER_DEV_MODE=1": "--enable-sleep-mode "
        "--no-enable-sleep-mode",
        "usage always says how many prompt tokens were cached": "--enable-prompt-tokens-details",
        "gloo or NCCL reduces": "--disable-custom-all-reduce --no-disable-custom-all-reduce",
        "models read and write text only": "--language-model-only --no-language-model-only",
        "a wrong setting always ends the start": "--fail-on-environ-validation "
        "--no-fail-on-environ-validation",
    }
)
ANYWAY |= {flag: why for flag, why in negations(REFUSED, NOTED).items() if flag not in NOTED}

ONLY: Only = {
    "--model-impl": (("auto", "vllm"), "every model runs on twostroke's own decoder"),
    "--runner": (("auto", "generate"), "the server generates text"),
    "--task": (("auto", "generate"), f"the server generates text ({DROPPED})"),
    "--convert": (("auto", "none"), "the server generates text"),
    "--chat-template-content-format": (
        ("auto", "openai", "string"),
        "a content in parts is joined where the template does not take it apart",
    ),
    "--logprobs-mode": (
        ("raw_logprobs",),
        "log-probabilities are the model's, before penalties and temperature",
    ),
    "--pipeline-parallel-size -pp": (("1",), NO_STAGES),
    "--decode-context-parallel-size -dcp": (("1",), WHOLE_CONTEXT),
    "--prefill-context-parallel-size -pcp": (("1",), WHOLE_CONTEXT),
    "--nnodes": (("1",), "all ranks are on one machine"),
    "--cpu-offload-gb": (("0", "0.0"), "weights stay on the device"),
    "--ssl-cert-reqs": (("0",), "client certificates are not checked; put a proxy in front"),
    "--allowed-methods": (('["*"]', "*"), "GET and POST are allowed"),
    "--allowed-headers": (('["*"]', "*"), "all headers are allowed"),
    "--tool-strict-level": (("auto",), "a request's tool_choice makes a call's form certain"),
    "--fingerprint-mode": (("full", "hash"), "the fingerprint is of version, model and device"),
    "--sse-keep-alive-interval": (
        ("0",),
        "nothing is sent between tokens; give the proxy a longer read time-out",
    ),
}

# Flags above that vLLM 0.33 no longer has.
_OF_EARLIER_VERSIONS = (
    "--quantization-param-path --calculate-kv-scales --override-attention-dtype "
    "--speculative-model --num-speculative-tokens --speculative-draft-tensor-parallel-size "
    "--ngram-prompt-lookup-max --ngram-prompt-lookup-min --spec-decoding-acceptance-method "
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
    "--enable-reasoning"
)
OF_EARLIER_VERSIONS = frozenset(_OF_EARLIER_VERSIONS.split())

# The setting that each option sets, and the reader of its value.
TAKEN = {
    "--device-memory-utilization": ("gpu_memory_utilization", float),
    "--max-num-active-seqs": ("max_num_seqs", int),
    "--max-num-queued-reqs": ("max_queue", int),
    "--h11-max-incomplete-event-size": ("max_header_bytes", int),
}
MISTRAL = {
    "--tokenizer-mode": ("auto", "hf", "slow", "mistral"),
    "--config-format": ("auto", "hf", "mistral"),
}
HUB_VARIABLES = {
    "--hf-token": "HF_TOKEN",
    "-hft": "HF_TOKEN",
    "--download-dir": "HF_HUB_CACHE",
    "--offline": "HF_HUB_OFFLINE",
}
NEUTRAL = {one.name: one.default for one in fields(SamplingParams) if one.name in RECOMMENDED}


class _Take(Foreign):
    def apply(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        name, read = TAKEN[flag]
        try:
            setattr(given, name, read(value))
        except ValueError:
            parser.problem(f"{flag} {value}: expected a number")


class _Format(Foreign):
    """How files are read: as Hugging Face has them, which Mistral's repositories have as well."""

    def apply(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        if value not in MISTRAL[flag]:
            parser.problem(f"{flag} {value}: expected one of {', '.join(MISTRAL[flag])}")
        elif value == "mistral":
            parser.note(f"{flag} mistral", "the model's Hugging Face files are read")


class _GenerationConfig(Foreign):
    def apply(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        if value == "vllm":  # not what the model's makers recommend
            before = getattr(given, "override_generation_config", {})
            given.override_generation_config = {**NEUTRAL, **before}
        elif value != "auto":
            parser.problem(
                f"{flag} {value}: expected auto or vllm; put generation_config.json beside the "
                "model, or its values into --override-generation-config"
            )


class _Environment(Foreign):
    """What the Hub's library reads from the environment."""

    def apply(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        name = HUB_VARIABLES[flag]
        if name == "HF_HUB_OFFLINE":
            value = "1"
        if value:  # without one, --hf-token means what `hf auth login` has kept
            given.environment = {**getattr(given, "environment", {}), name: value}


class _RopeTheta(Foreign):
    def apply(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        try:
            theta = float(value)
        except ValueError:
            parser.problem(f"{flag} {value}: expected a number")
            return
        given.hf_overrides = merged(
            getattr(given, "hf_overrides", None) or {}, {"rope_theta": theta}
        )


class _Inverse(Foreign):
    """The opposite of a switch to enable or disable something, as vLLM takes it."""

    def apply(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        negated = f"--no-{_opposite(flag)[2:]}"
        action = parser._option_string_actions[negated]
        # One of our own switches reads its value off the name; another's is named in the log.
        action(parser, given, [], flag if isinstance(action, Foreign) else negated)


def _opposite(flag: str) -> str:
    enables = flag.startswith("--enable-")
    return (
        flag.replace("--enable-", "--disable-")
        if enables
        else flag.replace("--disable-", "--enable-")
    )


class _DeviceIds(Foreign):
    def apply(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        if value.isdigit():
            given.device = f"cuda:{value}"
        else:
            parser.problem(
                f"{flag} {value}: expected one number; CUDA_VISIBLE_DEVICES names several"
            )


class _LogLevel(Foreign):
    def apply(self, parser: Parser, given: argparse.Namespace, flag: str, value: str) -> None:
        level = value.lower()
        given.uvicorn_log_level = "debug" if level == "notset" else level


def add_foreign_arguments(parser: Parser) -> None:
    """What other servers have."""
    refused = {**llama_flags.REFUSED, **REFUSED}
    noted = {**llama_flags.NOTED, **NOTED}
    anyway = {**llama_flags.ANYWAY, **ANYWAY}
    add_tables(parser, refused, noted, anyway, {**llama_flags.ONLY, **ONLY}, OF_EARLIER_VERSIONS)
    add_hidden(parser, TAKEN, _Take)
    add_hidden(parser, MISTRAL, _Format)
    add_hidden(parser, ["--generation-config"], _GenerationConfig)
    add_hidden(parser, ["--hf-token", "-hft"], _Environment, nargs="?")
    add_hidden(parser, ["--download-dir"], _Environment)
    add_hidden(parser, ["--offline"], _Environment, nargs=0)
    add_hidden(parser, ["--device-ids"], _DeviceIds)
    add_hidden(parser, ["--log-level"], _LogLevel)
    add_hidden(parser, ["--rope-theta"], _RopeTheta)
    llama_flags.add_llama_arguments(parser)
    switches = [flag[5:] for flag in parser._option_string_actions if flag.startswith("--no-")]
    named = [f"--{name}" for name in switches if name.startswith(("enable-", "disable-"))]
    add_hidden(parser, map(_opposite, named), _Inverse, nargs=0)
