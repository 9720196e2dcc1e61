// Conversations as the page shows them: the list, the open one, and the answers that are being written.

import { batch, computed, effect, signal } from "../vendor/preact.js";
import * as database from "../history/database.js";
import { below, leafOf, newestLeaf, path } from "../history/tree.js";
import { authorization } from "../server/credentials.js";
import { newId, sentence } from "../server/http.js";
import { modelNamed, models, refreshModels } from "../server/models.js";
import { t } from "../strings.js";
import { Answer } from "./answer.js";

/**
 * @typedef {database.Conversation} Conversation
 * @typedef {database.Message} Message
 * @typedef {{conversation: Conversation, messages: Map<string, Message>, leaf: string | null}} Open
 */

const TITLE_CHARS = 60;
const LAST_MODEL = "mlxd.model";
/** A message that another tab writes was saved within this time. */
const OTHERS_MS = 5_000;

/** @type {import("../vendor/preact.js").Signal<Conversation[]>} */
export const list = signal([]);
/** @type {import("../vendor/preact.js").Signal<Open | null>} */
export const open = signal(null);
/** Sentence that says why something could not be saved; it stays until a save succeeds. */
export const saveFailure = signal("");
/** Answers being written, by the id of their conversation. @type {import("../vendor/preact.js").Signal<Map<string, Answer>>} */
export const answers = signal(new Map());
export const branch = computed(() => (open.value === null ? [] : path(open.value.messages, open.value.leaf)));

const channel = "BroadcastChannel" in window ? new BroadcastChannel("mlxd") : null;

/** Saves that failed, the newest of each record: tried again before the next one. @type {Map<string, () => Promise<unknown>>} */
const failed = new Map();

/**
 * Runs a save, says a failure until all that failed is saved, and keeps what is on the screen.
 * @param {string} record what is saved @param {() => Promise<unknown>} work @param {string} [changed] id of a conversation, for other tabs
 */
async function saved(record, work, changed = "") {
  failed.delete(record);
  let problem = null;
  for (const [name, each] of [...failed, /** @type {const} */ ([record, work])]) {
    try {
      await each();
      failed.delete(name);
    } catch (error) {
      failed.set(name, each);
      problem = error;
    }
  }
  const isFull = problem instanceof Error && problem.name === "QuotaExceededError";
  saveFailure.value = problem === null ? "" : isFull ? t.storageFull : t.notSaved(sentence(problem));
  if (!failed.has(record)) channel?.postMessage({ changed });
  return !failed.has(record);
}

export async function refreshList() {
  try {
    list.value = await database.listConversations();
  } catch (error) {
    saveFailure.value = t.noStorage(sentence(error));
  }
}

/** Opens a conversation, or a new one. @param {string} id empty for a new one */
export async function openConversation(id) {
  if (open.value?.conversation.id === id) return;
  if (!id) {
    open.value = blank();
    return;
  }
  try {
    const conversation = await database.readConversation(id);
    if (conversation === undefined) {
      open.value = blank();
      return;
    }
    const messages = new Map((await database.listMessages(id)).map((message) => [message.id, message]));
    open.value = { conversation, messages, leaf: leafOf(messages, conversation.leaf) };
    resume(open.value);
  } catch (error) {
    saveFailure.value = t.noStorage(sentence(error));
    open.value = blank();
  }
}

/** @returns {Open} */
function blank() {
  const now = Date.now();
  const conversation = { id: "", title: "", model: usualModel(), system: "", sampling: {}, thinking: "", tools: "", leaf: null, created: now, updated: now };
  return { conversation, messages: new Map(), leaf: null };
}

/** The model of the newest conversation, where it is still there; else one that is ready. */
export function usualModel() {
  let last = "";
  try {
    last = localStorage.getItem(LAST_MODEL) ?? "";
  } catch {
    // Without storage the first one has to do.
  }
  if (last && (models.value.length === 0 || modelNamed(last))) return last;
  return (models.value.find((model) => model.state === "ready") ?? models.value[0])?.id ?? "";
}

/** Answers that were left in the middle: joined where the daemon writes them on, else kept as far as they are. @param {Open} opened */
function resume({ conversation, messages }) {
  if (answers.value.has(conversation.id)) return;
  for (const message of messages.values()) {
    if (message.state !== "writing") continue;
    if (message.response !== null) {
      const answer = begin(message, conversation);
      answer.rejoin().finally(() => end(conversation.id));
      return;
    }
    const age = Date.now() - (message.saved ?? 0);
    if (age < OTHERS_MS) setTimeout(() => reopen(conversation.id), OTHERS_MS);
    else put({ ...message, state: "failed", error: t.interrupted });
  }
}

/** Reads the open conversation again, as another tab has changed it. @param {string} id */
async function reopen(id) {
  const now = open.value;
  if (now?.conversation.id !== id || answers.value.has(id)) return;
  const conversation = await database.readConversation(id);
  if (conversation === undefined || open.value !== now) return;
  const messages = new Map((await database.listMessages(id)).map((message) => [message.id, message]));
  // The branch that is looked at stays; one that has grown is followed.
  const leaf = now.leaf !== null && messages.has(now.leaf) ? newestLeaf(messages, now.leaf) : leafOf(messages, conversation.leaf);
  open.value = { conversation, messages, leaf };
  resume(open.value);
}

/** Puts a message into the open conversation, where it belongs there, and into the database. @param {Message} message */
function put(message) {
  const now = open.value;
  if (now?.conversation.id === message.conversation) {
    open.value = { ...now, messages: new Map(now.messages).set(message.id, message) };
  }
  return saved(message.id, () => database.saveMessage({ ...message, saved: Date.now() }), message.conversation);
}

/** @param {Partial<Conversation>} fields */
export async function change(fields) {
  const now = open.value;
  if (now === null) return;
  open.value = { ...now, conversation: { ...now.conversation, ...fields } };
  if (fields.model) {
    try {
      localStorage.setItem(LAST_MODEL, fields.model);
    } catch {
      // The next visit begins with another model.
    }
  }
  const { id } = now.conversation;
  if (!id) return;
  const whole = { ...now.conversation, ...fields };
  await saved(`${id}.${Object.keys(fields)}`, () => database.changeConversation(id, fields, whole), id);
  list.value = list.value.map((each) => (each.id === id ? { ...each, ...fields } : each));
}

/** @param {string} id @param {string} title */
export async function rename(id, title) {
  if (open.value?.conversation.id === id) return change({ title });
  await saved(`${id}.title`, () => database.changeConversation(id, { title }), id);
  return refreshList();
}

/** @param {string} id */
export async function remove(id) {
  answers.value.get(id)?.stop();
  if (await saved(id, () => database.deleteConversation(id), id)) {
    list.value = list.value.filter((each) => each.id !== id);
    if (open.value?.conversation.id === id) open.value = blank();
  }
}

/** Shows the branch through a message. @param {string} id */
export function showBranch(id) {
  const now = open.value;
  if (now === null) return;
  const leaf = newestLeaf(now.messages, id);
  open.value = { ...now, leaf };
  change({ leaf });
}

/** @param {Partial<Message> & Pick<Message, "role" | "parent">} fields @returns {Message} */
function newMessage(fields) {
  return {
    id: newId(), conversation: open.value?.conversation.id ?? "", text: "", reasoning: "", calls: [], call_id: "", files: [], model: "",
    created: Date.now(), timings: {}, state: "whole", finish: "", error: "", response: null, ...fields,
  };
}

/** Makes a new conversation one that is kept. Returns its id. @param {string} text its first message */
async function keep(text) {
  const now = open.value ?? blank();
  if (now.conversation.id) return now.conversation.id;
  const title = (text.trim().split("\n", 1)[0] ?? "").slice(0, TITLE_CHARS) || t.untitled;
  const conversation = { ...now.conversation, id: newId(), title, model: now.conversation.model || usualModel(), created: Date.now(), updated: Date.now() };
  open.value = { ...now, conversation };
  list.value = [conversation, ...list.value];
  await saved(conversation.id, () => database.saveConversation(conversation), conversation.id);
  return conversation.id;
}

/**
 * Adds a user's message, below `parent` or at the end, and asks for its answer. Returns the conversation's id.
 * @param {string} text @param {{name: string, type: string, bytes: ArrayBuffer}[]} files @param {string | null} [parent]
 */
export async function send(text, files, parent = open.value?.leaf ?? null) {
  const id = await keep(text || (files[0]?.name ?? ""));
  const stored = files.map((file) => ({ ...file, id: newId(), conversation: id }));
  if (stored[0]) await saved(stored[0].id, () => database.saveFiles(stored), id);
  await add(newMessage({ role: "user", parent, text, files: stored.map((file) => file.id) }));
  ask();
  return id;
}

/** Another version of a user's message, with an answer of its own. @param {Message} message @param {string} text */
export async function edit(message, text) {
  await add(newMessage({ role: message.role, parent: message.parent, text, files: message.files, model: message.model }));
  if (message.role === "user") ask();
}

/** The result of a tool's call, given by hand; asks on once every call has one. @param {Message} message @param {string} callId @param {string} text */
export async function giveResult(message, callId, text) {
  const parent = open.value?.leaf ?? message.id;
  await add(newMessage({ role: "tool", parent, call_id: callId, text }));
  const given = new Set(branch.value.filter((each) => each.role === "tool").map((each) => each.call_id));
  if (message.calls.every((call) => given.has(call.id))) ask();
}

/** @param {Message} message */
async function add(message) {
  const now = open.value;
  if (now === null) return;
  open.value = { ...now, messages: new Map(now.messages).set(message.id, message), leaf: message.id };
  await put(message);
  await change({ leaf: message.id, updated: message.created });
}

/** Another answer beside this one. @param {Message} message */
export function askAgain(message) {
  const now = open.value;
  if (now === null || answers.value.has(now.conversation.id)) return;
  open.value = { ...now, leaf: message.parent };
  ask();
}

/** Asks for the answer to the branch that is shown. */
export function ask() {
  const now = open.value;
  if (now === null || answers.value.has(now.conversation.id)) return;
  const asked = branch.value;
  const message = newMessage({ role: "assistant", parent: now.leaf, model: now.conversation.model, state: "writing" });
  const answer = begin(message, now.conversation);
  change({ leaf: message.id, updated: message.created });
  answer.ask(now.conversation, asked).finally(() => end(now.conversation.id));
}

/** Goes on with an answer that ended too soon or failed, in the same message. @param {Message} message */
export function goOn(message) {
  const now = open.value;
  if (now === null || answers.value.has(now.conversation.id)) return;
  const asked = path(now.messages, message.id);
  // Without a text there is nothing to continue: it begins again.
  const kept = message.text ? {} : { reasoning: "", calls: [], timings: {}, model: now.conversation.model };
  const answer = begin({ ...message, ...kept, state: "writing", error: "", finish: "" }, now.conversation);
  answer.ask(now.conversation, message.text ? asked : asked.slice(0, -1)).finally(() => end(now.conversation.id));
}

export const stop = () => answers.value.get(open.value?.conversation.id ?? "")?.stop();

/** @param {Message} message @param {Conversation} conversation */
function begin(message, conversation) {
  const answer = new Answer(message, (draft) => void put(draft));
  batch(() => {
    answers.value = new Map(answers.value).set(conversation.id, answer);
    const now = open.value;
    if (now?.conversation.id === conversation.id) {
      open.value = { ...now, messages: new Map(now.messages).set(message.id, message), leaf: message.id };
    }
  });
  put(message);
  return answer;
}

/** @param {string} id */
function end(id) {
  const now = new Map(answers.value);
  now.delete(id);
  answers.value = now;
  refreshModels();
  database.changeConversation(id, { updated: Date.now() }).then(refreshList, () => {});
}

/** Removes a message with everything below it. @param {Message} message */
export async function removeMessage(message) {
  const now = open.value;
  if (now === null) return;
  const gone = below(now.messages, message.id);
  const messages = new Map(now.messages);
  for (const id of gone) messages.delete(id);
  const leaf = message.parent !== null ? newestLeaf(messages, message.parent) : leafOf(messages, null);
  open.value = { ...now, messages, leaf };
  await saved(`${message.id}.gone`, () => database.deleteMessages(gone), now.conversation.id);
  await change({ leaf });
}

// With a key or a session, answers go on that were left for want of it.
effect(() => {
  void authorization();
  const { id } = open.peek()?.conversation ?? {};
  // Later, so that the effect hears of credentials alone.
  if (id) queueMicrotask(() => reopen(id));
});

channel?.addEventListener("message", (event) => {
  refreshList();
  if (event.data?.changed) reopen(event.data.changed);
});
