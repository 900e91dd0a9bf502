/* Submitting a job: a form made from what the server says it takes. */

import {api, post, remember, remembered} from "./api.js";
import {fill, h, set, setText, toast} from "./dom.js";
import {parseDuration, quoted, splitCommand} from "./format.js";

const FIRST = ["name", "cwd", "min_replicas", "max_replicas"];
const LEFT_OUT = new Set(["version", "command", "array_index"]);
const LABELS = {
  name: "Name",
  cwd: "Working directory",
  min_replicas: "At least replicas",
  max_replicas: "At most replicas",
  replicas: "Exactly replicas",
  kind: "Kind",
  application: "Application",
  is_preemptible: "May be preempted",
  checkpoints: "Saves its own state",
  weight: "Weight",
  max_restarts: "Most restarts",
  env: "Environment",
  time_limit_s: "Time limit",
  after: "After",
  array: "Array",
  accelerators: "Accelerators",
};
const EXAMPLES = {
  cwd: "/home/me/project",
  env: "SEED=1",
  time_limit_s: "90, 10m, 2h30m, 1d",
  after: "prepare, train",
  array: "0-9",
  accelerators: "H200, A100",
};
// Where a form is not like the command line, for which the server's descriptions are written.
const HELP = {cwd: "An absolute path on the machine of the server.", env: "KEY=VALUE, one per line."};
let described = null;

/* The form of a job, as OpenAPI has it. */
async function describe() {
  if (!described) {
    const told = await api("/openapi.json");
    described = told.paths["/api/v1/jobs"].post.requestBody.content["application/json"].schema.properties;
  }
  return described;
}

const typeOf = schema => schema.type ?? schema.anyOf?.find(one => one.type !== "null")?.type ?? "string";

function field(name, schema) {
  const id = `job-${name}`,
    type = typeOf(schema),
    help = h("small", {id: `${id}-help`}, HELP[name] ?? schema.description ?? "");
  const shared = {id, name, "aria-describedby": `${id}-help`, autocomplete: "off", spellcheck: "false"};
  const choices = schema.enum ?? schema.anyOf?.find(one => one.enum)?.enum;
  if (type === "boolean") {
    const input = h("input", {...shared, type: "checkbox", checked: Boolean(schema.default)});
    return {
      input,
      element: h(
        "div",
        {class: "field"},
        h("label", {class: "check", for: id}, input, ` ${LABELS[name] ?? name}`),
        help,
      ),
      read: () => input.checked,
      write: value => {
        input.checked = value;
      },
    };
  }
  const input = choices
    ? h(
        "select",
        shared,
        choices.map(value => h("option", {value, selected: value === schema.default}, value)),
      )
    : name === "env"
      ? h("textarea", {...shared, rows: 2, placeholder: EXAMPLES.env})
      : h("input", {
          ...shared,
          type: type === "integer" || (type === "number" && name !== "time_limit_s") ? "number" : "text",
          step: type === "integer" ? 1 : "any",
          min: type === "integer" ? 0 : null,
          placeholder: EXAMPLES[name] ?? (typeof schema.default === "number" ? String(schema.default) : ""),
        });
  const element = h("div", {class: "field"}, h("label", {for: id}, LABELS[name] ?? name), input, help);
  return {
    input,
    element,
    read: () => {
      if (input.validity.badInput) throw new Error(`${LABELS[name] ?? name}: that is no number.`);
      return readText(name, type, input.value);
    },
    write: value => {
      input.value = writeText(name, value);
    },
  };
}

function readText(name, type, text) {
  if (!text.trim()) return undefined;
  if (name === "env") {
    return Object.fromEntries(
      text
        .split("\n")
        .filter(row => row.trim())
        .map(row => {
          const at = row.indexOf("=");
          if (at < 1) throw new Error(`Environment: “${row}” is not KEY=VALUE.`);
          return [row.slice(0, at).trim(), row.slice(at + 1)];
        }),
    );
  }
  if (name === "time_limit_s") {
    const seconds = parseDuration(text);
    if (Number.isNaN(seconds))
      throw new Error(`Time limit: “${text}” is no duration; 90 (seconds), 10m, 2h30m and 1d are.`);
    return seconds;
  }
  if (type === "array")
    return text
      .split(",")
      .map(word => word.trim())
      .filter(Boolean);
  return type === "integer" || type === "number" ? Number(text) : text.trim();
}

const writeText = (name, value) =>
  value === null || value === undefined
    ? ""
    : name === "env"
      ? Object.entries(value)
          .map(([key, one]) => `${key}=${one}`)
          .join("\n")
      : Array.isArray(value)
        ? value.join(", ")
        : String(value);

/* `request` fills it in: a job to be submitted once more. */
export async function openSubmit({go, request = null}) {
  let schema;
  try {
    schema = await describe();
  } catch (error) {
    toast(error.message);
    return;
  }
  if (document.querySelector("dialog[open]")) return; // asked for twice, or something else is asked by now
  const names = Object.keys(schema).filter(name => !LEFT_OUT.has(name));
  const fields = new Map(names.map(name => [name, field(name, schema[name])]));
  const words = h("div", {class: "words-list", "aria-live": "polite"}),
    problem = h("p", {class: "problem", role: "alert", hidden: true});
  const command = h("textarea", {
    id: "job-command",
    rows: 2,
    required: true,
    spellcheck: "false",
    placeholder: "python train.py --lr 0.1",
    "aria-describedby": "job-command-help",
    oninput: showWords,
  });
  const send = h("button", {type: "submit", class: "primary"}, "Submit");

  function showWords() {
    try {
      const list = splitCommand(command.value);
      fill(words, list.length ? ["Runs: ", list.map(word => h("code", {}, word || "''"))] : "");
      words.classList.remove("bad");
      return list;
    } catch (error) {
      fill(words, `Not complete: ${error.message}.`);
      words.classList.add("bad");
      return null;
    }
  }

  function fail(message) {
    setText(problem, message);
    problem.hidden = false;
    problem.scrollIntoView({block: "nearest"});
  }

  async function submit(event) {
    event.preventDefault();
    problem.hidden = true;
    const list = showWords(),
      body = {version: 1};
    if (!list?.length) {
      if (list) fail("Say what to run, as in: python train.py"); // else it is said what is not complete
      command.focus();
      return;
    }
    body.command = list;
    try {
      for (const [name, one] of fields) {
        const value = one.read(),
          usual = schema[name].default;
        if (value !== undefined && value !== usual) body[name] = value;
      }
    } catch (error) {
      fail(error.message);
      return;
    }
    set(send, {disabled: true});
    try {
      const {jobs} = await post("/jobs", body);
      if (body.cwd) remember("pollux-cwd", body.cwd);
      dialog.close();
      const text = jobs.length === 1 ? `${jobs[0].name} is submitted.` : `${jobs.length} jobs are submitted.`;
      toast(text, "good");
      go(jobs.length === 1 ? `#/jobs/${encodeURIComponent(jobs[0].name)}` : "#/jobs");
    } catch (error) {
      fail(error.message);
    }
    set(send, {disabled: false});
  }

  const pick = list => list.filter(name => fields.has(name)).map(name => fields.get(name).element);
  const dialog = h(
    "dialog",
    {id: "submit-dialog", class: "ask large", "aria-labelledby": "submit-title"},
    h(
      "form",
      {novalidate: true, onsubmit: submit},
      h("h2", {id: "submit-title"}, request ? "Submit it again" : "Submit a job"),
      h(
        "div",
        {class: "field"},
        h("label", {for: "job-command"}, "Command"),
        command,
        h(
          "small",
          {id: "job-command-help"},
          "Program and arguments, with quotes as in a shell; it does not run in one.",
        ),
        words,
      ),
      h("div", {class: "form-grid"}, pick(FIRST)),
      h(
        "details",
        {},
        h("summary", {}, "More options"),
        h("div", {class: "form-grid"}, pick(names.filter(name => !FIRST.includes(name)))),
      ),
      problem,
      h(
        "div",
        {class: "actions"},
        h("button", {type: "button", class: "ghost", onclick: () => dialog.close()}, "Close"),
        send,
      ),
    ),
  );
  dialog.addEventListener("close", () => dialog.remove());
  if (request) {
    command.value = request.command.map(quoted).join(" ");
    for (const [name, one] of fields) if (request[name] !== undefined && name !== "array") one.write(request[name]);
  } else fields.get("cwd")?.write(remembered("pollux-cwd"));
  document.body.append(dialog);
  dialog.showModal();
  showWords();
  command.focus();
}
