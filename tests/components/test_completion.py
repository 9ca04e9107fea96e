"""A completion is its token ids; the text is for people."""

import pickle

import torch

from sysdpo_lab.components import Completion


def test_equality_and_hash_follow_the_ids_only():
    first, second = Completion("a cat", (5, 6, 2)), Completion("a  cat", [5, 6, 2], truncated=True)
    assert first == second and hash(first) == hash(second) and first != Completion("a cat", (5, 6))
    assert len({first, second}) == 1 and first != "a cat"


def test_ids_become_plain_numbers():
    completion = Completion("a", torch.tensor([5, 6]))
    assert completion.token_ids == (5, 6) and all(type(i) is int for i in completion.token_ids)


def test_it_prints_as_its_text_and_pickles():
    completion = Completion("a cat", (5,), truncated=True)
    again = pickle.loads(pickle.dumps(completion))
    assert str(completion) == "a cat" and (again.text, again.token_ids, again.truncated) == ("a cat", (5,), True)
