/* The figures of one job: how it trained, and the model of its speed against what was measured. */

import {Figure, dots, hasNumbers, lastOf, layout, line, logAxis, wholeAxis} from "./charts.js";
import {DASH, byName, count, duration, isOdd, number, plural, share, wallClock, withError} from "./format.js";

const MOST_METRICS = 12,
  MOST_LINES = 12;
const LEGEND = {showlegend: true},
  SHARE = {show: value => share(value), range: [0, 1.04], dtick: 0.25};
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "x", "cross", "star", "pentagon"];

export function jobFigures() {
  const own = {
    replicas: new Figure({title: "Replicas"}),
    batch: new Figure({title: "Batch size", hint: "total, and per device"}),
    accum: new Figure({title: "Accumulation", hint: "extra passes per step"}),
    gain: new Figure({title: "Learning-rate gain"}),
    noise: new Figure({title: "Gradient noise scale", hint: "examples ± standard error, log scale"}),
    efficiency: new Figure({title: "Efficiency"}),
    speed: new Figure({title: "Throughput and goodput", hint: "examples per second"}),
    progress: new Figure({title: "Progress"}),
  };
  const metrics = new Map(),
    holder = document.createElement("div");
  holder.className = "grid charts wide";
  const model = {
    fit: new Figure({
      title: "Time of a step",
      hint: "fitted: lines; measured: points",
      height: 300,
      empty: "No speed has been fitted yet: that takes a few reports.",
    }),
    error: new Figure({
      title: "Measured against predicted",
      hint: "a perfect fit is on the line",
      height: 300,
      empty: "No speed has been fitted yet.",
    }),
    goodput: new Figure({
      title: "Goodput by batch size",
      hint: "for its present replicas",
      height: 300,
      empty: "Needs a fitted model, a noise scale and replicas.",
    }),
    speedup: new Figure({
      title: "Speedup by replicas",
      hint: "what the last decision considered",
      height: 300,
      empty: "No decision has considered more than one size for it.",
    }),
  };
  const {gain, noise, efficiency, accum, ...first} = own,
    overview = Object.values(first).map(figure => figure.element);
  return {
    overview,
    metrics: [holder, ...[efficiency, noise, gain, accum].map(figure => figure.element)],
    model: Object.values(model).map(figure => figure.element),
    updateCurves: told => {
      drawCurves(own, told);
      drawMetrics(metrics, holder, told);
    },
    /* Of a job that tells nothing. */
    setHidden: isHidden => {
      for (const element of overview) element.hidden = isHidden;
    },
    updateModel: told => drawModel(model, told),
    remove() {
      for (const figure of [...Object.values(own), ...metrics.values(), ...Object.values(model)]) figure.remove();
    },
  };
}

function drawCurves(own, told) {
  const x = told.at.map(wallClock);
  const one = (figure, name, colour, show, {shape = "linear", ...more} = {}) =>
    figure.update(
      hasNumbers(told[name])
        ? {data: [line(x, told[name], name.replaceAll("_", " "), colour, {line: {shape}})], layout: layout(more)}
        : null,
      show(lastOf(told[name])),
    );
  one(own.replicas, "num_replicas", "@0", number, {shape: "hv", yaxis: wholeAxis(told.num_replicas)});
  own.batch.update(
    hasNumbers(told.total_batch)
      ? {
          data: [
            line(x, told.total_batch, "total", "@0", {line: {shape: "hv"}}),
            line(x, told.device_batch, "per device", "@3", {line: {shape: "hv", dash: "dash"}}),
          ],
          layout: layout(LEGEND),
        }
      : null,
    count(lastOf(told.total_batch)),
  );
  one(own.accum, "accum_steps", "@5", number, {shape: "hv", yaxis: wholeAxis(told.accum_steps)});
  one(own.gain, "gain", "@2", number);
  drawNoise(own.noise, x, told);
  one(own.efficiency, "efficiency", "@2", share, {yaxis: SHARE});
  own.speed.update(
    hasNumbers(told.throughput)
      ? {
          data: [
            line(x, told.throughput, "throughput", "@0"),
            line(x, told.goodput, "goodput", "@2", {line: {dash: "dash"}}),
          ],
          layout: layout(LEGEND),
        }
      : null,
    hasNumbers(told.goodput) ? `${number(lastOf(told.goodput))}/s useful` : "",
  );
  one(own.progress, "progress", "@0", share, {yaxis: SHARE});
}

/* A band of one standard error around it. What a log scale has no room for (0 and less) is a decade below the least. */
function drawNoise(figure, x, told) {
  const noise = told.noise_scale.map(value => (value > 0 ? value : null));
  if (!hasNumbers(noise)) {
    figure.update(null, number(lastOf(told.noise_scale)));
    return;
  }
  const floor = Math.min(...noise.filter(value => value !== null)) / 10;
  const shifted = sign =>
    noise.map((value, index) =>
      value === null ? null : Math.max(value + sign * (told.noise_scale_error[index] ?? 0), floor),
    );
  const low = shifted(-1),
    high = shifted(1),
    hidden = {line: {width: 0}, mode: "lines", isQuiet: true};
  const band = hasNumbers(told.noise_scale_error)
    ? [line(x, low, "low", "@4", hidden), line(x, high, "high", "@4", {...hidden, fill: "tonexty"})]
    : [];
  figure.update(
    {
      data: [...band, line(x, noise, "noise scale", "@4")],
      layout: layout({yaxis: logAxis([...low, ...high])}),
    },
    withError(lastOf(told.noise_scale), lastOf(told.noise_scale_error)),
  );
}

/* Where NaN or infinity was logged: a cross at the height of the last number. */
function oddMarks(x, values, name) {
  let height = values.find(value => typeof value === "number");
  const at = [],
    heights = [],
    texts = [];
  values.forEach((value, index) => {
    if (typeof value === "number") height = value;
    if (!isOdd(value)) return;
    at.push(x[index]);
    heights.push(height);
    texts.push(number(value));
  });
  if (!at.length) return [];
  return [dots(at, heights, name, {color: "@ink", symbol: "x", size: 8}, {tell: index => texts[index]})];
}

/* The loss first; the others by name. Figures come as metrics do. */
function drawMetrics(figures, holder, told) {
  const names = Object.keys(told.metrics)
    .sort((a, b) => (b === "loss") - (a === "loss") || byName(a, b))
    .slice(0, MOST_METRICS);
  for (const [name, figure] of figures)
    if (!names.includes(name)) {
      figure.remove();
      figure.element.remove();
      figures.delete(name);
    }
  const x = told.at.map(wallClock);
  for (const [index, name] of names.entries()) {
    let figure = figures.get(name);
    if (!figure) {
      figure = new Figure({
        title: name.slice(0, 80),
        hint: "logged by the script",
        empty: "Logged, but never as a finite number.",
      });
      figures.set(name, figure);
      holder.insertBefore(figure.element, holder.children[index] ?? null);
    }
    const values = told.metrics[name],
      finite = values.map(value => (isOdd(value) ? null : value)),
      label = name.slice(0, 40);
    figure.update(
      hasNumbers(finite)
        ? {
            data: [line(x, finite, label, "@3", {connectgaps: true}), ...oddMarks(x, values, label)],
            layout: layout({yaxis: {rangemode: "normal"}}),
          }
        : null,
      number(lastOf(values)),
    );
  }
}

function drawModel(figures, told) {
  const found = Object.entries(told.accelerators ?? {}).filter(([, fit]) => fit.points.length);
  drawFit(figures.fit, found);
  drawError(figures.error, found);
  drawGoodput(figures.goodput, told.goodput);
  drawSpeedup(figures.speedup, told.speedups);
}

const setup = (one, type, hasTypes) =>
  `${one.num_replicas}${one.num_nodes > 1 ? ` on ${one.num_nodes} nodes` : ""}${hasTypes ? ` (${type})` : ""}`;
/* The error is one of logarithms: how many percent it is off, or by which factor. */
const errorOf = rmsle =>
  rmsle === null ? DASH : rmsle < 0.5 ? share(Math.expm1(rmsle), 1) : `a factor of ${number(Math.exp(rmsle), 2)}`;
const errors = found =>
  found.map(([type, fit]) => `${found.length > 1 ? `${type} ` : ""}${errorOf(fit.rmsle)}`).join(", ");

function drawFit(figure, found) {
  if (!found.length) {
    figure.update(null);
    return;
  }
  const data = [],
    numberOf = new Map();
  const style = key => {
    if (!numberOf.has(key)) numberOf.set(key, numberOf.size);
    return numberOf.get(key);
  };
  for (const [type, fit] of found) {
    for (const drawn of fit.lines.slice(0, MOST_LINES)) {
      const name = setup(drawn, type, found.length > 1),
        colour = `@${style(name) % 6}`;
      data.push({...line(drawn.device_batch, drawn.step_s, name, colour, {line: {width: 1.5}}), mode: "lines", isQuiet: true});
    }
    for (const [name, points] of Map.groupBy(fit.points, point => setup(point, type, found.length > 1))) {
      const index = style(name);
      data.push(
        dots(
          points.map(one => one.device_batch),
          points.map(one => one.step_s),
          `${name} ${name === "1" ? "replica" : "replicas"}`,
          {color: `@${index % 6}`, symbol: SYMBOLS[index % SYMBOLS.length], size: 9},
          {
            tell: at =>
              `${count(points[at].device_batch)} per device: ${duration(points[at].step_s)}, predicted ` +
              `${duration(points[at].predicted_step_s)}, ${plural(points[at].num_steps, "step")}`,
          },
        ),
      );
    }
  }
  figure.update(
    {
      data,
      layout: layout({
        hover: "point",
        xaxis: {title: "examples per device", rangemode: "tozero"},
        yaxis: {title: "seconds", nticks: 6},
        showlegend: true,
      }),
    },
    `error ${errors(found)}`,
  );
}

function drawError(figure, found) {
  const points = found.flatMap(([type, fit]) =>
    fit.points.filter(one => one.predicted_step_s !== null).map(one => ({...one, type})),
  );
  if (!points.length) {
    figure.update(null);
    return;
  }
  const ends = [
    Math.min(...points.flatMap(one => [one.step_s, one.predicted_step_s])),
    Math.max(...points.flatMap(one => [one.step_s, one.predicted_step_s])),
  ];
  const marks = (of, predicted, name, color, symbol) =>
    dots(
      points.map(one => one[of]),
      points.map(one => one[predicted]),
      name,
      {color, symbol, size: 8},
      {
        tell: at =>
          `${plural(points[at].num_replicas, "replica")}, ${points[at].device_batch} per device: measured ` +
          `${duration(points[at][of])}, predicted ${duration(points[at][predicted])}`,
      },
    );
  const worst = Math.max(...points.map(one => Math.abs(one.predicted_step_s / one.step_s - 1)));
  figure.update(
    {
      data: [
        {...line(ends, ends, "perfect", "@muted", {line: {dash: "dot", width: 1.5}}), mode: "lines", isQuiet: true},
        marks("step_s", "predicted_step_s", "step", "@0", "circle"),
        marks("grad_s", "predicted_grad_s", "gradient alone", "@1", "diamond"),
      ],
      layout: layout({
        hover: "point",
        showlegend: true,
        xaxis: {title: "measured seconds", rangemode: "tozero"},
        yaxis: {title: "predicted seconds", nticks: 6},
      }),
    },
    `worst ${share(worst)} off`,
  );
}

function drawGoodput(figure, told) {
  if (!told?.total_batch?.length) {
    figure.update(null);
    return;
  }
  const {chosen} = told;
  figure.update(
    {
      data: [
        line(told.total_batch, told.throughput, "throughput", "@0", {line: {dash: "dot", width: 1.5}}),
        line(told.total_batch, told.goodput, "goodput", "@2"),
        ...(chosen
          ? [dots([chosen.total_batch], [chosen.goodput], "chosen", {color: "@3", size: 13, symbol: "star"})]
          : []),
      ],
      layout: layout({
        xaxis: logAxis(told.total_batch, {title: "total batch, examples"}),
        yaxis: {title: "examples per second", nticks: 6},
        showlegend: true,
      }),
    },
    chosen ? `${count(chosen.total_batch)} → ${number(chosen.goodput)}/s, efficiency ${share(chosen.efficiency)}` : "",
  );
}

function drawSpeedup(figure, told) {
  if (!told || told.num_replicas.length < 1) {
    figure.update(null);
    return;
  }
  const index = told.num_replicas.indexOf(told.chosen);
  figure.update(
    {
      data: [
        {...line(told.num_replicas, told.speedup, "speedup", "@0"), mode: "lines+markers"},
        ...(index >= 0
          ? [dots([told.chosen], [told.speedup[index]], "chosen", {color: "@3", size: 13, symbol: "star"})]
          : []),
      ],
      layout: layout({
        xaxis: {title: "replicas", ...wholeAxis(told.num_replicas)},
        yaxis: {title: "speedup over its fair share", nticks: 6},
        showlegend: true,
      }),
    },
    index >= 0
      ? `chosen: ${plural(told.chosen, "replica")}, speedup ${number(told.speedup[index])}`
      : told.chosen === 0
        ? "chosen: none now"
        : "",
  );
}
