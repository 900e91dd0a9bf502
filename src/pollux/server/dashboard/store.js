/* What is known of the cluster, kept up to date by the server's events. Pages read it and are told when it changes:
   once a frame at most, and not at all while the page is not visible. */

import {api, ApiError, eventParser, stream} from "./api.js";
import {announce, whileSeen} from "./dom.js";
import {FINAL} from "./format.js";

const EVERY_S = 1;
const SILENCE_MS = 40000; // the server says something every 15 s
const FIRST_WAIT_MS = 500,
  LONGEST_WAIT_MS = 10000;
const MOST_ROUNDS = 1000,
  MOST_SAMPLES = 2000;

export const store = {
  cluster: null,
  jobs: new Map(),
  nodes: new Map(),
  rounds: new Map(), // by id
  samples: [],
  clockSkewS: 0, // the server's clock minus ours
  isConnected: false,
  hasState: false,
  version: 0, // goes up with every message
  updates: [], // milliseconds of this thread that the last messages took, for benchmarks
};

export const now = () => Date.now() / 1000 + store.clockSkewS;
export const jobsByArrival = () => [...store.jobs.values()].sort((a, b) => a.sequence - b.sequence);
export const roundsNewestFirst = () => [...store.rounds.values()].sort((a, b) => b.id - a.id);

/* The cluster at this moment, with the fields of a sample: tiles, headings and the ends of curves all show this. Of
   goodput (the useful slots) only the samples tell; `sampledAt` is when. */
export function current() {
  const {cluster} = store,
    sample = store.samples.at(-1),
    counts = cluster.jobs ?? {},
    of = state => counts[state] ?? 0,
    hours = cluster.sizing?.node_hours;
  let efficient = 0,
    measured = 0,
    fixed = 0;
  for (const job of store.jobs.values()) {
    if (FINAL.has(job.state) || !job.num_replicas) continue;
    if (job.kind === "fixed") fixed += job.num_replicas;
    if (typeof job.efficiency !== "number") continue;
    efficient += job.num_replicas * job.efficiency;
    measured += job.num_replicas;
  }
  return {
    at: now(),
    num_slots: cluster.num_slots,
    num_used_slots: cluster.num_used_slots,
    num_fixed_slots: fixed,
    num_running: of("running") + of("resizing") + of("starting") + of("stopping"),
    num_pending: of("pending"),
    efficiency: measured ? efficient / measured : null,
    goodput: cluster.num_used_slots > fixed ? (sample?.goodput ?? null) : cluster.num_used_slots ? null : 0,
    sampledAt: sample?.at ?? null,
    node_hours: hours ? Object.values(hours).reduce((sum, one) => sum + one, 0) : (sample?.node_hours ?? null),
    cost: cluster.sizing?.cost ?? null,
  };
}

const listeners = new Set();
let changes = null; // since the last frame

/* `listener(changes)` with {jobs: Set of names, nodes: Set, rounds, samples, cluster, moves: has any
   come, or any job got or lost slots; isFull: all is new} */
export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function noted() {
  if (!changes) {
    changes = {
      jobs: new Set(),
      nodes: new Set(),
      rounds: false,
      samples: false,
      cluster: false,
      moves: false,
      isFull: false,
      workMs: 0,
    };
    requestAnimationFrame(flush);
  }
  return changes;
}

function flush() {
  const told = changes,
    begun = performance.now();
  changes = null;
  for (const listener of listeners) listener(told);
  store.updates.push(told.workMs + performance.now() - begun);
  if (store.updates.length > 500) store.updates.shift();
}

/* --- messages ------------------------------------------------------------------------------------------------- */

function apply(text) {
  const begun = performance.now();
  const told = JSON.parse(text),
    note = noted();
  store.version++;
  store.clockSkewS = told.at - Date.now() / 1000;
  if (told.is_full) {
    for (const name of store.jobs.keys()) note.jobs.add(name);
    for (const name of store.nodes.keys()) note.nodes.add(name);
    store.jobs.clear();
    store.nodes.clear();
    note.isFull = true;
  }
  if (told.cluster) {
    store.cluster = told.cluster;
    note.cluster = true;
  }
  note.moves ||= told.gone_jobs?.length > 0;
  const changed = [];
  for (const job of told.jobs ?? []) {
    const before = store.jobs.get(job.name);
    if (before && before.state !== job.state) changed.push(`${job.name} is ${job.state}`);
    note.moves ||= before?.state !== job.state || before.num_replicas !== job.num_replicas;
    store.jobs.set(job.name, job);
    noteSequence(job);
    note.jobs.add(job.name);
  }
  for (const name of told.gone_jobs ?? []) {
    store.jobs.delete(name);
    note.jobs.add(name);
  }
  for (const node of told.nodes ?? []) {
    store.nodes.set(node.name, node);
    note.nodes.add(node.name);
  }
  for (const name of told.gone_nodes ?? []) {
    store.nodes.delete(name);
    note.nodes.add(name);
  }
  if (told.rounds?.length) {
    addRounds(told.rounds);
    note.rounds = true;
  }
  if (told.samples?.length) {
    addSamples(told.samples);
    note.samples = true;
  }
  if (changed.length) announce(changed.length > 3 ? `${changed.length} jobs changed their state` : changed.join("; "));
  store.hasState = true;
  note.workMs += performance.now() - begun;
}

export function addRounds(rounds) {
  for (const round of rounds) store.rounds.set(round.id, round);
  if (store.rounds.size > MOST_ROUNDS)
    for (const id of [...store.rounds.keys()].sort((a, b) => a - b).slice(0, store.rounds.size - MOST_ROUNDS))
      store.rounds.delete(id);
}

/* All of one cluster: another token may mean another cluster. */
export function forget() {
  store.cluster = null;
  for (const kept of [store.jobs, store.nodes, store.rounds]) kept.clear();
  store.samples = [];
  store.hasState = false;
}

function addSamples(samples) {
  const last = store.samples.at(-1)?.at ?? -Infinity;
  store.samples.push(...samples.filter(sample => sample.at > last));
  if (store.samples.length > MOST_SAMPLES) store.samples.splice(0, store.samples.length - MOST_SAMPLES);
}

/* Those of the last `spanS` seconds, asked for anew; the stream adds to them. */
export async function loadSamples(spanS, signal) {
  const since = spanS ? `&since=${Math.max(0, now() - spanS).toFixed(3)}` : "";
  const {samples} = await api(`/samples?points=600${since}`, {signal}),
    before = store.samples;
  store.samples = samples;
  addSamples(before); // those that came since the server looked
  noted().samples = true;
}

/* --- the connection ------------------------------------------------------------------------------------------- */

let hurry = () => {};
let ending = null; // of the connection there is
let stateListener = () => {};
whileSeen(
  () => ending?.abort(),
  () => connect(stateListener),
);

/* `onState("on" | "off" | "denied", {message})` */
export async function connect(onState) {
  ending?.abort();
  store.isConnected = false;
  stateListener = onState;
  const mine = (ending = new AbortController());
  let waitMs = FIRST_WAIT_MS;
  while (!mine.signal.aborted) {
    let message = "The server ended the connection.";
    try {
      const parse = eventParser((event, data) => {
        if (event !== "state") return;
        apply(data);
        if (!store.isConnected) {
          store.isConnected = true;
          waitMs = FIRST_WAIT_MS;
          onState("on", {});
        }
      });
      await stream(`/events?every_s=${EVERY_S}`, parse, {signal: mine.signal, silenceMs: SILENCE_MS});
    } catch (error) {
      if (mine.signal.aborted) return;
      store.isConnected = false;
      if (error instanceof ApiError && (error.status === 401 || error.status === 403)) {
        onState("denied", {});
        return;
      }
      message = error instanceof ApiError ? error.message : "The connection broke.";
    }
    if (mine.signal.aborted) return;
    store.isConnected = false;
    onState("off", {message});
    await new Promise(resolve => {
      const timer = setTimeout(resolve, waitMs * (0.8 + 0.4 * Math.random()));
      hurry = () => {
        clearTimeout(timer);
        resolve();
      };
    });
    waitMs = Math.min(LONGEST_WAIT_MS, 1.7 * waitMs);
  }
}

export const tryNow = () => hurry();
addEventListener("online", tryNow);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) tryNow();
});

/* --- colours of jobs ------------------------------------------------------------------------------------------ */

const NUM_COLOURS = 6; // --c0 ... --c5; the others are grey and ink
const PATTERNS = ["solid", "stripes", "dots", "rungs"];
const MOST_SEQUENCES = 20000;
const sequences = new Map(); // of all jobs that were ever told of, also those that are gone

export function noteSequence({name, sequence}) {
  if (sequences.size >= MOST_SEQUENCES && !sequences.has(name)) sequences.delete(sequences.keys().next().value);
  sequences.set(name, sequence);
}

/* Of a job: {colour: "--c3", pattern}. By its place in the order of arrival: the same for every viewer and after every
   reload, and jobs that come one after the other differ. Patterns tell apart what colours alone do not, and help those
   who do not see colours. A job of which that is not known has no colour. */
export function styleOf(name) {
  const sequence = sequences.get(name);
  if (sequence === undefined) return {colour: "--muted", pattern: "solid"};
  const pattern = PATTERNS[Math.floor(sequence / NUM_COLOURS) % PATTERNS.length];
  return {colour: `--c${sequence % NUM_COLOURS}`, pattern};
}
