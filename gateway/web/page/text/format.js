// Numbers for people: bytes, durations, counts, rates, days.

import { t } from "../strings.js";

const GIB = 1024 ** 3;
const MIB = 1024 ** 2;

/** @param {number} bytes */
export function bytes(bytes) {
  if (bytes >= 10 * GIB) return `${Math.round(bytes / GIB)} GiB`;
  if (bytes >= GIB) return `${(bytes / GIB).toFixed(1)} GiB`;
  if (bytes >= MIB) return `${Math.round(bytes / MIB)} MiB`;
  return bytes >= 1024 ? `${Math.round(bytes / 1024)} KiB` : `${bytes} B`;
}

/** A part of a whole, with the unit once where both have the same. @param {number} part @param {number} whole */
export function partOf(part, whole) {
  const [first, second] = [bytes(part), bytes(whole)];
  const unit = second.slice(second.indexOf(" "));
  return t.ofBytes(first.endsWith(unit) ? first.slice(0, -unit.length) : first, second);
}

/** @param {number} count */
export function count(count) {
  // Contexts are powers of two, and known by them.
  if (count >= 1_048_576 && count % 1_048_576 === 0) return `${count / 1_048_576}M`;
  if (count >= 4096 && count % 1024 === 0) return `${count / 1024}k`;
  if (count >= 9_999_500) return `${Math.round(count / 1e6)}M`;
  if (count >= 999_500) return `${(count / 1e6).toFixed(1)}M`;
  if (count >= 99_950) return `${Math.round(count / 1000)}k`;
  return count >= 1000 ? `${(count / 1000).toFixed(1).replace(/\.0$/, "")}k` : String(count);
}

/** @param {number} seconds */
export function duration(seconds) {
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86_400)} d ${Math.floor((seconds % 86_400) / 3600)} h`;
}

/** @param {number} rate */
export const rate = (rate) => (rate >= 100 ? String(Math.round(rate)) : rate.toFixed(1).replace(/\.0$/, ""));

/** @param {number} part */
export const percent = (part) => `${Math.floor(Math.min(1, Math.max(0, part)) * 100)} %`;

/** The heading under which a conversation is listed. @param {number} at @param {number} now */
export function period(at, now) {
  const today = new Date(now).setHours(0, 0, 0, 0);
  if (at >= today) return t.today;
  if (at >= today - 86_400_000) return t.yesterday;
  if (at >= today - 7 * 86_400_000) return t.lastWeek;
  return new Date(at).toLocaleDateString(undefined, { month: "long", year: "numeric" });
}

/** @param {number} seconds */
export const moment = (seconds) => new Date(seconds * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
/** @param {number} seconds */
export const day = (seconds) => new Date(seconds * 1000).toLocaleDateString(undefined, { dateStyle: "medium" });
