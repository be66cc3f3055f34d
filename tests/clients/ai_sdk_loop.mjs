// Vercel's AI SDK: a tool loop of two turns, streaming, structured output.
import assert from "node:assert";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "twostroke", baseURL, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider(name);
const common = { model, temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
const tools = {
  getWeather: tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
    execute: async ({ city }) => `It is sunny in ${city}.`,
  }),
};

const loop = await generateText({
  ...common,
  prompt: "What is the weather in Paris? Use the tool.",
  tools,
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
});
assert.equal(loop.steps.length, 2);
assert.equal(loop.steps[0].toolCalls[0].toolName, "getWeather");
assert.ok(loop.text.length > 0);
console.log("   tool loop:", loop.text.slice(0, 60).replaceAll("\n", " "));

const stream = streamText({ ...common, prompt: "Count to five." });
let text = "";
for await (const piece of stream.textStream) text += piece;
assert.ok(text.length > 0);
assert.ok((await stream.usage).outputTokens > 0);

const called = streamText({
  ...common, prompt: "What is the weather in Paris?", tools, toolChoice: "required",
});
const calls = [];
for await (const part of called.fullStream) if (part.type === "tool-call") calls.push(part);
assert.ok(["Paris", "Rome"].includes(calls[0].input.city));

const shaped = await generateObject({
  ...common, prompt: "Ann is 30 years old.", schema: z.object({ name: z.string(), age: z.int() }),
});
console.log("   structured:", JSON.stringify(shaped.object));
