/* The page of one job: what it is and has, how it trains, its performance model, why it has what it has, its output. */

import {api, post} from "./api.js";
import {DataTable, confirmDialog, fill, h, set, setText, toast} from "./dom.js";
import {
  DASH,
  FINAL,
  ago,
  batchParts,
  count,
  duration,
  gpuParts,
  number,
  plural,
  quoted,
  replicaRange,
  share,
  slotHours,
  time,
  withError,
} from "./format.js";
import {actOn, changeLimits, isHeld} from "./job_actions.js";
import {jobFigures} from "./job_figures.js";
import {progressBar, stateChip} from "./job_columns.js";
import {LogView} from "./logs.js";
import {isWanted, toggleNotice} from "./notices.js";
import {swatch} from "./paint.js";
import {noteSequence, now, store} from "./store.js";
import {openSubmit} from "./submit.js";
import {Tabs} from "./tabs.js";

const EVERY_MS = 2000,
  RETRY_MS = 10000,
  MODEL_EVERY_MS = 8000,
  FORECAST_EVERY_MS = 20000,
  SILENT_S = 30; // of reports without a metric

/* Facts with their names; made once, then only their text is set. Null: a fact that this job does not have. */
class Facts {
  constructor() {
    this.element = h("dl", {class: "facts card"});
    this.rows = new Map();
  }

  update(pairs) {
    for (const [name, value, title] of pairs) {
      let row = this.rows.get(name);
      if (!row) {
        row = {value: h("dd"), box: null};
        row.box = h("div", {title}, h("dt", {}, name), row.value);
        this.rows.set(name, row);
        this.element.append(row.box);
      }
      row.box.hidden = value === null;
      if (value !== null) setText(row.value, value);
    }
  }
}

/* What a start or resize under way waits for, and for how long already. */
function phaseText(job) {
  if (!job.phase) return "";
  return job.phase_since === null ? job.phase : `${job.phase} (for ${duration(Math.max(now() - job.phase_since, 0))})`;
}

const nodesIn = shares => (shares.length ? shares.map(([node, num]) => `${num} on ${node}`).join(", ") : "none");

const slotOf = one => store.nodes.get(one.node)?.reading?.slots.find(slot => slot.slot === one.slot);

function gpuWords(slot) {
  if (!slot) return DASH;
  const {busy, memory, power, temperature} = gpuParts([slot]);
  return [busy, memory, power, temperature].join(" · ");
}

const replicaTable = () =>
  new DataTable({
    columns: [
      {key: "rank", label: "Rank", value: one => one.rank, cell: one => (one.rank === null ? DASH : String(one.rank))},
      {key: "id", label: "Replica", class: "left", cell: one => one.replica_id},
      {key: "node", label: "Node", class: "left", value: one => one.node, cell: one => one.node},
      {key: "slot", label: "Slot", value: one => one.slot, cell: one => String(one.slot)},
      {key: "gpu", label: "GPU", class: "left", cell: one => gpuWords(slotOf(one))},
      {key: "pid", label: "Process", cell: one => (one.pid === null ? DASH : String(one.pid))},
      {key: "state", label: "State", class: "left", cell: one => one.state},
    ],
    keyOf: one => one.replica_id,
    sort: {key: "rank", isDown: false},
    label: "Replicas",
    empty: "It has no replicas now.",
  });

const decisionTable = () =>
  new DataTable({
    columns: [
      {key: "at", label: "When", cell: one => time(one.at)},
      {key: "change", label: "Replicas", class: "left", cell: one => `${one.before} → ${one.after}`},
      {
        key: "speedup",
        label: "Speedup",
        class: "left",
        cell: one => `${number(one.speedup_before)} → ${number(one.speedup_after)}`,
      },
      {
        key: "fitness",
        label: "Fitness",
        title: "Of the whole cluster, after the decision",
        cell: one => number(one.fitness),
      },
      {key: "trigger", label: "Trigger", class: "left words", cell: one => one.trigger},
      {key: "note", label: "Note", class: "left words", cell: one => one.note},
    ],
    keyOf: one => `${one.round}/${one.at}`,
    step: 20,
    label: "Decisions",
    empty: "No decision has changed it.",
  });

/* Not a note of what happened to it while it stayed in its state. */
const isMove = one => Boolean(one.target) && one.source !== one.target;

/* States it came to, and what its training decided (which has no target). */
const historyTable = () =>
  new DataTable({
    columns: [
      {key: "at", label: "When", cell: one => time(one.at)},
      {
        key: "change",
        label: "What",
        class: "left",
        mark: one => (isMove(one) ? one.target : one.source ?? "training"),
        cell: one => (isMove(one) ? stateChip(one.target) : one.target ? `while ${one.source}` : "training"),
      },
      {key: "reason", label: "Why", class: "left words", cell: one => one.reason.replaceAll("->", "→")},
    ],
    keyOf: one => (one.target ? `${one.at}/${one.source}/${one.target}/${one.reason}` : `training/${one.id}`),
    step: 20,
    label: "History",
    empty: "Nothing has happened yet.",
  });

const resizeTable = () =>
  new DataTable({
    columns: [
      {key: "at", label: "When", cell: one => time(one.at)},
      {
        key: "what",
        label: "What",
        class: "left words",
        cell: one => one.words ?? `${nodesIn(one.before)} → ${nodesIn(one.after)}`,
      },
      {key: "took", label: "Took", cell: one => (one.took_s === null ? one.instead : duration(one.took_s))},
    ],
    keyOf: one => one.generation ?? `restart/${one.at}`,
    step: 20,
    label: "Resizes",
    empty: "It was never started.",
  });

const section = (title, ...children) => h("section", {}, h("h2", {}, title), children);
const newestFirst = list => [...list].reverse();

/* `query`: which tab, as the address has it. */
export function jobPage({name, query, go}) {
  const leaving = new AbortController(),
    {signal} = leaving,
    path = `/jobs/${encodeURIComponent(name)}`;
  const chip = h("span"),
    mark = h("span"),
    bar = h("span"),
    reason = h("p", {class: "reason"}),
    forecast = h("p", {class: "forecast", hidden: true}),
    whySlots = h("p", {class: "reason", hidden: true}),
    failure = h("pre", {class: "failure", hidden: true});
  const noMetric = h("p", {class: "reason", hidden: true}, "No metric: call run.log(loss=...) in the script.");
  const command = h("code", {class: "command"}),
    facts = new Facts(),
    figures = jobFigures(),
    logs = new LogView(name);
  const cancel = h("button", {type: "button", class: "danger", hidden: true, onclick: askCancel}, "Cancel the job");
  const again = h(
    "button",
    {type: "button", class: "ghost", hidden: true, onclick: () => openSubmit({go, request: detail?.request})},
    "Submit again",
  );
  const hold = h("button", {type: "button", class: "ghost changes", hidden: true, onclick: askHold}, "Hold"),
    limits = h(
      "button",
      {type: "button", class: "ghost changes", hidden: true, onclick: () => changeLimits(known(), detail?.request)},
      "Change limits",
    ),
    notice = h("button", {type: "button", class: "ghost", hidden: true, onclick: switchNotice}, "Notify me");
  const replicas = replicaTable(),
    decisions = decisionTable(),
    history = historyTable(),
    resizes = resizeTable();
  const address = `#/jobs/${encodeURIComponent(name)}`;
  const tabs = new Tabs({
    label: `Parts of ${name}`,
    parts: [
      ["overview", "Overview", whySlots, facts.element, failure, h("div", {class: "grid charts"}, figures.overview)],
      ["metrics", "Metrics", noMetric, h("div", {class: "grid charts"}, figures.metrics)],
      ["model", "Model", h("div", {class: "grid charts"}, figures.model)],
      ["logs", "Logs", logs.element],
      [
        "history",
        "History",
        section("Decisions", decisions.element),
        h("div", {class: "grid"}, section("States", history.element), section("Starts and resizes", resizes.element)),
        section("Replicas", replicas.element),
      ],
    ],
    chosen: new URLSearchParams(query).get("tab"),
    onchange: key => {
      // Replaced, not pushed: "back" leaves the job.
      window.history.replaceState(window.history.state, "", key === "overview" ? address : `${address}?tab=${key}`);
      if (key === "logs") logs.open();
    },
  });
  if (tabs.chosen === "logs") logs.open();
  const body = h("div", {hidden: true}, tabs.element);
  const missing = h("div", {class: "card pad empty-page", hidden: true});
  const element = h(
    "div",
    {},
    h("p", {class: "crumbs"}, h("a", {href: "#/jobs"}, "Jobs"), " / "),
    h(
      "div",
      {class: "section-head"},
      h("h1", {}, mark, name, " ", chip),
      h("div", {class: "actions"}, notice, limits, hold, again, cancel),
    ),
    bar,
    reason,
    forecast,
    command,
    missing,
    body,
  );

  let detail = null,
    shownState = null,
    shownProgress = null;

  const known = () => ({...(detail ?? {}), ...(store.jobs.get(name) ?? {})});

  async function askHold() {
    if (await actOn([name], isHeld(known()) ? "release" : "hold")) refresh(true);
  }

  function switchNotice() {
    toggleNotice(name);
    show();
  }

  const canCheckpoint = () =>
    (detail ?? store.jobs.get(name))?.kind !== "fixed" || Boolean(detail?.request?.checkpoints);

  /* When it will start, asked now and then while it waits. */
  let forecastAt = -Infinity;
  async function foresee(state) {
    if (state !== "pending") {
      forecast.hidden = true;
      return;
    }
    if (performance.now() - forecastAt < FORECAST_EVERY_MS) return;
    forecastAt = performance.now();
    try {
      const {words} = await api(`${path}/forecast`, {signal});
      setText(forecast, `When will it start? ${words.charAt(0).toUpperCase()}${words.slice(1)}.`);
      forecast.hidden = false;
    } catch {
      /* the page says what is wrong with the connection */
    }
  }

  async function askCancel() {
    const told = await confirmDialog({
      title: `Cancel ${name}?`,
      text: canCheckpoint()
        ? "It checkpoints and leaves. A cancelled job does not go on by itself."
        : "It receives SIGTERM. Unsaved work is lost, and it does not start again by itself.",
      action: "Cancel the job",
      field: "Reason (shown with the job)",
    });
    if (!told) return;
    set(cancel, {disabled: true});
    try {
      await post(`${path}/cancel`, told.text ? {reason: told.text} : {});
      toast(`${name} is being cancelled.`, "good");
      refresh(true);
    } catch (error) {
      toast(error.message);
    }
    set(cancel, {disabled: false});
  }

  function show() {
    const job = known();
    if (!job.name) return;
    missing.hidden = true;
    for (const part of [body, chip, bar, command]) part.hidden = false;
    noteSequence(job);
    if (job.state !== shownState) {
      fill(mark, swatch(name));
      shownState = job.state;
      fill(chip, stateChip(job.state));
    }
    if (job.progress !== shownProgress) {
      shownProgress = job.progress;
      fill(bar, typeof job.progress === "number" && progressBar(job.progress));
    }
    // That it trains is said by its state.
    const said = job.state === "running" && /^generation \d+ trains$/.test(job.reason) ? "" : job.reason;
    setText(reason, [job.note, phaseText(job), detail?.idle, said].filter(Boolean).join(" · ").replaceAll("->", "→"));
    reason.hidden = !reason.textContent;
    for (const button of [cancel, hold, limits, notice]) button.hidden = FINAL.has(job.state);
    setText(hold, isHeld(job) ? "Release" : "Hold");
    setText(notice, isWanted(name) ? "Will notify at the end" : "Notify me at the end");
    set(notice, {"aria-pressed": String(isWanted(name))});
    foresee(job.state);
    const lasted = job.started_at === null ? null : (job.finished_at ?? now()) - job.started_at;
    facts.update([
      ["Replicas", `${job.num_replicas}`, ""],
      ["Allowed", replicaRange(job.min_replicas, job.max_replicas)],
      [
        "Nodes",
        job.allocation?.length
          ? job.allocation.length > 3
            ? plural(job.allocation.length, "node")
            : nodesIn(job.allocation)
          : DASH,
      ],
      [
        "Total batch",
        job.total_batch === null
          ? DASH
          : `${count(job.total_batch)}${job.num_replicas ? " =" : ","} ${batchParts(job)}`,
        "Replicas × device batch × accumulation",
      ],
      ["Learning-rate gain", number(job.gain)],
      ["Noise scale", withError(job.noise_scale, job.noise_scale_error), "Examples, ± standard error"],
      ["Efficiency", share(job.efficiency)],
      ["Throughput", job.throughput === null ? DASH : `${number(job.throughput)}/s`, "Examples per second"],
      ["Goodput", job.goodput === null ? DASH : `${number(job.goodput)}/s`, "Useful examples per second"],
      ["Passes over the data", number(job.epoch), "An epoch of run.epochs may take several at a larger batch"],
      ["Time left", duration(job.remaining_s)],
      ["Running for", duration(lasted)],
      ["Submitted", time(job.submitted_at)],
      ["Last report", job.reported_at === null ? DASH : ago(Math.max(0, now() - job.reported_at))],
      ...(job.finished_at === null ? [] : [["Ended", time(job.finished_at)]]),
      ...(typeof job.used_slot_s === "number" ? [["Slot-hours", slotHours(job.used_slot_s)]] : []),
      ...(typeof job.exit_code === "number" ? [["Exit code", String(job.exit_code)]] : []),
      ["Resizes", number(job.num_resizes)],
      ["Crashes", number(job.num_crashes)],
      [
        "Time lost",
        detail
          ? `${duration(detail.lost_s)}${detail.lost_share === null ? "" : ` (${share(detail.lost_share)})`}`
          : DASH,
        "To resizes, restarts and work that was trained again; the first start does not count",
      ],
      [
        "Energy",
        typeof detail?.energy_j !== "number" ? null : `${number(detail.energy_j / 1000)} kJ`,
        typeof detail?.energy_per_percent_j !== "number"
          ? "Of its GPUs"
          : `Of its GPUs: ${number(detail.energy_per_percent_j)} J for 1 % of its work`,
      ],
      ["Application", job.application || null],
    ]);
  }

  function showDetail() {
    setText(
      command,
      detail.command?.length ? `${detail.cwd ? `${detail.cwd} $ ` : "$ "}${detail.command.map(quoted).join(" ")}` : "",
    );
    again.hidden = !detail.request?.command;
    const decided = detail.decisions.at(-1),
      when = decided ? `, since ${time(decided.at)}` : "";
    setText(whySlots, detail.why ? `Why ${plural(detail.num_replicas, "slot")}${when}: ${detail.why}.` : "");
    whySlots.hidden = !detail.why;
    failure.hidden = !detail.failure;
    setText(failure, detail.failure);
    replicas.update(detail.replicas);
    decisions.update(newestFirst(detail.decisions).sort((a, b) => b.at - a.at));
    const told = detail.training_notes.map(({id, at, text}) => ({id, at, reason: text}));
    history.update(newestFirst([...detail.transitions, ...told].sort((a, b) => a.at - b.at)));
    const last = FINAL.has(detail.state) ? "never finished" : phaseText(known()) || "under way";
    const begun = newestFirst(detail.resizes).sort((a, b) => b.generation - a.generation);
    const shown = begun.map((one, index) => ({...one, instead: index ? "replaced by the next" : last}));
    const restarts = detail.restarts.map(({at, pause_s, words}) => ({at, took_s: pause_s, words}));
    resizes.update([...shown, ...restarts].sort((a, b) => b.at - a.at));
  }

  let timer = null,
    loadedAt = 0,
    modelAt = 0,
    isLoading = false;
  async function load() {
    timer = null;
    isLoading = true;
    loadedAt = performance.now();
    const wantsModel = performance.now() - modelAt > MODEL_EVERY_MS || !modelAt;
    try {
      const [found, curves, model] = await Promise.all([
        api(path, {signal}),
        api(`${path}/curves?points=600`, {signal}),
        wantsModel ? api(`${path}/model`, {signal}) : null,
      ]);
      if (!missing.hidden && tabs.chosen === "logs") logs.start(); // it was not there before
      detail = found;
      show();
      showDetail();
      // A command that does not train with Pollux has nothing to draw.
      const isSilent = found.kind === "fixed" && !curves.at.length;
      for (const key of ["metrics", "model"]) tabs.setHidden(key, isSilent);
      figures.setHidden(isSilent);
      figures.updateCurves(curves);
      const told = curves.at.length ? curves.at.at(-1) - curves.at[0] : 0;
      noMetric.hidden = found.kind !== "elastic" || Object.keys(curves.metrics).length > 0 || told < SILENT_S;
      if (model) {
        modelAt = performance.now();
        figures.updateModel(model);
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error.status === 404) showMissing(error.known ?? []);
      else {
        if (error.status) toast(error.message);
        timer ??= setTimeout(load, RETRY_MS); // a job that is over says nothing that would bring it about
      }
    } finally {
      isLoading = false;
    }
  }

  /* It never was, or the server is another one now. */
  function showMissing(known) {
    const links = known
      .slice(0, 8)
      .map((one, index) => [index ? ", " : "", h("a", {href: `#/jobs/${encodeURIComponent(one)}`}, one)]);
    detail = null;
    fill(
      missing,
      h("h2", {}, `There is no job “${name}”.`),
      h("p", {}, links.length ? ["There are ", links] : h("a", {href: "#/jobs"}, "To all jobs")),
    );
    missing.hidden = false;
    for (const part of [body, again, cancel, hold, limits, notice, chip, bar, reason, forecast, command]) part.hidden = true;
  }
  function refresh(isUrgent) {
    if (timer && !isUrgent) return;
    clearTimeout(timer);
    timer = setTimeout(
      () => (isLoading ? refresh(false) : load()),
      isUrgent ? 0 : Math.max(50, loadedAt + EVERY_MS - performance.now()),
    );
  }

  const ticking = setInterval(() => {
    if (!document.hidden) show();
  }, 1000);
  load();
  show();
  return {
    title: name,
    element,
    update(changes) {
      if (changes.isFull) {
        modelAt = 0;
        refresh(true);
        logs.renew();
        show();
      } else if (changes.jobs.has(name)) {
        show();
        refresh(false);
      }
    },
    remove() {
      clearInterval(ticking);
      clearTimeout(timer);
      leaving.abort();
      logs.remove();
      figures.remove();
    },
  };
}
