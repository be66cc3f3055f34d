"""Flags of vLLM's that `serve` does not have, so that none is ever silently ignored.

A flag here is refused by name with the reason; or it asks for what happens anyway (`ANYWAY`,
`ONLY`) and is taken. llama-server's are in `llama_flags.py`. What is in no table is a misspelling.
"""

from __future__ import annotations

from argparse import Namespace

from twostroke.commands import llama_flags
from twostroke.commands.foreign import Foreign, Parser, add_hidden

_BY_REASON: dict[str, str] = {
    "weights are taken as their files have them, or as --quantization makes them on a CPU": (
        "--quantization-config --allow-deprecated-quantization "
        "--quantization-param-path --calculate-kv-scales --kv-cache-dtype-skip-layers "
        "--override-attention-dtype"
    ),
    "a model runs on one device in this version": "--distributed-executor-backend --master-addr "
    "--master-port -r --node-rank --distributed-timeout-seconds --data-parallel-rank -dpn "
    "--data-parallel-start-rank -dpr --data-parallel-size-local -dpl --data-parallel-address -dpa "
    "--data-parallel-rpc-port -dpp --data-parallel-backend -dpb --data-parallel-hybrid-lb -dph "
    "--data-parallel-external-lb -dpe --worker-cls --worker-extension-cls --worker-use-ray "
    "--ray-workers-use-nsight --max-parallel-loading-workers --aggregate-engine-logging "
    "--headless --cp-kv-cache-interleave-size --dcp-kv-cache-interleave-size --dcp-comm-backend "
    "--disable-nccl-for-dp-synchronization --numa-bind --numa-bind-nodes --numa-bind-cpus",
    "mixtures of experts are not supported yet": "--enable-expert-parallel -ep --enable-eplb "
    "--eplb-config --enable-ep-weight-filter --all2all-backend --enable-elastic-ep "
    "--expert-placement-strategy --enable-return-routed-experts --enable-dbo "
    "--dbo-decode-token-threshold --dbo-prefill-token-threshold --moe-backend",
    "speculative decoding is not there yet": "--speculative-config --speculative-model "
    "--num-speculative-tokens --num-lookahead-slots --speculative-draft-tensor-parallel-size "
    "--ngram-prompt-lookup-max --ngram-prompt-lookup-min --spec-decoding-acceptance-method",
    "LoRA adapters are not there yet; merge the adapter into the model": "--enable-lora "
    "--lora-modules --max-loras --max-lora-rank --max-cpu-loras --lora-dtype "
    "--lora-extra-vocab-size --long-lora-scaling-factors --fully-sharded-loras "
    "--lora-target-modules --default-mm-loras --specialize-active-lora "
    "--enable-tower-connector-lora --lora-cache-dir --enable-prompt-adapter --prompt-adapters "
    "--max-prompt-adapters --max-prompt-adapter-token",
    "weights and KV blocks stay on the device; --kv-cache-memory-bytes and a smaller --dtype make "
    "room": "--cpu-offload-params --offload-backend --offload-group-size --offload-num-in-group "
    "--offload-prefetch-step --offload-params --kv-offloading-size --kv-offloading-backend "
    "--enable-sleep-mode",
    "KV blocks do not travel between engines yet": "--kv-transfer-config --kv-events-config "
    "--ec-transfer-config --weight-transfer-config",
    "code that comes with a model is never run; the supported families need none, so leave it "
    "out": "--trust-remote-code --code-revision",
    "code of others is not loaded into the server": "--middleware --tool-parser-plugin "
    "--reasoning-parser-plugin --logits-processors --logits-processor-pattern "
    "--io-processor-plugin --scheduler-cls --tool-server --additional-config",
    "nothing is compiled, and graphs are of decode batches; --cudagraph-capture-sizes, "
    "--max-cudagraph-capture-size and --enforce-eager are all there is to choose": (
        "--compilation-config -cc --compilation-level -O --optimization-level --cuda-graph-sizes "
        "--max-seq-len-to-capture --cudagraph-metrics --kernel-config "
        "--enable-flashinfer-autotune --ir-op-priority"
    ),
    "there is one attention backend": "--attention-backend --attention-config "
    "--gdn-prefill-backend --disable-sliding-window --kv-sharing-fast-prefill",
    "state-space models are not supported": "--mamba-config --mamba-backend --mamba-cache-dtype "
    "--mamba-ssm-cache-dtype --mamba-block-size --mamba-cache-mode --mamba-cache-philox-rounds "
    "--enable-mamba-cache-stochastic-rounding",
    "models read and write text only": "--limit-mm-per-prompt --media-io-kwargs "
    "--mm-processor-kwargs --mm-processor-cache-gb --mm-processor-cache-type "
    "--mm-shm-cache-max-object-size-mb --mm-encoder-only --mm-encoder-tp-mode "
    "--mm-encoder-attn-backend --mm-encoder-attn-dtype --mm-tensor-ipc --interleave-mm-strings "
    "--skip-mm-profiling --video-pruning-rate --enable-mm-embeds --allowed-local-media-path "
    "--allowed-media-domains --disable-mm-preprocessor-cache --enable-mm-processor-stats "
    "--disable-chunked-mm-input",
    "the server generates text: no embeddings, scores or classes": "--pooler-config "
    "--override-pooler-config --enable-prompt-embeds",
    "thinking is not parted from the answer yet; it comes as text": "--reasoning-parser "
    "--reasoning-config --enable-reasoning",
    "llguidance is the one backend of structured outputs": (
        "--guided-decoding-disable-fallback --guided-decoding-disable-any-whitespace"
    ),
    "config.json is read as it stands; change a copy of it and give its folder as the model": (
        "--hf-overrides --hf-config-path --rope-scaling --rope-theta"
    ),
    "the token is read from HF_TOKEN or `hf auth login`, where others cannot see it": "--hf-token",
    "models are kept under TWOSTROKE_CACHE": "--download-dir",
    "--revision holds for the tokenizer too": "--tokenizer-revision",
    "files are mapped and read once; there is nothing to choose": "--safetensors-load-strategy "
    "--model-loader-extra-config --ignore-patterns --pt-load-map-location",
    "prompts share a step's tokens in their order; --max-num-batched-tokens sets how many": (
        "--max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold "
        "--scheduler-delay-factor --scheduler-reserve-full-isl"
    ),
    "how far the engine plans ahead is not a setting": "--async-scheduling "
    "--multi-step-stream-outputs",
    "KV blocks are shared by what they say, compared token by token": "--prefix-caching-hash-algo",
    "there is one KV cache manager": "--disable-hybrid-kv-cache-manager",
    "a request's span, which --otlp-traces-endpoint exports, is all there is": (
        "--collect-detailed-traces"
    ),
    "--nvtx names steps and the parts of layers": "--enable-layerwise-nvtx-tracing",
    "`twostroke profile URL` and POST /start_profile need no setting": "--profiler-config",
    "/metrics has one set of names": "--show-hidden-metrics-for-version --kv-cache-metrics "
    "--kv-cache-metrics-sample --enable-mfu-metrics --enable-logging-iteration-details "
    "--enable-server-load-tracking",
    "the HTTP side and the engine are always two processes": "--disable-frontend-multiprocessing "
    "--renderer-num-workers",
    "client certificates are not checked; put a proxy in front": "--ssl-ca-certs --ssl-cert-reqs "
    "--enable-ssl-refresh --ssl-ciphers",
    "routes start at /; let the proxy in front strip its prefix": "--root-path",
    "--allowed-origins is all there is of CORS: it allows GET and POST, never cookies": (
        "--allow-credentials --allowed-methods --allowed-headers"
    ),
    "--max-header-bytes is the limit of a request's head": "--h11-max-incomplete-event-size "
    "--h11-max-header-count",
    "logs go to stderr; only --uvicorn-log-level changes them": "--log-config-file "
    "--log-error-stack --enable-log-outputs --enable-log-deltas "
    "--disable-access-log-for-endpoints",
    "a request asks for this itself": "--return-tokens-as-token-ids --enable-force-include-usage",
    "leave tools that must not be called out of the request": (
        "--exclude-tools-when-tool-choice-none"
    ),
    "--skip-tokenizer-init goes without a tokenizer": "--tokens-only",
    "the tokenizer's files are not served": "--enable-tokenizer-info-endpoint",
    "there are no pages of documentation to serve": "--enable-offline-docs",
    "HTTP is the only protocol": "--grpc",
}

REFUSED: dict[str, str] = {
    **llama_flags.REFUSED,
    **{
        flag: f"{flag} is vLLM's and not supported: {reason}"
        for reason, flags in _BY_REASON.items()
        for flag in flags.split()
    },
}

# Switches that ask for what happens anyway.
ANYWAY: dict[str, str] = {
    **llama_flags.ANYWAY,
    "--disable-log-requests": "requests are not logged unless --enable-log-requests asks for it",
    "--disable-uvicorn-access-log": "there is none unless --enable-log-requests asks for it",
    "--disable-fastapi-docs": "no pages of documentation are served",
    "--enable-prompt-tokens-details": "usage always says how many prompt tokens were cached",
    "--disable-custom-all-reduce": "one device reduces nothing",
    "--disable-cascade-attn": "there is none",
    "--guided-decoding-disable-additional-properties": "a schema's objects are closed",
    "--use-v2-block-manager": "there is one block manager",
    "--use-tqdm-on-load": "only what is shown while loading",
    "--no-use-tqdm-on-load": "only what is shown while loading",
    "--language-model-only": "models read and write text only",
    "--fail-on-environ-validation": "a wrong setting always ends the start",
    "--no-trust-remote-code": "code that comes with a model is never run",
    "--no-async-scheduling": "the tokens are the same",
    "--no-enable-lora": "there are no adapters",
    "--no-enable-expert-parallel": "there are no experts",
    "--no-enable-sleep-mode": "there is none",
}

# Flags with a value: which values ask for what happens anyway, and why others are refused.
ONLY: dict[str, tuple[tuple[str, ...], str]] = {
    **llama_flags.ONLY,
    "--generation-config": (
        ("auto",),
        "the model's own generation_config.json is what a request's fields go over",
    ),
    "--tokenizer-mode": (("auto",), "a model has one tokenizer here"),
    "--config-format": (("auto", "hf"), "a model is described by config.json or by its GGUF file"),
    "--model-impl": (("auto",), "every model runs on twostroke's own decoder"),
    "--runner": (("auto", "generate"), "the server generates text"),
    "--task": (("auto", "generate"), "the server generates text"),
    "--convert": (("auto", "none"), "the server generates text"),
    "--chat-template-content-format": (
        ("auto",),
        "a content in parts is joined where the template does not take it apart",
    ),
    "--logprobs-mode": (
        ("raw_logprobs",),
        "log-probabilities are the model's, before penalties and temperature",
    ),
    "--guided-decoding-backend": (("auto", "guidance"), "llguidance is the one backend"),
    "--preemption-mode": (("recompute",), "a preempted request is computed again"),
    "--pipeline-parallel-size": (("1",), "a model runs on one device in this version"),
    "--data-parallel-size": (("1",), "a server runs one engine; start several behind a proxy"),
    "--decode-context-parallel-size": (("1",), "a model runs on one device in this version"),
    "--prefill-context-parallel-size": (("1",), "a model runs on one device in this version"),
    "--nnodes": (
        ("1",),
        "a model runs on one device in this version; llama-server's -n is --predict here",
    ),
    "--api-server-count": (("1",), "one HTTP process serves; start several behind a proxy"),
    "--stream-interval": (("1",), "every token is sent as it is written"),
    "--num-scheduler-steps": (("1",), "every step is planned"),
    "--swap-space": (("0",), "KV blocks stay on the device; a preempted request is computed again"),
    "--cpu-offload-gb": (("0",), "weights stay on the device"),
}
_SHORT = {
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-n": "--nnodes",
    "-asc": "--api-server-count",
}


class _Refuse(Foreign):
    def meet(self, parser: Parser, given: Namespace, flag: str, value: str) -> None:
        parser.error(REFUSED[flag])


class _Only(Foreign):
    def meet(self, parser: Parser, given: Namespace, flag: str, value: str) -> None:
        allowed, reason = ONLY[_SHORT.get(flag, flag)]
        if value not in allowed:
            parser.error(f"{flag} {value} is not supported, only {' or '.join(allowed)}: {reason}")


def add_foreign_arguments(parser: Parser) -> None:
    """What other servers have."""
    # Perhaps with a value: whatever follows, the flag is what the message must be about.
    add_hidden(parser, REFUSED, _Refuse, nargs="?")
    add_hidden(parser, ANYWAY, Foreign, nargs=0)
    with_value = [flag for flag in (*ONLY, *_SHORT) if flag not in llama_flags.OR_NOTHING]
    add_hidden(parser, with_value, _Only)
    add_hidden(parser, llama_flags.OR_NOTHING, _Only, nargs="?", const="on")
    llama_flags.add_llama_arguments(parser)
