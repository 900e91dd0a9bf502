/* Jobs as a table, to sort, search and group; and the page with all of them. */

import {api} from "./api.js";
import {DataTable, fill, h, set, setText, toast} from "./dom.js";
import {FINAL, ago, count, plural} from "./format.js";
import {activeColumns, endedColumns, why} from "./job_columns.js";
import {actOn} from "./job_actions.js";
import {grouped, keyOf} from "./job_groups.js";
import {jobLink} from "./paint.js";
import {noteSequence, now, store} from "./store.js";

const MOST_COMPARED = 6;

export class JobsTable {
  /* `keep` is called with the filters and the order whenever the user has changed them. `selects`: jobs can be chosen,
     to be compared, held, released and cancelled. */
  constructor({step = 100, keep = () => {}, selects = false} = {}) {
    Object.assign(this, {all: [], keep, selects, chosen: new Set(), open: new Set(), shown: []});
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
    this.groups = h("input", {type: "checkbox", checked: true, onchange: () => this.change()});
    this.tally = h("span", {class: "muted", role: "status"});
    this.compare = h("a", {class: "button"});
    this.number = h("span", {role: "status"});
    const act = (action, text, kind) =>
      h("button", {type: "button", class: `${kind} changes`, onclick: () => this.act(action)}, text);
    this.choice = h(
      "div",
      {class: "tools choice", role: "group", "aria-label": "The chosen jobs", hidden: true},
      this.number,
      this.compare,
      act("hold", "Hold", "ghost"),
      act("release", "Release", "ghost"),
      act("cancel", "Cancel them", "danger"),
      h("button", {type: "button", class: "ghost", onclick: () => this.chooseShown()}, "Choose all shown"),
      h("button", {type: "button", class: "ghost", onclick: () => this.chooseNone()}, "Choose none"),
    );
    const make = (columns, sort) =>
      new DataTable({
        columns,
        keyOf,
        sort,
        step,
        label: "Jobs",
        onsort: () => this.keep(this.filters()),
        expand: row => (row.isGroup && this.isOpen(row) ? row.members.map(job => ({...job, isMember: true})) : []),
      });
    this.tables = {
      active: make(activeColumns(this), {key: "state", isDown: false}),
      ended: make(endedColumns(this), {key: "ended", isDown: true}),
    };
    this.place = h("div", {}, this.tables.active.element);
    this.element = h(
      "div",
      {},
      h(
        "div",
        {class: "tools"},
        this.search,
        this.which,
        h("label", {class: "check"}, this.groups, "Group arrays and studies"),
        this.tally,
      ),
      this.choice,
      this.place,
    );
  }

  /* That which is shown: of jobs that have ended, other things are of interest. */
  get table() {
    return ["ended", "failed"].includes(this.which.value) ? this.tables.ended : this.tables.active;
  }

  isOpen(group) {
    return this.open.has(keyOf(group));
  }

  toggle(group) {
    const key = keyOf(group);
    if (!this.open.delete(key)) this.open.add(key);
    this.show();
  }

  choose(names, isChosen) {
    for (const name of names)
      if (isChosen) this.chosen.add(name);
      else this.chosen.delete(name);
    this.show();
  }

  chooseShown() {
    this.choose(this.shown.map(job => job.name), true);
  }

  chooseNone() {
    this.chosen.clear();
    this.show();
  }

  /* With those of the chosen jobs that are not over. */
  async act(action) {
    const names = this.all.filter(job => this.chosen.has(job.name) && !FINAL.has(job.state)).map(job => job.name);
    if (!names.length) toast("All of the chosen jobs are over.");
    else if (await actOn(names, action)) this.chooseNone();
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
      first = this.table === this.tables.ended ? "-ended" : "state",
      sort = `${isDown ? "-" : ""}${key}`,
      chosen = new URLSearchParams();
    if (this.search.value) chosen.set("find", this.search.value);
    if (this.which.value !== "all") chosen.set("which", this.which.value);
    if (!this.groups.checked) chosen.set("groups", "no");
    if (sort !== first) chosen.set("sort", sort);
    return chosen;
  }

  restore(chosen) {
    this.search.value = chosen.get("find") ?? "";
    const which = chosen.get("which");
    if ([...this.which.options].some(option => option.value === which)) this.which.value = which;
    this.groups.checked = chosen.get("groups") !== "no";
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
      const place = (job.allocation ?? []).map(([node]) => node).join(" "),
        text = `${job.name} ${job.state} ${job.application} ${job.owner} ${job.team} ${job.kind} ${place} ${why(job)}`;
      return words.every(word => text.toLowerCase().includes(word));
    });
    this.shown = chosen;
    if (this.place.firstElementChild !== this.table.element) fill(this.place, this.table.element);
    setText(
      this.table.empty,
      this.all.length
        ? "No job matches."
        : "No jobs yet. “Submit a job” above starts one, as does: pollux submit -- python train.py",
    );
    this.table.update(this.groups.checked ? grouped(chosen) : chosen);
    setText(
      this.tally,
      chosen.length === this.all.length
        ? plural(chosen.length, "job")
        : `${count(chosen.length)} of ${plural(this.all.length, "job")}`,
    );
    const names = [...this.chosen],
      canCompare = names.length > 1 && names.length <= MOST_COMPARED;
    this.choice.hidden = !names.length;
    setText(this.number, `${count(names.length)} chosen`);
    set(this.compare, {
      href: canCompare ? `#/compare?jobs=${names.map(encodeURIComponent).join(",")}` : null,
      "aria-disabled": canCompare ? null : "true",
    });
    setText(
      this.compare,
      canCompare
        ? `Compare ${names.length} jobs`
        : names.length > 1
          ? `At most ${MOST_COMPARED} jobs can be compared`
          : "Choose another job to compare",
    );
  }
}

const whyWaiting = job => why(job) || "waiting for the next decision";

/* Of a group: what most of its jobs wait for, and how many wait for something else. */
function groupWaits(group) {
  const reasons = new Map();
  for (const job of group.members) reasons.set(whyWaiting(job), (reasons.get(whyWaiting(job)) ?? 0) + 1);
  const [[reason, most]] = [...reasons].sort((a, b) => b[1] - a[1]);
  return most < group.members.length ? `${count(most)} of them: ${reason}` : reason;
}

/* Those who wait, and why; arrays and studies as one row each. */
export function queueTable() {
  return new DataTable({
    columns: [
      {
        key: "name",
        label: "Job",
        mark: job => `${job.name}/${job.isGroup ? job.members.length : ""}`,
        cell: job =>
          job.isGroup
            ? h(
                "a",
                {href: `#/jobs?find=${encodeURIComponent(job.name)}`},
                `${job.name}: ${plural(job.members.length, "job")}`,
              )
            : jobLink(job.name),
      },
      {key: "why", label: "Waits because", class: "left words", cell: job => (job.isGroup ? groupWaits(job) : whyWaiting(job))},
      {
        key: "least",
        label: "Needs",
        class: "wide-only",
        cell: job =>
          job.isGroup
            ? `${plural(Math.max(...job.members.map(one => one.min_replicas)), "slot")} each`
            : plural(job.min_replicas, "slot"),
      },
      {key: "since", label: "Submitted", class: "wide-only", cell: job => ago(now() - job.submitted_at)},
    ],
    keyOf,
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
    table = new JobsTable({keep, selects: true});
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
      for (const job of page.jobs) older.set(job.name, job);
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
