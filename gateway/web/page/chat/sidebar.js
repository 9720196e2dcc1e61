// Sidebar: new conversation, search, the list, export and import.

import { html, signal, useEffect, useState } from "../vendor/preact.js";
import { exportText, importText } from "../history/archive.js";
import { search } from "../history/search.js";
import { confirmed } from "../parts/dialog.js";
import { chooseFiles, saveAs } from "../parts/file.js";
import { Icon } from "../parts/icons.js";
import { Menu } from "../parts/menu.js";
import { notify } from "../parts/notice.js";
import { go, place } from "../route.js";
import { sentence } from "../server/http.js";
import { t } from "../strings.js";
import { period } from "../text/format.js";
import * as conversations from "./conversations.js";

/** @typedef {import("../history/database.js").Conversation} Conversation */

const SEARCH_MS = 200;
/** Rows drawn at first, and with each look at the end of the list: a thousand of them cost time at every change. */
const ROWS = 100;

export const isSidebarOpen = signal(false);

/** @param {string} [id] */
async function exportAll(id) {
  try {
    saveAs(`mlxd-${id ? "conversation" : "conversations"}-${new Date().toISOString().slice(0, 10)}.json`, await exportText(id));
  } catch (error) {
    notify(sentence(error), true);
  }
}

async function importAll() {
  for (const file of await chooseFiles({ accept: "application/json,.json", isMany: true })) {
    try {
      const number = await importText(await file.text());
      notify(t.imported(number));
    } catch (error) {
      notify(t.notImported(file.name, sentence(error)), true);
    }
  }
  await conversations.refreshList();
}

/** @param {string} words @returns {Set<string> | null} null without words */
function useHits(words) {
  const [hits, setHits] = useState(/** @type {Set<string> | null} */ (null));
  useEffect(() => {
    if (!words.trim()) {
      setHits(null);
      return undefined;
    }
    const abort = new AbortController();
    const timer = setTimeout(() => search(words, abort.signal).then((ids) => !abort.signal.aborted && setHits(ids), () => {}), SEARCH_MS);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [words, conversations.list.value]);
  return hits;
}

/** @param {{current: string}} props */
export function Sidebar({ current }) {
  const [words, setWords] = useState("");
  const [rows, setRows] = useState(ROWS);
  const hits = useHits(words);
  const all = conversations.list.value.filter((each) => hits === null || hits.has(each.id));
  const onScroll = (/** @type {any} */ event) => {
    const { scrollTop, scrollHeight, clientHeight } = event.currentTarget;
    if (rows < all.length && scrollHeight - scrollTop - clientHeight < 400) setRows(rows + ROWS);
  };
  const onNew = () => {
    isSidebarOpen.value = false;
    go("chat");
    document.getElementById("message-box")?.focus();
  };
  const now = Date.now();
  let heading = "";
  return html`<aside class=${isSidebarOpen.value ? "sidebar open" : "sidebar"} aria-label=${t.conversations}>
    <button type="button" class="new" onClick=${onNew} title=${t.newKey}><${Icon} name="plus" />${t.newChat}</button>
    <label class="search"><${Icon} name="search" /><input id="search-box" type="search" value=${words} placeholder=${t.search} aria-label=${t.search}
      title=${t.searchKey} onInput=${(/** @type {any} */ event) => setWords(event.target.value)} /></label>
    <nav class="list" aria-label=${t.conversations} tabindex="-1" onScroll=${onScroll}>${all.slice(0, rows).map((each) => {
      const next = period(each.updated, now);
      const isFirst = next !== heading;
      heading = next;
      return html`${isFirst ? html`<h3 key=${next}>${next}</h3>` : null}<${Row} key=${each.id} conversation=${each} isCurrent=${each.id === current} />`;
    })}
    ${all.length ? null : html`<p class="faint">${hits === null ? t.noConversations : t.nothingFound}</p>`}</nav>
    <div class="sidebar-foot">
      <button type="button" class="quiet" onClick=${() => exportAll()} disabled=${!conversations.list.value.length}><${Icon} name="export" />${t.export}</button>
      <button type="button" class="quiet" onClick=${importAll}><${Icon} name="import" />${t.import}</button>
    </div>
  </aside>`;
}

/** @param {{conversation: Conversation, isCurrent: boolean}} props */
function Row({ conversation, isCurrent }) {
  const [title, setTitle] = useState(/** @type {string | null} */ (null));
  const { id } = conversation;
  const keep = () => {
    if (title?.trim()) conversations.rename(id, title.trim());
    setTitle(null);
  };
  const onDelete = async () => {
    if (!(await confirmed({ title: t.deleteChat, text: t.deleteChatText(conversation.title), action: t.delete }))) return;
    await conversations.remove(id);
    if (isCurrent) go("chat");
  };
  if (title !== null) {
    return html`<form class="row" onSubmit=${(/** @type {Event} */ event) => (event.preventDefault(), keep())}><input value=${title} aria-label=${t.rename}
      ref=${(/** @type {HTMLElement | null} */ element) => element?.focus()} onBlur=${keep} onInput=${(/** @type {any} */ event) => setTitle(event.target.value)}
      onKeyDown=${(/** @type {KeyboardEvent} */ event) => event.key === "Escape" && setTitle(null)} /></form>`;
  }
  const choices = [
    { id: "rename", label: t.rename, action: () => setTitle(conversation.title) },
    { id: "export", label: t.export, action: () => exportAll(id) },
    { id: "delete", label: t.delete, action: onDelete },
  ];
  return html`<div class=${isCurrent ? "row current" : "row"}>
    <a href=${place("chat", id)} aria-current=${isCurrent ? "page" : undefined} dir="auto" onClick=${() => (isSidebarOpen.value = false)}>${conversation.title}</a>
    ${conversations.answers.value.has(id) ? html`<span class="pulse" title=${t.writing} aria-label=${t.writing} role="img"></span>` : null}
    <${Menu} label=${t.actionsOf(conversation.title)} button=${html`<${Icon} name="more" />`} choices=${choices} />
  </div>`;
}
