/* Scales of charts: where a value stands, which values get a tick, and how ticks are written. */

import {number} from "./format.js";

const SECOND = 1000,
  MINUTE = 60 * SECOND,
  HOUR = 60 * MINUTE,
  DAY = 24 * HOUR;
const TIME_STEPS = [
  ...[1, 2, 5, 10, 15, 30].map(one => one * SECOND),
  ...[1, 2, 5, 10, 15, 30].map(one => one * MINUTE),
  ...[1, 2, 3, 6, 12].map(one => one * HOUR),
  ...[1, 2, 7, 14, 28, 84, 364].map(one => one * DAY),
];
// Values of a time axis are the clock on the wall (`wallClock`), so they are written as if it were UTC.
const written = form => new Intl.DateTimeFormat(undefined, {timeZone: "UTC", ...form});
const CLOCK = {hour: "2-digit", minute: "2-digit", hourCycle: "h23"};
const TIMES = {
  second: written({...CLOCK, second: "2-digit"}),
  minute: written(CLOCK),
  day: written({day: "numeric", month: "short"}),
};
const moment = written({day: "numeric", month: "short", ...CLOCK, second: "2-digit"});

/* 1, 2 or 5 times a power of ten, so that at most `most` of them fill the span. */
export function niceStep(span, most) {
  const rough = span / Math.max(1, most),
    power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5, 10].find(factor => factor * power >= rough * 0.999) ?? 10);
}

/* The scale of an axis between two pixels. `own` is what a figure says of the axis, `values` what it has to hold, and
   `window` the part that is zoomed to. Returns {place(value), value(pixel), ticks: [{at, text}], text(value), low, high}. */
export function makeScale(own = {}, values, [from, to], window = null) {
  if (own.type === "category") return categories(values, [from, to]);
  const isLog = own.type === "log",
    known = values.filter(value => Number.isFinite(value) && (!isLog || value > 0)),
    [low, high] = (window ?? own.range ?? extent(own, known)).map(value => (isLog ? Math.log10(value) : value)),
    span = high - low || 1;
  const place = value => from + (((isLog ? Math.log10(value) : value) - low) / span) * (to - from);
  const value = pixel => {
    const found = low + ((pixel - from) / (to - from)) * span;
    return isLog ? 10 ** found : found;
  };
  const scale = {low, high, place, value, text: own.show ?? number};
  if (own.type === "date") return {...scale, text: at => moment.format(at), ticks: timeTicks(low, high, own.nticks ?? 6)};
  const at = own.tickvals ?? (isLog ? powers(10 ** low, 10 ** high) : steps(low, high, own));
  const isIn = tick => place(tick) >= Math.min(from, to) - 0.5 && place(tick) <= Math.max(from, to) + 0.5;
  return {...scale, ticks: at.filter(isIn).map(tick => ({at: tick, text: scale.text(tick)}))};
}

/* From where to where an axis goes that says nothing of it. */
function extent({type, rangemode, isTight}, known) {
  if (!known.length) return type === "log" ? [1, 10] : [0, 1];
  let low = known[0],
    high = known[0];
  for (const value of known) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (type === "date") return low === high ? [low - MINUTE, high + MINUTE] : [low, high];
  if (type === "log") return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
  if (rangemode === "tozero") [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (low === high) return low === 0 ? [0, 1] : [low - 0.1 * Math.abs(low), high + 0.1 * Math.abs(high)];
  const room = isTight ? 0 : 0.06 * (high - low);
  return [low === 0 ? 0 : low - room, high === 0 ? 0 : high + room];
}

function steps(low, high, {dtick, nticks = 5}) {
  const step = dtick ?? niceStep(high - low || 1, nticks),
    made = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + 1e-9 * step && made.length < 100; index++)
    made.push(Number((index * step).toPrecision(12)));
  return made;
}

/* A few ticks that can be read, of what grows by factors. */
export function powers(low, high) {
  const base = high / low > 300 ? 10 : 2,
    made = [];
  for (let power = Math.ceil(Math.log(low) / Math.log(base) - 1e-9); base ** power <= high * 1.001; power++)
    made.push(base ** power);
  const every = Math.ceil(made.length / 7);
  return made.filter((_, index) => index % every === 0);
}

function timeTicks(low, high, most) {
  const step = TIME_STEPS.find(one => (high - low) / one <= most) ?? TIME_STEPS.at(-1),
    made = [];
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) {
    const form = at % DAY === 0 && high - low > HOUR ? "day" : step < MINUTE ? "second" : "minute";
    made.push({at, text: TIMES[form].format(at)});
  }
  return made;
}

/* Words at even distances; each stands in the middle of its place. */
function categories(values, [from, to]) {
  const names = [...new Set(values)],
    width = (to - from) / Math.max(1, names.length);
  return {
    names,
    width: Math.abs(width),
    place: name => from + (names.indexOf(name) + 0.5) * width,
    value: pixel => names[Math.min(names.length - 1, Math.max(0, Math.floor((pixel - from) / width)))],
    text: String,
    ticks: names.map(name => ({at: name, text: String(name)})),
  };
}
