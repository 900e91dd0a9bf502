/* Single nodes: what is on them, as a table or one at a time; draining them. */

import {post} from "./api.js";
import {DataTable, confirmDialog, h, toast} from "./dom.js";
import {DASH, gigabytes, gpuParts, number, plural, share} from "./format.js";
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

const slotsOf = node => node.reading?.slots ?? [];
const meanOf = (slots, name) => slots.reduce((sum, slot) => sum + (slot[name] ?? 0), 0) / Math.max(slots.length, 1);
const machineWords = ({cpu, memory_bytes, memory_total_bytes, disk_bytes, disk_total_bytes, ...rest}) =>
  [
    `CPU ${share(cpu)}`,
    `memory ${gigabytes(memory_bytes)} of ${gigabytes(memory_total_bytes)}`,
    `disk ${gigabytes(disk_bytes)} of ${gigabytes(disk_total_bytes)}`,
    `network in ${number(rest.received_bytes_per_s / 1e6)} MB/s, out ${number(rest.sent_bytes_per_s / 1e6)} MB/s`,
  ].join(" · ");

function slotItem(slot) {
  const {busy, memory, power, temperature} = gpuParts([slot]);
  return h("li", {}, `Slot ${slot.slot}: ${[`busy ${busy}`, memory, power, temperature].join(" · ")}`);
}

const labelsOf = node =>
  Object.entries(node.labels ?? {})
    .filter(([key]) => !key.startsWith("ray.io/"))
    .map(([key, value]) => `${key}=${value}`)
    .join(", ");

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
          labelsOf(node),
          node.is_draining && nodeState(node),
          node.is_leaving && (node.problem || "is given back once it is empty"),
          node.health !== "ok" && `${node.health}: ${node.problem}`,
        ]
          .filter(Boolean)
          .join(" · "),
      ),
      node.reading && h("p", {class: "muted"}, machineWords(node.reading)),
      slotsOf(node).length > 0 && h("ul", {class: "plain"}, slotsOf(node).map(slotItem)),
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
        key: "gpu",
        label: "GPU",
        value: node => meanOf(slotsOf(node), "utilisation"),
        cell: node => gpuParts(slotsOf(node)).busy,
      },
      {
        key: "power",
        label: "Power",
        value: node => meanOf(slotsOf(node), "power_w"),
        cell: node => gpuParts(slotsOf(node)).power,
      },
      {key: "cpu", label: "CPU", value: node => node.reading?.cpu ?? -1, cell: node => share(node.reading?.cpu ?? null)},
      {
        key: "memory",
        label: "Memory",
        value: node => node.reading?.memory_bytes ?? -1,
        cell: node => gigabytes(node.reading?.memory_bytes ?? null),
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
