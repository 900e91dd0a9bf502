/* Tell the user when a job ends that they asked about: on the page, and by the browser where it may. */

import {remember, remembered} from "./api.js";
import {toast} from "./dom.js";
import {FINAL} from "./format.js";
import {store} from "./store.js";

const KEY = "pollux-notices";
const wanted = new Set(JSON.parse(remembered(KEY) || "[]"));
const keep = () => remember(KEY, JSON.stringify([...wanted]));

export const isWanted = name => wanted.has(name);

/* Asked for by a click, as browsers demand before they let a page notify. */
export function toggleNotice(name) {
  if (!wanted.delete(name)) {
    wanted.add(name);
    if (globalThis.Notification?.permission === "default") Notification.requestPermission();
  }
  keep();
}

/* Called with every change that the page is told of. */
export function noticeEnds() {
  for (const name of wanted) {
    const job = store.jobs.get(name);
    if (!job || !FINAL.has(job.state)) continue;
    wanted.delete(name);
    keep();
    const words = `${name} ${job.state}${job.state === "failed" && job.reason ? `: ${job.reason}` : ""}`;
    toast(words, job.state === "succeeded" ? "good" : "error");
    if (globalThis.Notification?.permission === "granted") new Notification("Pollux", {body: words, tag: name});
  }
}
