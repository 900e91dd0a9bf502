/* Jobs side by side: their curves overlaid, and how they were submitted, with what differs. */

import {api} from "./api.js";
import {Figure, hasNumbers, layout, line, wholeAxis} from "./charts.js";
import {DataTable, fill, h, toast} from "./dom.js";
import {DASH, byName, count, duration, isOdd, number, quoted, share, time} from "./format.js";
import {stateChip} from "./job_columns.js";
import {noteSequence, now} from "./store.js";

const MOST_JOBS = 6,
  MOST_METRICS = 8,
  EVERY_MS = 4000;
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const OWN = [
  ["num_replicas", "Replicas", "hv"],
  ["total_batch", "Batch size", "hv"],
  ["goodput", "Goodput", "linear"],
  ["efficiency", "Efficiency", "linear"],
  ["noise_scale", "Gradient noise scale", "linear"],
  ["progress", "Progress", "linear"],
];
/* By what curves are laid over each other: [value, text, x of a point]. */
const AXES = [
  ["time", "Time since the start", (curves, index) => (curves.at[index] - curves.at[0]) / 60, "minutes"],
  ["progress", "Progress", (curves, index) => curves.progress[index], "progress"],
];

/* How a job was submitted and what became of it: [name, text] pairs. */
function factsOf(job) {
  const request = Object.entries(job.request ?? {})
    .filter(([name]) => !["name", "command", "cwd"].includes(name))
    .map(([name, value]) => [name.replaceAll("_", " "), words(value)]);
  const params = Object.entries(job.request?.params ?? {}).map(([name, value]) => [`parameter ${name}`, words(value)]);
  return new Map([
    ["command", (job.command ?? []).map(quoted).join(" ")],
    ["folder", job.cwd ?? DASH],
    ["state", job.state],
    ["submitted", time(job.submitted_at)],
    ["ran for", duration(job.started_at === null ? null : (job.finished_at ?? now()) - job.started_at)],
    ["slot-hours", number((job.attained_slot_s ?? 0) / 3600)],
    ["exit code", job.exit_code === null ? DASH : String(job.exit_code)],
    [job.metric_name ? `last ${job.metric_name}` : "last metric", number(job.metric)],
    ["batch", count(job.total_batch)],
    ["resizes", number(job.num_resizes)],
    ...params,
    ...request.filter(([name]) => name !== "params"),
  ]);
}

const words = value =>
  value === null || value === undefined || value === "" || (typeof value === "object" && !Object.keys(value).length)
    ? DASH
    : typeof value === "object"
      ? JSON.stringify(value)
      : String(value);

export function sideBySidePage(query) {
  const names = (new URLSearchParams(query).get("jobs") ?? "").split(",").filter(Boolean).slice(0, MOST_JOBS),
    leaving = new AbortController(),
    {signal} = leaving;
  const axis = h(
      "select",
      {"aria-label": "Align curves by", onchange: () => draw()},
      AXES.map(([value, text]) => h("option", {value}, text)),
    ),
    onlyDifferent = h("input", {type: "checkbox", checked: true, onchange: () => compare()}),
    key = h("div", {class: "chips"}),
    charts = h("div", {class: "grid charts"}),
    figures = new Map(),
    table = new DataTable({
      columns: [
        {key: "name", label: "What", cell: row => row.name},
        ...names.map((name, index) => ({
          key: `job-${index}`,
          label: name,
          class: "left words",
          mark: row => `${row.values[index]}/${row.isDifferent}`,
          cell: row => (row.isDifferent ? h("strong", {}, row.values[index]) : h("span", {}, row.values[index])),
        })),
      ],
      keyOf: row => row.name,
      label: "How they differ",
      empty: "They were submitted in the same way.",
    });
  let known = []; // [{job, curves}]

  function compare() {
    const facts = known.map(({job}) => factsOf(job)),
      all = [...new Set(facts.flatMap(one => [...one.keys()]))];
    const rows = all.map(name => {
      const values = facts.map(one => one.get(name) ?? DASH);
      return {name, values, isDifferent: new Set(values).size > 1};
    });
    table.update(onlyDifferent.checked ? rows.filter(row => row.isDifferent) : rows);
  }

  function figure(name, title, index) {
    if (!figures.has(name)) {
      const made = new Figure({title, hint: OWN.some(([own]) => own === name) ? "" : "logged by the scripts"});
      figures.set(name, made);
      charts.insertBefore(made.element, charts.children[index] ?? null);
    }
    return figures.get(name);
  }

  function draw() {
    const [by, , xOf, unit] = AXES.find(([value]) => value === axis.value);
    const logged = [...new Set(known.flatMap(({curves}) => Object.keys(curves.metrics)))]
      .sort((a, b) => b.endsWith("loss") - a.endsWith("loss") || byName(a, b))
      .slice(0, MOST_METRICS);
    const wanted = [...logged.map(name => [`metric/${name}`, name, "linear", curves => curves.metrics[name]]),
      ...OWN.map(([name, title, shape]) => [name, title, shape, curves => curves[name]])];
    wanted.forEach(([name, title, shape, read], index) => {
      const shown = known
        .map(({job, curves}, place) => ({job, curves, place, y: read(curves)?.map(value => (isOdd(value) ? null : value))}))
        .filter(({y}) => y && hasNumbers(y));
      const isWhole = ["num_replicas", "total_batch"].includes(name),
        isShare = ["efficiency", "progress"].includes(name);
      figure(name, title.slice(0, 80), index).update(
        shown.length
          ? {
              data: shown.map(({job, curves, place, y}) =>
                line(y.map((_, at) => xOf(curves, at)), y, job.name, `@${place}`, {
                  connectgaps: true,
                  line: {shape, dash: DASHES[place]},
                }),
              ),
              layout: layout({
                xaxis: {title: unit, rangemode: "tozero", isTight: true, ...(by === "progress" ? {show: value => share(value)} : {})},
                yaxis: isWhole
                  ? wholeAxis(shown.flatMap(({y}) => y))
                  : {rangemode: name.startsWith("metric/") ? "normal" : "tozero", ...(isShare ? {show: value => share(value)} : {})},
              }),
            }
          : null,
      );
    });
  }

  let timer = null;
  async function load() {
    clearTimeout(timer);
    try {
      known = await Promise.all(
        names.map(async name => {
          const path = `/jobs/${encodeURIComponent(name)}`;
          const [job, curves] = await Promise.all([api(path, {signal}), api(`${path}/curves?points=400`, {signal})]);
          noteSequence(job);
          return {job, curves};
        }),
      );
      fill(
        key,
        known.map(({job}, place) =>
          h("span", {class: "key"}, curveMark(place), link(job.name), stateChip(job.state)),
        ),
      );
      compare();
      draw();
    } catch (error) {
      if (error.name === "AbortError") return;
      toast(error.message);
      if (error.status === 404) return; // it will not come back
    }
    timer = setTimeout(() => (document.hidden ? null : load()), EVERY_MS);
  }

  const element = h(
    "div",
    {},
    h("p", {class: "crumbs"}, h("a", {href: "#/jobs"}, "Jobs"), " / "),
    h("div", {class: "section-head"}, h("h1", {}, "Jobs side by side"), axis),
    names.length < 2
      ? h("p", {class: "card pad"}, "Choose two to six jobs in the list of jobs, then “Compare”.")
      : [
          key,
          charts,
          h(
            "section",
            {},
            h(
              "div",
              {class: "section-head"},
              h("h2", {}, "How they differ"),
              h("label", {class: "check"}, onlyDifferent, "Only what differs"),
            ),
            table.element,
          ),
        ],
  );
  if (names.length > 1) load();
  return {
    title: "Jobs side by side",
    element,
    update(changes) {
      if (changes.isFull && names.length > 1) load();
    },
    remove() {
      clearTimeout(timer);
      leaving.abort();
      for (const one of figures.values()) one.remove();
    },
  };
}

/* Without the job's own colour, which is another one than its curves have here. */
const link = name => h("a", {href: `#/jobs/${encodeURIComponent(name)}`}, name);

/* A short line as the curves have it: its colour here is by place, not the job's own, so that six always differ. */
const curveMark = place =>
  h("span", {
    class: "curve-mark",
    "aria-hidden": "true",
    style: {"border-top-color": `var(--c${place})`, "border-top-style": ["solid", "dashed", "dotted"][place % 3]},
  });
