"""Experiments on lowcomm: data, models, tasks, comparisons and their figures."""
