"""A lesson of three exercises that needs nothing but Python, so that a process for each of them starts at once."""

from nbformat import from_dict

from sysdpo_lab.coursework import build, exercises


def solution(name: str) -> str:
    marks = (
        f'"grade": false, "grade_id": "{name}", "locked": false, "schema_version": 3, "solution": true, "task": false'
    )
    return f"# %% nbgrader={{{marks}}}\n"


def test(name: str, points: float) -> str:
    marks = f'"grade": true, "grade_id": "{name}-test", "locked": true, "points": {points}'
    return f'# %% nbgrader={{{marks}, "schema_version": 3, "solution": false, "task": false}}\n'


LESSON = f'''# %% [markdown]
# # 00 Small
#
# Text.

# %% [markdown] tags=["instructor"]
# Say this aloud.

# %%
import sys
import types


def module(name, text=""):
    made = sys.modules[name] = types.ModuleType(name)
    exec(text, vars(made))
    above, _, last = name.rpartition(".")
    if above:
        setattr(sys.modules[above], last, made)


module("sysdpo_lab")
module("sysdpo_lab.coursework")
module("sysdpo_lab.coursework.checks")
module(
    "sysdpo_lab.coursework.checks.lesson_00",
    """
class Check:
    def __init__(self, right):
        self.right = right

    def __call__(self, answer):
        assert all(answer(x) == self.right(x) for x in (1, 5)), "double: this is not twice the number"


def double(x):
    return 2 * x


check_double = Check(double)
""",
)
from sysdpo_lab.coursework import checks

# %%
SCALE = 2

# %%
unused = sum(range(10))

# %% [markdown]
# ### Exercise 1

{solution("double")}def double(x):
    """Twice x."""
    ### BEGIN SOLUTION
    return SCALE * x
    ### END SOLUTION

{test("double", 2)}checks.lesson_00.check_double(double)
### BEGIN HIDDEN TESTS
assert double(0) == 0, "nothing doubled is nothing"
### END HIDDEN TESTS

{solution("greet")}def greet(name):
    """A greeting."""
    ### BEGIN SOLUTION
    words = ["hello", name]
    return " ".join(words)
    ### END SOLUTION

{test("greet", 0.5)}assert greet("ann") == "hello ann", "greet by name"

{solution("quadruple")}def quadruple(x):
    """Four times x, by means of double."""
    ### BEGIN SOLUTION
    return double(double(x))
    ### END SOLUTION

{test("quadruple", 3)}assert quadruple(3) == 12, "four times three is twelve"

# %% [markdown]
# ## Recap
'''


def lesson_file(folder, text: str = LESSON, name: str = "00_small"):
    """The lesson's source as a file."""
    (folder / "sources").mkdir(parents=True, exist_ok=True)
    path = folder / "sources" / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    return path


def answered(notebook, answers: dict[str, str]):
    """A copy of a student notebook with other text in the cells of these exercises."""
    made = from_dict(notebook)
    for cell in made.cells:
        name = exercises.marks(cell).get("grade_id")
        cell.source = answers.get(name, cell.source)
    return made


def read(path):
    return build.read_source(path)
