"""What the server shows: views of jobs and rounds, charts, explanations, the event feed, metrics."""
