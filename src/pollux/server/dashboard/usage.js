/* The page of usage: what teams and users have used, and what teams have of their guarantees. */

import {api} from "./api.js";
import {fill, h} from "./dom.js";
import {DASH} from "./format.js";

const hours = value => value.toLocaleString("en", {minimumFractionDigits: 2, maximumFractionDigits: 2});
const slots = table =>
  Object.entries(table)
    .map(([kind, count]) => (kind === "any" ? count : `${kind}=${count}`))
    .join(", ") || DASH;

const LEFT = new Set(["Month", "Team", "User", "Users", "Lends"]);
const table = (titles, rows) =>
  h(
    "div",
    {class: "scroll"},
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, titles.map(title => h("th", {scope: "col", class: LEFT.has(title) ? "left" : null}, title)))),
      h("tbody", {}, rows.map(cells => h("tr", {}, cells.map((cell, at) => h("td", {class: LEFT.has(titles[at]) ? "left" : null}, cell))))),
    ),
  );

export function usagePage() {
  const used = h("div", {}, "Asking the server …"),
    teams = h("div", {});
  const element = h(
    "div",
    {},
    h("h1", {}, "Usage by month"),
    h("p", {class: "muted"}, "Slots that jobs held, times hours. Goodput-hours count what was useful of them."),
    used,
    h("section", {}, h("h2", {}, "Teams"), teams),
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
      fill(
        used,
        rows.length
          ? table(["Month", "Team", "User", "Slot-hours", "GPU-hours", "Goodput-hours", "Cost"], rows)
          : h("p", {class: "muted"}, "Nothing was used yet."),
      );
      const lent = team => Object.entries(team.lent_to).map(([other, count]) => `${count} to ${other}`);
      fill(
        teams,
        known.teams.length
          ? table(
              ["Team", "Weight", "Guarantee", "Limit", "Holds", "Wants", "Lends", "Users"],
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
            )
          : h("p", {class: "muted"}, "There are no teams. An admin makes one: pollux team add NAME --guarantee SLOTS"),
      );
    } catch (error) {
      fill(used, h("p", {class: "problem", role: "alert"}, error.message));
    }
  };
  load();
  const timer = setInterval(load, 15000);
  return {title: "Usage", element, update() {}, remove: () => clearInterval(timer)};
}
