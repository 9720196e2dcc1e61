// Tree of a conversation's messages: an edit or another answer is a branch beside the one before.

/** @typedef {import("./database.js").Message} Message */

/** @param {Message} a @param {Message} b */
const inOrder = (a, b) => a.created - b.created || (a.id < b.id ? -1 : 1);

/** Messages with the same parent, the oldest first. @param {Iterable<Message>} messages @param {string | null} parent */
export function children(messages, parent) {
  return [...messages].filter((message) => message.parent === parent).sort(inOrder);
}

/** Messages from the root to `leaf`. @param {Map<string, Message>} messages @param {string | null} leaf */
export function path(messages, leaf) {
  /** @type {Message[]} */
  const found = [];
  const seen = new Set();
  for (let at = leaf; at !== null && !seen.has(at); ) {
    const message = messages.get(at);
    if (message === undefined) break;
    seen.add(at);
    found.push(message);
    at = message.parent;
  }
  return found.reverse();
}

/** The end of the newest branch below a message. @param {Map<string, Message>} messages @param {string} from */
export function newestLeaf(messages, from) {
  const seen = new Set([from]);
  for (let at = from; ; ) {
    const next = children(messages.values(), at).at(-1);
    if (next === undefined || seen.has(next.id)) return at;
    seen.add(next.id);
    at = next.id;
  }
}

/** The leaf to show: the one that was kept, where its messages are all there, else the newest. @param {Map<string, Message>} messages @param {string | null} kept */
export function leafOf(messages, kept) {
  if (kept !== null && messages.has(kept)) return kept;
  const root = children(messages.values(), null).at(-1);
  return root === undefined ? null : newestLeaf(messages, root.id);
}

/** A message and everything below it. @param {Map<string, Message>} messages @param {string} from */
export function below(messages, from) {
  const found = [from];
  for (const id of found) for (const child of children(messages.values(), id)) if (!found.includes(child.id)) found.push(child.id);
  return found;
}
