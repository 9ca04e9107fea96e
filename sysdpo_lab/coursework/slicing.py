"""Which cells of a lesson must run before an exercise can be tested: grading must not train what no test looks at.

A cell is needed when it binds a needed name, stores into the value behind one or calls a method of it that may change it;
what a needed cell reads is needed too. A value that is changed by a function it is handed to (`train(system)`) is not seen:
the grader tries each exercise's solution on what is chosen here, and runs all cells where that fails.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

READ_ONLY_METHODS = {
    *(
        "abs",
        "all",
        "any",
        "argmax",
        "argmin",
        "clone",
        "cos",
        "detach",
        "diff",
        "dim",
        "double",
        "exp",
        "expand",
        "flatten",
    ),
    *(
        "float",
        "index",
        "isfinite",
        "isnan",
        "item",
        "items",
        "join",
        "keys",
        "log",
        "max",
        "mean",
        "min",
        "nonzero",
        "numel",
    ),
    *(
        "permute",
        "reshape",
        "round",
        "size",
        "softmax",
        "split",
        "sqrt",
        "std",
        "sum",
        "tolist",
        "transpose",
        "values",
        "view",
    ),
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Use:
    """What a cell does with names: `code` are imports, functions and classes, `data` all else that it binds."""

    code: set[str] = field(default_factory=set)
    data: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    touches: set[str] = field(default_factory=set)
    everything: bool = False  # a star import


def plain_python(source: str) -> str:
    """The cell without notebook magics, which only Jupyter understands.

    >>> plain_python("%matplotlib inline\\nx = 1")
    '\\nx = 1'
    """
    return "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in source.splitlines())


def use_of(source: str) -> Use:
    """What a cell binds, reads and may change; nothing for what is no valid Python.

    >>> use = use_of("import math\\ny = math.exp(x)\\nz.append(y)")
    >>> sorted(use.code), sorted(use.data), sorted(use.touches)
    (['math'], ['y'], ['z'])
    """
    use = Use()
    try:
        tree = ast.parse(plain_python(source))
    except SyntaxError:
        return use
    _note_uses(tree, set(), use)
    for name, is_code in _bindings(tree):
        (use.code if is_code else use.data).add(name)
    return use


def _note_uses(node: ast.AST, local: set[str], use: Use) -> None:
    """What is read and touched at this node and below it; `local` are the names of the functions around it."""
    if isinstance(node, FUNCTIONS):
        arguments = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
        local = (local | arguments | {name for name, _ in _bindings(node)}) - _declared_global(node)
        use.data |= _declared_global(node)
    elif isinstance(node, COMPREHENSIONS):
        local = local | {name for generator in node.generators for name, _ in _bindings(generator)}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        use.reads |= {node.id} - local
    elif isinstance(node, ast.AugAssign):
        use.reads |= _base(node.target) - local
    elif isinstance(node, ast.ImportFrom):
        use.everything |= any(alias.name == "*" for alias in node.names)
    use.touches |= set().union(*map(_base, _may_change(node))) - local
    for child in ast.iter_child_nodes(node):
        _note_uses(child, local, use)


def _declared_global(function: ast.AST) -> set[str]:
    return {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}


def _may_change(node: ast.AST) -> list[ast.AST]:
    """The expressions whose values this node itself may change."""
    if isinstance(node, ast.Attribute | ast.Subscript):
        return [] if isinstance(node.ctx, ast.Load) else [node]
    method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return [node.func.value] if method and node.func.attr not in READ_ONLY_METHODS else []


def _base(node: ast.AST) -> set[str]:
    """The names that `name.a[b].c`, `*name` or a list of such begin with."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        node = node.value
    if isinstance(node, ast.Tuple | ast.List):
        return set().union(*map(_base, node.elts))
    if isinstance(node, ast.Dict):
        return set().union(*map(_base, node.values))
    return {node.id} if isinstance(node, ast.Name) else set()


def _bindings(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """(name, whether it is an import, a function or a class) of what is bound here, not within inner functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, True
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (((alias.asname or alias.name).split(".")[0], True) for alias in node.names)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id, False
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name, False
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef, *COMPREHENSIONS)):
            yield from _bindings(node)


def needed_cells(uses: Sequence[Use], wanted: set[str]) -> list[int]:
    """Positions of the cells that must run, in order, before something that reads `wanted` can.

    A reader needs the latest cell above it that binds the name, and those between the two that touch its value; where
    none above binds it (a function that reads what is defined further down), the first one below.

    Args:
        uses: of the cells that stand before it; an empty use is never needed.
        wanted: the names that are read.

    >>> cells = ["import math", "a = [0]", "a = [1]", "b = 2", "a.append(math.pi)", "print(a)"]
    >>> needed_cells([use_of(cell) for cell in cells], {"a"})
    [0, 2, 4]
    """
    code = set().union(*(use.code for use in uses)) - set().union(*(use.data for use in uses))
    chosen = {position for position, use in enumerate(uses) if use.everything}
    todo = [(len(uses), name) for name in wanted]
    todo += [(position, name) for position in chosen for name in uses[position].reads]
    while todo:
        reader, name = todo.pop()
        binders = [position for position, use in enumerate(uses) if name in use.code | use.data]
        above = [position for position in binders if position < reader]
        first = above[-1] if above else next(iter(binders), reader)
        touched = [] if name in code else [k for k in range(first, reader) if name in uses[k].touches]
        for position in {*binders} & {first} | {*touched}:
            if position not in chosen:
                chosen.add(position)
                todo += [(position, other) for other in uses[position].reads]
    return sorted(chosen)
