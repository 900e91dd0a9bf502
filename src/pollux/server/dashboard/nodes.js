/* Single nodes: what is on them, as a table or one at a time; draining them. */

import {post} from "./api.js";
import {DataTable, confirmDialog, h, toast} from "./dom.js";
import {DASH, plural} from "./format.js";
import {jobLink} from "./paint.js";
import {store} from "./store.js";

/* What will become of the jobs on a node that is drained. */
function drainWords(jobs) {
  const moving = jobs.filter(job => job.may_move),
    staying = jobs.filter(job => !job.may_move),
    named = some => (some.length > 3 ? plural(some.length, "job") : some.map(job => job.name).join(", "));
  return [
    "No more jobs go there.",
    moving.length && `${named(moving)}: moved to other nodes, or waiting where there is no room.`,
    staying.length && `${named(staying)}: cannot be moved, so the node is in use until ${staying.length > 1 ? "they end" : "it ends"}.`,
  ]
    .filter(Boolean)
    .join(" ");
}

/* In a word: what a node does for the cluster now. */
export const nodeState = node =>
  node.health !== "ok"
    ? node.health
    : node.is_leaving
      ? "leaving"
      : node.is_draining
        ? node.used
          ? "draining"
          : "drained"
        : "in use";

async function setDrained(name, isDrained) {
  const jobs = store.nodes.get(name)?.jobs ?? [];
  const told = isDrained
    ? {title: `Drain ${name}?`, action: "Drain it", text: drainWords(jobs)}
    : {title: `Use ${name} again?`, action: "Use it again", text: "The next decision may give its slots to jobs."};
  if (!(await confirmDialog(told))) return;
  try {
    await post(`/nodes/${encodeURIComponent(name)}/${isDrained ? "drain" : "undrain"}`);
    toast(isDrained ? `${name} is being drained.` : `${name} is used again.`, "good");
  } catch (error) {
    toast(error.message);
  }
}

const drainButton = node =>
  h(
    "button",
    {type: "button", class: "ghost", onclick: () => setDrained(node.name, !node.is_draining)},
    node.is_draining ? "Use again" : "Drain",
  );

/* What is on a node; from here it is drained, or used again. */
export function openNode(name) {
  const node = store.nodes.get(name);
  if (!node) return;
  const dialog = h(
    "dialog",
    {class: "ask", "aria-labelledby": "node-title"},
    h(
      "form",
      {method: "dialog"},
      h("h2", {id: "node-title"}, node.name),
      h(
        "p",
        {class: "muted"},
        [
          `${node.used} of ${plural(node.num_slots, "slot")} used`,
          node.accelerator,
          node.is_draining && nodeState(node),
          node.is_leaving && "is given back once it is empty",
          node.health !== "ok" && `${node.health}: ${node.problem}`,
        ]
          .filter(Boolean)
          .join(" · "),
      ),
      node.jobs.length
        ? h(
            "ul",
            {class: "plain"},
            node.jobs.map(job => h("li", {}, jobLink(job.name), ` ${plural(job.num_replicas, "replica")}`)),
          )
        : h("p", {}, "No job is on it."),
      h(
        "div",
        {class: "actions"},
        h("button", {type: "submit", class: "ghost"}, "Close"),
        h(
          "button",
          {type: "submit", value: "drain", class: node.is_draining ? "primary" : "danger"},
          node.is_draining ? "Use it again …" : "Drain it …",
        ),
      ),
    ),
  );
  dialog.addEventListener("click", event => {
    const box = dialog.getBoundingClientRect(),
      isBeside =
        event.clientX < box.left || event.clientX > box.right || event.clientY < box.top || event.clientY > box.bottom;
    if (event.target.closest("a") || (event.target === dialog && isBeside)) dialog.close();
  });
  dialog.addEventListener("close", () => {
    dialog.remove();
    if (dialog.returnValue === "drain") setDrained(name, !node.is_draining);
  });
  document.body.append(dialog);
  dialog.showModal();
}

export const nodeTable = () =>
  new DataTable({
    columns: [
      {key: "name", label: "Node", value: node => node.name, cell: node => node.name},
      {
        key: "state",
        label: "State",
        class: "left",
        value: node => Number(node.is_draining),
        cell: nodeState,
      },
      {
        key: "accelerator",
        label: "Type",
        class: "left",
        value: node => node.accelerator,
        cell: node => node.accelerator,
      },
      {
        key: "used",
        label: "Used",
        isDown: true,
        value: node => node.used,
        cell: node => `${node.used} of ${node.num_slots}`,
      },
      {
        key: "jobs",
        label: "Jobs",
        class: "left words",
        mark: node => JSON.stringify(node.jobs),
        cell: node =>
          node.jobs.length ? node.jobs.slice(0, 8).map(job => [jobLink(job.name), ` × ${job.num_replicas} `]) : DASH,
      },
      {key: "drain", label: "Action", mark: node => node.is_draining, cell: drainButton},
    ],
    keyOf: node => node.name,
    sort: {key: "name", isDown: false},
    label: "Nodes",
    empty: "No nodes.",
  });
