// Search in titles and messages of all conversations.

import { database } from "./database.js";

const HITS_MAX = 100;
const BATCH = 500;

/** Ids of conversations in which every word occurs, by title or in one message. @param {string} words @param {AbortSignal} signal @returns {Promise<Set<string>>} */
export async function search(words, signal) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  /** @type {Set<string>} */
  const hits = new Set();
  const has = (/** @type {string} */ text) => {
    const lower = text.toLowerCase();
    return wanted.every((word) => lower.includes(word));
  };
  const db = await database();
  for (const conversation of await db.getAll("conversations")) if (has(conversation.title)) hits.add(conversation.id);
  // In batches: all messages at once could be more than a tab holds.
  for (let after = ""; hits.size < HITS_MAX && !signal.aborted; ) {
    const batch = await db.getAll("messages", IDBKeyRange.lowerBound(after, true), BATCH);
    for (const message of batch) if (!hits.has(message.conversation) && has(message.text)) hits.add(message.conversation);
    if (batch.length < BATCH) break;
    after = batch.at(-1).id;
  }
  return hits;
}
