"""Shape of the package: sizes, imports, duplicate names and prose, counted from the syntax trees.

``python -m benchmarks.shape`` prints every figure, its limit and one place. ``--check`` fails where a figure is over
its limit in `shape_limits.toml`, with a hint and the places in files that differ from the last commit. It also names
the limits that can be lowered. ``--list NAME`` prints all places.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
LIMITS = Path(__file__).with_name("shape_limits.toml")
PACKAGE = "lightning_realloc"
STEP = f"{PACKAGE}.generation.loop.run"
SMALL_FILE_LINES, LONG_FILE_LINES, PAGE_WORDS = 60, 400, 1_200
GENERATED = re.compile(r"<!-- ([\w ]+): start -->.*?<!-- \1: end -->", re.DOTALL)
WORD = re.compile(r"\S*\w\S*")
WIDE_LINE = re.compile(r"^(?!\|).{121}", re.MULTILINE)  # rows of tables may be wider
NUMBER = re.compile(r" = [-+*/%<>() ]*\d[-+*/%<>().\de ]*$")
QUESTION = re.compile(r"[^.]*\?(\s|$)")
BANNED = re.compile(r"(?<![a-z])(stood|acquainted|told|hear|outlet|whoever|come to)(?![a-z])", re.IGNORECASE)
BANNED_START = re.compile(r"Of |Return (what|who|where)\b")
ENGINE = re.compile(r"engine\b.* (==|!=|in) .*'(native|hf|vllm)'")
PROMPT_TOKENS = re.compile(r"tuple\([\w.]*\bprompt\)$|.*\.ragged\('prompt_ids'\)\.(split|to_lists)\(\)$")
"""Token ids of prompts taken as values to compare; ``prompt_key`` is what identifies a prompt."""
AXES = ("dp", "fsdp", "cp", "tp", "pp")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
HINTS = {
    "files_per_folder": "move some files into a sub-package",
    "long_files": "move a class or its helpers into a module of their own",
    "function_lines": "split the function where a comment would begin a paragraph",
    "constructor_parameters": "group what belongs together in a frozen dataclass",
    "class_attributes": "move attributes that change together into a class of their own",
    "public_methods": "make a method a function, or give it to an object that the class holds",
    "one_importer_and_small": "move the file into the module that imports it",
    "file_cycles": "move the name that both need into a third module",
    "folder_cycles": "move the file to the folder that needs it",
    "engine_comparisons": "ask CAPABILITIES for the capability that is meant",
    "prompt_identity": "compare prompt_keys(samples), or Sample.input.prompt_key",
    "axis_literals": "ask the layout, such as Layout.batch_axes",
    "file_cycles_with_types": "move the name that both need into a third module",
    "step_files": "import it in the function that needs it, or under TYPE_CHECKING",
    "generation_numbers": "compute the number, or use a constant that is there",
    "duplicate_classes": "add to the name what tells them apart",
    "duplicate_functions": "use the function that is there, or add to the name what tells them apart",
    "duplicate_files": "add to the name what tells them apart",
    "any_parameters_of_strategies": "write a type or a Protocol",
    "fmt_skip": "let ruff format it",
    "type_ignore": "annotate or narrow the type",
    "docstrings_that_ask": "write a noun phrase or an imperative",
    "banned_starts": "begin with the thing itself",
    "banned_words": "use the field's term: accepted, finished, receive, report",
    "long_pages": "move a part to a page of its own, and figures to docs/benchmarks",
    "wide_pages": "break the line before 120 columns",
}
"""How to lower each figure that has a limit."""
Graph = Mapping[str, set[str]]
Figure = tuple[int, list[str]]  # a count with all its places, or a maximum with the place that has it


class Module(NamedTuple):
    """One source file; ``path`` is relative to the repository."""

    name: str
    path: Path
    lines: list[str]
    tree: ast.Module

    def nodes(self, *kinds: type) -> list[Any]:
        """Return all nodes of some kinds."""
        return [node for node in ast.walk(self.tree) if isinstance(node, kinds)]

    def place(self, node: Any) -> str:
        """Return ``path:line``, and the name if there is one."""
        return f"{self.path}:{node.lineno} {getattr(node, 'name', '')}".strip()


def read_modules(root: Path) -> list[Module]:
    """Parse all files of the package."""
    modules = []
    for file in sorted((root / PACKAGE).rglob("*.py")):
        path, text = file.relative_to(root), file.read_text()
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        modules.append(Module(name, path, text.splitlines(), ast.parse(text)))
    return modules


def import_graph(modules: list[Module], *, at_start: bool) -> Graph:
    """Return the modules that each module imports; ``at_start`` skips functions and blocks for type checkers."""
    graph: dict[str, set[str]] = {module.name: set() for module in modules}
    for module in modules:
        for node in _nodes(module.tree, at_start):
            if isinstance(node, ast.Import):
                graph[module.name] |= {alias.name for alias in node.names} & graph.keys()
            elif isinstance(node, ast.ImportFrom) and node.module in graph:
                inner = {f"{node.module}.{alias.name}" for alias in node.names} & graph.keys()
                graph[module.name] |= inner or {node.module}
    return graph


def _nodes(tree: ast.AST, at_start: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not at_start or not (for_types or isinstance(node, FUNCTIONS)):
            yield node
            yield from _nodes(node, at_start)


def reachable(graph: Graph, start: str) -> set[str]:
    """Return the nodes that a walk from ``start`` reaches; ``start`` is one only if it lies on a cycle."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def cycles(graph: Graph) -> Figure:
    """Count the groups of nodes that reach one another."""
    reach = {node: reachable(graph, node) for node in graph}
    groups = {frozenset(other for other in reach[node] if node in reach[other]) for node in graph}
    return _count(" <-> ".join(sorted(group)) for group in groups if group)


def merge_folders(graph: Graph, modules: list[Module]) -> Graph:
    """Join the files of each folder into one node; files next to subfolders stay nodes of their own."""
    parents = {module.path.parent.parent for module in modules}
    nodes = {m.name: str(m.path if m.path.parent in parents else m.path.parent) for m in modules}
    merged: dict[str, set[str]] = defaultdict(set)
    for name, targets in graph.items():
        merged[nodes[name]] |= {nodes[target] for target in targets} - {nodes[name]}
    return merged


def measure_sizes(modules: list[Module]) -> dict[str, Figure]:
    """Return the figures of files, functions and classes."""
    functions = [(node.end_lineno - node.lineno + 1, m.place(node)) for m in modules for node in m.nodes(*FUNCTIONS)]
    lengths = sorted(length for length, _ in functions)
    classes = [(_class_sizes(node), m.place(node)) for m in modules for node in m.nodes(ast.ClassDef)]
    rooms = Counter[str]()
    for module in modules:
        rooms[module.path.parts[1] if len(module.path.parts) > 2 else "(top)"] += len(module.lines)
    folders = Counter(m.path.parent for m in modules if m.path.name != "__init__.py")
    generation = [(m, node) for m in modules if "generation" in m.path.parts for node in m.tree.body]
    constants = [(m, node) for m, node in generation if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
    numbers = (f"{m.place(node)} {ast.unparse(node)}" for m, node in constants if NUMBER.search(ast.unparse(node)))
    return {
        "files": (len(modules), []),
        "lines": (sum(rooms.values()), [f"{room} {number}" for room, number in rooms.most_common()]),
        "long_files": _count(f"{m.path} {len(m.lines)}" for m in modules if len(m.lines) > LONG_FILE_LINES),
        "files_per_folder": _largest((number, str(folder)) for folder, number in folders.items()),
        "function_lines_p90": (lengths[len(lengths) * 9 // 10], []),
        "function_lines": _largest(functions),
        "constructor_parameters": _largest((sizes[0], place) for sizes, place in classes),
        "class_attributes": _largest((sizes[1], place) for sizes, place in classes),
        "public_methods": _largest((sizes[2], place) for sizes, place in classes),
        "generation_numbers": _count(numbers),
    }


def measure_names(modules: list[Module]) -> dict[str, Figure]:
    """Return the figures of imports and of public names that several files define."""
    importers = Counter(name for names in import_graph(modules, at_start=False).values() for name in names)
    files = [m for m in modules if m.path.name != "__init__.py"]
    small = {m.name: str(m.path) for m in files if len(m.lines) < SMALL_FILE_LINES}
    graph = import_graph(modules, at_start=True)
    step = {STEP, *reachable(graph, STEP)}
    top = [(node, m) for m in files for node in m.tree.body if isinstance(node, (ast.ClassDef, *FUNCTIONS))]
    return {
        "small_files": _count(small.values()),
        "one_importer": _count(str(m.path) for m in files if importers[m.name] == 1),
        "one_importer_and_small": _count(path for name, path in small.items() if importers[name] == 1),
        "file_cycles": cycles(graph),
        "folder_cycles": cycles(merge_folders(graph, modules)),
        "step_files": _count(step),
        "step_files_of_generation": _count(name for name in step if ".generation." in name),
        "duplicate_classes": _duplicates((node.name, m.path) for node, m in top if isinstance(node, ast.ClassDef)),
        "duplicate_functions": _duplicates((node.name, m.path) for node, m in top if isinstance(node, FUNCTIONS)),
        "duplicate_files": _duplicates((m.path.stem, m.path) for m in files),
    }


def measure_seams(modules: list[Module]) -> dict[str, Figure]:
    """Return the figures of names that one room should know alone: engines, tokens of prompts, and axes."""
    outside = [m for m in modules if "layout" not in m.path.parts]
    compared = [(m, node, ast.unparse(node)) for m in modules for node in m.nodes(ast.Compare)]
    calls = [(m, node) for m in modules if "batch" not in m.path.parts for node in m.nodes(ast.Call)]
    return {
        "engine_comparisons": _count(m.place(node) for m, node, text in compared if ENGINE.search(text)),
        "prompt_identity": _count(m.place(node) for m, node in calls if PROMPT_TOKENS.match(ast.unparse(node))),
        "axis_literals": _count(m.place(node) for m in outside for node in m.nodes(ast.Constant) if node.value in AXES),
        "file_cycles_with_types": cycles(import_graph(modules, at_start=False)),
    }


def measure_text(modules: list[Module], root: Path) -> dict[str, Figure]:
    """Return the figures of docstrings, words to avoid, pages, and exceptions for formatter and type checker."""
    texts = [
        (m.place(node), node.value.value) for m in modules for node in m.nodes(ast.Expr)
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]  # fmt: skip
    strategies = [(m, node) for m in modules if "strategies" in m.path.parts for node in m.nodes(ast.arg)]
    untyped = (m.place(node) for m, node in strategies if node.annotation and ast.unparse(node.annotation) == "Any")
    files = [*root.glob("README.md"), *(root / "docs").rglob("*.md")]
    pages = {str(page.relative_to(root)): GENERATED.sub("", page.read_text()) for page in files}
    return {
        "docstrings_that_ask": _count(str(m.path) for m in modules if QUESTION.match(ast.get_docstring(m.tree) or "")),
        "what_in_docstrings": _count(place for place, text in texts for _ in re.findall(r"(?i)\bwhat\b", text)),
        "banned_starts": _count(place for place, text in texts if BANNED_START.match(text)),
        "banned_words": _matches(modules, BANNED),
        "any_parameters_of_strategies": _count(untyped),
        "fmt_skip": _matches(modules, re.compile("# fmt: skip")),
        "type_ignore": _matches(modules, re.compile("# type: ignore")),
        "long_pages": _count(
            path for path, text in pages.items() if len(WORD.findall(text)) > PAGE_WORDS and "benchmarks" not in path
        ),
        "wide_pages": _count(path for path, text in pages.items() if WIDE_LINE.search(text)),
    }


def _count(places: Iterable[str]) -> Figure:
    found = sorted(places)
    return len(found), found


def _largest(sizes: Iterable[tuple[int, str]]) -> Figure:
    value, place = max(sizes)
    return value, [place]


def _matches(modules: list[Module], pattern: re.Pattern[str]) -> Figure:
    lines = [(f"{m.path}:{number}", line) for m in modules for number, line in enumerate(m.lines, 1)]
    return _count(f"{place} {found[0]}" for place, line in lines for found in pattern.finditer(line))


def _duplicates(named: Iterable[tuple[str, Path]]) -> Figure:
    files: dict[str, set[str]] = defaultdict(set)
    for name, path in named:
        files[name].add(str(path))
    several = {name: paths for name, paths in files.items() if len(paths) > 1 and not name.startswith("_")}
    return _count(f"{name}: {', '.join(sorted(paths))}" for name, paths in several.items())


def _class_sizes(node: ast.ClassDef) -> tuple[int, int, int]:
    """Return the numbers of constructor parameters, of attributes and of public methods."""
    methods = {part.name: part for part in node.body if isinstance(part, FUNCTIONS)}
    arguments = ast.walk(methods["__init__"].args) if "__init__" in methods else ()
    fields = [part for part in node.body if isinstance(part, ast.Assign | ast.AnnAssign)]
    stored = [ast.unparse(part) for part in ast.walk(node) if isinstance(getattr(part, "ctx", None), ast.Store)]
    attributes = {name for name in stored if re.fullmatch(r"self\.\w+", name)}
    attributes |= {f"self.{name}" for part in fields for name in re.findall(r"^\w+", ast.unparse(part))}
    parameters = {part.arg for part in arguments if isinstance(part, ast.arg)} - {"self"}
    return len(parameters), len(attributes), sum(not name.startswith("_") for name in methods)


def measure(root: Path = ROOT) -> dict[str, Figure]:
    """Return all figures of the package below ``root``, by name."""
    modules = read_modules(root)
    return measure_sizes(modules) | measure_names(modules) | measure_seams(modules) | measure_text(modules, root)


def changed_files(root: Path = ROOT) -> list[str]:
    """Return the files that differ from the last commit, new ones included; none without git."""
    if shutil.which("git") is None:
        return []
    command = ["git", "status", "--porcelain", "--untracked-files=all", "--no-renames"]
    status = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    return [line[3:] for line in status.splitlines()]


def check(figures: Mapping[str, Figure], limits: Mapping[str, int], changed: Collection[str] = ()) -> int:
    """Print the figures over their limits and the limits that can be lowered, or that all are within them.

    Return 1 where one is over.

    For figures over their limits, the places in ``changed`` files are printed as well.
    """
    for name, limit in limits.items():
        value, places = figures[name]
        if value > limit:
            hint = f"{HINTS[name]}; " if name in HINTS else ""
            print(f"{name} is {value}, over its limit of {limit}: {hint}`python -m benchmarks.shape --list {name}`")
            print(*(f"  {place}\n" for place in places if any(path in place for path in changed)), sep="", end="")
        elif value < limit:
            print(f"{name} is {value}: lower its limit of {limit} in benchmarks/{LIMITS.name}")
    num_over = sum(figures[name][0] > limit for name, limit in limits.items())
    if not num_over:
        print(f"all {len(limits)} figures are within their limits")
    return int(num_over > 0)


def main(argv: list[str] | None = None) -> int:
    """Print the figures, the places of one, or the result of the check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a figure is over its limit")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write figures and limits here")
    parser.add_argument("--list", metavar="NAME", help="print all places that a figure counts")
    options = parser.parse_args(argv)
    figures, limits = measure(), tomllib.loads(LIMITS.read_text())
    if options.json:
        values = {name: {"value": value, "limit": limits.get(name)} for name, (value, _) in figures.items()}
        options.json.write_text(json.dumps(values, indent=2) + "\n")
    if options.check:
        return check(figures, limits, changed_files())
    if options.list:
        print(*figures[options.list][1], sep="\n")
    else:
        for name, (value, places) in figures.items():
            print(f"{name:30}{value:>8,}{limits.get(name, ''):>8}  {places[0] if places else ''}"[:100])
    return 0


if __name__ == "__main__":
    sys.exit(main())
