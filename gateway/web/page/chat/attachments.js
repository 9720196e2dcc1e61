// Files attached to the next message: text and PDFs for every model, images for those that see.

import { signal } from "../vendor/preact.js";
import { t } from "../strings.js";
import { chooseFiles } from "../parts/file.js";
import { notify } from "../parts/notice.js";

/** @typedef {{name: string, type: string, bytes: ArrayBuffer}} Attachment */

const MEDIA_BYTES_MAX = 20 * 1024 ** 2;
const TEXT_BYTES_MAX = 1024 ** 2;
const PDF_TYPE = "application/pdf";
export const IMAGE_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];

/** @type {import("../vendor/preact.js").Signal<Attachment[]>} */
export const attachments = signal([]);

/** Adds what can be sent, and says why the rest cannot. @param {Iterable<File>} files @param {boolean} takesImages */
export async function attach(files, takesImages) {
  for (const file of files) {
    const isImage = file.type.startsWith("image/");
    const isText = !isImage && file.type !== PDF_TYPE;
    if (isImage && !takesImages) notify(t.seesNoImages(file.name), true);
    else if (isImage && !IMAGE_TYPES.includes(file.type)) notify(t.unknownImage(file.name), true);
    else if (file.size > (isText ? TEXT_BYTES_MAX : MEDIA_BYTES_MAX)) notify(t.tooLarge(file.name), true);
    else await add(file, isText);
  }
}

/** @param {File} file @param {boolean} isText */
async function add(file, isText) {
  const bytes = await file.arrayBuffer();
  if (isText) {
    try {
      new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    } catch {
      notify(t.notText(file.name), true);
      return;
    }
  }
  attachments.value = [...attachments.value, { name: file.name, type: isText ? "text/plain" : file.type, bytes }];
}

/** @param {boolean} takesImages */
export async function chooseAttachments(takesImages) {
  const text = ".pdf,text/*,.md,.py,.js,.ts,.json,.toml,.yaml,.yml,.csv,.log,.rs,.go,.swift,.c,.h,.cpp,.java,.sql,.sh,.html,.css";
  await attach(await chooseFiles({ accept: takesImages ? `${IMAGE_TYPES.join(",")},${text}` : text, isMany: true }), takesImages);
}

/** @param {Attachment} attachment */
export function detach(attachment) {
  attachments.value = attachments.value.filter((each) => each !== attachment);
}
