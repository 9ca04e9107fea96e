"""The experiments of the command line: each module has TITLE, METRICS, `check`, `run_seed`, `figures`, `samples` and `prose`."""
