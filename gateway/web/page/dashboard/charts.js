// Charts of the last ten minutes, full at once from the daemon's history, then a point a second from the feed.

import { effect, html, signal, useEffect, useRef, useState } from "../vendor/preact.js";
import Plot from "../vendor/uplot.js";
import { liveModels, tickTime } from "../server/feed.js";
import { sessionJson } from "../server/session.js";
import { t } from "../strings.js";
import { bytes, count } from "../text/format.js";
import { theme } from "../theme.js";
import { colour, hue } from "./hues.js";

/** @typedef {"tokens_per_s" | "prompt_tokens_per_s" | "running" | "footprint_bytes"} Kind */

const SECONDS = 600;
const KINDS = /** @type {const} */ (["tokens_per_s", "prompt_tokens_per_s", "running", "footprint_bytes"]);
/** The least that is shown: a daemon that has just started fills its charts soon. */
const SECONDS_MIN = 60;
/** Below it, the axis of time tells seconds. */
const LONG_S = 180;
const HEIGHT = 120;
const GIB = 1024 ** 3;
/** Steps of the axis of bytes. */
const BYTE_STEPS = Array.from({ length: 14 }, (_, power) => 2 ** (power - 2) * GIB);

/** Numbers by kind and model, and the second of the newest of them. */
const points = signal({ until: 0, series: /** @type {Record<string, Record<Kind, number[]>>} */ ({}) });
let isLoaded = false;

async function loadHistory() {
  isLoaded = true;
  try {
    const history = await sessionJson("history");
    /** @type {Record<string, Record<Kind, number[]>>} */
    const series = {};
    for (const [name, chart] of Object.entries(history.models)) {
      series[name] = /** @type {any} */ (Object.fromEntries(KINDS.map((kind) => [kind, padded(/** @type {any} */ (chart)[kind])])));
    }
    points.value = { until: Math.floor(history.until), series };
  } catch {
    // They fill as the feed comes.
    isLoaded = false;
  }
}

/** @param {number[]} numbers */
const padded = (numbers) => [...new Array(Math.max(0, SECONDS - numbers.length)).fill(0), ...numbers.slice(-SECONDS)];

/** A point for each second since the last one. */
effect(() => {
  const second = Math.floor(tickTime.value);
  const models = liveModels.value;
  const before = points.peek();
  if (!isLoaded || before.until === 0 || second <= before.until) return;
  const passed = Math.min(SECONDS, second - before.until);
  /** @type {Record<string, Record<Kind, number[]>>} */
  const series = {};
  for (const model of models) {
    const old = before.series[model.name];
    series[model.name] = /** @type {any} */ (
      Object.fromEntries(KINDS.map((kind) => [kind, [...(old?.[kind] ?? new Array(SECONDS).fill(0)).slice(passed), ...new Array(passed).fill(model[kind] ?? 0)]]))
    );
  }
  points.value = { until: second, series };
});

export function Charts() {
  useEffect(() => void loadHistory(), []);
  return html`<section class="charts" aria-label=${t.charts}>${KINDS.map((kind) => html`<${Chart} key=${kind} kind=${kind} />`)}</section>`;
}

/** @param {Kind} kind @param {number} value */
const told = (kind, value) => (kind === "footprint_bytes" ? bytes(value) : count(Math.round(value)));

/** @param {{kind: Kind}} props */
function Chart({ kind }) {
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const plot = useRef(/** @type {any} */ (null));
  const [width, setWidth] = useState(0);
  const { until, series: all } = points.value;
  // A line along zero says nothing.
  const series = Object.fromEntries(Object.entries(all).filter(([, each]) => each[kind].some((number) => number > 0)));
  const names = Object.keys(series);
  const latest = names.reduce((sum, name) => sum + (series[name]?.[kind].at(-1) ?? 0), 0);
  useEffect(() => {
    if (!box.current) return undefined;
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry?.contentRect.width ?? 0)));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    if (!box.current || !width) return undefined;
    plot.current = new Plot(options(kind, names, width), data(kind, until, series, beginning(all)), box.current);
    return () => plot.current.destroy();
  }, [width, names.join("\n"), theme.value]);
  useEffect(() => plot.current?.setData(data(kind, until, series, beginning(all))), [until, all]);
  return html`<figure class="chart"><figcaption><span>${t.chart(kind)}</span><b>${told(kind, latest)}</b></figcaption>
    <div ref=${box} role="img" aria-label=${`${t.chart(kind)}: ${told(kind, latest)}`}></div></figure>`;
}

/** Index from which on anything happened. @param {Record<string, Record<Kind, number[]>>} series */
function beginning(series) {
  const all = Object.values(series).flatMap((each) => KINDS.map((kind) => each[kind]));
  const first = Math.min(...all.map((numbers) => numbers.findIndex((number) => number > 0)).map((at) => (at < 0 ? SECONDS : at)), SECONDS);
  return Math.max(0, Math.min(first - 2, SECONDS - SECONDS_MIN));
}

/** @param {Kind} kind @param {number} until @param {Record<string, Record<Kind, number[]>>} series @param {number} from @returns {any} */
function data(kind, until, series, from) {
  const times = Array.from({ length: SECONDS - from }, (_, at) => until - SECONDS + from + 1 + at);
  return [times, ...Object.values(series).map((each) => each[kind].slice(from))];
}

/** @param {number[]} times of the axis's ticks */
function clock(times) {
  const isLong = times.length === 1 || (times.at(-1) ?? 0) - (times[0] ?? 0) > LONG_S;
  return times.map((time) => new Date(time * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", ...(isLong ? {} : { second: "2-digit" }) }));
}

/** @param {Kind} kind @param {string[]} names @param {number} width @returns {any} */
function options(kind, names, width) {
  const style = getComputedStyle(document.documentElement);
  const faint = colourOf(style.getPropertyValue("--faint"));
  const line = colourOf(style.getPropertyValue("--line"));
  const axis = { stroke: faint, grid: { stroke: line, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    padding: [8, 30, 0, 0],
    scales: { x: { time: true }, y: { range: (/** @type {any} */ _plot, /** @type {number} */ _low, /** @type {number} */ high) => [0, Math.max(high * 1.1, kind === "footprint_bytes" ? GIB : 4)] } },
    axes: [
      { ...axis, grid: { show: false }, size: 22, space: 90, values: (/** @type {any} */ _plot, /** @type {number[]} */ times) => clock(times) },
      { ...axis, size: 52, space: 34, ...(kind === "footprint_bytes" ? { incrs: BYTE_STEPS } : {}), values: (/** @type {any} */ _plot, /** @type {number[]} */ values) => values.map((value) => told(kind, value)) },
    ],
    series: [{}, ...names.map((name) => ({ label: name, stroke: colour(hue(name)), width: 1.75, points: { show: false }, fill: faded(colour(hue(name))) }))],
  };
}

/** A colour that a canvas understands: a custom property still holds `light-dark(…)`. @param {string} text */
function colourOf(text) {
  const probe = document.createElement("i");
  probe.style.color = text;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** @param {string} colour */
const faded = (colour) => colour.replace(/^rgb\((.*)\)$/, "rgb($1 / 12%)").replaceAll(",", " ").replace(/\s+/g, " ");
