// Picker of the model that answers next.

import { html } from "../vendor/preact.js";
import { Icon } from "../parts/icons.js";
import { Menu } from "../parts/menu.js";
import { modelNamed, models, modelsFailure } from "../server/models.js";
import { t } from "../strings.js";
import { count } from "../text/format.js";
import { change } from "./conversations.js";

/** @param {{state: string}} props */
export const StateDot = ({ state }) => html`<span class=${`dot ${state}`} aria-hidden="true"></span>`;

/** @param {{model: string}} props */
export function ModelPicker({ model }) {
  const now = modelNamed(model);
  const choices = models.value.map((each) => ({
    id: each.id,
    label: html`<${StateDot} state=${each.state} />${each.id}`,
    hint: [t.state(each.state), each.context_length ? count(each.context_length) : ""].filter(Boolean).join(" · "),
    isChosen: each.id === now?.id,
    action: () => change({ model: each.id }),
  }));
  if (!choices.length) return html`<span class="faint">${modelsFailure.value || t.noModels}</span>`;
  const hint = now ? t.state(now.state) : t.unknownModel;
  return html`<${Menu} class="picker" hasText label=${t.chooseModel(model, hint)} choices=${choices}
    button=${html`<${StateDot} state=${now?.state ?? "failed"} /><span class="off-screen">${t.modelLabel} </span><strong>${model || t.chooseAModel}</strong> <span class="faint">${hint}</span><${Icon} name="down" />`} />`;
}
