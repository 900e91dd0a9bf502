/* The pages of studies: all of them, and one with its trials, its best value over time and cost, and its curves. */

import {api, post} from "./api.js";
import {Figure, bars, dots, layout, line} from "./charts.js";
import {DataTable, confirmDialog, fill, h, setText, toast} from "./dom.js";
import {DASH, asNumber, duration, number, plural, share, time, wallClock} from "./format.js";
import {jobLink} from "./paint.js";

const EVERY_MS = 2000,
  MOST_CURVES = 60;
const HOW = "pollux tune train.py --space lr=log:1e-4..1e-1 --metric val_loss --trials 20";

const paramText = params =>
  Object.entries(params)
    .map(([name, value]) => `${name}=${typeof value === "number" ? number(value, 4) : value}`)
    .join("  ");
const countsText = study =>
  `${Object.entries(study.counts)
    .map(([state, count]) => `${count} ${state}`)
    .join(", ") || "none yet"} of ${study.num_trials}`;
const bestText = one =>
  one.front.length
    ? `a front of ${plural(one.front.length, "trial")}`
    : one.best_value === null ? DASH : `${one.metric} ${number(one.best_value, 5)}`;
const limitText = limit => `${limit.name}${limit.relation}${number(limit.bound, 4)}`;
/* Metrics beside the first one, and what has a limit. */
const watchedOf = study =>
  [...new Set([...study.further, ...study.limits].map(one => one.name))].filter(name => name !== study.metric);
const studyLink = name => h("a", {href: `#/studies/${encodeURIComponent(name)}`}, name);

/* Asks again and again while the page is there. */
function repeatedly(ask, show) {
  const leaving = new AbortController();
  let timer = null;
  const turn = async () => {
    try {
      show(await ask(leaving.signal));
    } catch (error) {
      if (error.name !== "AbortError" && error.status) toast(error.message);
    }
    if (!leaving.signal.aborted) timer = setTimeout(turn, EVERY_MS);
  };
  turn();
  return () => {
    leaving.abort();
    clearTimeout(timer);
  };
}

export function studiesPage() {
  const table = new DataTable({
    label: "Studies",
    empty: `No study yet. Begin one: ${HOW}`,
    keyOf: study => study.name,
    columns: [
      {key: "name", label: "Study", value: one => one.name, mark: one => one.name, cell: one => studyLink(one.name)},
      {key: "state", class: "left", label: "State", value: one => one.state, cell: one => one.state},
      {key: "trials", class: "left", label: "Trials", cell: countsText},
      {key: "best", class: "left", label: "Best", cell: bestText},
      {key: "params", class: "left words", label: "Parameters", cell: one => paramText(one.best_params)},
      {key: "cost", label: "Slot time", title: "Slots that it held × time", value: one => one.slot_s, cell: one => duration(one.slot_s)},
    ],
  });
  const stop = repeatedly(
    signal => api("/studies", {signal}),
    told => table.update(told.studies),
  );
  return {
    title: "Studies",
    element: h("div", {}, h("h1", {}, "Studies"), h("div", {class: "card"}, table.element)),
    update() {},
    remove: stop,
  };
}

export function studyPage({name}) {
  const path = `/studies/${encodeURIComponent(name)}`;
  const about = h("p", {class: "reason"}),
    storage = h("code", {class: "command"}),
    notes = h("ul", {class: "plain"}),
    figures = {
      front: new Figure({title: "Front", hint: "trials that no other one beats in all metrics", height: 320, isWide: true}),
      time: new Figure({title: "Best so far", hint: "running trials too, over time"}),
      cost: new Figure({title: "Best so far", hint: "running trials too, over slot-hours"}),
      curves: new Figure({title: "Curves by trial", hint: "over their progress; larger dots: more slots", height: 320, isWide: true}),
      parallel: new Figure({title: "Parameters of all trials", hint: "by value", height: 320, isWide: true}),
      importance: new Figure({title: "Importance", hint: "by PED-ANOVA", empty: "Needs eight trials that are done."}),
      rungs: new Figure({title: "Cost by rung", hint: "slot-seconds of trials that ended there"}),
    };
  const card = h("div", {class: "card"});
  let trials = null; // its columns follow from the study's metrics
  const button = h("button", {type: "button", class: "ghost", hidden: true, onclick: () => change()});
  let known = null;

  async function change() {
    const isRunning = known.state === "running";
    const told = isRunning
      ? {title: `Stop ${name}?`, text: "Its trials end. Those that are not done begin again when it is resumed.", action: "Stop it"}
      : {title: `Resume ${name}?`, text: "Trials that were stopped begin again.", action: "Resume it"};
    if (!(await confirmDialog(told))) return;
    try {
      await post(`${path}/${isRunning ? "stop" : "resume"}`);
    } catch (error) {
      toast(error.message);
    }
  }

  function show([study, told]) {
    known = study;
    setText(about, [`${study.state}${study.reason ? `: ${study.reason}` : ""}`, countsText(study),
      study.front.length ? `front: ${study.front.join(", ")}` : study.best_value === null ? "no best value yet"
        : `best ${study.metric} ${number(study.best_value, 5)} of trial ${study.best_trial}: ${paramText(study.best_params)}`,
      ...(study.limits.length ? [`limits ${study.limits.map(limitText).join(", ")}`] : []),
      `begun ${time(study.created_at)}`].join(" · "));
    setText(storage, `Optuna reads it too: ${study.storage}`);
    fill(notes, study.warnings.map(text => h("li", {}, text)));
    button.hidden = !["running", "stopped"].includes(study.state);
    setText(button, study.state === "running" ? "Stop" : "Resume");
    trials ??= trialsTable(study);
    if (!trials.element.isConnected) fill(card, trials.element);
    trials.update([...study.trials].reverse());
    drawStudy(figures, study, told.curves);
  }

  const stop = repeatedly(
    signal => Promise.all([api(path, {signal}), api(`${path}/curves`, {signal})]),
    show,
  );
  return {
    title: `Study ${name}`,
    element: h(
      "div",
      {},
      h("p", {class: "crumbs"}, h("a", {href: "#/studies"}, "Studies"), " / "),
      h("div", {class: "section-head"}, h("h1", {}, name), button),
      about,
      storage,
      notes,
      h("div", {class: "grid charts"}, Object.values(figures).map(figure => figure.element)),
      h("h2", {}, "Trials"),
      card,
    ),
    update() {},
    remove() {
      stop();
      for (const figure of Object.values(figures)) figure.remove();
    },
  };
}

function trialsTable(study) {
  const values = watchedOf(study).map(name => ({
    key: `value-${name}`, label: name, value: one => asNumber(one.values[name]), cell: one => (name in one.values ? number(one.values[name], 5) : DASH),
  }));
  const front = {key: "front", class: "left", label: "Front", title: "No other trial beats it in all metrics", cell: one => (study.front.includes(one.number) ? "yes" : DASH)};
  const limits = {key: "limits", class: "left", label: "Limits", cell: one => (one.keeps_limits === null ? DASH : one.keeps_limits ? "kept" : "broken")};
  return new DataTable({
    label: "Trials",
    empty: "No trial yet.",
    keyOf: one => one.number,
    columns: [
      {key: "number", label: "Trial", value: one => one.number, mark: one => one.job, cell: one => jobLink(one.job)},
      {key: "state", class: "left", label: "State", value: one => one.state, cell: one => one.state},
      {key: "value", label: study.metric, value: one => asNumber(one.value), cell: one => (one.value === null ? DASH : number(one.value, 5))},
      ...values,
      ...(study.further.length ? [front] : []),
      ...(study.limits.length ? [limits] : []),
      {key: "progress", label: "Progress", value: one => one.progress, cell: one => share(one.progress)},
      {key: "slots", label: "Slots", value: one => one.num_replicas, cell: one => (one.num_replicas ? String(one.num_replicas) : DASH)},
      {key: "chance", label: "Chance", title: "How likely it is still to become the best", value: one => one.chance, cell: one => share(one.chance)},
      {key: "cost", label: "Slot time", title: "Slots that it held × time", value: one => one.slot_s, cell: one => duration(one.slot_s)},
      {key: "params", class: "left words", label: "Parameters", cell: one => paramText(one.params)},
      {key: "reason", class: "left words", label: "Why", cell: one => one.reason},
    ],
  });
}

function drawStudy(figures, study, curves) {
  const best = study.improvements,
    values = best.map(one => one.value),
    step = {line: {shape: "hv"}},
    isFront = study.further.length > 0;
  figures.front.element.hidden = !isFront;
  figures.time.element.hidden = figures.cost.element.hidden = isFront;
  if (isFront) figures.front.update(frontOf(study), plural(study.front.length, "trial"));
  const drawn = (x, own) => (best.length ? {data: [line(x, values, study.metric, "@0", step)], layout: layout(own)} : null);
  // A running trial's value counts while it stands, so the curve may have been lower than what trials ended with.
  const newest = study.best_value === null ? DASH : `best now ${number(study.best_value, 5)}`;
  figures.time.update(drawn(best.map(one => wallClock(one.at)), {}), newest);
  figures.cost.update(drawn(best.map(one => one.slot_s / 3600), {xaxis: {isTight: true}}), newest);
  const shown = Object.entries(curves).slice(-MOST_CURVES);
  figures.curves.update(
    shown.length
      ? {
          data: shown.map(([trial, points], index) =>
            line(points.map(point => point.progress), points.map(point => asNumber(point.value)), `trial ${trial}`, `@${index % 8}`, {
              mode: "lines+markers",
              marker: {color: `@${index % 8}`, size: points.map(point => 4 + 2 * Math.min(point.num_replicas ?? 0, 8))},
              tell: at => `${number(points[at].value, 4)}${points[at].num_replicas ? `, ${plural(points[at].num_replicas, "slot")}` : ""}`,
            }),
          ),
          layout: layout({xaxis: {show: value => share(value), rangemode: "tozero", isTight: true}, hover: "point"}),
        }
      : null,
    plural(shown.length, "trial"),
  );
  figures.parallel.update(parallel(study));
  const names = Object.keys(study.importance).reverse();
  figures.importance.update(
    names.length
      ? {
          data: [bars(names.map(one => study.importance[one]), names, "", {color: "@0"}, {orientation: "h"})],
          layout: layout({xaxis: {show: value => share(value), rangemode: "tozero"}, yaxis: {type: "category"}}),
        }
      : null,
  );
  const rungs = study.rungs.filter(one => one.num_trials);
  figures.rungs.update(
    rungs.length
      ? {
          data: [bars(rungs.map(one => `${share(one.at_progress)}, ${plural(one.num_trials, "trial")}`), rungs.map(one => one.slot_s), "", {color: "@0"})],
          layout: layout({xaxis: {type: "category"}, yaxis: {show: duration}}),
        }
      : null,
  );
}

/* The first two metrics of each trial, by whether it is on the front and keeps the limits. */
function frontOf(study) {
  const other = study.further[0].name,
    shown = study.trials.filter(one => typeof one.value === "number" && typeof one.values[other] === "number");
  if (!shown.length) return null;
  const isBest = new Set(study.front),
    kindOf = one => (one.keeps_limits === false ? "breaks a limit" : isBest.has(one.number) ? "on the front" : "others");
  const group = (name, color, symbol) => {
    const own = shown.filter(one => kindOf(one) === name);
    return dots(own.map(one => one.value), own.map(one => one.values[other]), name, {color, symbol, size: 9}, {
      tell: index => `trial ${own[index].number}: ${paramText(own[index].params)}; ${study.metric} ${number(own[index].value, 5)}, ${other} ${number(own[index].values[other], 5)}`,
    });
  };
  return {
    data: [group("on the front", "@0", "circle"), group("others", "@muted", "diamond"), group("breaks a limit", "@3", "x")].filter(
      trace => trace.x.length,
    ),
    layout: layout({xaxis: {title: study.metric}, yaxis: {title: other, rangemode: "normal"}, hover: "point", showlegend: true}),
  };
}

/* Parallel coordinates: a line for each trial that has a value, each parameter from its least to its greatest. Words
   become their place in a list. */
function parallel(study) {
  const done = study.trials.filter(one => typeof one.value === "number").slice(-MOST_CURVES);
  if (done.length < 2) return null;
  const names = [...new Set(done.flatMap(one => Object.keys(one.params)))];
  const columns = [...names.map(name => done.map(one => one.params[name] ?? null)), done.map(one => one.value)],
    places = columns.map(placesOf);
  return {
    data: done.map((one, index) => ({
      ...line([...names, study.metric], places.map(column => column[index]), `trial ${one.number}`, `@${index % 8}`),
      tell: at => (at < names.length ? `${names[at]} ${one.params[names[at]] ?? DASH}` : `${study.metric} ${number(one.value, 5)}`),
    })),
    layout: layout({
      xaxis: {type: "category"},
      yaxis: {isBare: true, range: [-0.14, 1.14]},
      hover: "point",
      ends: Object.fromEntries([...names, study.metric].map((name, at) => [name, ends(columns[at])])),
    }),
  };
}

/* What stands at the foot and at the top of an axis. */
function ends(values) {
  const known = values.filter(value => value !== null);
  if (known.every(value => typeof value === "number")) return [Math.min(...known), Math.max(...known)].map(value => number(value, 4));
  const words = [...new Set(values.map(String))].sort();
  return [words[0], words.at(-1)];
}

/* Values as numbers from 0, the least, to 1. */
function placesOf(values) {
  const isNumeric = values.every(value => typeof value === "number"),
    words = [...new Set(values.map(String))].sort();
  const numbers = isNumeric ? values : values.map(value => words.indexOf(String(value)));
  const low = Math.min(...numbers),
    span = Math.max(...numbers) - low || 1;
  return numbers.map(value => (value - low) / span);
}
