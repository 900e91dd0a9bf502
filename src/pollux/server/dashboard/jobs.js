/* Jobs as a table, to sort and to search; and the page with all of them. */

import {api} from "./api.js";
import {DataTable, h, set, setText, toast} from "./dom.js";
import {DASH, FINAL, ago, asNumber, batchParts, count, duration, number, plural, share, time} from "./format.js";
import {jobLink} from "./paint.js";
import {noteSequence, now, store} from "./store.js";

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
export const stateChip = state =>
  h("span", {class: `state ${state}`}, h("span", {"aria-hidden": "true"}, MARKS[state] ?? "?"), state);

export function progressBar(progress) {
  if (typeof progress !== "number") return DASH;
  return h(
    "span",
    {
      class: "progress",
      role: "progressbar",
      "aria-valuemin": 0,
      "aria-valuemax": 100,
      "aria-valuenow": Math.round(100 * progress),
      "aria-label": "progress",
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
const why = job => job.note || (["running", "succeeded"].includes(job.state) ? "" : job.reason);

const columns = () => [
  {
    key: "name",
    label: "Job",
    value: job => job.name,
    mark: job => `${job.name}/${why(job)}`,
    cell: job => [jobLink(job.name), why(job) && h("small", {class: "why", title: why(job)}, why(job))],
  },
  {
    key: "state",
    label: "State",
    class: "left",
    value: job => (RANK[job.state] ?? 9) * 1e9 - job.sequence,
    mark: job => job.state,
    cell: job => stateChip(job.state),
  },
  {
    key: "replicas",
    label: "Replicas",
    isDown: true,
    value: job => job.num_replicas,
    cell: job => (job.num_replicas ? String(job.num_replicas) : DASH),
  },
  {
    key: "progress",
    label: "Progress",
    class: "left",
    isDown: true,
    value: job => job.progress,
    mark: job => (job.progress === null ? DASH : share(job.progress)),
    cell: job => progressBar(job.progress),
  },
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
  {key: "loss", label: "Loss", value: job => asNumber(job.loss), cell: job => number(job.loss)},
  {
    key: "submitted",
    label: "Submitted",
    isDown: true,
    value: job => job.submitted_at,
    cell: job => time(job.submitted_at),
  },
];

export class JobsTable {
  /* `keep` is called with the filters and the order whenever the user has changed them. */
  constructor({step = 100, keep = () => {}} = {}) {
    this.all = [];
    this.keep = keep;
    this.search = h("input", {
      type: "search",
      placeholder: "Filter by name, state, reason …",
      "aria-label": "Filter jobs",
      oninput: () => this.change(),
    });
    this.which = h(
      "select",
      {"aria-label": "Which jobs", onchange: () => this.change()},
      [
        ["all", "All jobs"],
        ["active", "Active"],
        ["ended", "Ended"],
        ["failed", "Failed"],
      ].map(([value, text]) => h("option", {value}, text)),
    );
    this.tally = h("span", {class: "muted", role: "status"});
    this.table = new DataTable({
      columns: columns(),
      keyOf: job => job.name,
      sort: {key: "state", isDown: false},
      step,
      label: "Jobs",
      onsort: () => this.keep(this.filters()),
    });
    this.element = h("div", {}, h("div", {class: "tools"}, this.search, this.which, this.tally), this.table.element);
  }

  update(jobs) {
    this.all = jobs;
    this.show();
  }

  change() {
    this.show();
    this.keep(this.filters());
  }

  /* What differs from what is shown at first, as the address has it. */
  filters() {
    const {key, isDown} = this.table.sort,
      chosen = new URLSearchParams();
    if (this.search.value) chosen.set("find", this.search.value);
    if (this.which.value !== "all") chosen.set("which", this.which.value);
    if (key !== "state" || isDown) chosen.set("sort", `${isDown ? "-" : ""}${key}`);
    return chosen;
  }

  restore(chosen) {
    this.search.value = chosen.get("find") ?? "";
    const which = chosen.get("which");
    if ([...this.which.options].some(option => option.value === which)) this.which.value = which;
    const [, minus, key] = /^(-?)(\w+)$/.exec(chosen.get("sort") ?? "") ?? [];
    if (this.table.columns.some(column => column.key === key)) this.table.sort = {key, isDown: Boolean(minus)};
  }

  show() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean),
      which = this.which.value;
    const chosen = this.all.filter(job => {
      if (
        (which === "active" && FINAL.has(job.state)) ||
        (which === "ended" && !FINAL.has(job.state)) ||
        (which === "failed" && job.state !== "failed")
      )
        return false;
      if (!words.length) return true;
      const text = `${job.name} ${job.state} ${job.application} ${why(job)} ${job.kind}`.toLowerCase();
      return words.every(word => text.includes(word));
    });
    setText(
      this.table.empty,
      this.all.length
        ? "No job matches."
        : "No jobs yet. “Submit a job” above starts one, as does: pollux submit -- python train.py",
    );
    this.table.update(chosen);
    setText(
      this.tally,
      chosen.length === this.all.length
        ? plural(chosen.length, "job")
        : `${count(chosen.length)} of ${plural(this.all.length, "job")}`,
    );
  }
}

/* Those who wait, and why. */
export function queueTable() {
  return new DataTable({
    columns: [
      {key: "name", label: "Job", mark: job => job.name, cell: job => jobLink(job.name)},
      {
        key: "why",
        label: "Waits because",
        class: "left words",
        cell: job => why(job) || "waiting for the next decision",
      },
      {key: "least", label: "Needs", class: "wide-only", cell: job => plural(job.min_replicas, "slot")},
      {key: "since", label: "Submitted", cell: job => ago(now() - job.submitted_at)},
    ],
    keyOf: job => job.name,
    step: 20,
    label: "Queue",
    empty: "Queue is empty.",
  });
}

/* The page: what is live, and on request what ended long ago. `query`: the filters that the address has. */
export function jobsPage(query = "") {
  const leaving = new AbortController(),
    older = new Map(),
    // Replaced, not pushed: "back" leaves the page, it does not take letters away.
    keep = chosen => history.replaceState(history.state, "", chosen.size ? `#/jobs?${chosen}` : "#/jobs"),
    table = new JobsTable({keep});
  table.restore(new URLSearchParams(query));
  const more = h("button", {type: "button", class: "ghost", onclick: load}, "Load older jobs");
  const note = h("p", {class: "muted"});
  let offset = 0,
    total = null;

  async function load() {
    set(more, {disabled: true});
    try {
      const page = await api(`/jobs?limit=500&offset=${offset}&newest=true`, {signal: leaving.signal});
      offset += page.jobs.length;
      total = page.total;
      for (const job of page.jobs)
        older.set(job.name, {...job, loss: job.metrics?.loss ?? null});
      page.jobs.forEach(noteSequence);
      update();
    } catch (error) {
      if (error.name !== "AbortError") toast(error.message);
    }
    set(more, {disabled: false});
  }

  function update() {
    // The feed forgets who ended long ago; what it said last of them stands.
    for (const [name, job] of store.jobs) if (older.has(name)) older.set(name, job);
    const merged = new Map([...older, ...store.jobs]);
    table.update([...merged.values()]);
    const known = Object.values(store.cluster?.jobs ?? {}).reduce((sum, num) => sum + num, 0);
    more.hidden = total !== null ? offset >= total : known <= merged.size;
    setText(note, more.hidden ? "" : "All active jobs are here, and those that ended last.");
  }

  update();
  return {
    title: "Jobs",
    element: h("div", {}, h("h1", {}, "Jobs"), table.element, h("div", {class: "actions left"}, more, note)),
    update: changes => {
      if (changes.jobs.size || changes.cluster) update();
    },
    remove() {
      leaving.abort();
    },
  };
}
