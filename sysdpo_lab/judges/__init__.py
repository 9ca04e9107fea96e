"""Judges of final answers (E10): each has `compare(inputs, first, second)`, 1 where the first answer is better.

exact and rule: a score of one answer - similarity: to a reference answer - PairwiseJudge: a language model that is asked
in both orders, behind an endpoint (`OpenAIModel`) or in this process (`LocalModel`).
"""

from sysdpo_lab.judges.models import LocalModel as LocalModel
from sysdpo_lab.judges.models import OpenAIModel as OpenAIModel
from sysdpo_lab.judges.pairwise import PairwiseJudge as PairwiseJudge
from sysdpo_lab.judges.pairwise import read_verdict as read_verdict
from sysdpo_lab.judges.replies import ReplyStore as ReplyStore
from sysdpo_lab.judges.scores import ScoreJudge as ScoreJudge
from sysdpo_lab.judges.scores import exact as exact
from sysdpo_lab.judges.scores import rule as rule
from sysdpo_lab.judges.scores import similarity as similarity
