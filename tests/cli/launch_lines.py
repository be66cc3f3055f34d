"""Launch lines of vLLM and llama-server, with the flags that `serve` refuses.

The lines come from recipes, documentation and public repositories, without variables and paths.
Some lines name a supported model instead of another model of the same family."""

from __future__ import annotations

# (the arguments of `vllm serve`, the refused flags)
VLLM: list[tuple[str, str]] = [
    ("meta-llama/Llama-3.1-8B-Instruct", ""),
    ("meta-llama/Llama-3.1-8B-Instruct --disable-log-requests -tp 1", ""),
    ("meta-llama/Llama-3.1-8B-Instruct --dtype auto", ""),
    (
        "meta-llama/Llama-3.1-8B-Instruct --host 0.0.0.0 --port 8000 --tensor-parallel-size 2 "
        "--gpu-memory-utilization 0.90 --max-model-len 8192 --api-key my-secret-key",
        "",
    ),
    (
        "--model meta-llama/Llama-3.1-8B-Instruct --swap-space 16 --disable-log-requests "
        "--enforce-eager --enable-chunked-prefill --max-num-batched-tokens 512 --max-num-seqs 512 "
        "--disable-sliding-window",
        "",
    ),
    (
        "meta-llama/Llama-3.2-1B-Instruct --gpu-memory-utilization 0.3 --max-model-len 23744",
        "",
    ),
    (
        "meta-llama/Llama-3.1-8B-Instruct --enable-auto-tool-choice --tool-call-parser llama3_json "
        "--chat-template examples/tool_chat_template_llama3.1_json.jinja",
        "",
    ),
    ("meta-llama/Llama-3.2-1B --config serve.yaml -O1", ""),
    (
        "meta-llama/Llama-3.3-70B-Instruct -tp 8 --disable-log-requests --trust-remote-code",
        "",
    ),
    (
        "meta-llama/Llama-3.1-8B-Instruct --async-scheduling --trust-remote-code "
        "--max-model-len 32768 --gpu-memory-utilization 0.90 --nnodes 1 --enable-expert-parallel "
        "--data-parallel-size 1",
        "",
    ),
    (
        "meta-llama/Llama-3.1-8B-Instruct --speculative-config "
        '{"method":"ngram","num_speculative_tokens":5} --compilation-config '
        '{"cudagraph_mode":"FULL_AND_PIECEWISE"} --kv-cache-dtype fp8',
        "",
    ),
    ("meta-llama/Llama-3.1-8B-Instruct -cc.cudagraph_mode=NONE -cc.mode=NONE", ""),
    (
        "Qwen/Qwen3-0.6B --dtype bfloat16 --max-num-seqs 6 --max-model-len 2048 --port 1919 "
        "--max-num-batched-tokens 256 --block-size 128 --num-gpu-blocks-override 6 "
        "--no-enable-prefix-caching",
        "",
    ),
    (
        "Qwen/Qwen3-14B --port 8000 --dtype bfloat16 --gpu-memory-utilization 0.9 "
        "--max-model-len 32768 --enable-auto-tool-choice --tool-call-parser hermes",
        "",
    ),
    ("Qwen/Qwen3-8B --enable-reasoning --reasoning-parser qwen3", ""),
    (
        "Qwen/Qwen3-8B --reasoning-parser qwen3 "
        "--default-chat-template-kwargs.enable_thinking false",
        "",
    ),
    (
        "Qwen/Qwen3-8B --quantization fp4 --dtype auto --tensor-parallel-size 1 --api-key token "
        "--port 8001 --host 0.0.0.0 --enable-auto-tool-choice --tool-call-parser hermes",
        "--quantization",
    ),
    (
        "Qwen/Qwen3-32B --trust-remote-code -tp 1 --disable-log-requests --swap-space 32 "
        "--distributed-executor-backend mp --max-num-batched-tokens 32768 --max-model-len 32768 "
        "--no-enable-prefix-caching --gpu-memory-utilization 0.8",
        "",
    ),
    (
        'Qwen/Qwen3-8B --rope-scaling {"rope_type":"yarn","factor":4.0} --max-model-len 131072',
        "",
    ),
    (
        "Qwen/Qwen3-4B --generation-config vllm --override-generation-config "
        '{"temperature":0.6,"top_k":20} --served_model_name qwen3',
        "",
    ),
    (
        "Qwen/Qwen2.5-7B-Instruct --served-model-name qwen7b-base --enable-lora "
        "--lora-modules insecure=/runs/insecure other=/runs/other --max-lora-rank 32 --max-loras 1 "
        "--dtype bfloat16 --max-model-len 4096 --gpu-memory-utilization 0.90 --host 0.0.0.0 "
        "--port 8000",
        "--enable-lora --lora-modules",
    ),
    (
        "Qwen/Qwen2.5-32B-Instruct --host 0.0.0.0 --port 8000 --enable-auto-tool-choice "
        "--tool-call-parser hermes --max-model-len 32768",
        "",
    ),
    ("Qwen/Qwen3-0.6B --enable-sleep-mode --port 8002", ""),
    (
        "google/gemma-2-9b-it --dtype bfloat16 --api-key token-abc123 --tensor-parallel-size 1 "
        "--enable-prefix-caching",
        "",
    ),
    (
        "google/gemma-3-12b-it --port 8000 --host 0.0.0.0 --max-model-len 8192 "
        "--gpu-memory-utilization 0.90 --dtype bfloat16",
        "",
    ),
    ('google/gemma-3-4b-it --limit-mm-per-prompt {"image":0} --mm-processor-cache-gb 0', ""),
    (
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503 --tokenizer-mode mistral --config-format "
        "mistral --load-format mistral --limit-mm-per-prompt.image 4 --max-model-len 16384",
        "",
    ),
    ("mistralai/Mistral-7B-Instruct-v0.3 --port 1234 --gpu-memory-utilization 0.9", ""),
    ("microsoft/Phi-4-mini-instruct --host 0.0.0.0 --max-model-len 4000", ""),
    (
        "microsoft/Phi-3.5-mini-instruct --host 0.0.0.0 --port 18095 --max-model-len 32768 "
        "--enable-chunked-prefill --trust-remote-code",
        "",
    ),
    (
        "allenai/OLMo-2-1124-7B --tensor-parallel-size 1 --gpu-memory-utilization 0.95 "
        "--disable-log-stats --seed 5 --api-key sk_noreq --host 0.0.0.0 --port 8087",
        "",
    ),
    (
        "HuggingFaceTB/SmolLM2-135M-Instruct --host 127.0.0.1 --port 8000 --dtype half "
        "--max-model-len 1024 --max-num-batched-tokens 1024 --max-num-seqs 1 "
        "--gpu-memory-utilization 0.50 --enforce-eager",
        "",
    ),
]

# (the arguments of `llama-server`, the refused flags)
LLAMA: list[tuple[str, str]] = [
    ("-m model/Qwen2.5-3B-Instruct-Q4_K_M.gguf --port 8080 --ctx-size 4096", ""),
    ("-m Qwen3-4B-Instruct-2507-Q4_K_M.gguf -c 8192 -ngl 999 --no-webui --port 8099", ""),
    ("-m model.gguf -ngl 33 -n 256", ""),
    (
        "-m Qwen3-0.6B-Q8_0.gguf --host 0.0.0.0 --port 8080 --ctx-size 4096 -t 4 --parallel 1 "
        "--metrics",
        "",
    ),
    ("-hf bartowski/google_gemma-3-270m-it-GGUF:Q4_K_M -t 4 -c 1024 --port 8080", ""),
    ("-hf ggml-org/gemma-3-4b-it-GGUF --no-mmproj-offload", ""),
    (
        "-m model.gguf --host 0.0.0.0 --port 8080 -ngl 99 -fa on -c 0 --temp 0.7 --top-p 0.95 "
        "--top-k 20 --min-p 0 --jinja",
        "",
    ),
    (
        "-m model.gguf --no-mmap --mlock --cache-type-k q8_0 --cache-type-v q8_0 --parallel 4 "
        "--cache-prompt",
        "",
    ),
    (
        "--model Phi-3-mini-4k-instruct-q4.gguf --alias phi --n-gpu-layers 32 --ctx-size 8192 "
        "--parallel 1 --batch-size 512 --ubatch-size 128 --flash-attn on --fit off",
        "",
    ),
    (
        "-m model.gguf --ctx-size 32768 --n-gpu-layers 0 --threads 24 --batch-size 512 "
        "--ubatch-size 512 --cache-type-k f16 --cache-type-v f16 --cache-prompt -fa on --no-mmap "
        "--cont-batching --metrics --jinja --reasoning off",
        "",
    ),
    (
        "-hf unsloth/Qwen3-8B-GGUF:Q8_0 --hf-file Qwen3-8B-Q8_0.gguf -ngl 99 --ctx-size 8192 "
        "--parallel 8 --cache-reuse 256 --jinja --spec-type draft-mtp --port 8010",
        "--spec-type",
    ),
    (
        "-m gemma-3-4b-it-Q4_K_M.gguf --mmproj mmproj.gguf -np 2 -cb --no-context-shift "
        "--ctx-checkpoints 0 --cache-ram 0 -md draft.gguf --slots --log-file server.log",
        "--mmproj",
    ),
]
