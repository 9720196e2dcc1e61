// Chat: sidebar, the open conversation and the composer.

import { html, signal, useEffect, useLayoutEffect, useRef, useState } from "../vendor/preact.js";
import { Icon } from "../parts/icons.js";
import { go, route } from "../route.js";
import { isAdmin } from "../server/credentials.js";
import { hasOnlyDemos, isDemo, isKnown, models } from "../server/models.js";
import { me } from "../server/session.js";
import { t } from "../strings.js";
import { Composer } from "./composer.js";
import * as conversations from "./conversations.js";
import { Message } from "./message.js";
import { changedSettings, Panel } from "./panel.js";
import { ModelPicker } from "./picker.js";
import { isSidebarOpen, Sidebar } from "./sidebar.js";

const isPanelOpen = signal(false);
/** Distance from the end within which the view follows what is written. */
const FOLLOW_PX = 80;

export function Chat() {
  const { id } = route.value;
  useEffect(() => void conversations.openConversation(id), [id]);
  useEffect(() => {
    // A new conversation begun before the models were known has none yet.
    const now = conversations.open.value;
    if (now && !now.conversation.model && models.value.length) conversations.change({ model: conversations.usualModel() });
  }, [models.value, conversations.open.value]);
  const now = conversations.open.value;
  const close = () => (isPanelOpen.value = false);
  return html`<div class=${isPanelOpen.value ? "chat with-panel" : "chat"}>
    <${Sidebar} current=${id} />
    ${isSidebarOpen.value ? html`<div class="shade" onClick=${() => (isSidebarOpen.value = false)}></div>` : null}
    ${now === null ? html`<main class="conversation"></main>` : html`<${Conversation} key=${now.conversation.id} open=${now} />`}
    ${isPanelOpen.value && now !== null ? html`<${Panel} conversation=${now.conversation} onClose=${close} />` : null}
  </div>`;
}

/** @param {{open: conversations.Open}} props */
function Conversation({ open }) {
  const { conversation, messages } = open;
  const answer = conversations.answers.value.get(conversation.id);
  const isBusy = answer !== undefined;
  const branch = conversations.branch.value;
  const settings = changedSettings(conversation);
  return html`<main class="conversation" id="main">
    <header class="bar">
      <button type="button" class="quiet only-narrow" aria-label=${t.conversations} onClick=${() => (isSidebarOpen.value = true)}><${Icon} name="menu" /></button>
      <${ModelPicker} model=${conversation.model} />
      <span class="spring"></span>
      <button type="button" class=${isPanelOpen.value ? "quiet chosen" : "quiet"} aria-expanded=${String(isPanelOpen.value)} onClick=${() => (isPanelOpen.value = !isPanelOpen.value)}>
        <${Icon} name="tune" /><span class="wide">${t.settingsOfChat}</span>${settings ? html`<span class="badge">${settings}</span>` : null}</button>
    </header>
    <${Scroll} conversation=${conversation.id} answer=${answer}>
      ${branch.length ? null : html`<${Welcome} model=${conversation.model} />`}
      ${branch.map((message, at) => html`<${Message} key=${message.id} message=${message} messages=${messages} isBusy=${isBusy}
        isLast=${at === branch.length - 1} answer=${answer?.id === message.id ? answer : undefined} />`)}
    <//>
    <${Composer} id=${conversation.id} model=${conversation.model} isBusy=${isBusy} />
    <${Announcer} answer=${answer} />
  </main>`;
}

/** @param {{model: string}} props */
function Welcome({ model }) {
  const hasModels = models.value.length > 0 || !isKnown.value;
  const examples = isDemo(model) ? t.demoExamples : t.examples;
  return html`<div class="welcome"><img src="icons/icon.svg" alt="" width="56" height="56" /><h1>${t.welcome}</h1><p>${hasModels ? t.welcomeText : t.welcomeNoModel}</p>
    ${hasModels ? html`<div class="examples">${examples.map((text) => html`<button type="button" key=${text} onClick=${() => start(text)}>${text}</button>`)}</div>` : null}
    ${hasOnlyDemos.value ? html`<${FirstVisit} />` : null}</div>`;
}

/** The way to a real model: for a session a card, whose parts are loaded now. */
function FirstVisit() {
  const [card, setCard] = useState(/** @type {any} */ (null));
  useEffect(() => {
    if (isAdmin.value) import("./first_models.js").then(({ FirstModels }) => setCard(() => FirstModels), () => {});
  }, [isAdmin.value]);
  if (isAdmin.value) return card && html`<${card} />`;
  return me.value?.visitor === "open" && me.value.admin !== "off"
    ? html`<section class="first-models"><p class="faint">${t.firstModelsLogIn}</p><pre class="command"><code>mlxctl ui</code></pre></section>`
    : null;
}

/** @param {string} text */
async function start(text) {
  const id = await conversations.send(text, []);
  go("chat", id, true);
}

/** Messages that scroll, and follow what is written while the reader is at the end. @param {{conversation: string, answer?: import("./answer.js").Answer, children?: any}} props */
function Scroll({ conversation, answer, children }) {
  const element = useRef(/** @type {HTMLElement | null} */ (null));
  const follows = useRef(true);
  const [isAway, setAway] = useState(false);
  const toEnd = () => {
    const now = element.current;
    if (now) now.scrollTop = now.scrollHeight;
  };
  useLayoutEffect(() => {
    follows.current = true;
    toEnd();
  }, [conversation]);
  useEffect(() => {
    const inner = element.current?.firstElementChild;
    if (!inner) return undefined;
    const observer = new ResizeObserver(() => follows.current && toEnd());
    observer.observe(inner);
    return () => observer.disconnect();
  }, [conversation]);
  useLayoutEffect(() => {
    // A question that was just sent is looked at.
    if (answer) {
      follows.current = true;
      toEnd();
    }
  }, [answer]);
  const onScroll = () => {
    const now = element.current;
    if (!now) return;
    const rest = now.scrollHeight - now.scrollTop - now.clientHeight;
    follows.current = rest < FOLLOW_PX;
    setAway(rest > now.clientHeight);
  };
  return html`<div class="scroll" ref=${element} onScroll=${onScroll} tabindex="0" role="region" aria-label=${t.messages}><div class="messages">${children}</div></div>
    ${isAway ? html`<button type="button" class="to-end round" aria-label=${t.toEnd} title=${t.toEnd} onClick=${toEnd}><${Icon} name="down" /></button>` : null}`;
}

/** Says to a screen reader that an answer began and how it ended, and not each word. @param {{answer?: import("./answer.js").Answer}} props */
function Announcer({ answer }) {
  const [text, setText] = useState("");
  const was = useRef(false);
  useEffect(() => {
    if (answer) setText(t.writing);
    else if (was.current) setText(conversations.branch.value.at(-1)?.text.slice(0, 2000) || t.ended);
    was.current = answer !== undefined;
  }, [answer]);
  return html`<div class="off-screen" role="status" aria-live="polite">${text}</div>`;
}

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.isComposing || document.querySelector("dialog[open]")) return;
  const isCommand = event.metaKey || event.ctrlKey;
  if (event.key === "Escape" && route.value.page === "chat") {
    if (conversations.answers.value.has(conversations.open.value?.conversation.id ?? "")) conversations.stop();
    else if (isPanelOpen.value) isPanelOpen.value = false;
    else isSidebarOpen.value = false;
  } else if (isCommand && event.shiftKey && event.key.toLowerCase() === "o") {
    event.preventDefault();
    go("chat");
  } else if (isCommand && !event.shiftKey && event.key.toLowerCase() === "k") {
    event.preventDefault();
    if (route.value.page !== "chat") go("chat");
    isSidebarOpen.value = true;
    setTimeout(() => document.getElementById("search-box")?.focus());
  }
});
