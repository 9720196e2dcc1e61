// Dashboard: one page each for models, requests, keys, logs and settings.

import { html } from "../vendor/preact.js";
import { Icon } from "../parts/icons.js";
import { addStyle } from "../parts/style.js";
import { about, feedFailure } from "../server/feed.js";
import { t } from "../strings.js";
import { Keys } from "./keys.js";
import { Logs } from "./logs.js";
import { Models } from "./models.js";
import { Requests } from "./requests.js";
import { Settings } from "./settings.js";

/** @type {Record<string, any>} */
const PAGES = { models: Models, requests: Requests, keys: Keys, logs: Logs, settings: Settings };

// Without its styles the first look would jump.
await Promise.all([addStyle("dashboard.css"), addStyle("vendor/uplot.css")]);

/** @param {{page: string}} props */
export function View({ page }) {
  return html`<main class="dashboard" id="main" key=${page}>
    <h1 class="off-screen">${t.pages[page]}</h1>
    ${about.value?.is_draining ? html`<div class="banner" role="status"><${Icon} name="warning" /><span>${t.draining}</span></div>` : null}
    ${feedFailure.value ? html`<div class="banner" role="status"><span class="pulse" aria-hidden="true"></span><span>${feedFailure.value}</span></div>` : null}
    <${PAGES[page]} />
  </main>`;
}
