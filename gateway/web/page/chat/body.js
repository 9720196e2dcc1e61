// Bodies of requests: a branch of a conversation as /v1/chat/completions and /v1/responses take it.
//
// A field that is not set is not sent, so that the server's own settings count.

import { readFile } from "../history/database.js";

/**
 * @typedef {import("../history/database.js").Conversation} Conversation
 * @typedef {import("../history/database.js").Message} Message
 * @typedef {import("../history/database.js").StoredFile} StoredFile
 */

const CHUNK = 0x8000;

/** @param {StoredFile} file */
function dataAddress(file) {
  const view = new Uint8Array(file.bytes);
  let text = "";
  for (let at = 0; at < view.length; at += CHUNK) text += String.fromCharCode(...view.subarray(at, at + CHUNK));
  return `data:${file.type};base64,${btoa(text)}`;
}

/** @param {string} text */
const fence = (text) => "`".repeat(Math.max(3, ...(text.match(/`+/g) ?? []).map((ticks) => ticks.length + 1)));

/** @param {StoredFile} file */
const isText = (file) => !file.type.startsWith("image/") && file.type !== "application/pdf";

/** Text of a user's message with its text files, and its images and PDFs. @param {Message} message */
async function partsOf(message) {
  const files = (await Promise.all(message.files.map(readFile))).filter((file) => file !== undefined);
  const media = files.filter((file) => !isText(file));
  const quoted = files.filter(isText).map((file) => {
    const text = new TextDecoder().decode(file.bytes);
    return `${file.name}:\n${fence(text)}\n${text}\n${fence(text)}`;
  });
  return { text: [...quoted, message.text].filter(Boolean).join("\n\n"), media };
}

/** @param {Conversation} conversation */
function tools({ tools }) {
  return tools.trim() ? JSON.parse(tools) : undefined;
}

/** @param {string} thinking */
const effort = (thinking) => (thinking ? { reasoning_effort: thinking === "off" ? "none" : thinking } : {});

/**
 * Body of a chat completion, which continues the last message where that is the assistant's.
 * @param {Conversation} conversation @param {Message[]} branch
 */
export async function completionBody(conversation, branch) {
  const { sampling, system, thinking, model } = conversation;
  const messages = await Promise.all(branch.map(completionMessage));
  const isContinued = branch.at(-1)?.role === "assistant";
  return {
    model,
    messages: system.trim() ? [{ role: "system", content: system }, ...messages] : messages,
    ...sampling,
    ...effort(thinking),
    ...(isContinued ? { continue_final_message: true } : {}),
    ...(conversation.tools.trim() ? { tools: tools(conversation) } : {}),
  };
}

/** @param {Message} message */
async function completionMessage(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.call_id, content: message.text };
  if (message.role === "assistant") {
    const calls = message.calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
    return {
      role: "assistant",
      content: message.text,
      ...(message.reasoning ? { reasoning_content: message.reasoning } : {}),
      ...(calls.length ? { tool_calls: calls } : {}),
    };
  }
  const { text, media } = await partsOf(message);
  if (!media.length) return { role: "user", content: text };
  const parts = media.map((file) =>
    file.type.startsWith("image/")
      ? { type: "image_url", image_url: { url: dataAddress(file) } }
      : { type: "file", file: { filename: file.name, file_data: dataAddress(file) } },
  );
  return { role: "user", content: text ? [...parts, { type: "text", text }] : parts };
}

/** Body of a response, without what /v1/responses does not take. @param {Conversation} conversation @param {Message[]} branch */
export async function responseBody(conversation, branch) {
  const { sampling, system, thinking, model } = conversation;
  const { max_tokens: maxTokens, stop: _stop, ...rest } = sampling;
  const input = (await Promise.all(branch.map(responseItems))).flat();
  const given = tools(conversation)?.map((/** @type {any} */ tool) => ({ type: "function", ...tool.function }));
  return {
    model,
    input,
    ...(system.trim() ? { instructions: system } : {}),
    ...rest,
    ...(maxTokens === undefined ? {} : { max_output_tokens: maxTokens }),
    ...effort(thinking),
    ...(given ? { tools: given } : {}),
  };
}

/** Whether /v1/responses has all that this request needs. @param {Conversation} conversation @param {Message[]} branch */
export const isResponse = (conversation, branch) => conversation.sampling.stop === undefined && branch.at(-1)?.role !== "assistant";

/** @param {Message} message @returns {Promise<Record<string, unknown>[]>} */
async function responseItems(message) {
  if (message.role === "tool") return [{ type: "function_call_output", call_id: message.call_id, output: message.text }];
  if (message.role === "user") {
    const { text, media } = await partsOf(message);
    /** @type {Record<string, unknown>[]} */
    const parts = media.map((file) =>
      file.type.startsWith("image/")
        ? { type: "input_image", image_url: dataAddress(file) }
        : { type: "input_file", filename: file.name, file_data: dataAddress(file) },
    );
    if (text) parts.push({ type: "input_text", text });
    return [{ type: "message", role: "user", content: parts }];
  }
  /** @type {Record<string, unknown>[]} */
  const items = [];
  if (message.reasoning) items.push({ type: "reasoning", summary: [], content: [{ type: "reasoning_text", text: message.reasoning }] });
  if (message.text || !message.calls.length) items.push({ type: "message", role: "assistant", content: [{ type: "output_text", text: message.text }] });
  for (const call of message.calls) items.push({ type: "function_call", call_id: call.id, name: call.name, arguments: call.arguments });
  return items;
}
