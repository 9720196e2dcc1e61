// Archive of conversations: one JSON file out, the same tree in again.

import { database } from "./database.js";
import { t } from "../strings.js";

const FORMAT = "mlxd-conversations";
const VERSION = 1;
const CHUNK = 0x8000;

/** @param {ArrayBuffer} bytes */
function toBase64(bytes) {
  const view = new Uint8Array(bytes);
  let text = "";
  for (let at = 0; at < view.length; at += CHUNK) text += String.fromCharCode(...view.subarray(at, at + CHUNK));
  return btoa(text);
}

/** @param {string} text */
const fromBase64 = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0)).buffer;

/** All conversations, or one, as the text of a file. @param {string} [only] */
export async function exportText(only) {
  const db = await database();
  const conversations = (await db.getAll("conversations")).filter((each) => only === undefined || each.id === only);
  const whole = [];
  for (const conversation of conversations) {
    const messages = await db.getAllFromIndex("messages", "conversation", conversation.id);
    const files = await db.getAllFromIndex("files", "conversation", conversation.id);
    whole.push({ ...conversation, messages, files: files.map((file) => ({ ...file, bytes: toBase64(file.bytes) })) });
  }
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations: whole });
}

/** @param {any} value @param {string} name @param {string} type */
function needs(value, name, type) {
  if (typeof value?.[name] !== type) throw new Error(t.notAnArchive);
}

/** @param {any} raw */
function conversationOf({ messages: _messages, files: _files, ...fields }) {
  needs(fields, "id", "string");
  needs(fields, "title", "string");
  const now = Date.now();
  return { model: "", system: "", sampling: {}, thinking: "", tools: "", leaf: null, created: now, updated: now, ...fields };
}

/** @param {any} raw @param {string} conversation */
function messageOf(raw, conversation) {
  needs(raw, "id", "string");
  needs(raw, "text", "string");
  if (!["user", "assistant", "tool"].includes(raw.role)) throw new Error(t.notAnArchive);
  const empty = { parent: null, reasoning: "", calls: [], call_id: "", files: [], model: "", created: Date.now(), timings: {}, finish: "", error: "" };
  return { ...empty, ...raw, conversation, state: raw.state === "writing" ? "stopped" : (raw.state ?? "whole"), response: null };
}

/** Adds what a file holds and is not here yet; returns the number of its conversations. Raises when it is none. @param {string} text */
export async function importText(text) {
  let archive;
  try {
    archive = JSON.parse(text);
  } catch {
    throw new Error(t.notAnArchive);
  }
  if (archive?.format !== FORMAT || !Array.isArray(archive.conversations)) throw new Error(t.notAnArchive);
  if (archive.version > VERSION) throw new Error(t.newerArchive);
  // Everything is checked before anything is written.
  const conversations = archive.conversations.map(conversationOf);
  const messages = archive.conversations.flatMap((/** @type {any} */ each) => (each.messages ?? []).map((/** @type {any} */ raw) => messageOf(raw, each.id)));
  const files = archive.conversations.flatMap((/** @type {any} */ each) =>
    (each.files ?? []).map((/** @type {any} */ raw) => ({ id: String(raw.id), conversation: each.id, name: String(raw.name), type: String(raw.type), bytes: fromBase64(String(raw.bytes)) })),
  );
  const transaction = (await database()).transaction(["conversations", "messages", "files"], "readwrite");
  for (const [store, records] of /** @type {const} */ ([["conversations", conversations], ["messages", messages], ["files", files]])) {
    for (const record of records) {
      if ((await transaction.objectStore(store).getKey(record.id)) === undefined) transaction.objectStore(store).put(record);
    }
  }
  await transaction.done;
  return conversations.length;
}
