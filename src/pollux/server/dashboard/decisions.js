/* The page of decisions: what each round changed and why, in words. */

import {api} from "./api.js";
import {Figure, layout, line} from "./charts.js";
import {DataTable, KeyedList, fill, h, set, setText, toast} from "./dom.js";
import {DASH, count, duration, number, plural, share, time, wallClock} from "./format.js";
import {jobLink} from "./paint.js";
import {addRounds, roundsNewestFirst} from "./store.js";

const FIRST = 25,
  MORE = 100,
  AT_FIRST = 500;
const sign = value => `${value > 0 ? "+" : "−"}${share(Math.abs(value))}`;

function gapOf(round) {
  if (typeof round.gap === "number") return round.gap;
  return round.upper_bound ? Math.max(0, 1 - round.fitness / round.upper_bound) : null;
}

const held = shares => shares.reduce((sum, [, num]) => sum + num, 0);

const detailTable = () =>
  new DataTable({
    columns: [
      {key: "job", label: "Job", value: one => one.job, mark: one => one.job, cell: one => jobLink(one.job)},
      {
        key: "replicas",
        label: "Replicas",
        class: "left",
        isDown: true,
        value: one => one.after,
        cell: one =>
          one.before !== one.after ? `${one.before} → ${one.after}` : `${one.after}${one.hasMoved ? ", moved" : ""}`,
      },
      {
        key: "speedup",
        label: "Speedup",
        class: "left",
        isDown: true,
        value: one => one.speedup_after,
        cell: one =>
          one.speedup_before === one.speedup_after
            ? number(one.speedup_after)
            : `${number(one.speedup_before)} → ${number(one.speedup_after)}`,
      },
      {
        key: "factor",
        label: "Cost of moving",
        title: "The speedup counts by this factor if the allocation changes",
        value: one => one.move_factor,
        cell: one =>
          one.move_factor === null || one.move_factor === undefined ? DASH : `× ${number(one.move_factor)}`,
      },
      {
        key: "options",
        label: "Considered",
        class: "left words",
        cell: one =>
          (one.option_replicas ?? [])
            .slice(0, 12)
            .map((num, index) => `${num}: ${number(one.option_speedups[index])}`)
            .join(", ") || DASH,
      },
      {key: "note", label: "Note", class: "left words", cell: one => one.note},
    ],
    keyOf: one => one.job,
    step: 50,
    label: "Jobs of the round",
    empty: "Decisions about single jobs are no longer kept for this round.",
  });

function roundCard(round) {
  const when = h("time"),
    trigger = h("span", {class: "muted"}),
    facts = h("div", {class: "round-facts"}),
    words = h("ul", {class: "round-words"});
  const box = h("div", {hidden: true});
  const more = h(
    "button",
    {type: "button", class: "ghost small", "aria-expanded": "false", onclick: toggle},
    "Details",
  );
  let isLoaded = false;

  async function toggle() {
    box.hidden = !box.hidden;
    set(more, {"aria-expanded": String(!box.hidden)});
    if (box.hidden || isLoaded) return;
    fill(box, h("p", {class: "muted"}, "Loading …"));
    try {
      const told = await api(`/rounds/${round.id}`),
        table = detailTable();
      isLoaded = true;
      table.update(
        told.jobs.map(job => ({
          ...job,
          before: held(job.before),
          after: held(job.after),
          hasMoved: JSON.stringify(job.before) !== JSON.stringify(job.after),
        })),
      );
      fill(
        box,
        h(
          "p",
          {class: "muted"},
          `Round ${told.id}: ${plural(told.num_jobs, "job")} on ${plural(told.num_slots, "slot")}`,
          told.nodes && ` of ${plural(told.nodes.length, "node")}`,
          `; fitness ${number(told.fitness_before)} → ${number(told.fitness)}, upper bound ${number(told.upper_bound)}.`,
        ),
        table.element,
      );
    } catch (error) {
      fill(box, h("p", {class: "muted"}, error.message));
    }
  }

  function update(told) {
    setText(when, time(told.at));
    const date = new Date(1000 * told.at);
    set(when, {datetime: date.toISOString(), title: date.toLocaleString()});
    setText(trigger, told.trigger);
    const change = told.fitness !== null && told.fitness_before ? told.fitness / told.fitness_before - 1 : null;
    const shown = [
      ["took", duration(told.decision_s)],
      [
        "fitness",
        `${number(told.fitness)}${change && Math.abs(change) >= 0.0005 && change < 10 ? ` (${sign(change)})` : ""}`,
      ],
      ["gap", gapOf(told) === null ? DASH : share(gapOf(told), 1)],
      ["jobs", count(told.num_jobs)],
      ["slots", count(told.num_slots)],
    ];
    fill(
      facts,
      shown.map(([name, value]) => h("span", {}, h("small", {}, name), " ", value)),
    );
    const sentences = told.error ? [`failed: ${told.error}`] : told.words?.length ? told.words : ["nothing changed"];
    fill(
      words,
      sentences.map(sentence => h("li", {}, sentence)),
    );
    element.classList.toggle("quiet", isQuiet(told));
    element.classList.toggle("bad", Boolean(told.error));
  }

  const element = h(
    "article",
    {class: "card round"},
    h("div", {class: "round-head"}, when, trigger, more),
    words,
    facts,
    box,
  );
  let shown = null;
  return {
    element,
    update: told => {
      if (told !== shown) {
        shown = told;
        update(told);
      }
    },
  };
}

const isQuiet = round => !round.error && !round.changes.length;

export function decisionsPage() {
  const leaving = new AbortController();
  const figure = new Figure({
    title: "Fitness and its upper bound",
    hint: "what the policy makes the most of",
    height: 240,
    isWide: true,
    empty: "No decision yet.",
  });
  const gaps = new Figure({
    title: "Gap and time taken",
    hint: "gap to the bound; seconds per decision",
    height: 240,
    isWide: true,
    empty: "No decision yet.",
  });
  const quiet = h("input", {type: "checkbox", id: "quiet", onchange: show});
  const list = h("div", {class: "rounds"}),
    cards = new KeyedList(list, roundCard),
    empty = h("p", {class: "empty"});
  const more = h(
    "button",
    {
      type: "button",
      class: "ghost more",
      onclick: async () => {
        limit += MORE;
        if (!hasAll)
          try {
            addRounds((await api("/rounds?limit=1000")).rounds);
            hasAll = true;
          } catch (error) {
            toast(error.message);
          }
        show();
      },
    },
    "Show earlier rounds",
  );
  let limit = FIRST,
    hasAll = false;

  function show() {
    const rounds = roundsNewestFirst(),
      all = rounds.filter(round => quiet.checked || !isQuiet(round)),
      chosen = all.slice(0, limit);
    cards.update(chosen, round => round.id);
    empty.hidden = chosen.length > 0;
    setText(
      empty,
      rounds.length
        ? "The last rounds changed nothing. Tick the box to see them."
        : "No decision has been made yet. The first comes with the first job.",
    );
    more.hidden = all.length <= limit && (hasAll || rounds.length < AT_FIRST);
    draw(rounds);
  }

  function draw(rounds) {
    const known = rounds.filter(round => round.fitness !== null && round.fitness !== undefined).reverse();
    if (!known.length) {
      figure.update(null);
      gaps.update(null);
      return;
    }
    const x = known.map(round => wallClock(round.at)),
      last = known.at(-1),
      legend = {showlegend: true};
    figure.update(
      {
        data: [
          line(
            x,
            known.map(round => round.upper_bound),
            "upper bound",
            "@1",
            {line: {dash: "dash", shape: "hv"}},
          ),
          line(
            x,
            known.map(round => round.fitness),
            "fitness",
            "@0",
            {line: {shape: "hv"}},
          ),
        ],
        layout: layout(legend),
      },
      number(last.fitness),
    );
    gaps.update(
      {
        data: [
          line(x, known.map(gapOf), "gap", "@3"),
          line(
            x,
            known.map(round => round.decision_s),
            "time taken",
            "@5",
            {yaxis: "y2", line: {dash: "dot"}},
          ),
        ],
        layout: layout({
          ...legend,
          yaxis: {show: value => share(value, 1), range: [0, Math.max(0.01, 1.1 * Math.max(...known.map(gapOf)))]},
          yaxis2: {rangemode: "tozero", show: duration},
        }),
      },
      `${share(gapOf(last), 1)}, ${duration(last.decision_s)}`,
    );
  }

  /* Rounds that changed something may be long past: the stream begins with the last ones only. */
  async function load() {
    try {
      addRounds((await api(`/rounds?limit=${AT_FIRST}`, {signal: leaving.signal})).rounds);
    } catch (error) {
      if (error.status) toast(error.message);
    }
    if (!leaving.signal.aborted) show();
  }

  show();
  load();
  const element = h(
    "div",
    {},
    h("h1", {}, "Decisions"),
    h(
      "p",
      {class: "muted"},
      "In every round the policy looks at all jobs and may move slots between them. Newest first.",
    ),
    h("div", {class: "grid charts"}, figure.element, gaps.element),
    h(
      "div",
      {class: "section-head"},
      h("h2", {}, "Rounds"),
      h("label", {class: "check", for: "quiet"}, quiet, " also those that changed nothing"),
    ),
    list,
    empty,
    more,
  );
  return {
    title: "Decisions",
    element,
    update: changes => {
      if (changes.isFull)
        load(); // more may have been decided meanwhile than the stream begins with
      else if (changes.rounds) show();
    },
    remove() {
      leaving.abort();
      figure.remove();
      gaps.remove();
    },
  };
}
