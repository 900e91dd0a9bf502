/* The page of the cluster: what it does now, who has what, who waits, and how it came to that. */

import {api} from "./api.js";
import {Figure, hasNumbers, lastOf, layout, line, wholeAxis} from "./charts.js";
import {fill, h, setText, toast} from "./dom.js";
import {DASH, ago, count, duration, money, number, plural, share, wallClock} from "./format.js";
import {Gantt} from "./gantt.js";
import {grouped} from "./job_groups.js";
import {JobsTable, queueTable} from "./jobs.js";
import {NodeMap} from "./map.js";
import {nodeTable, openNode} from "./nodes.js";
import {current, jobsByArrival, loadSamples, noteSequence, now, roundsNewestFirst, store} from "./store.js";

const SPANS = [
  [900, "15 minutes"],
  [3600, "hour"],
  [21600, "6 hours"],
  [86400, "day"],
  [604800, "week"],
  [0, "all of it"],
];
const TIMELINE_EVERY_MS = 5000,
  SPAN_EVERY_MS = 300000; // what became too old leaves, and what came since is as fine as the rest
const GANTT_NOTE = "bars are as high as their replicas; dotted: waiting";

/* A number with its name; `bar` is a share that is drawn under it. */
class Tile {
  constructor(label, title = "") {
    this.number = h("span");
    this.unit = h("small");
    this.value = h("div", {class: "tile-value"}, this.number, " ", this.unit);
    this.note = h("div", {class: "tile-note"});
    this.bar = h("span", {class: "tile-bar"});
    this.track = h("div", {class: "tile-track", hidden: true}, this.bar);
    this.element = h(
      "div",
      {class: "card tile", title},
      h("div", {class: "tile-label"}, label),
      this.value,
      this.track,
      this.note,
    );
  }

  update(value, note = "", bar = null, unit = "") {
    setText(this.number, value);
    setText(this.unit, unit);
    setText(this.note, note);
    this.track.hidden = bar === null;
    if (bar !== null) this.bar.style.width = `${Math.min(100, Math.max(0, 100 * bar))}%`;
  }
}

const hoursText = hours => (hours === null ? DASH : hours < 10 ? hours.toFixed(2) : count(hours));

function tiles() {
  const all = {
    slots: new Tile("Slots in use"),
    goodput: new Tile(
      "Useful slots",
      "What a job does with one slot counts 1, with more its speedup over one. Fixed jobs are left out: their work is not known",
    ),
    efficiency: new Tile("Efficiency", "Statistical efficiency of the running jobs, weighted by their replicas"),
    jobs: new Tile("Jobs"),
    lost: new Tile(
      "Time lost",
      "Share of the running jobs' slot time in which they stood still, or trained again what a crash had undone; " +
        "first starts do not count",
    ),
    cost: new Tile("Node hours", "Since the data directory was made"),
    decision: new Tile("Last decision"),
  };
  return {
    element: h(
      "div",
      {class: "tiles"},
      Object.values(all).map(tile => tile.element),
    ),
    update() {
      const {cluster} = store,
        last = roundsNewestFirst()[0];
      if (!cluster) return;
      const jobs = cluster.jobs ?? {},
        here = current();
      let out = 0; // slots that are free, but not for use
      for (const node of store.nodes.values())
        if (node.is_draining || node.is_leaving) out += node.num_slots - node.used;
      all.slots.update(
        count(here.num_used_slots),
        `on ${plural(cluster.nodes, "node")}${out ? `, ${count(out)} drained` : ""}`,
        here.num_slots ? here.num_used_slots / here.num_slots : 0,
        `of ${count(here.num_slots)}`,
      );
      const apart = here.num_fixed_slots;
      all.goodput.update(
        number(here.goodput),
        apart ? `${plural(apart, "slot")} of fixed jobs apart` : "as if each worked like a job’s only one",
      );
      all.efficiency.update(share(here.efficiency), "of the running jobs", here.efficiency);
      const ended = [
        ["succeeded", "done"],
        ["failed", "failed"],
        ["cancelled", "cancelled"],
      ]
        .filter(([state]) => jobs[state])
        .map(([state, word]) => `${count(jobs[state])} ${word}`);
      all.jobs.update(count(here.num_running), [`${count(here.num_pending)} waiting`, ...ended].join(" · "), null, "running");
      all.lost.update(share(cluster.lost_share), "to resizes, restarts and work trained again");
      const sizing = cluster.sizing;
      const wanted =
        sizing?.num_wanted !== null && sizing?.num_wanted !== undefined
          ? `${plural(sizing.num_wanted, "node")} wanted`
          : "";
      all.cost.update(
        hoursText(here.node_hours),
        [here.cost !== null ? `cost ${money(here.cost)}` : "no price set", wanted]
          .filter(Boolean)
          .join(" · "),
      );
      all.decision.update(
        duration(cluster.last_decision_s),
        last ? `${ago(Math.max(0, now() - last.at))} · ${cluster.policy}` : cluster.policy,
      );
    },
  };
}

/* --- curves --------------------------------------------------------------------------------------------------- */

function curves() {
  const figures = {
    slots: new Figure({title: "Slots", hint: "in use, and there"}),
    goodput: new Figure({title: "Useful slots", hint: "a job’s first slot counts 1"}),
    efficiency: new Figure({title: "Efficiency", hint: "of running jobs"}),
    queue: new Figure({title: "Jobs", hint: "running and waiting"}),
    cost: new Figure({title: "Node hours", hint: "and what they cost"}),
  };
  return {
    elements: Object.values(figures).map(figure => figure.element),
    /* `since`: those of before are too old. */
    update(since) {
      const kept = store.samples.filter(sample => sample.at >= since),
        samples = kept.length && store.cluster ? [...kept, current()] : kept,
        x = samples.map(sample => wallClock(sample.at)),
        of = name => samples.map(sample => sample[name]);
      if (!samples.length) {
        for (const figure of Object.values(figures)) figure.update(null);
        return;
      }
      const last = samples.at(-1),
        step = {line: {shape: "hv"}},
        legend = {showlegend: true};
      figures.slots.update(
        {
          data: [
            line(x, of("num_slots"), "there", "@muted", {line: {shape: "hv", dash: "dot", width: 1.5}}),
            line(x, of("num_used_slots"), "in use", "@0", {line: {shape: "hv"}, fill: "tozeroy"}),
          ],
          layout: layout({...legend, yaxis: wholeAxis(of("num_slots"))}),
        },
        `${last.num_used_slots} of ${last.num_slots}`,
      );
      const goodput = of("goodput"),
        efficiency = of("efficiency");
      figures.goodput.update(
        hasNumbers(goodput) ? {data: [line(x, goodput, "useful slots", "@2", step)], layout: layout()} : null,
        number(last.goodput),
      );
      figures.efficiency.update(
        hasNumbers(efficiency)
          ? {
              data: [line(x, efficiency, "efficiency", "@4")],
              layout: layout({yaxis: {show: value => share(value), range: [0, 1.04], dtick: 0.25}}),
            }
          : null,
        share(last.efficiency),
      );
      figures.queue.update(
        {
          data: [
            line(x, of("num_running"), "running", "@0", step),
            line(x, of("num_pending"), "waiting", "@3", {line: {shape: "hv", dash: "dash"}}),
          ],
          layout: layout({...legend, yaxis: wholeAxis([...of("num_running"), ...of("num_pending")])}),
        },
        `${last.num_running} running, ${last.num_pending} waiting`,
      );
      const cost = of("cost"),
        hours = of("node_hours"),
        hasCost = hasNumbers(cost);
      const right = {yaxis2: {rangemode: "tozero"}, showlegend: true};
      figures.cost.update(
        hasNumbers(hours)
          ? {
              data: [
                line(x, hours, "node hours", "@5"),
                ...(hasCost ? [line(x, cost, "cost", "@1", {yaxis: "y2", line: {dash: "dash"}})] : []),
              ],
              layout: layout(hasCost ? right : {}),
            }
          : null,
        hasCost ? `${hoursText(lastOf(hours))} h, cost ${money(lastOf(cost))}` : `${hoursText(lastOf(hours))} h`,
      );
    },
    remove() {
      for (const figure of Object.values(figures)) figure.remove();
    },
  };
}

/* --- the page ------------------------------------------------------------------------------------------------- */

export function clusterPage({go}) {
  const openJob = name => go(`#/jobs/${encodeURIComponent(name)}`);
  const headline = tiles(),
    map = new NodeMap({openJob, openNode}),
    nodes = nodeTable(),
    queue = queueTable(),
    jobs = new JobsTable({step: 25});
  const charts = curves(),
    gantt = new Gantt({openJob});
  const nodesBox = h(
    "details",
    {
      class: "as-table",
      ontoggle: () => {
        if (nodesBox.open) nodes.update([...store.nodes.values()]);
      },
    },
    h("summary", {}, "The nodes as a table"),
    nodes.element,
  );
  const span = h(
    "select",
    {
      "aria-label": "How far back",
      onchange: () => loadSpan(),
    },
    SPANS.map(([value, text]) => h("option", {value, selected: value === 3600}, value ? `last ${text}` : text)),
  );
  const ganttNote = h("small", {}, GANTT_NOTE);
  const queueTitle = h("h2", {}, "Queue"),
    reason = h("p", {class: "muted"}),
    warnings = h("ul", {class: "plain reasons problem", role: "status", hidden: true}),
    whyFree = h("ul", {class: "plain reasons"}),
    free = h("details", {class: "why-free", hidden: true}, h("summary", {}, "Why are slots free?"), whyFree);
  const element = h(
    "div",
    {},
    h("h1", {class: "sr-only"}, "Cluster"),
    headline.element,
    reason,
    h(
      "section",
      {class: "card pad", "aria-label": "Map"},
      h("div", {class: "section-head"}, h("h2", {}, "Nodes and slots")),
      map.element,
      warnings,
      free,
      nodesBox,
    ),
    h("section", {}, queueTitle, queue.element),
    h("section", {}, h("h2", {}, "Jobs"), jobs.element),
    h(
      "section",
      {},
      h("div", {class: "section-head"}, h("h2", {}, "Over time"), span),
      h(
        "figure",
        {class: "card pad gantt-box", "aria-label": "Allocations"},
        h("figcaption", {}, h("span", {}, "Allocations", ganttNote)),
        gantt.element,
      ),
      h("div", {class: "grid charts"}, charts.elements),
    ),
  );

  const spanS = () => Number(span.value),
    since = () => (spanS() ? now() - spanS() : 0);
  // Of another span no answer is wanted any more: it may come last.
  let asking = new AbortController(),
    spanAt = 0;
  const timeline = {at: 0, isStale: false, isAsked: false};

  async function loadTimeline() {
    const {signal} = asking;
    Object.assign(timeline, {isStale: false, isAsked: true});
    try {
      const told = await api(`/timeline?limit=200&since=${since().toFixed(3)}`, {signal});
      told.jobs.forEach(noteSequence);
      gantt.update(told, spanS());
      const isCut = told.total > told.jobs.length;
      setText(ganttNote, isCut ? `${GANTT_NOTE}; ${told.jobs.length} of ${count(told.total)} jobs` : GANTT_NOTE);
    } catch (error) {
      if (error.name !== "AbortError" && error.status) toast(`The timeline: ${error.message}`);
      timeline.isStale ||= !signal.aborted; // to be asked for again
    }
    if (!signal.aborted) Object.assign(timeline, {at: performance.now(), isAsked: false});
  }

  async function loadSpan() {
    asking.abort();
    asking = new AbortController();
    spanAt = performance.now();
    loadTimeline();
    try {
      await loadSamples(spanS(), asking.signal);
    } catch (error) {
      if (error.name !== "AbortError" && error.status) toast(`The curves: ${error.message}`);
    }
  }

  function tick() {
    if (document.hidden) return;
    headline.update();
    queue.update(queue.items); // who waits, waits longer
    gantt.refresh();
    const at = performance.now();
    if (at - spanAt > SPAN_EVERY_MS) loadSpan();
    else if (timeline.isStale && !timeline.isAsked && at - timeline.at > TIMELINE_EVERY_MS) loadTimeline();
  }

  function update(changes) {
    if (changes.isFull) loadSpan();
    else if (changes.moves) timeline.isStale = true;
    headline.update();
    if (changes.isFull || changes.nodes.size) {
      map.update();
      if (nodesBox.open) nodes.update([...store.nodes.values()]);
    }
    if (changes.isFull || changes.jobs.size) {
      const all = jobsByArrival(),
        waiting = all.filter(job => job.state === "pending");
      queue.update(grouped(waiting));
      setText(queueTitle, waiting.length ? `Queue: ${plural(waiting.length, "job waits", "jobs wait")}` : "Queue");
      jobs.update(all);
    }
    if (changes.isFull || changes.samples || changes.cluster || changes.moves) charts.update(since());
    const warned = store.cluster?.warnings ?? [];
    warnings.hidden = !warned.length;
    if (changes.isFull || changes.cluster) fill(warnings, warned.map(words => h("li", {}, words)));
    const why = store.cluster?.why_free ?? [];
    free.hidden = !why.length;
    if (changes.isFull || changes.cluster) fill(whyFree, why.map(words => h("li", {}, words)));
    setText(reason, store.cluster?.sizing?.reason ? `Size: ${store.cluster.sizing.reason}` : "");
    reason.hidden = !reason.textContent;
    gantt.refresh();
  }

  const ticking = setInterval(tick, 1000);
  update({isFull: true, jobs: new Set(), nodes: new Set()});
  return {
    title: "Cluster",
    element,
    update,
    remove() {
      clearInterval(ticking);
      asking.abort();
      charts.remove();
      map.remove();
      gantt.remove();
    },
  };
}
