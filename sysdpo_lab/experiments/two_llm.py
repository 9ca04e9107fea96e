"""`run two-llm`: two language models, draft and refine, aligned as one system.

x -> draft -> refine, x -> refine; two LoRA adapters on one base; SysDPO-Sampling with diverse beam search, k = 2.
"""

from sysdpo_lab.experiments.language import LanguageExperiment

EXPERIMENT = LanguageExperiment(
    title="Two language models, draft and refine, aligned as one system",
    parents={"draft": ("x",), "refine": ("x", "draft")},
    roles={},
    about="Two language models: draft writes a first answer, refine sees the request and the draft and writes the final one.",
)
