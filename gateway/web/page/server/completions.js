// Chat completions as a stream of the events that an answer is made of.

import { Failure, request, streamFailure } from "./http.js";
import { readEvents } from "./events.js";
import { t } from "../strings.js";

/**
 * @typedef {{type: "open"} | {type: "text", text: string} | {type: "reasoning", text: string}
 *   | {type: "call", index: number, id: string, name: string} | {type: "arguments", index: number, text: string}
 *   | {type: "usage", prompt: number, cached: number, completion: number, reasoning: number, timing?: Record<string, number>}
 *   | {type: "finish", reason: string} | {type: "mark", id: string, sequence: number}} AnswerEvent
 */

/**
 * Sends a body and takes the events of its answer. Raises `Failure`, or the signal's `AbortError`.
 * @param {Record<string, unknown>} body @param {(event: AnswerEvent) => void} take
 * @param {{signal: AbortSignal, requestId: string}} options
 */
export async function streamCompletion(body, take, { signal, requestId }) {
  const response = await request("v1/chat/completions", {
    body: { ...body, stream: true, stream_options: { include_usage: true }, x_mlxd: { timing: true } },
    signal,
    headers: { "x-request-id": requestId },
  });
  take({ type: "open" });
  let isWhole = false;
  await readEvents(
    response,
    ({ data }) => {
      if (data === "[DONE]") return (isWhole = true);
      const chunk = JSON.parse(data);
      if (chunk.error) throw streamFailure(chunk.error);
      takeChunk(chunk, take);
      return false;
    },
    signal,
  );
  if (!isWhole) throw new Failure(t.cutOff);
}

/** @param {any} chunk @param {(event: AnswerEvent) => void} take */
function takeChunk(chunk, take) {
  const choice = chunk.choices?.[0];
  const delta = choice?.delta;
  const reasoning = delta?.reasoning_content ?? delta?.reasoning;
  if (reasoning) take({ type: "reasoning", text: reasoning });
  if (delta?.content) take({ type: "text", text: delta.content });
  for (const call of delta?.tool_calls ?? []) {
    if (call.function?.name) take({ type: "call", index: call.index, id: call.id ?? "", name: call.function.name });
    if (call.function?.arguments) take({ type: "arguments", index: call.index, text: call.function.arguments });
  }
  if (choice?.finish_reason) take({ type: "finish", reason: choice.finish_reason });
  if (chunk.usage) {
    const { prompt_tokens, completion_tokens, prompt_tokens_details, completion_tokens_details } = chunk.usage;
    take({
      type: "usage",
      prompt: prompt_tokens,
      cached: prompt_tokens_details?.cached_tokens ?? 0,
      completion: completion_tokens,
      reasoning: completion_tokens_details?.reasoning_tokens ?? 0,
      timing: chunk.x_mlxd?.timing,
    });
  }
}
