// Decisions: questions about an input, answered by the probabilities of their options.

import { html, signal } from "../vendor/preact.js";
import { Icon } from "../parts/icons.js";
import { json, sentence } from "../server/http.js";
import { modelNamed, models } from "../server/models.js";
import { t } from "../strings.js";

/**
 * `options` is the text in the form: one option a line.
 * @typedef {{kind: "predicate" | "choice" | "score", instructions: string, options: string}} Question
 * @typedef {{type: string, probability?: number, choice?: string | boolean, score?: number, confidence?: number,
 *   probabilities?: {value: string | number | boolean, label?: string, probability: number}[]}} Answer
 */

/** @type {("predicate" | "choice" | "score")[]} */
const KINDS = ["predicate", "choice", "score"];

// The form stays as it is while the visitor looks at another page.
const chosen = signal("");
const input = signal("");
const questions = signal(/** @type {Question[]} */ ([{ kind: "predicate", instructions: "", options: "" }]));
const result = signal(/** @type {{asked: Question[], answers: Answer[]} | null} */ (null));
const failure = signal("");
const isBusy = signal(false);

/** @param {string} text @returns {string[]} */
const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

/** A question as the API takes it. @param {Question} question */
function asked({ kind, instructions, options }) {
  const named = lines(options);
  if (kind === "choice") return { type: kind, instructions, choices: named.map((value) => ({ value })) };
  if (kind === "score") return { type: kind, instructions, levels: named.map((label) => ({ label })) };
  return { type: kind, instructions };
}

/** Whether a question can be sent: a choice needs two options, a score two levels. @param {Question} question */
const isWhole = ({ kind, instructions, options }) => instructions.trim() !== "" && (kind === "predicate" || lines(options).length >= 2);

const model = () => modelNamed(chosen.value)?.id ?? models.value[0]?.id ?? "";

/** @param {Event} event */
async function decide(event) {
  event.preventDefault();
  const sent = questions.value;
  isBusy.value = true;
  failure.value = "";
  try {
    const body = { model: model(), input: input.value, questions: sent.map(asked) };
    result.value = { asked: sent, answers: (await json("v1/decisions", { body })).answers };
  } catch (error) {
    result.value = null;
    failure.value = sentence(error);
  } finally {
    isBusy.value = false;
  }
}

/** @param {number} at @param {Partial<Question>} change */
const edit = (at, change) => (questions.value = questions.value.map((each, index) => (index === at ? { ...each, ...change } : each)));

export function Decide() {
  const canSend = model() !== "" && input.value.trim() !== "" && questions.value.every(isWhole);
  return html`<main class="decide" id="main"><h1>${t.pages.decide}</h1><p class="faint">${t.decideText}</p>
    <form onSubmit=${decide}>
      <label>${t.modelLabel}<select value=${model()} onChange=${(/** @type {any} */ event) => (chosen.value = event.target.value)}>
        ${models.value.map((each) => html`<option key=${each.id} value=${each.id}>${each.id}</option>`)}</select></label>
      <label>${t.decideInput}<textarea rows="5" value=${input.value} placeholder=${t.decideInputExample} onInput=${(/** @type {any} */ event) => (input.value = event.target.value)}></textarea></label>
      ${questions.value.map((question, at) => html`<${Fields} key=${at} question=${question} at=${at} />`)}
      <p class="actions"><button type="button" onClick=${() => (questions.value = [...questions.value, { kind: "predicate", instructions: "", options: "" }])}><${Icon} name="plus" />${t.addQuestion}</button>
        <button type="submit" class="primary" disabled=${!canSend || isBusy.value}>${isBusy.value ? t.deciding : t.decide}</button></p>
    </form>
    <div aria-live="polite">${failure.value ? html`<p class="bad">${failure.value}</p>` : null}
      ${result.value?.answers.map((answer, at) => html`<${Outcome} key=${at} question=${result.value?.asked[at]} answer=${answer} />`)}</div></main>`;
}

/** @param {{question: Question, at: number}} props */
function Fields({ question, at }) {
  const { kind } = question;
  return html`<fieldset><legend>${t.questionNumber(at + 1)}</legend>
    <label>${t.questionKind}<select value=${kind} onChange=${(/** @type {any} */ event) => edit(at, { kind: event.target.value })}>
      ${KINDS.map((each) => html`<option key=${each} value=${each}>${t.questionKinds[each]}</option>`)}</select></label>
    <label>${t.questionLabel}<input value=${question.instructions} placeholder=${t.questionExamples[kind]} onInput=${(/** @type {any} */ event) => edit(at, { instructions: event.target.value })} /></label>
    ${kind === "predicate"
      ? null
      : html`<label>${kind === "score" ? t.levelLines : t.optionLines}<textarea rows="3" value=${question.options} onInput=${(/** @type {any} */ event) => edit(at, { options: event.target.value })}></textarea></label>`}
    ${questions.value.length > 1
      ? html`<button type="button" class="quiet" onClick=${() => (questions.value = questions.value.filter((_, index) => index !== at))}><${Icon} name="trash" />${t.removeQuestion}</button>`
      : null}</fieldset>`;
}

/** @param {{question: Question, answer: Answer}} props */
function Outcome({ question, answer }) {
  const shares = answer.probabilities?.map((each) => /** @type {[string, number]} */ ([String(each.label ?? each.value), each.probability])) ?? [
    /** @type {[string, number]} */ ([t.yes, answer.probability ?? 0]),
  ];
  if (answer.type === "refusal") return html`<section class="outcome"><h2>${question.instructions}</h2><p class="bad">${t.questionRefused}</p></section>`;
  const verdict = answer.choice !== undefined ? String(answer.choice) : answer.score !== undefined ? answer.score.toFixed(2) : (answer.probability ?? 0) >= 0.5 ? t.yes : t.no;
  return html`<section class="outcome"><h2>${question.instructions}</h2>
    <p><strong>${verdict}</strong>${answer.confidence === undefined ? null : html` <span class="faint">${t.confidence(answer.confidence)}</span>`}</p>
    <dl>${shares.map(([name, share]) => html`<div key=${name}><dt>${name}</dt><dd><progress max="1" value=${share} aria-label=${name}></progress><span>${t.percent(share)}</span></dd></div>`)}</dl></section>`;
}
