"""One file for each guest: the only place that knows it."""
