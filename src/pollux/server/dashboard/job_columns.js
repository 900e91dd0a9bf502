/* The columns of tables of jobs: of those that are active, and of those that have ended. */

import {h} from "./dom.js";
import {DASH, asNumber, batchParts, count, duration, number, plural, share, slotHours, time} from "./format.js";
import {jobLink} from "./paint.js";

const RANK = {running: 0, resizing: 0, starting: 1, stopping: 1, pending: 2, failed: 3, cancelled: 4, succeeded: 5};
const MARKS = {
  running: "▶",
  resizing: "↔",
  starting: "△",
  stopping: "▽",
  pending: "…",
  failed: "✕",
  cancelled: "◦",
  succeeded: "✓",
};

/* The state in words, a sign and a colour. */
export const stateChip = (state, text = state) =>
  h("span", {class: `state ${state}`}, h("span", {"aria-hidden": "true"}, MARKS[state] ?? "?"), text);

export function progressBar(progress, label = "progress") {
  if (typeof progress !== "number") return DASH;
  return h(
    "span",
    {
      class: "progress",
      role: "progressbar",
      "aria-valuemin": 0,
      "aria-valuemax": 100,
      "aria-valuenow": Math.round(100 * progress),
      "aria-label": label,
    },
    h(
      "span",
      {class: "progress-track"},
      h("span", {class: "progress-bar", style: {width: `${Math.min(100, 100 * progress)}%`}}),
    ),
    h("span", {class: "progress-text"}, share(progress)),
  );
}

/* Where all is well there is nothing to explain. */
export const why = job =>
  (job.note || job.phase || (["running", "succeeded"].includes(job.state) ? "" : job.reason)).replaceAll("->", "→");
const progressText = job => (typeof job.progress === "number" ? share(job.progress) : DASH);

/* `table` is asked which jobs are chosen and which groups are open; it is a JobsTable. */
function nameCell(job, table) {
  const bar =
    typeof job.progress === "number" &&
    h("span", {class: "phone-only"}, progressBar(job.progress, `progress of ${job.name}`));
  const choose = (names, label) =>
    table.selects &&
    h("input", {
      type: "checkbox",
      "aria-label": label,
      checked: names.every(name => table.chosen.has(name)),
      onchange: event => table.choose(names, event.target.checked),
    });
  if (job.isGroup) {
    const isOpen = table.isOpen(job);
    return [
      h(
        "span",
        {class: "name-cell"},
        choose(job.members.map(one => one.name), `Choose all of ${job.name}`),
        h(
          "button",
          {type: "button", class: "group", "aria-expanded": String(isOpen), onclick: () => table.toggle(job)},
          h("span", {"aria-hidden": "true"}, isOpen ? "▾" : "▸"),
          job.name,
        ),
      ),
      h(
        "small",
        {class: "why"},
        job.groupKind === "study"
          ? h("a", {href: `#/studies/${encodeURIComponent(job.name)}`}, `study of ${plural(job.members.length, "job")}`)
          : `array of ${plural(job.members.length, "job")}`,
      ),
      bar,
    ];
  }
  return [
    h(
      "span",
      {class: `name-cell${job.isMember ? " member" : ""}`},
      choose([job.name], `Choose ${job.name}`),
      jobLink(job.name),
    ),
    why(job) && h("small", {class: "why", title: why(job)}, why(job)),
    bar,
  ];
}

const nameColumn = table => ({
  key: "name",
  label: "Job",
  value: job => job.name,
  mark: job =>
    [
      job.name,
      why(job),
      progressText(job),
      job.isMember,
      table.chosen.has(job.name),
      job.isGroup &&
        `${table.isOpen(job)}/${job.members.length}/${job.members.every(one => table.chosen.has(one.name))}`,
    ].join("/"),
  cell: job => nameCell(job, table),
});

const stateColumn = {
  key: "state",
  label: "State",
  class: "left",
  value: job => (RANK[job.state] ?? 9) * 1e9 - job.sequence,
  mark: job => (job.isGroup ? job.words.join() : job.state),
  cell: job =>
    job.isGroup
      ? [stateChip(job.state, job.words[0]), h("small", {}, job.words.slice(1).join(" · "))]
      : stateChip(job.state),
};

const progressColumn = {
  key: "progress",
  label: "Progress",
  class: "left wide-only",
  isDown: true,
  value: job => job.progress,
  mark: progressText,
  cell: job => progressBar(job.progress, `progress of ${job.name}`),
};

const metricColumn = {
  key: "metric",
  label: "Metric",
  title: "The last logged number: the loss if there is one, else the first; for a trial, its study's metric",
  value: job => asNumber(job.metric),
  mark: job => `${job.metric_name}/${number(job.metric)}`,
  cell: job => (job.metric_name ? [number(job.metric), h("small", {}, job.metric_name)] : DASH),
};

const submittedColumn = {
  key: "submitted",
  label: "Submitted",
  isDown: true,
  value: job => job.submitted_at,
  cell: job => time(job.submitted_at),
};

export const activeColumns = table => [
  nameColumn(table),
  stateColumn,
  {
    key: "replicas",
    label: "Replicas",
    isDown: true,
    value: job => job.num_replicas,
    cell: job => (job.num_replicas ? count(job.num_replicas) : DASH),
  },
  progressColumn,
  {
    key: "remaining",
    label: "Left",
    title: "Time it still needs, by its own reports",
    value: job => job.remaining_s,
    cell: job => (job.remaining_s === null ? DASH : duration(job.remaining_s)),
  },
  {
    key: "batch",
    label: "Batch",
    title: "Examples per step: replicas × device batch × accumulation",
    isDown: true,
    value: job => job.total_batch,
    mark: job => `${job.total_batch}/${batchParts(job)}`,
    cell: job => (job.total_batch === null ? DASH : [count(job.total_batch), h("small", {}, batchParts(job))]),
  },
  {
    key: "efficiency",
    label: "Efficiency",
    title: "Statistical efficiency: progress per example, against the batch size it was tuned for",
    isDown: true,
    value: job => job.efficiency,
    cell: job => share(job.efficiency),
  },
  {
    key: "goodput",
    label: "Goodput",
    title: "Useful examples per second",
    isDown: true,
    value: job => job.goodput,
    cell: job => (job.goodput === null ? DASH : `${number(job.goodput)}/s`),
  },
  metricColumn,
  submittedColumn,
];

export const endedColumns = table => [
  nameColumn(table),
  stateColumn,
  {
    key: "code",
    label: "Exit code",
    value: job => job.exit_code,
    cell: job => (job.exit_code === null ? DASH : String(job.exit_code)),
  },
  {key: "ended", label: "Ended", isDown: true, value: job => job.finished_at, cell: job => time(job.finished_at)},
  {
    key: "took",
    label: "Took",
    title: "From its first start to its end",
    isDown: true,
    value: took,
    cell: job => duration(took(job)),
  },
  {
    key: "slots",
    label: "Slot-hours",
    title: "Slots that it held × hours",
    isDown: true,
    value: job => job.used_slot_s,
    cell: job => slotHours(job.used_slot_s),
  },
  progressColumn,
  metricColumn,
  submittedColumn,
];

function took(job) {
  return job.started_at === null || job.finished_at === null ? null : job.finished_at - job.started_at;
}
