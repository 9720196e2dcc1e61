// Database of conversations in this browser: a record a conversation, a record a message, files apart.
//
// Records are versioned by the database's own version; an upgrade adds and converts, and never deletes. Two tabs write
// different records: a message belongs to the tab in which it is written.

import { openDB } from "../vendor/idb.js";

/**
 * @typedef {{temperature?: number, top_p?: number, top_k?: number, min_p?: number, repetition_penalty?: number,
 *   presence_penalty?: number, frequency_penalty?: number, max_tokens?: number, seed?: number, stop?: string[]}} Sampling
 * @typedef {{id: string, title: string, model: string, system: string, sampling: Sampling, thinking: string, tools: string,
 *   leaf: string | null, created: number, updated: number}} Conversation
 * @typedef {{id: string, name: string, arguments: string}} Call
 * @typedef {{ttft_ms?: number, tokens?: number, prompt?: number, cached?: number, rate?: number, reasoning_ms?: number,
 *   reasoning_tokens?: number, request?: string, waits?: Record<string, number>}} Timings
 * @typedef {{id: string, conversation: string, parent: string | null, role: "user" | "assistant" | "tool", text: string,
 *   reasoning: string, calls: Call[], call_id: string, files: string[], model: string, created: number, timings: Timings,
 *   state: "whole" | "writing" | "stopped" | "failed", finish: string, error: string,
 *   response: {id: string, sequence: number} | null, saved?: number}} Message
 * @typedef {{id: string, conversation: string, name: string, type: string, bytes: ArrayBuffer}} StoredFile
 */

export const NAME = "mlxd";
const VERSION = 1;

/** @type {Promise<import("../vendor/idb.js").IDBPDatabase<any>> | null} */
let opening = null;

/** The open database. Raises where the browser has none, such as in some private windows. */
export function database() {
  opening ??= openDB(NAME, VERSION, {
    upgrade(db, from) {
      if (from < 1) {
        db.createObjectStore("conversations", { keyPath: "id" }).createIndex("updated", "updated");
        db.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
        db.createObjectStore("files", { keyPath: "id" }).createIndex("conversation", "conversation");
      }
    },
    // A newer page in another tab wants to upgrade: let it, and open again at the next call.
    blocking(_current, _blocked, event) {
      /** @type {IDBDatabase} */ (event.target).close();
      opening = null;
    },
    terminated() {
      opening = null;
    },
  }).catch((error) => {
    opening = null;
    throw error;
  });
  return opening;
}

/** All conversations, the newest first. @returns {Promise<Conversation[]>} */
export async function listConversations() {
  const all = await (await database()).getAllFromIndex("conversations", "updated");
  return all.reverse();
}

/** @param {string} id @returns {Promise<Message[]>} */
export async function listMessages(id) {
  return (await database()).getAllFromIndex("messages", "conversation", id);
}

/** @param {string} id @returns {Promise<Conversation | undefined>} */
export const readConversation = async (id) => (await database()).get("conversations", id);

/** @param {Conversation} conversation */
export async function saveConversation(conversation) {
  await (await database()).put("conversations", conversation);
}

/**
 * Changes fields of a conversation; those that another tab changed stay. One that is not there is made of `whole`, if given.
 * @param {string} id @param {Partial<Conversation>} fields @param {Conversation} [whole]
 */
export async function changeConversation(id, fields, whole) {
  const transaction = (await database()).transaction("conversations", "readwrite");
  const before = (await transaction.store.get(id)) ?? whole;
  if (before) transaction.store.put({ ...before, ...fields });
  await transaction.done;
}

/** @param {Message} message */
export async function saveMessage(message) {
  await (await database()).put("messages", message);
}

/** @param {StoredFile[]} files */
export async function saveFiles(files) {
  const transaction = (await database()).transaction("files", "readwrite");
  for (const file of files) transaction.store.put(file);
  await transaction.done;
}

/** @param {string} id @returns {Promise<StoredFile | undefined>} */
export const readFile = async (id) => (await database()).get("files", id);

/** @param {string} id */
export async function deleteConversation(id) {
  const transaction = (await database()).transaction(["conversations", "messages", "files"], "readwrite");
  transaction.objectStore("conversations").delete(id);
  for (const store of ["messages", "files"]) {
    for (const key of await transaction.objectStore(store).index("conversation").getAllKeys(id)) {
      transaction.objectStore(store).delete(key);
    }
  }
  await transaction.done;
}

/** Deletes messages. @param {string[]} ids */
export async function deleteMessages(ids) {
  const transaction = (await database()).transaction("messages", "readwrite");
  for (const id of ids) transaction.store.delete(id);
  await transaction.done;
}
