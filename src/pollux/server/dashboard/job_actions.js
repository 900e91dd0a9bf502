/* What can be done with jobs: cancel, hold and release one or many, change the limits of one. Each asks first. */

import {api, post} from "./api.js";
import {confirmDialog, h, toast} from "./dom.js";
import {parseDuration, plural, replicaRange} from "./format.js";

const DONE = {cancel: "being cancelled", hold: "held", release: "released"};
const ASK = {
  cancel: {
    action: "Cancel",
    text: "Jobs that can checkpoint do so and leave; others receive SIGTERM. Cancelled jobs do not go on by themselves.",
    field: "Reason (shown with the jobs)",
  },
  hold: {action: "Hold", text: "Jobs that run checkpoint and leave. Held jobs wait until they are released.", field: null},
  release: {action: "Release", text: "They start as soon as a decision gives them slots.", field: null},
};

export const isHeld = job => job.state === "pending" && job.reason.startsWith("held");

const called = names => (names.length === 1 ? names[0] : plural(names.length, "job"));

/* True if it was done. `action`: cancel, hold or release. */
export async function actOn(names, action) {
  const {action: word, text, field} = ASK[action];
  const told = await confirmDialog({title: `${word} ${called(names)}?`, text, action: word, field});
  if (!told) return false;
  try {
    const {names: found} = await post("/job-actions", {action, names, ...(told.text ? {reason: told.text} : {})});
    toast(`${called(found)}: ${DONE[action]}.`, "good");
    return true;
  } catch (error) {
    toast(error.message);
    return false;
  }
}

/* --- limits of one job --- */

const whole = text => (/^\d+$/.test(text) ? Number(text) : NaN);
const FIELDS = [
  ["min_replicas", "Least replicas", whole],
  ["max_replicas", "Most replicas", whole],
  ["weight", "Weight", Number],
  ["priority", "Priority", text => (/^-?\d+$/.test(text) ? Number(text) : NaN)],
  ["time_limit_s", "Time limit, as 90, 10m or 2h30m", parseDuration],
];

/* The changed fields of the form; throws an Error that names the one that cannot be read. */
function changesIn(inputs) {
  const changes = {};
  for (const [name, label, read] of FIELDS) {
    const text = inputs[name].value.trim();
    if (text === inputs[name].defaultValue || !text) continue;
    const value = read(text);
    if (!Number.isFinite(value)) throw new Error(`${label}: “${text}” cannot be read`);
    changes[name] = value;
  }
  return changes;
}

/* Asks for new limits of a job and sends them. `request`: how it was submitted, which is what the fields show. */
export function changeLimits(job, request) {
  const known = {...request, min_replicas: job.min_replicas},
    isBounded = replicaRange(job.min_replicas, job.max_replicas) === replicaRange(job.max_replicas, job.max_replicas);
  if (isBounded || request?.max_replicas) known.max_replicas = job.max_replicas;
  const inputs = {},
    problem = h("p", {class: "problem", role: "alert", hidden: true});
  const fields = FIELDS.map(([name, label]) => {
    inputs[name] = h("input", {type: "text", id: `limit-${name}`, autocomplete: "off"});
    inputs[name].defaultValue = known[name] ?? "";
    return h("label", {for: `limit-${name}`, class: "field"}, h("span", {}, label), inputs[name]);
  });
  const send = h("button", {type: "submit", class: "primary"}, "Change them");
  const form = h(
    "form",
    {},
    h("h2", {id: "limits-title"}, `Limits of ${job.name}`),
    h("p", {class: "muted"}, "Changes take effect with the next decision. Empty fields stay as they are."),
    h("div", {class: "form-grid"}, fields),
    problem,
    h(
      "div",
      {class: "actions"},
      h("button", {type: "button", class: "ghost", onclick: () => dialog.close()}, "Keep as it is"),
      send,
    ),
  );
  const dialog = h("dialog", {"aria-labelledby": "limits-title"}, form);
  form.addEventListener("submit", async event => {
    event.preventDefault();
    try {
      const body = changesIn(inputs);
      if (Object.keys(body).length) {
        await api(`/jobs/${encodeURIComponent(job.name)}`, {method: "PATCH", body});
        toast(`${job.name}: limits changed.`, "good");
      }
      dialog.close();
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
    }
  });
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
