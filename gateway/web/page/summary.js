// Summary of the daemon for the bar: filled by the feed, where there is one.

import { signal } from "./vendor/preact.js";

export const summary = signal("");
