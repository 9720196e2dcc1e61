// Ten cases of the AI SDK with four of its providers. Usage: ai_sdk.mjs NODE_MODULES URL; prints {"PROVIDER: CASE": "error or empty"}.

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [folder, url] = process.argv.slice(2);
const require = createRequire(pathToFileURL(`${folder}/`));
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateText, streamText, generateObject, streamObject, tool, jsonSchema, stepCountIs } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createAnthropic } = await load("@ai-sdk/anthropic");

const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "x" });
const providers = {
  compatible: createOpenAICompatible({ name: "mlxd", baseURL: `${url}/v1`, includeUsage: true, supportsStructuredOutputs: true })("demo"),
  chat: openai.chat("demo"),
  responses: openai.responses("demo"),
  anthropic: createAnthropic({ baseURL: `${url}/v1`, apiKey: "x" })("demo"),
};
const question = "What is the capital of France?";
const schema = jsonSchema({ type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"], additionalProperties: false });
const weather = (execute) =>
  tool({
    description: "Get the current weather of a city.",
    inputSchema: jsonSchema({ type: "object", properties: { city: { type: "string", description: "the city" } }, required: ["city"] }),
    ...(execute ? { execute: async ({ city }) => `It is sunny in ${city}.` } : {}),
  });
const limits = { temperature: 0, maxOutputTokens: 200, maxRetries: 0 };

function assert(condition, message) {
  if (!condition) throw new Error(message);
}

const cases = {
  "a text": async (model) => {
    const { text, finishReason } = await generateText({ model, prompt: question, ...limits });
    assert(text.includes("Paris"), text);
    assert(finishReason === "stop", finishReason);
  },
  "a stream": async (model) => {
    const result = streamText({ model, prompt: question, ...limits });
    let text = "";
    for await (const piece of result.textStream) text += piece;
    assert(text.includes("Paris"), text);
    assert((await result.usage).outputTokens > 0, "no usage");
  },
  "usage": async (model) => {
    const { usage } = await generateText({ model, prompt: question, ...limits });
    assert(usage.inputTokens > 0 && usage.outputTokens > 0, JSON.stringify(usage));
  },
  "a limit of tokens": async (model) => {
    const { finishReason } = await generateText({ model, prompt: question, ...limits, maxOutputTokens: 2 });
    assert(finishReason === "length", finishReason);
  },
  "a system prompt and turns": async (model) => {
    const messages = [
      { role: "user", content: "Hello" },
      { role: "assistant", content: "Hello!" },
      { role: "user", content: question },
    ];
    const { text } = await generateText({ model, system: "You are a helpful assistant.", messages, ...limits });
    assert(text.length > 0, "no text");
  },
  "an object": async (model) => {
    const { object } = await generateObject({ model, schema, prompt: question, ...limits });
    assert(typeof object.city === "string", JSON.stringify(object));
  },
  "a streamed object": async (model) => {
    const result = streamObject({ model, schema, prompt: question, ...limits });
    for await (const _ of result.partialObjectStream);
    assert(typeof (await result.object).city === "string", "no object");
  },
  "a forced call": async (model) => {
    const tools = { get_weather: weather(false) };
    const { toolCalls } = await generateText({ model, tools, toolChoice: "required", prompt: "What is the weather in Paris?", ...limits });
    assert(toolCalls[0]?.toolName === "get_weather", JSON.stringify(toolCalls));
  },
  "a call and its result": async (model) => {
    const tools = { get_weather: weather(true) };
    const { steps } = await generateText({ model, tools, stopWhen: stepCountIs(3), prompt: "What is the weather in Paris?", ...limits });
    assert(steps.some((step) => step.toolResults.length), JSON.stringify(steps.map((step) => step.content)));
    assert(steps.at(-1).text.length > 0, "no text after the result");
  },
  "an abort": async (model) => {
    const controller = new AbortController();
    const result = streamText({ model, prompt: "Count to one hundred.", ...limits, abortSignal: controller.signal, onError: () => {} });
    for await (const part of result.fullStream) {
      if (part.type === "text-delta" || part.type === "reasoning-delta") controller.abort();
      if (part.type === "abort") return;
    }
    assert(controller.signal.aborted, "it ended before its first piece");
  },
};

const outcomes = {};
for (const [provider, model] of Object.entries(providers)) {
  for (const [name, run] of Object.entries(cases)) {
    try {
      await run(model);
      outcomes[`${provider}: ${name}`] = "";
    } catch (error) {
      outcomes[`${provider}: ${name}`] = `${error?.message ?? error}`.slice(0, 300) || "failed";
    }
  }
}
console.log(JSON.stringify(outcomes));
