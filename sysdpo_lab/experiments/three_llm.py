"""`run three-llm`: two language models answer on their own, a third merges their answers; aligned as one system.

x -> answer1, x -> answer2, all -> merge: a collider. SysDPO-Sampling draws k joint assignments of (answer1, answer2). The
rows direct and direct-edge ask whether an edge answer1 -> answer2 helps SysDPO-Direct, as it does on tables (lesson 04).
"""

from sysdpo_lab.experiments.language import LanguageExperiment

EXPERIMENT = LanguageExperiment(
    title="Three language models: two answer, one merges, aligned as one system",
    parents={"answer1": ("x",), "answer2": ("x",), "merge": ("x", "answer1", "answer2")},
    roles={},
    about="Three language models: answer1 and answer2 answer on their own, merge sees the request and both answers.",
    extra_rows=("direct", "prompted-edge", "direct-edge"),
    edge=("answer1", "answer2"),
)
