/* The page of simulations: what policies make of a workload, side by side, as `pollux compare --publish` sends it. */

import {api} from "./api.js";
import {Figure, bars, layout} from "./charts.js";
import {DataTable, KeyedList, confirmDialog, fill, h, toast} from "./dom.js";
import {DASH, describeField, duration, time} from "./format.js";

const AVERAGE = "avg_jct_s"; // as our own reports call it
const MOST_CHOSEN = 6;

const HOW = [
  [
    "Compare policies on a workload",
    "pollux compare --workload builtin:small --policy pollux --policy tiresias --publish",
  ],
  ["Replay what this server has recorded under other policies", "pollux replay --publish"],
  ["Simulate one policy", "pollux simulate --workload builtin:small --policy pollux --publish"],
];

/* The name of the average completion time among a summary's numbers; undefined: it has none. */
function averageOf(rows) {
  const names = rows.flatMap(row => Object.keys(row).filter(name => typeof row[name] === "number"));
  return names.includes(AVERAGE) ? AVERAGE : names.find(name => /jct/.test(name));
}

/* The least, if there is anything to choose. */
const bestOf = values => (Math.min(...values) < Math.max(...values) ? Math.min(...values) : null);

/* Until it is known who looks, all is offered; the server refuses what may not be. */
function mayDelete(one) {
  const {role, user} = document.body.dataset;
  return !role || role === "admin" || user === one.owner;
}

export function simulationsPage() {
  const leaving = new AbortController(),
    {signal} = leaving;
  const list = h("div", {class: "simulations"}),
    cards = new KeyedList(list, makeCard),
    result = h("div"),
    figure = new Figure({title: "Average job completion time", hint: "shorter is better", height: 300, isWide: true});
  const report = h("div"),
    empty = h(
      "div",
      {class: "card pad", hidden: true},
      h("h2", {}, "No simulation has been published yet"),
      h("p", {}, "Any of these sends its report here:"),
      h(
        "dl",
        {class: "how"},
        HOW.map(([what, command]) => [h("dt", {}, what), h("dd", {}, h("code", {}, command))]),
      ),
    );
  const element = h(
    "div",
    {},
    h("h1", {}, "Simulations"),
    h(
      "p",
      {class: "muted"},
      "Simulations use the same scheduler as this cluster, with the policies that you choose.",
    ),
    empty,
    list,
    result,
    report,
  );
  const chosen = new Set();
  let known = null; // until the server has told

  async function load() {
    let told;
    try {
      told = (await api("/simulations", {signal})).simulations;
    } catch (error) {
      if (error.name !== "AbortError" && error.status) toast(error.message);
      return;
    }
    if (known && JSON.stringify(told) === JSON.stringify(known)) return;
    known = told;
    const ids = new Set(known.map(one => one.id));
    for (const id of chosen) if (!ids.has(id)) chosen.delete(id);
    if (!chosen.size && known.length) chosen.add(known[0].id);
    show();
  }

  async function remove(one) {
    if (!(await confirmDialog({title: "Delete this simulation?", text: one.title, action: "Delete it"}))) return;
    try {
      await api(`/simulations/${encodeURIComponent(one.id)}`, {method: "DELETE"});
      chosen.delete(one.id);
    } catch (error) {
      toast(error.message);
    }
    await load();
  }

  function makeCard(one) {
    const box = h("input", {
      type: "checkbox",
      onchange: () => {
        if (box.checked) chosen.add(one.id);
        else chosen.delete(one.id);
        if (chosen.size > MOST_CHOSEN) chosen.delete(chosen.values().next().value);
        show();
      },
    });
    const card = h(
      "div",
      {class: "card simulation"},
      h(
        "label",
        {class: "check"},
        box,
        h("span", {}, h("strong", {}, one.title), h("small", {class: "muted"}, ` ${one.kind} · ${time(one.at)} · ${one.owner}`)),
      ),
      h("code", {class: "command"}, one.command),
      h(
        "div",
        {class: "actions"},
        h("a", {href: one.report_url, target: "_blank", rel: "noopener noreferrer"}, "Open the report"),
        mayDelete(one) && h("button", {type: "button", class: "ghost small", onclick: () => remove(one)}, "Delete"),
      ),
    );
    return {
      element: card,
      update: () => {
        box.checked = chosen.has(one.id);
      },
    };
  }

  function show() {
    empty.hidden = known.length > 0;
    cards.update(known, one => one.id);
    const shown = known.filter(one => chosen.has(one.id));
    showSummary(shown);
    showReport(shown[0]);
  }

  function showSummary(shown) {
    const rows = shown.flatMap(one => (one.summary ?? []).map(row => ({...row, from: one})));
    if (!rows.length) {
      fill(result);
      figure.update(null);
      return;
    }
    const names = [
      ...new Set(
        rows.flatMap(row => Object.keys(row).filter(name => typeof row[name] === "number")), // known of one of them
      ),
    ];
    const isBest = (row, name) =>
      /jct|makespan/.test(name) &&
      row[name] !== null &&
      row[name] === bestOf(rows.filter(one => one.workload === row.workload).map(one => one[name] ?? Infinity));
    const columns = [
      {key: "policy", label: "Policy", value: row => row.policy, cell: row => String(row.policy ?? DASH)},
      {
        key: "workload",
        label: "Workload",
        class: "left",
        value: row => row.workload,
        cell: row => String(row.workload ?? DASH),
      },
      ...(shown.length > 1
        ? [
            {
              key: "from",
              label: "Simulation",
              class: "left words",
              value: row => row.from.title,
              cell: row => row.from.title,
            },
          ]
        : []),
      ...names.map(name => {
        const {label, show} = describeField(name);
        return {
          key: name,
          label,
          value: row => row[name],
          mark: row => `${row[name]}`,
          cell: row => h("span", {class: isBest(row, name) ? "best" : null}, show(row[name])),
        };
      }),
    ];
    const table = new DataTable({columns, keyOf: row => rows.indexOf(row), label: "Summary", step: 200});
    table.update(rows);
    fill(result, h("h2", {}, "Side by side"), table.element, figure.element);
    drawBars(rows, shown);
  }

  function drawBars(rows, shown) {
    const name = averageOf(rows);
    if (!name) {
      figure.update(null);
      return;
    }
    const workload = row => String(row.workload ?? DASH),
      policyOf = row => String(row.policy ?? DASH);
    const label = row => (shown.length > 1 ? `${workload(row)} · ${row.from.title}` : workload(row)).slice(0, 60);
    const policies = [...new Set(rows.map(policyOf))],
      longest = Math.max(...rows.map(row => (typeof row[name] === "number" ? row[name] : 0)));
    const [unit, unitS] = longest < 120 ? ["seconds", 1] : longest < 7200 ? ["minutes", 60] : ["hours", 3600];
    const patterns = ["solid", "stripes", "dots", "rungs"];
    const data = policies.map((policy, index) => {
      const own = rows.filter(row => policyOf(row) === policy);
      return bars(
        own.map(label),
        own.map(row => (typeof row[name] === "number" ? row[name] / unitS : null)),
        policy,
        {color: `@${index % 6}`, pattern: patterns[Math.floor(index / 6) % patterns.length]},
        {text: own.map(row => duration(row[name]))},
      );
    });
    figure.update({
      data,
      layout: layout({
        xaxis: {type: "category"},
        yaxis: {title: unit, range: [0, (1.12 * longest) / unitS || 1], nticks: 6},
        showlegend: true,
      }),
    });
  }

  function showReport(one) {
    if (report.dataset.id === (one?.id ?? "")) return;
    report.dataset.id = one?.id ?? "";
    // Its address cannot be guessed, and the server lets it do nothing but draw.
    fill(
      report,
      one && [
        h("h2", {}, "The full report"),
        h("iframe", {
          class: "report card",
          src: one.report_url,
          title: `Report: ${one.title}`,
          sandbox: "allow-scripts",
          loading: "lazy",
          referrerpolicy: "no-referrer",
        }),
      ],
    );
  }

  load();
  addEventListener("focus", load, {signal}); // back from the terminal where one was published
  return {
    title: "Simulations",
    element,
    update: changes => {
      if (changes.isFull) load();
    },
    remove() {
      leaving.abort();
      figure.remove();
    },
  };
}
