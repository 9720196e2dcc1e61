// Start of the page.

import "./theme.js";
import { h, render } from "./vendor/preact.js";
import { refreshList } from "./chat/conversations.js";
import { refreshModels } from "./server/models.js";
import { followVisitor, logIn } from "./server/session.js";
import { Shell } from "./shell.js";

const root = document.getElementById("root");
if (root === null) throw new Error("index.html has no element with the id root");
root.replaceChildren();
await logIn();
followVisitor();
refreshModels();
refreshList();
render(h(Shell, null), root);
// A link with a code, opened in the tab that shows the page already.
window.addEventListener("hashchange", () => void logIn());
// Browsers may empty a site's storage when the disk is full, unless it asked to be kept.
navigator.storage?.persist?.().catch(() => {});
