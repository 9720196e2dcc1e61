// Shell of every page: navigation, status, theme, sign-in, and the page itself.

import { html, useEffect, useState } from "./vendor/preact.js";
import { saveFailure } from "./chat/conversations.js";
import { Chat } from "./chat/view.js";
import { Decide } from "./decide/view.js";
import { Dialog } from "./parts/dialog.js";
import { Icon } from "./parts/icons.js";
import { Notices } from "./parts/notice.js";
import { PAGES, place, route } from "./route.js";
import { apiKey, isAdmin, keepKey } from "./server/credentials.js";
import { models, modelsFailure, ready, refreshModels, wantsKey } from "./server/models.js";
import { logInFailure, logOut, me, refreshMe } from "./server/session.js";
import { t } from "./strings.js";
import { summary } from "./summary.js";
import { nextTheme, theme } from "./theme.js";

/** @type {Record<string, string>} */
const THEME_ICONS = { auto: "auto", light: "sun", dark: "moon" };

export function Shell() {
  const { page } = route.value;
  useEffect(() => {
    document.title = `${t.pages[page]} · mlxd`;
  }, [page]);
  useEffect(() => {
    // A session's bar tells more, also beside the chat.
    if (isAdmin.value) import("./server/feed.js").catch(() => {});
  }, [isAdmin.value]);
  return html`<a class="skip" href="#main" onClick=${skip}>${t.skip}</a>
    <${Bar} page=${page} />
    <${Banners} />
    <div class="page">${wantsKey.value ? html`<${KeyForm} />` : page === "chat" ? html`<${Chat} />` : page === "decide" ? html`<${Decide} />` : html`<${Dashboard} page=${page} />`}</div>
    <${Notices} /><${Dialog} />`;
}

/** The hash is the route: a link to a part of the page must not change it. @param {Event} event */
function skip(event) {
  event.preventDefault();
  const main = document.querySelector("main");
  main?.setAttribute("tabindex", "-1");
  main?.focus();
}

/** @param {{page: string}} props */
function Bar({ page }) {
  return html`<header class="top">
    <a class="brand" href=${place("chat")}><img src="icons/icon.svg" alt="" width="22" height="22" />mlxd</a>
    <nav class="pages" aria-label=${t.pagesLabel}>${PAGES.map(
      (name) => html`<a key=${name} href=${place(name)} aria-current=${name === page ? "page" : undefined}><${Icon} name=${name} /><span>${t.pages[name]}</span></a>`,
    )}</nav>
    <${Status} />
    <button type="button" class="quiet" onClick=${nextTheme} aria-label=${t.theme(theme.value)} title=${t.theme(theme.value)}><${Icon} name=${THEME_ICONS[theme.value]} /></button>
    <${Visitor} />
  </header>`;
}

function Status() {
  const isDown = modelsFailure.value !== "" && !wantsKey.value;
  const text = isDown ? t.unreachable : summary.value || t.readyModels(ready.value, models.value.length);
  const state = isDown ? "failed" : ready.value ? "ready" : "stopped";
  return html`<a class="status" href=${place("models")} title=${isDown ? modelsFailure.value : text}><span class=${`dot ${state}`} aria-hidden="true"></span><span>${text}</span></a>`;
}

function Visitor() {
  if (isAdmin.value) return html`<button type="button" class="quiet" onClick=${logOut} title=${t.logOutTitle}>${t.logOut}</button>`;
  if (apiKey.value && !wantsKey.value) {
    const leave = () => {
      keepKey("", false);
      refreshMe();
      refreshModels();
    };
    return html`<button type="button" class="quiet" onClick=${leave} title=${t.dropKeyTitle}>${me.value?.key ?? t.key}<${Icon} name="cross" /></button>`;
  }
  return null;
}

function Banners() {
  return html`${saveFailure.value ? html`<div class="banner bad" role="alert"><${Icon} name="warning" />${saveFailure.value}</div>` : null}
    ${logInFailure.value
      ? html`<div class="banner bad" role="alert"><${Icon} name="warning" /><span>${logInFailure.value}</span>
          <button type="button" class="quiet" aria-label=${t.close} onClick=${() => (logInFailure.value = "")}><${Icon} name="cross" /></button></div>`
      : null}
    ${modelsFailure.value && !wantsKey.value ? html`<div class="banner" role="status"><span class="pulse" aria-hidden="true"></span>${modelsFailure.value}</div>` : null}`;
}

/** For a visitor from whom the daemon wants a key. */
function KeyForm() {
  const [key, setKey] = useState("");
  const [isRemembered, setRemembered] = useState(false);
  const [isTried, setTried] = useState(apiKey.value !== "");
  const onSubmit = async (/** @type {Event} */ event) => {
    event.preventDefault();
    keepKey(key.trim(), isRemembered);
    await refreshModels();
    await refreshMe();
    setTried(true);
  };
  return html`<main class="gate" id="main"><form onSubmit=${onSubmit}>
    <h1>${t.needsKey}</h1><p>${t.needsKeyText}</p>
    <label>${t.keyLabel}<input type="password" autocomplete="off" spellcheck=${false} value=${key} onInput=${(/** @type {any} */ event) => setKey(event.target.value)} /></label>
    <label class="check"><input type="checkbox" checked=${isRemembered} onChange=${(/** @type {any} */ event) => setRemembered(event.target.checked)} />${t.rememberKey}</label>
    ${isTried && modelsFailure.value ? html`<p class="bad" role="alert">${modelsFailure.value}</p>` : null}
    <button type="submit" class="primary" disabled=${!key.trim()}>${t.useKey}</button>
    <p class="faint">${t.ownerHint} <code>mlxctl ui</code></p></form></main>`;
}

/** The dashboard, loaded when it is first looked at. @param {{page: string}} props */
function Dashboard({ page }) {
  const [view, setView] = useState(/** @type {any} */ (null));
  const [failure, setFailure] = useState("");
  useEffect(() => {
    if (isAdmin.value) import("./dashboard/view.js").then(({ View }) => setView(() => View), () => setFailure(t.noAnswer));
  }, [isAdmin.value]);
  if (!isAdmin.value) return html`<${Closed} page=${page} />`;
  if (view === null) return html`<main class="dashboard" id="main"><p class="faint">${failure || t.loadingPage}</p></main>`;
  return html`<${view} page=${page} />`;
}

/** What a visitor without a session sees in place of the dashboard. @param {{page: string}} props */
function Closed({ page }) {
  const usage = me.value?.usage;
  return html`<main class="gate" id="main"><div>
    <h1>${t.pages[page]}</h1><p>${me.value?.admin === "off" ? t.adminOff : t.adminOnly}</p>
    ${me.value?.admin === "off" ? null : html`<pre class="command"><code>mlxctl ui</code></pre><p class="faint">${t.adminHow}</p>`}
    ${usage ? html`<h2>${t.ownUsage(me.value?.key ?? "")}</h2><p>${t.usage(usage.requests, usage.prompt_tokens, usage.completion_tokens)}</p>` : null}
  </div></main>`;
}
