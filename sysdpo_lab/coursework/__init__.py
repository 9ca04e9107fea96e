"""From the lessons' text sources to executed notebooks, student versions and marks, with checks for their exercises.

build: sources -> executed notebooks, and student versions beside them (student: what they leave out) - grade: hand-ins -> points
and feedback (handins: finds the answers; slicing: which cells of a lesson a test needs; processes and judge: run one
exercise; feedback: the words) - exercises: cells, marks and markers, and what can be wrong with them - checks: what each
exercise's test cell calls. The marks are nbgrader's: it takes the executed notebooks as source notebooks.

    python -m sysdpo_lab.coursework.build --student             # notebooks/student/*.ipynb to hand out
    python -m sysdpo_lab.coursework.grade hand-ins --jobs 2     # grades/grades.csv and a page for each

How to write an exercise
------------------------
**1. The cells**, at the end of a lesson's source, before the recap. An exercise always asks for a *function* (without
arguments where it asks for a value), so that an empty answer raises NotImplementedError and nothing else. Five cells::

    # %% [markdown]
    # ### Exercise 1: The margin of a pair
    #
    # **Difficulty** 1/5 · **importance** 5/5 · **minutes** 5
    #
    # Write `margin(policy_chosen, ..., beta)`: what goes in, what comes out, shapes.
    #
    # <details><summary>Hint 1</summary>
    #
    # What do you compare the policy with?
    #
    # </details>
    #
    # <details><summary>Hint 2</summary>
    #
    # Two differences, then one more, then beta.
    #
    # </details>

    # %% nbgrader={"grade": false, "grade_id": "margin", "locked": false, "solution": true, MORE}
    def margin(policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta):
        '''beta x log-ratio gap of each pair, shape (B,).'''
        ### BEGIN SOLUTION
        return ...
        ### END SOLUTION

    # %% nbgrader={"grade": true, "grade_id": "margin-test", "locked": true, "points": 2, "solution": false, MORE}
    checks.lesson_00.check_margin(margin)
    ### BEGIN HIDDEN TESTS
    assert margin(*(torch.zeros(2),) * 4, 0.1).shape == (2,), "one margin for each pair"
    ### END HIDDEN TESTS

    # %% [markdown]
    # *Why it matters.* One sentence.

where MORE stands for `"schema_version": 3, "task": false`. The lesson imports `from sysdpo_lab.coursework import checks`.
`grade_id` is unique in the lesson; the test's is the solution's with `-test`. Hidden tests hold asserts with messages. A cell
tagged `instructor` is left out of the student version. The grader first runs the lesson's own solutions: they must pass,
and each test must refuse an answer that only raises NotImplementedError. So that grading is quick, an exercise runs only
the cells of the lesson that its test, or the answer, uses by name.

**2. The check**, in `sysdpo_lab/coursework/checks/lesson_NN.py` (found by its name; no list to keep)::

    from sysdpo_lab.coursework.checks.core import Check, Mistake, fail

    check_margin = Check(
        cases=lambda: [(…inputs…), …],       # called anew for each run, own generator with a fixed seed inside
        right=margin,                        # the library's function, or an independent formula; its name and
                                             # parameters are what the learner is told
        mistakes=[
            Mistake("reference forgotten", wrong_function, "subtract the reference's log-probabilities: …"),
            …                                # two or more; the message says what to change, not the answer
        ],
    )

`check_margin(answer)` prints one line when all values agree (to `tolerance`, relative and absolute, 1e-6) and raises
`checks.CheckFailed` otherwise: with a mistake's message when the answer gives that mistake's values in *all* cases (where the
mistake raises, the answer must raise the same kind of error), else with what came out: an exception, None, another shape or
type, NaN, a wrong value and for which input. NotImplementedError is passed on. Results may be numbers, tensors, texts, and
lists, tuples and dicts of them. Each call has 20 s (`seconds`), so that an answer that enumerates or never ends gets a
message too. Options: `view`, applied to each result before the comparison (`view=exact.marginal` for an answer that is a
system); `also`, functions of the answer that raise CheckFailed (`fail(...)`) for what values do not show (a gradient, a
distribution, the global random state); `name`, when it is not the right function's.

**3. Tests.** tests/coursework/test_checks.py finds every check by itself: the right answer passes, each mistake fails with
its own message and no other, garbage gives a readable message. Write tests/coursework/test_checks_lesson_NN.py with wrong
answers written as a learner would, not taken from the check: `checks.message(check, answer)` returns the message, None for
a pass.
"""
