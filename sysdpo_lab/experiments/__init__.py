"""The experiments of the command line: each module has METRICS, `run_seed`, `figures`, `samples` and PROSE."""
