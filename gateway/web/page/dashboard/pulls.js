// Downloads of models: percent, rate and time left, with cancel and resume.

import { html } from "../vendor/preact.js";
import { Icon } from "../parts/icons.js";
import { notify } from "../parts/notice.js";
import { liveModels, pulls } from "../server/feed.js";
import { sentence } from "../server/http.js";
import { refreshModels } from "../server/models.js";
import { order, sessionJson } from "../server/session.js";
import { t } from "../strings.js";
import { bytes, duration, partOf, percent } from "../text/format.js";

/** @typedef {import("../server/feed.js").Pull} Pull */

/** @param {string} repository */
export async function pull(repository) {
  try {
    await order("pulls", { repository });
    notify(t.pullOrdered(repository));
  } catch (error) {
    notify(sentence(error), true);
  }
}

/** @param {Pull} pull */
async function cancel(pull) {
  try {
    await sessionJson(`pulls/${encodeURIComponent(pull.id)}`, { method: "DELETE" });
  } catch (error) {
    notify(sentence(error), true);
  }
}

/** Serves what was downloaded: a reload finds it, unless the configuration names its models. Returns whether it is. @param {string} repository */
export async function serve(repository) {
  try {
    const { done } = await order("config/reload");
    const isServed = [...done.added, ...liveModels.value.map((model) => model.name)].includes(repository);
    notify(isServed ? t.served(repository) : t.notServed(repository), !isServed);
    refreshModels();
    return isServed;
  } catch (error) {
    notify(sentence(error), true);
    return false;
  }
}

export function Pulls() {
  const all = pulls.value;
  if (!all.length) return null;
  return html`<section aria-labelledby="pulls-title"><h2 id="pulls-title">${t.pulls}</h2>
    <ul class="rows">${[...all].reverse().map((each) => html`<${PullRow} key=${each.id} pull=${each} />`)}</ul></section>`;
}

/** @param {{pull: Pull}} props */
export function PullRow({ pull: now }) {
  const part = now.total_bytes ? now.downloaded_bytes / now.total_bytes : 0;
  const isOpen = now.state === "running" || now.state === "waiting";
  const rate = now.bytes_per_s ? t.perSecondBytes(bytes(now.bytes_per_s)) : "";
  const numbers = [percent(part), partOf(now.downloaded_bytes, now.total_bytes), rate, now.left_s === null ? "" : t.left(duration(now.left_s))];
  return html`<li class="pull"><strong>${now.repository}</strong>
    ${now.state === "running" ? html`<progress max="1" value=${part} aria-label=${now.repository}></progress><span class="numbers">${numbers.filter(Boolean).join(" · ")}</span>` : null}
    ${now.state === "running" ? null : html`<span class=${now.state === "failed" ? "bad" : "faint"}>${[t.pullState(now.state), now.message].filter(Boolean).join(": ")}</span>`}
    <span class="spring"></span>
    ${isOpen ? html`<button type="button" onClick=${() => cancel(now)}><${Icon} name="cross" />${t.cancel}</button>` : null}
    ${now.state === "failed" || now.state === "cancelled" ? html`<button type="button" onClick=${() => pull(now.repository)}>${t.resume}</button>` : null}
    ${now.state === "done" && !liveModels.value.some((model) => model.name === now.repository) ? html`<button type="button" onClick=${() => serve(now.repository)}>${t.serve}</button>` : null}
  </li>`;
}
