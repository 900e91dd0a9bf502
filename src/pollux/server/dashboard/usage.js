/* The page of usage: what teams and users have used, and what teams have of their guarantees. */

import {api} from "./api.js";
import {DataTable, h, setText} from "./dom.js";
import {DASH} from "./format.js";

const hours = value => value.toLocaleString("en", {minimumFractionDigits: 2, maximumFractionDigits: 2});
const slots = table =>
  Object.entries(table)
    .map(([kind, count]) => (kind === "any" ? count : `${kind}=${count}`))
    .join(", ") || DASH;

const LEFT = new Set(["Month", "Team", "User", "Users", "Lends"]);

/* Rows are lists of texts, one for each title. */
function table(label, titles, empty) {
  const columns = titles.map((title, at) => ({
    key: title,
    label: title,
    class: LEFT.has(title) ? "left" : null,
    cell: row => String(row[at]),
  }));
  return new DataTable({label, columns, empty, keyOf: row => row.slice(0, 3).join("/")});
}

export function usagePage() {
  const titles = ["Month", "Team", "User", "Slot-hours", "GPU-hours", "Goodput-hours", "Cost"],
    used = table("Usage", titles, "Nothing was used yet."),
    teams = table(
      "Teams",
      ["Team", "Weight", "Guarantee", "Limit", "Holds", "Wants", "Lends", "Users"],
      "There are no teams. An admin makes one: pollux team add NAME --guarantee SLOTS",
    ),
    problem = h("p", {class: "problem", role: "alert", hidden: true});
  const element = h(
    "div",
    {},
    h("h1", {}, "Usage by month"),
    h("p", {class: "muted"}, "Slot-hours are slots held, times hours. Goodput-hours are the useful part of them."),
    problem,
    used.element,
    h("section", {}, h("h2", {}, "Teams"), teams.element),
  );
  const load = async () => {
    try {
      const [usage, known] = await Promise.all([api("/usage?by=month&by=team&by=user"), api("/teams")]);
      const rows = usage.rows
        .reverse()
        .map(row => [
          row.month,
          row.team || DASH,
          row.user,
          hours(row.slot_hours),
          hours(row.gpu_hours),
          hours(row.goodput_hours),
          row.cost ? hours(row.cost) : DASH, // no price was set
        ]);
      used.update(rows);
      const lent = team => Object.entries(team.lent_to).map(([other, count]) => `${count} to ${other}`);
      teams.update(
        known.teams.map(team => [
          team.name,
          team.weight,
          slots(team.guarantee),
          slots(team.limit),
          team.num_held,
          team.num_wanted,
          lent(team).join(", ") || DASH,
          team.users.join(", ") || DASH,
        ]),
      );
      problem.hidden = true;
    } catch (error) {
      setText(problem, error.message);
      problem.hidden = false;
    }
  };
  load();
  const timer = setInterval(load, 15000);
  return {title: "Usage", element, update() {}, remove: () => clearInterval(timer)};
}
