/* Before anything is painted: the theme that was chosen last. A plain script, as modules run too late for that. */
"use strict";
try {
  const theme = localStorage.getItem("pollux-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  /* no storage: the system's theme */
}
