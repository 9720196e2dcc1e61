// Card of a first visit: three models that fit this machine, with a button that downloads and then serves one.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { PullRow, pull, serve } from "../dashboard/pulls.js";
import { Icon } from "../parts/icons.js";
import { addStyle } from "../parts/style.js";
import { pulls, showsPulls } from "../server/feed.js";
import { sentence } from "../server/http.js";
import { sessionJson } from "../server/session.js";
import { t } from "../strings.js";
import { bytes, count } from "../text/format.js";
import { change } from "./conversations.js";

/** @typedef {import("../dashboard/finder.js").HubModel} HubModel */

const OFFERED = 3;

// Its rows are those of the dashboard.
await addStyle("dashboard.css");

export function FirstModels() {
  const [offers, setOffers] = useState(/** @type {HubModel[] | null} */ (null));
  const [failure, setFailure] = useState("");
  const served = useRef(/** @type {Set<string>} */ (new Set()));
  useEffect(() => {
    showsPulls.value = true;
    sessionJson("hub/recommend").then(
      (answer) => setOffers(chosen(answer.models)),
      (error) => setFailure(sentence(error)),
    );
    return () => {
      showsPulls.value = false;
    };
  }, []);
  const done = (offers ?? []).find(({ repository }) => pullOf(repository)?.state === "done");
  useEffect(() => {
    // What is here now answers next.
    if (!done || served.current.has(done.repository)) return;
    served.current.add(done.repository);
    serve(done.repository).then((isServed) => {
      if (isServed) change({ model: done.repository });
    });
  }, [done]);
  return html`<section class="first-models" aria-labelledby="first-models-title"><h2 id="first-models-title">${t.firstModels}</h2><p class="faint">${t.firstModelsText}</p>
    ${failure ? html`<p class="bad">${failure}</p>` : null}
    ${offers === null && !failure ? html`<p class="faint"><span class="pulse"></span> ${t.lookingAtHub}</p>` : null}
    ${offers?.length === 0 ? html`<p class="faint">${t.noModelFits}</p>` : null}
    ${offers?.length ? html`<ul class="rows">${offers.map((model) => html`<${Offer} key=${model.repository} model=${model} />`)}</ul>` : null}
  </section>`;
}

/** The newest download of a repository, if there is one. @param {string} repository */
const pullOf = (repository) => pulls.value.findLast((each) => each.repository === repository);

/** The most capable, one between, and the quickest to get. @param {HubModel[]} models the largest first */
function chosen(models) {
  const fitting = models.filter((model) => model.fits && !model.obstacles.length && !model.is_here);
  const own = fitting.filter((model) => model.purpose);
  const list = own.length ? own : fitting;
  if (list.length <= OFFERED) return list;
  return [0, Math.floor(list.length / 2), list.length - 1].flatMap((at) => list[at] ?? []);
}

/** @param {{model: HubModel}} props */
function Offer({ model }) {
  const now = pullOf(model.repository);
  if (now) return html`<${PullRow} pull=${now} />`;
  const facts = [model.purpose, model.disk_bytes ? bytes(model.disk_bytes) : "", model.context ? t.contextOf(count(model.context)) : ""];
  return html`<li><div class="grow"><strong>${model.repository.split("/").pop()}</strong><span class="faint">${facts.filter(Boolean).join(" · ")}</span></div>
    <button type="button" onClick=${() => pull(model.repository)}><${Icon} name="import" />${t.pull}</button></li>`;
}
