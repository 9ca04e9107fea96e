"""At the root, so that it also holds for `pytest notebooks/one.ipynb`: notebook kernels inherit this environment."""

import os

os.environ.pop("MPLBACKEND", None)  # a kernel started under Agg shows no figure, and nbval would miss each of them
os.environ.pop("SYSDPO_PROFILE", None)  # the stored outputs belong to the profile that each lesson has by default
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that needs the network should fail at once, not hang
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else tokenizers warns in every process that pytest forks
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads make a busy machine many times slower
