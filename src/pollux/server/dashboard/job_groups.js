/* Arrays and studies as one row each: jobs in, rows out. A row of a group has the fields of a job, summed up. */

import {FINAL, count} from "./format.js";

const ORDER = ["running", "resizing", "starting", "stopping", "pending", "failed", "cancelled", "succeeded"];
const WORDS = {pending: "waiting", succeeded: "done"};

/* [kind, name] of the group that a job belongs to; null: none. */
const groupOf = job => (job.study ? ["study", job.study] : job.array ? ["array", job.array] : null);

export const keyOf = row => (row.isGroup ? `${row.groupKind}/${row.name}` : row.name);

/* Rows for these jobs: groups of two or more as one, the others as they are. */
export function grouped(jobs) {
  const groups = new Map(),
    rows = [];
  for (const job of jobs) {
    const found = groupOf(job);
    if (!found) {
      rows.push(job);
      continue;
    }
    const key = found.join("/");
    if (!groups.has(key)) groups.set(key, {kind: found[0], name: found[1], members: []});
    groups.get(key).members.push(job);
  }
  for (const {kind, name, members} of groups.values())
    rows.push(...(members.length > 1 ? [summed(kind, name, members)] : members));
  return rows;
}

const known = values => values.filter(value => value !== null && value !== undefined);
const sum = values => values.reduce((total, one) => total + one, 0);
const sumOf = values => (known(values).length ? sum(known(values)) : null);
const mostOf = values => (known(values).length ? Math.max(...known(values)) : null);

function summed(groupKind, name, members) {
  const states = new Map();
  for (const {state} of members) states.set(state, (states.get(state) ?? 0) + 1);
  const of = field => members.map(job => job[field]),
    measured = members.filter(job => job.num_replicas && job.efficiency !== null),
    weight = sum(measured.map(job => job.num_replicas));
  return {
    isGroup: true,
    groupKind,
    name,
    members,
    kind: "group",
    application: "",
    reason: "",
    note: "",
    phase: "",
    state: ORDER.find(state => states.has(state)) ?? "pending",
    words: ORDER.filter(state => states.has(state)).map(state => `${count(states.get(state))} ${WORDS[state] ?? state}`),
    sequence: Math.max(...of("sequence")),
    num_replicas: sum(of("num_replicas")),
    progress: sum(members.map(progressOf)) / members.length,
    remaining_s: mostOf(of("remaining_s")),
    total_batch: null,
    efficiency: weight ? sum(measured.map(job => job.num_replicas * job.efficiency)) / weight : null,
    goodput: sumOf(members.filter(job => job.num_replicas).map(job => job.goodput)), // those that ended do nothing now
    metric_name: "",
    metric: null,
    submitted_at: Math.min(...of("submitted_at")),
    started_at: known(of("started_at")).length ? Math.min(...known(of("started_at"))) : null,
    finished_at: members.every(job => FINAL.has(job.state)) ? mostOf(of("finished_at")) : null,
    exit_code: null,
    used_slot_s: sumOf(of("used_slot_s")),
  };
}

const progressOf = job => (job.state === "succeeded" ? 1 : (job.progress ?? 0));
