// Finder of models on the hub: by words, or those that suit this machine; each with whether it fits, before the click.

import { html, useState } from "../vendor/preact.js";
import { Icon } from "../parts/icons.js";
import { pulls } from "../server/feed.js";
import { sentence } from "../server/http.js";
import { sessionJson } from "../server/session.js";
import { t } from "../strings.js";
import { bytes, count } from "../text/format.js";
import { pull } from "./pulls.js";

/**
 * @typedef {{repository: string, downloads: number | null, is_here: boolean, fits: boolean | null, verdict: string, obstacles: string[],
 *   disk_bytes: number | null, weights_bytes: number | null, context: number | null, model_type: string, purpose: string}} HubModel
 */

export function Finder() {
  const [words, setWords] = useState("");
  const [isFitting, setFitting] = useState(true);
  const [answer, setAnswer] = useState(/** @type {{models: HubModel[], available_bytes: number, is_offline: boolean} | null} */ (null));
  const [state, setState] = useState("");
  const look = async (/** @type {string} */ path) => {
    setState("looking");
    setAnswer(null);
    try {
      setAnswer(await sessionJson(path));
      setState("");
    } catch (error) {
      setState(sentence(error));
    }
  };
  const onSubmit = (/** @type {Event} */ event) => {
    event.preventDefault();
    const asked = words.trim();
    // The whole name of a repository is looked at, whatever the hub's search makes of it.
    if (/^[\w.-]+\/[\w.-]+$/.test(asked)) lookOne(asked);
    else look(asked ? `hub/search?words=${encodeURIComponent(asked)}` : "hub/recommend");
  };
  const lookOne = async (/** @type {string} */ repository) => {
    setState("looking");
    setAnswer(null);
    try {
      setAnswer({ models: [await sessionJson(`hub/info?repository=${encodeURIComponent(repository)}`)], available_bytes: 0, is_offline: false });
      setState("");
    } catch (error) {
      setState(sentence(error));
    }
  };
  const shown = (answer?.models ?? []).filter((model) => !isFitting || model.fits !== false);
  const hidden = (answer?.models.length ?? 0) - shown.length;
  return html`<section aria-labelledby="finder-title"><h2 id="finder-title">${t.addModel}</h2>
    <form class="finder" onSubmit=${onSubmit} role="search">
      <label class="search"><${Icon} name="search" /><input type="search" value=${words} placeholder=${t.findPlaceholder} aria-label=${t.findPlaceholder}
        onInput=${(/** @type {any} */ event) => setWords(event.target.value)} /></label>
      <label class="check"><input type="checkbox" checked=${isFitting} onChange=${(/** @type {any} */ event) => setFitting(event.target.checked)} />${t.onlyFitting}</label>
      <button type="submit" class="primary">${words.trim() ? t.search : t.recommend}</button>
    </form>
    <div aria-live="polite">
      ${state === "looking" ? html`<p class="faint"><span class="pulse"></span> ${t.lookingAtHub}</p>` : state ? html`<p class="bad">${state}</p>` : null}
      ${answer?.is_offline ? html`<p class="faint">${t.offlineList}</p>` : null}
      ${answer && !shown.length ? html`<p class="faint">${hidden ? t.noneFits(hidden) : t.nothingFound}</p>` : null}
      ${shown.length ? html`<ul class="rows">${shown.map((model) => html`<${Row} key=${model.repository} model=${model} />`)}</ul>` : null}
      ${shown.length && hidden ? html`<p class="faint">${t.moreDoNotFit(hidden)}</p>` : null}
    </div></section>`;
}

/** @param {{model: HubModel}} props */
function Row({ model }) {
  const numbers = [
    model.disk_bytes ? bytes(model.disk_bytes) : "",
    model.context ? t.contextOf(count(model.context)) : "",
    model.downloads === null ? "" : t.downloads(count(model.downloads)),
  ];
  const isComing = pulls.value.some((each) => each.repository === model.repository && (each.state === "running" || each.state === "waiting"));
  const cannot = model.obstacles.length > 0;
  return html`<li><div class="grow"><strong>${model.repository}</strong><span class="faint">${numbers.filter(Boolean).join(" · ")}</span>
      <span class=${cannot || model.fits === false ? "warn" : "faint"}>${cannot ? model.obstacles.join("; ") : model.verdict}</span></div>
    ${model.is_here
      ? html`<span class="chip small"><${Icon} name="check" />${t.isHere}</span>`
      : html`<button type="button" disabled=${isComing || cannot} onClick=${() => pull(model.repository)}><${Icon} name="import" />${isComing ? t.isComing : t.pull}</button>`}
  </li>`;
}
