// The FLOPs and bytes of a step, for dense models. The counts are those of
// twostroke/model/describe/cost.py and twostroke/measure/roofline/roofline.py.
//
//   linear      2 FLOPs per weight and token; the head only where a token is sampled
//   attention   4 FLOPs per query channel and visible position
//   bytes       the weights once a step, the keys and values that are read and written

// Shapes of well-known models: layers, hidden, heads, KV heads, head size, MLP width, vocabulary.
const SHAPES = {
  "Llama 3.2 1B": [16, 2048, 32, 8, 64, 8192, 128256, true],
  "Llama 3.1 8B": [32, 4096, 32, 8, 128, 14336, 128256, false],
  "Qwen3 32B": [64, 5120, 64, 8, 128, 25600, 151936, false],
  "Llama 3.1 70B": [80, 8192, 64, 8, 128, 28672, 128256, false],
};
export const WEIGHTS = {"16 bits": 2, "8 bits": 1, "4 bits": 0.5625};
export const KV = {"16 bits": 2, "8 bits": 1};
export const MODELS = Object.keys(SHAPES);

export function figuresOf(name, weightBytes, kvBytes) {
  const [layers, hidden, heads, kvHeads, dim, width, vocabulary, tied] = SHAPES[name];
  const attention = hidden * dim * (2 * heads + 2 * kvHeads);
  const perLayer = attention + 3 * hidden * width;
  const embedding = vocabulary * hidden;
  return {
    parameters: layers * perLayer + embedding * (tied ? 1 : 2),
    flops_per_token: 2 * layers * perLayer,
    flops_per_sample: 2 * embedding,
    flops_per_kv_token: 4 * layers * heads * dim,
    layer_weight_bytes: layers * perLayer * weightBytes,
    head_weight_bytes: embedding * weightBytes,
    kv_bytes_per_token: 2 * layers * kvHeads * dim * kvBytes,
  };
}

export const weightBytes = (figures) => figures.layer_weight_bytes + figures.head_weight_bytes;

// Returns the work of a whole prompt in one step.
export function prefillWork(figures, prompt) {
  const linear = prompt * figures.flops_per_token + figures.flops_per_sample;
  const attention = prompt * (prompt + 1) / 2 * figures.flops_per_kv_token;
  return {
    linear, attention, flops: linear + attention,
    weights: weightBytes(figures), kv: prompt * figures.kv_bytes_per_token,
    bytes: weightBytes(figures) + prompt * figures.kv_bytes_per_token,
  };
}

// Returns the work of a decode step with `batch` streams, each with `context` earlier positions.
export function decodeWork(figures, context, batch = 1) {
  const linear = batch * (figures.flops_per_token + figures.flops_per_sample);
  const attention = batch * context * figures.flops_per_kv_token;
  const kv = batch * (context + 1) * figures.kv_bytes_per_token;
  return {linear, attention, flops: linear + attention, weights: weightBytes(figures), kv, bytes: weightBytes(figures) + kv};
}

// Returns the minimum time for work on a machine, and which of the two limits decides.
export function floor(work, machine) {
  const compute = work.flops / machine.flops_per_s;
  const memory = work.bytes / machine.bytes_per_s;
  return {
    compute, memory, seconds: Math.max(compute, memory),
    bound: compute >= memory ? "compute" : "memory",
    intensity: work.flops / work.bytes,
  };
}

// Returns the minimum TTFT, TPOT and total time of one request.
export function request(figures, machine, prompt, answer, batch = 1) {
  const first = floor(prefillWork(figures, prompt), machine);
  const middle = prompt + answer / 2;
  const step = floor(decodeWork(figures, middle, batch), machine);
  return {first, step, ttft: first.seconds, tpot: step.seconds, total: first.seconds + (answer - 1) * step.seconds};
}

export const ridge = (machine) => machine.flops_per_s / machine.bytes_per_s;
