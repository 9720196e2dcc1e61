// Background responses: the daemon writes an answer on, whether this page is there or not, and the page joins again.

import { Failure, json, request, streamFailure } from "./http.js";
import { readEvents } from "./events.js";
import { t } from "../strings.js";

/** @typedef {import("./completions.js").AnswerEvent} AnswerEvent */

/** Whether a failure says that this daemon has no background responses, or keeps none. @param {unknown} error */
export const isUnsupported = (error) => error instanceof Failure && error.status === 400 && /background|store/i.test(error.message);

/**
 * Starts a background response and takes its events. Raises `Failure` or the signal's `AbortError`.
 * @param {Record<string, unknown>} body @param {(event: AnswerEvent) => void} take
 * @param {{signal: AbortSignal, requestId: string}} options
 */
export async function startResponse(body, take, { signal, requestId }) {
  const response = await request("v1/responses", {
    body: { ...body, background: true, stream: true, store: true, x_mlxd: { timing: true } },
    signal,
    headers: { "x-request-id": requestId },
  });
  await takeStream(response, take, signal);
}

/**
 * Joins a response after the event of that number. Raises `Failure` or the signal's `AbortError`.
 * @param {{id: string, sequence: number}} at @param {(event: AnswerEvent) => void} take @param {AbortSignal} signal
 */
export async function joinResponse(at, take, signal) {
  const path = `v1/responses/${encodeURIComponent(at.id)}`;
  await takeStream(await request(`${path}?stream=true&starting_after=${at.sequence}`, { signal }), take, signal);
}

/** A response as it is now, whole: for one whose events are gone. @param {string} id @param {AbortSignal} signal */
export async function wholeResponse(id, signal) {
  const response = await json(`v1/responses/${encodeURIComponent(id)}`, { signal });
  const items = response.output ?? [];
  const texts = (/** @type {string} */ type) =>
    items.filter((/** @type {any} */ item) => item.type === type).flatMap((/** @type {any} */ item) => (item.content ?? []).map((/** @type {any} */ part) => part.text ?? "")).join("");
  const calls = items
    .filter((/** @type {any} */ item) => item.type === "function_call")
    .map((/** @type {any} */ item) => ({ id: item.call_id, name: item.name, arguments: item.arguments }));
  return { text: texts("message"), reasoning: texts("reasoning"), calls, response };
}

/** @param {string} id */
export const cancelResponse = (id) => request(`v1/responses/${encodeURIComponent(id)}/cancel`, { body: {} });

/** Deletes a response that this browser has whole. @param {string} id */
export const forgetResponse = (id) => request(`v1/responses/${encodeURIComponent(id)}`, { method: "DELETE" });

/** @param {Response} response @param {(event: AnswerEvent) => void} take @param {AbortSignal} signal */
async function takeStream(response, take, signal) {
  take({ type: "open" });
  const calls = new Map();
  let isWhole = false;
  await readEvents(
    response,
    ({ data }) => {
      if (data === "[DONE]") return true;
      const event = JSON.parse(data);
      const id = event.response?.id;
      takeEvent(event, take, calls);
      if (event.sequence_number !== undefined) take({ type: "mark", id: id ?? "", sequence: event.sequence_number });
      return (isWhole = takeEnd(event, take));
    },
    signal,
  );
  if (!isWhole) throw new Failure(t.cutOff);
}

/** @param {any} event @param {(event: AnswerEvent) => void} take @param {Map<number, number>} calls index of a call by that of its item */
function takeEvent(event, take, calls) {
  switch (event.type) {
    case "response.output_text.delta":
      return take({ type: "text", text: event.delta });
    case "response.reasoning_text.delta":
      return take({ type: "reasoning", text: event.delta });
    case "response.output_item.added":
      if (event.item?.type !== "function_call") return undefined;
      calls.set(event.output_index, event.output_index);
      return take({ type: "call", index: event.output_index, id: event.item.call_id, name: event.item.name });
    case "response.function_call_arguments.delta":
      return take({ type: "arguments", index: event.output_index, text: event.delta });
    case "error":
      throw streamFailure(event.error ?? event);
    default:
      return undefined;
  }
}

/** Whether the event was the last one. @param {any} event @param {(event: AnswerEvent) => void} take */
export function takeEnd({ type, response }, take) {
  if (!["response.completed", "response.incomplete", "response.failed", "response.cancelled"].includes(type)) return false;
  if (type === "response.failed") throw streamFailure(response.error);
  const usage = response.usage;
  if (usage) {
    take({
      type: "usage",
      prompt: usage.input_tokens,
      cached: usage.input_tokens_details?.cached_tokens ?? 0,
      completion: usage.output_tokens,
      reasoning: usage.output_tokens_details?.reasoning_tokens ?? 0,
      timing: response.x_mlxd?.timing,
    });
  }
  const hasCalls = (response.output ?? []).some((/** @type {any} */ item) => item.type === "function_call");
  const cut = response.incomplete_details?.reason === "max_output_tokens";
  const reason = cut ? "length" : response.status === "cancelled" ? "cancelled" : hasCalls ? "tool_calls" : "stop";
  take({ type: "finish", reason });
  return true;
}
