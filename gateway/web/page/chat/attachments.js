// Files attached to the next message: text for every model, images for those that see.

import { signal } from "../vendor/preact.js";
import { t } from "../strings.js";
import { chooseFiles } from "../parts/file.js";
import { notify } from "../parts/notice.js";

/** @typedef {{name: string, type: string, bytes: ArrayBuffer}} Attachment */

const IMAGE_BYTES_MAX = 20 * 1024 ** 2;
const TEXT_BYTES_MAX = 1024 ** 2;
export const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

/** @type {import("../vendor/preact.js").Signal<Attachment[]>} */
export const attachments = signal([]);

/** Adds what can be sent, and says why the rest cannot. @param {Iterable<File>} files @param {boolean} takesImages */
export async function attach(files, takesImages) {
  for (const file of files) {
    const isImage = file.type.startsWith("image/");
    if (isImage && !takesImages) notify(t.seesNoImages(file.name), true);
    else if (isImage && !IMAGE_TYPES.includes(file.type)) notify(t.unknownImage(file.name), true);
    else if (file.size > (isImage ? IMAGE_BYTES_MAX : TEXT_BYTES_MAX)) notify(t.tooLarge(file.name), true);
    else await add(file, isImage);
  }
}

/** @param {File} file @param {boolean} isImage */
async function add(file, isImage) {
  const bytes = await file.arrayBuffer();
  if (!isImage) {
    try {
      new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    } catch {
      notify(t.notText(file.name), true);
      return;
    }
  }
  attachments.value = [...attachments.value, { name: file.name, type: isImage ? file.type : "text/plain", bytes }];
}

/** @param {boolean} takesImages */
export async function chooseAttachments(takesImages) {
  const text = "text/*,.md,.py,.js,.ts,.json,.toml,.yaml,.yml,.csv,.log,.rs,.go,.swift,.c,.h,.cpp,.java,.sql,.sh,.html,.css";
  await attach(await chooseFiles({ accept: takesImages ? `${IMAGE_TYPES.join(",")},${text}` : text, isMany: true }), takesImages);
}

/** @param {Attachment} attachment */
export function detach(attachment) {
  attachments.value = attachments.value.filter((each) => each !== attachment);
}
