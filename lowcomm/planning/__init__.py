"""What to run where: schedules and limits, in plain Python, from measured times."""
