// The six lessons. Each has screens for one idea: a question, a tool with a short text, a question.
import {count, figure, percent, plural, short, bytes, time} from "./draw.js";
import {byContext, byStreams} from "./company.js";
import {longestGap, median, onlyDecodes, sum, tpot, ttft} from "./records.js";
import {knownFacts, measured, once, thisMachine} from "./source.js";

const CODE = "https://github.com/twostroke/twostroke/blob/main/";
const code = (text, path) => ({text, href: CODE + path});

const idea = (title, tool, ...text) => ({kind: "idea", title, tool, text});
const ask = (title, make) => ({kind: "question", title, make});

function prefillBefore() {
  const long = Math.min(512, knownFacts().limits.prompt_tokens), half = Math.ceil(long / 2);
  return {
    name: "prefill-before", text: `A prompt gets twice as long: ${count(long)} tokens instead of ${count(half)}. The time to the first token …`,
    right: 1,
    options: [
      {text: "… stays the same", why: `It would if the machine had compute to spare. ${count(half)} tokens together keep it busy already.`},
      {text: "… about doubles", why: "Prefill is bound by compute: twice the tokens are twice the products."},
      {text: "… gets four times as long", why: "Attention does grow with the square, but at this length it is a small part. The products with the weights grow in step with the tokens."},
    ],
    measure: async () => {
      const first = (await measured(half, 2)).requests[0], second = (await measured(long, 2)).requests[0];
      const ratio = ttft(second) / ttft(first);
      return {agrees: ratio > 1.4 && ratio < 3, result: `${count(first.num_prompt)} tokens took ${time(ttft(first))}, ${count(second.num_prompt)} tokens ${time(ttft(second))}: ${figure(ratio)} times as long.`};
    },
  };
}

export const LESSONS = [
  {
    id: "token", title: "What a token costs", short: "Two phases, two prices.",
    links: [code("The cost of a step", "twostroke/model/describe/cost.py"), code("Docs: measuring", "docs/MEASURING.md")],
    screens: [
      ask("Before: a guess", () => ({
        name: "token-before", text: "A model reads a long prompt and writes 32 tokens. Which token takes longer?",
        right: 1,
        options: [
          {text: "A prompt token and an output token take the same", why: "Both pass through the same layers. But the tokens of a prompt pass together, and an output token passes alone."},
          {text: "An output token takes longer", why: "An output token has a step of its own, and each step reads all weights. Prompt tokens share a step."},
          {text: "A prompt token takes longer", why: "The prompt as a whole can take longer. Divided by its tokens, each is cheap: they are computed together."},
        ],
        measure: async () => {
          const one = (await measured(512, 32)).requests[0];
          const each = ttft(one) / one.num_prompt;
          return {agrees: tpot(one) > each, result: `With a prompt of ${count(one.num_prompt)} tokens the engine needed ${time(each)} for each of them and ${time(tpot(one))} for each output token, ${figure(tpot(one) / each)} times as long.`};
        },
      })),
      idea("One request, two workloads", "sliders",
        "A model reads and writes tokens, pieces of words. It is made of weights: millions or billions of fixed numbers in memory. Every token is computed with all of them. First the engine reads your whole prompt: prefill. You wait for the first token (time to first token, TTFT). All tokens of the prompt share one reading of the weights, so each of them is cheap.",
        "Then it writes: decode. You see the text grow by a token every TPOT (time per output token). Each of these tokens has a step of its own, one pass through the model, and each step reads all weights again.",
        "Move the sliders. The prompt changes the first number, the answer how often you pay the second. In the formulas a FLOP is one multiplication or addition of numbers. Attention is the part of the work in which a token looks at the tokens before it; keys and values are what the engine keeps of each token for that."),
      ask("After: check yourself", () => ({
        name: "token-after", text: "The answer gets twice as long, the prompt stays. What changes?",
        right: 2,
        options: [
          {text: "The time to the first token doubles", why: "The first token comes when the prompt has been read. How much is written after it does not matter yet."},
          {text: "Each token takes twice as long", why: "A longer answer has more steps, not longer ones. Only the cache grows a little, token by token."},
          {text: "The total grows, TTFT and TPOT hardly do", why: "Twice as many decode steps of the same length."},
        ],
        measure: async () => {
          const [short, long] = [(await measured(128, 24)).requests[0], (await measured(128, 48)).requests[0]];
          const total = (one) => one.token_s.at(-1) - one.received_s;
          return {agrees: tpot(long) < 1.5 * tpot(short) && total(long) > total(short), result: `With 24 tokens the answer took ${time(total(short))}, with 48 tokens ${time(total(long))}. TPOT: ${time(tpot(short))} and ${time(tpot(long))}.`};
        },
      })),
    ],
  },
  {
    id: "prefill", title: "Prefill", short: "The prompt, all at once.",
    links: [code("Chunks of a prompt", "twostroke/sched/prefill.py"), code("Docs: scheduling", "docs/SCHEDULING.md")],
    screens: [
      ask("Before: a guess", prefillBefore),
      idea("Step through your own prompt", "prompt",
        "In the bar below the tokens, each orange box is a step of prefill: many tokens at once. From some dozens of tokens on they keep the processor busy, so twice as many take about twice as long. A step has room for a limited number of tokens; a longer prompt is cut into chunks, a step for each. If you run a prompt twice, its beginning comes from a cache (green, lesson 4), and prefill is short.",
        "The last step of prefill writes the first token. Each blue box is a step of decode: it writes one more.",
        "The boxes are as wide as the steps took. Play it, or step through it. The panels below the bar show more than this lesson needs: the cache (lesson 4), how a token is chosen, and attention."),
      ask("After: check yourself", () => {
        const {max_num_batched_tokens: budget, limits} = knownFacts();
        const tokens = Math.min(limits.prompt_tokens, Math.round(2.5 * budget)), steps = Math.ceil(tokens / budget);
        return {
          name: "prefill-after", text: `A step of this engine has room for ${count(budget)} tokens. In how many steps is a prompt of ${plural(tokens, "token")} read?`,
          right: steps > 1 ? 1 : 0,
          options: [
            {text: "In one", why: steps > 1 ? "The engine cuts a long prompt into chunks, so that others need not wait for all of it." : "It fits into one step, so all of it is read at once."},
            {text: steps > 1 ? `In ${count(steps)}` : "In three", why: steps > 1 ? `${count(tokens)} ÷ ${count(budget)}, rounded up. Only the last chunk leads to a token.` : "The prompt fits into a single step."},
            {text: `In ${count(tokens)}, one for each token`, why: "That is decode. A prompt's tokens are all known, so they need not wait for each other."},
          ],
          measure: async () => {
            const chunks = (await measured(tokens, 2)).requests[0].chunks.map(([, , , size]) => size);
            return {agrees: chunks.length === steps, result: `The engine took ${plural(chunks.length, "step")}, of ${chunks.map(count).join(", ")} tokens.`};
          },
        };
      }),
    ],
  },
  {
    id: "decode", title: "Decode", short: "One token, all the weights.",
    links: [code("Decode slots", "twostroke/sched/decode.py"), code("The roofline in Python", "twostroke/measure/roofline/roofline.py")],
    screens: [
      ask("Before: a guess", () => ({
        name: "decode-before", text: "To write one token, what must the engine read from memory?",
        right: 1,
        options: [
          {text: "The weights of the words in question", why: "The weights are not divided by words. Every token passes through every layer."},
          {text: "All weights once, and the cache", why: "Each layer multiplies the token's vector with its whole matrices."},
          {text: "All weights again for each token so far", why: "The earlier tokens are not computed again: their keys and values are in the cache."},
        ],
        measure: async () => {
          const arm = await measured(64, 16), step = onlyDecodes(arm)[0], {figures} = knownFacts();
          const weights = figures.layer_weight_bytes + figures.head_weight_bytes;
          return {agrees: step.decode.num_bytes >= weights, result: `A decode step moved ${bytes(step.decode.num_bytes)}: ${bytes(weights)} of weights, the rest keys and values.`};
        },
      })),
      idea("Two limits, one picture", "roofline",
        "A step multiplies and adds (FLOPs) and reads from memory (bytes): all weights once, and the cache, which holds keys and values of the earlier tokens. A stream is an answer that is being written; a batch is the number of streams in a step, and the context the number of tokens before the new one. The longer of the two times decides how long the step takes.",
        "The picture shows FLOPs for each byte, with both axes in powers of ten. At the ridge, the bend of the line, both times are equal: left of it memory decides, right of it compute. Decode of few streams stands on the left: it does little with each byte. Prefill stands on the right, and many streams with short contexts can get there.",
        "Run some streams, of short prompts whatever the sliders say: each dot is a step of this engine. The line is what this machine reaches in two tests, one that only multiplies and one that only reads memory. Steps stay below it, those of a small model far below: its matrices are small, and much of a step is neither multiplying nor reading weights."),
      ask("After: check yourself", () => ({
        name: "decode-after", text: "A new processor multiplies twice as fast, with the same memory. For one stream, the time per token …",
        right: 1,
        options: [
          {text: "… halves", why: "It would if arithmetic were the limit. A decode step of one stream waits for the weights."},
          {text: "… hardly changes", why: "The weights arrive no faster. What helps is faster memory, or fewer bytes: smaller weights."},
          {text: "… doubles", why: "Nothing gets slower. The step waits for memory as before."},
        ],
        measure: async () => {
          const arm = await measured(64, 24), steps = onlyDecodes(arm), seconds = sum(steps.map((one) => one.device_s)), machine = thisMachine();
          const rate = sum(steps.map((one) => one.decode.flops)) / seconds, moved = sum(steps.map((one) => one.decode.num_bytes)) / seconds;
          const result = machine
            ? `The decode steps used ${percent(rate / machine.flops_per_s)} of what this machine multiplies and ${percent(moved / machine.bytes_per_s)} of what it reads.`
            : `The decode steps multiplied ${short(rate, "FLOP/s")} and read ${short(moved, "B/s")}: ${figure(rate / moved)} FLOPs a byte.`;
          return {agrees: !machine || rate / machine.flops_per_s < moved / machine.bytes_per_s, result};
        },
      })),
    ],
  },
  {
    id: "cache", title: "The KV cache", short: "What is kept, and what it costs.",
    links: [code("Blocks and owners", "twostroke/kv/cache.py"), code("Prefixes", "twostroke/kv/prefix.py")],
    screens: [
      ask("Before: a guess", () => ({
        name: "cache-before", text: "The same long prompt is sent a second time. What does the engine compute for the answer's first token?",
        right: 1,
        options: [
          {text: "All of the prompt again", why: "It would, without a prefix cache. Here full blocks are kept, and found by their content."},
          {text: "Only its last tokens", why: "Full blocks come from the cache. The last token is always computed, because it predicts the next one."},
          {text: "Nothing: the answer is remembered", why: "Keys and values are kept, not answers. Another temperature or seed would write another text."},
        ],
        measure: async () => {
          const [, second] = (await once("prefix")).arms[0].requests;
          return {agrees: second.num_cached > 0 && second.num_cached < second.num_prompt, result: `${count(second.num_cached)} of ${count(second.num_prompt)} tokens came from the cache; ${count(second.num_prompt - second.num_cached)} were computed.`};
        },
      })),
      idea("The same beginning twice", "prefix",
        "Each token leaves some numbers in the cache, its keys and values, which later tokens read. So a step computes the new tokens only.",
        "Keys and values lie in blocks, of 16 tokens unless the server sets another size. A prompt that begins like an earlier prompt takes over that prompt's full blocks and skips their prefill."),
      idea("What reading the cache costs", "context",
        "Each decode step reads the keys and values of all tokens before it.",
        "Weights are read once for all streams. The cache is read for each stream, even if two streams share blocks in memory."),
      ask("After: check yourself", () => ({
        name: "cache-after", text: "A conversation grows from a few to many hundred tokens. What grows with it in every decode step?",
        right: 0,
        options: [
          {text: "The bytes of cache that a step reads", why: "Every new token attends to all tokens before it."},
          {text: "The weights that a step reads", why: "They are the same for every step."},
          {text: "Nothing: a decode step always costs the same", why: "Nearly so for a short text. The cache adds to it, token by token."},
        ],
        measure: async () => {
          const rows = byContext((await once("context")).arms[0]), [least, most] = [rows[0], rows.at(-1)];
          return {agrees: most.seconds > least.seconds, result: `Behind ${count(least.context)} tokens a step took ${time(least.seconds)}, behind ${count(most.context)} tokens ${time(most.seconds)}; the cache to read was ${bytes(least.cache)} and ${bytes(most.cache)}.`};
        },
      })),
    ],
  },
  {
    id: "batching", title: "Batching", short: "Share the weights.",
    links: [code("The step-time model", "twostroke/sched/steptime.py"), code("Docs: performance", "docs/PERFORMANCE.md")],
    screens: [
      ask("Before: a guess", () => ({
        name: "batching-before", text: "Eight streams decode together instead of one. A step takes …",
        right: 1,
        options: [
          {text: "… eight times as long", why: "It would if the streams shared nothing. But the weights, the largest part of the bytes, are read once for all streams."},
          {text: "… longer, but far less than eight times", why: "The weights are read once for all of them. Products and caches add up."},
          {text: "… an eighth as long", why: "The streams add work to the step; they do not speed it up."},
        ],
        measure: async () => {
          const rows = byStreams((await once("batch")).arms[0]), one = rows[0], eight = rows.find((row) => row.streams === 8) ?? rows.at(-1);
          const ratio = eight.seconds / one.seconds;
          return {agrees: ratio > 1 && ratio < 0.8 * eight.streams, result: `A step of ${eight.streams} streams took ${figure(ratio)} times as long as one of a single stream.`};
        },
      })),
      idea("Many streams in one step", "batch",
        "A step writes a token for each stream. All of them share one reading of the weights.",
        "So the tokens a second of all streams together grow. Each single stream gets slower, but far less than their number says: the arithmetic and the caches add up, the reading of the weights does not. The gain ends where the arithmetic takes longer than the reading: from the ridge of lesson 3 on, twice the streams take about twice as long."),
      idea("Predict, then run", "predict",
        "How long will a request take, alone or with others? The engine learns from each step what streams, tokens and cache cost on this machine.",
        "Set the sliders, look at the prediction, then let the engine run it."),
      ask("After: check yourself", () => ({
        name: "batching-after", text: "What do sixteen decoding streams share in a step?",
        right: 1,
        options: [
          {text: "Their keys and values", why: "Each stream has its own text, so its own cache. Only equal beginnings are shared."},
          {text: "One reading of the weights", why: "That is why a batch pays: the same bytes serve more tokens."},
          {text: "Nothing", why: "Then a batch would gain nothing, and the run shows that it does."},
        ],
        measure: async () => {
          const rows = byStreams((await once("batch")).arms[0]), [one, most] = [rows[0], rows.at(-1)];
          const bytesOf = (row) => row.moved * row.seconds;
          return {agrees: bytesOf(most) < 0.7 * most.streams * bytesOf(one), result: `A step of one stream moved ${bytes(bytesOf(one))}, one of ${most.streams} streams ${bytes(bytesOf(most))}, for ${most.streams} times the tokens.`};
        },
      })),
    ],
  },
  {
    id: "company", title: "Company", short: "When others arrive.",
    links: [code("Chunks by the clock", "twostroke/sched/slo.py"), code("Docs: scheduling", "docs/SCHEDULING.md")],
    screens: [
      ask("Before: a guess", () => ({
        name: "company-before", text: "You read an answer as it is written. Another user sends a long prompt. Suppose the engine reads it in one piece, without chunks. Your next token …",
        right: 1,
        options: [
          {text: "… comes as usual: you were first", why: "A step is not interrupted. While it reads the prompt it writes nothing for you beyond one token."},
          {text: "… waits until the whole prompt has been read", why: "Your token is a part of that long step, and comes at its end."},
          {text: "… comes sooner: the machine is busier", why: "The step has more to do, and all in it wait for its end."},
        ],
        measure: async () => {
          const arm = (await once("stall")).arms[0], you = arm.requests[0], worst = longestGap(you).seconds;
          const usual = median(you.token_s.slice(1).map((at, n) => at - you.token_s[n]));
          return {agrees: worst > 2 * usual, result: `Your usual gap was ${time(usual)}. When the prompt arrived (${arm.name}), you waited ${time(worst)}.`};
        },
      })),
      idea("A visitor with a long prompt", "stall",
        "Prefill and decode share the machine. A long prompt in one step holds up every stream.",
        "If the prompt is cut into chunks, a token of yours comes between two of its chunks. With a goal you say how long your gaps may be, and the engine sizes each chunk to take about that long: your usual gaps get longer than without a prompt, and the visitor's first token comes later.",
        "With two pools, one engine reads prompts and another one writes: the prompt hardly touches your stream, but each engine has half of the cores."),
      idea("A full cache", "full_cache",
        "Every stream's cache grows. When no block is free, the engine preempts the stream that came last, even if it came only a moment later.",
        "The preempted stream gives all its blocks back. Later its keys and values are computed again, and the stream continues after the text that you have seen. Only time is lost."),
      ask("After: check yourself", () => ({
        name: "company-after", text: "A long prompt is read in chunks. Who gains?",
        right: 1,
        options: [
          {text: "The long prompt: its first token comes sooner", why: "It comes later, if anything: its chunks share their steps with the other streams."},
          {text: "The streams that already decode", why: "They get a token between two chunks, where they would have waited for the whole prompt."},
          {text: "Nobody: it is the same work", why: "It is the same work in another order, and a waiting reader notices the order."},
        ],
        measure: async () => {
          const {arms} = await once("stall"), gap = (arm) => longestGap(arm.requests[0]).seconds;
          if (arms.length < 2) return {agrees: true, result: `On this server's engine your longest gap was ${time(gap(arms[0]))}.`};
          return {agrees: gap(arms[1]) < gap(arms[0]), result: `Your longest gap: ${time(gap(arms[0]))} in one piece, ${time(gap(arms[1]))} in chunks. The visitor's first token: ${time(ttft(arms[0].requests[1]))} and ${time(ttft(arms[1].requests[1]))}.`};
        },
      })),
    ],
  },
];
