/* Numbers, times and names as people read them. Whatever is not known is a dash. */

export const DASH = "–";
const UNBOUNDED = 1 << 20;
/* As people order names: node-9 before node-10. */
export const byName = new Intl.Collator(undefined, {numeric: true}).compare;
const isNumber = value => typeof value === "number" && Number.isFinite(value);

/* JSON has no such numbers: they come as texts. */
const ODD = {nan: "NaN", inf: "∞", "-inf": "−∞"};
export const isOdd = value => typeof value === "string" && Object.hasOwn(ODD, value);

/* To sort by: what is no number counts as the worst. */
export const asNumber = value =>
  isNumber(value) ? value : isOdd(value) ? (value === "-inf" ? -Infinity : Infinity) : null;

export function number(value, digits = 3) {
  if (isOdd(value)) return ODD[value];
  if (!isNumber(value)) return DASH;
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return scaled(value, digits);
  if (Number.isInteger(value) || size >= 10 ** digits)
    return Math.round(value).toLocaleString("en-US").replaceAll(",", " ");
  return String(Number(value.toPrecision(digits)));
}

/* A number and its standard error, where that is known. */
export const withError = (value, error) =>
  isNumber(value) && isNumber(error) ? `${number(value)} ± ${number(error)}` : number(value);

function scaled(value, digits) {
  const size = Math.abs(value);
  if (size < 1e-3) return value.toExponential(1).replace("e-", "e−");
  const units = [
    [1e12, "T"],
    [1e9, "G"],
    [1e6, "M"],
  ];
  const [unit, name] = units.find(([least]) => size >= least) ?? [1, ""];
  return size >= 1e16 ? value.toExponential(1) : `${Number((value / unit).toPrecision(digits))} ${name}`;
}

export const count = value => (isNumber(value) ? Math.round(value).toLocaleString("en-US").replaceAll(",", " ") : DASH);

export function share(value, digits = 0) {
  if (!isNumber(value)) return DASH;
  const percent = 100 * value;
  if (percent > 0 && percent < 0.1) return "< 0.1 %";
  return `${percent.toFixed(digits || (percent < 10 && percent % 1 ? 1 : 0))} %`;
}

export function duration(seconds) {
  if (!isNumber(seconds)) return DASH;
  const s = Math.abs(seconds);
  if (s === 0) return "0 s";
  if (s < 0.001) return "< 1 ms";
  if (s < 1) return `${Math.round(1000 * seconds)} ms`;
  if (s < 9.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(s); // as reports and the command line round
  if (whole < 60) return `${Math.round(seconds)} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export const slotHours = slotS => (!isNumber(slotS) ? DASH : slotS > 0 && slotS < 3.6 ? "< 0.001" : number(slotS / 3600));

export const ago = seconds => (isNumber(seconds) ? (seconds < 1 ? "now" : `${duration(seconds)} ago`) : DASH);

const clock = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hourCycle: "h23",
});
const day = new Intl.DateTimeFormat(undefined, {
  day: "numeric",
  month: "short",
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hourCycle: "h23",
});

/* The time of today; the day too if it was another. */
export function time(at) {
  if (!isNumber(at)) return DASH;
  const date = new Date(1000 * at);
  return date.toDateString() === new Date().toDateString() ? clock.format(date) : day.format(date);
}

/* Figures' axes know no time zones: what they are given is the clock on the wall. */
export function wallClock(at) {
  return isNumber(at) ? 1000 * at - 60000 * new Date(1000 * at).getTimezoneOffset() : null;
}

export const money = value =>
  isNumber(value) ? value.toLocaleString("en-US", {maximumFractionDigits: value < 100 ? 2 : 0}) : DASH;

export function replicaRange(least, most) {
  if (most >= UNBOUNDED) return least > 1 ? `${least} or more` : "any number";
  return least === most ? `exactly ${least}` : `${least} to ${most}`;
}

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

export const FINAL = new Set(["succeeded", "failed", "cancelled"]);

/* The batch as it is made up: replicas × device batch × (accumulation + 1). */
export function batchParts(job) {
  if (!isNumber(job.total_batch)) return DASH;
  const accum = job.accum_steps ? ` × ${job.accum_steps + 1}` : "";
  return job.num_replicas
    ? `${job.num_replicas} × ${count(job.device_batch)}${accum}`
    : `${count(job.device_batch)} per device`;
}

/* Name of a number as in "avg_jct_s": words, and how its values are shown. */
export function describeField(name) {
  const words = name
    .replace(/_s$/, "")
    .replace(/^num_/, "")
    .replaceAll("_", " ")
    .replace(/\bjct\b/, "JCT")
    .replace(/\brho\b/, "ρ")
    .replace(/\bgpu\b/, "GPU")
    .replace(/\bavg\b/, "average")
    .replace(/^[a-z](?=[a-z])/, letter => letter.toUpperCase());
  if (/_s$/.test(name)) return {label: words, show: duration};
  if (/(share|efficiency|utilisation|utilization|unfair|fidelity|error)/.test(name))
    return {label: words, show: value => share(value, 1)};
  return {label: words, show: value => number(value, 4)};
}

/* Split like a shell does; throws an Error that says what is open. */
export function splitCommand(text) {
  const words = [];
  let word = null;
  for (let i = 0; i < text.length; i++) {
    const letter = text[i];
    if (letter === "'") {
      const end = text.indexOf("'", i + 1);
      if (end < 0) throw new Error("a ' is not closed");
      word = (word ?? "") + text.slice(i + 1, end);
      i = end;
    } else if (letter === '"') {
      word ??= "";
      for (i++; text[i] !== '"'; i++) {
        if (i >= text.length) throw new Error('a " is not closed');
        if (text[i] === "\\" && '"\\$`\n'.includes(text[i + 1] ?? "x")) i++;
        word += text[i];
      }
    } else if (letter === "\\") {
      if (i + 1 >= text.length) throw new Error("nothing stands behind the last \\");
      i++;
      if (text[i] !== "\n") word = (word ?? "") + text[i];
    } else if (/\s/.test(letter)) {
      if (word !== null) {
        words.push(word);
        word = null;
      }
    } else word = (word ?? "") + letter;
  }
  if (word !== null) words.push(word);
  return words;
}

/* A word as it would be typed in a shell. */
export const quoted = word => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);

/* Seconds of "90", "10m", "2h30m", "1d"; NaN if it is none of them. */
export function parseDuration(text) {
  const clean = text.trim();
  if (/^\d+(\.\d+)?$/.test(clean)) return Number(clean);
  const match = /^(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?$/.exec(clean);
  if (!match || !clean) return NaN;
  return [86400, 3600, 60, 1].reduce((sum, unit, index) => sum + unit * Number(match[index + 1] ?? 0), 0);
}

/* Of a job's or node's GPUs: shares of one card tell the same, so each card counts once; power is divided already. */
export function gpuParts(slots) {
  const cards = [...new Map(slots.map(slot => [slot.gpu, slot])).values()],
    known = (rows, name) => rows.map(row => row[name]).filter(isNumber),
    sum = values => values.reduce((a, b) => a + b, 0),
    busy = known(cards, "utilisation"),
    memory = known(cards, "memory_bytes"),
    power = known(slots, "power_w"),
    hot = known(cards, "temperature_c");
  return {
    busy: busy.length ? share(sum(busy) / busy.length) : DASH,
    memory: memory.length ? gigabytes(sum(memory)) : DASH,
    power: power.length ? `${Math.round(sum(power))} W` : DASH,
    temperature: hot.length ? `${Math.max(...hot)} °C` : DASH,
  };
}

export const gigabytes = bytes => (isNumber(bytes) ? `${number(bytes / 1e9)} GB` : DASH);
