"""Pages, figures and number formats that commands, benchmarks and the dashboard share."""
