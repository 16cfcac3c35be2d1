"""Builds the documentation: the pages of this folder, and references made from the code.

    python docs/build.py [FOLDER]      # build/docs by default; the site is FOLDER/site
    python docs/build.py --files ...   # rewrites generated parts of pages; --help has the list

README is the site's first page. A line `<!-- include: PATH -->` in a page is replaced by that file:
code in a block, a drawing as it is. Nothing is fetched, and a warning of the site's builder (a
broken link or anchor, a page missing from the navigation) fails the build.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs"
FOREIGN_NAMES = PAGES / "foreign_names.toml"
INCLUDE = re.compile(r"^<!-- include: (\S+) -->$", re.M)
INTERVAL = re.compile(r"(?<=\d) ± (?=\d)")
REFERENCE = re.compile(r"\]\(reference\.md#(names|errors)[\w-]*\)")
KEPT = ("settings", "metrics", "commands")
"""Generated pages that a clone holds in docs/reference, so that they are read without a site."""
TABLE = re.compile(r"(?<=^<!-- table: )(.+?) -->\n.*?(?=<!-- end of table -->)", re.S | re.M)
CONTENTS = re.compile(r"(?<=<!-- contents -->\n).*?(?=<!-- end of contents -->)", re.S)
NAMES = re.compile(r"(?<=<!-- names -->\n).*?(?=<!-- end of names -->)", re.S)
FILES = re.compile(r"(?<=<!-- files -->\n).*?(?=<!-- end of files -->)", re.S)

SETTINGS_HEAD = """# Settings

All settings of a recipe, generated from `src/treegraft/settings`. `treegraft config RECIPE` prints
the resolved settings of a recipe. On the command line, write a setting with its table, such as
`learn.lr=1e-5`; the last part is enough if only one setting has it. A setting on the command line
that would have no effect is an error."""
METRICS_HEAD = """# Metrics

The keys of `metrics.jsonl`, generated from `src/treegraft/runs/metrics.toml`. Each update is one
line with flat keys: `num_` is a count, `_frac` a share from 0 to 1, `_s` seconds; names in braces
depend on the recipe. A contribution is a pair of a loss token and a trajectory that contains it. A
token that k trajectories share has k. `time/*` is not reproducible. `treegraft config KEY` prints
one meaning."""
NAMES_HEAD = """# Names of other frameworks

Every setting of {versions} with what it is in Treegraft, generated from
`src/treegraft/settings/names.toml` and `docs/foreign_names.toml`. If you type one of the common
names in a recipe or on the command line, the error message says the same. `x.*` stands for all
settings below `x` that have no line of their own."""
WARNINGS_HEAD = """\
# Warnings while training

Generated from `src/treegraft/runs/health.toml` by `python docs/build.py --warnings`. The
terminal reports a warning when it begins and when it ends. The lines of its updates in
`metrics.jsonl` have it as `health/NAME`, and the viewer marks them. `health.NAME = "off"` turns a
warning off. A window is three updates.
"""
ERRORS_HEAD = """# Errors

Every error that Treegraft raises on purpose is a `treegraft.TreegraftError`. Its `code` names the
reason for programs and stays when the message is edited: catch the class, then compare
`error.code`; `error.settings` holds the dotted names of settings that it is about, where these are
known. Generated from the source; `…` stands for what a message fills in."""
COMMANDS_HEAD = """# Commands

Generated from the program; `treegraft COMMAND --help` prints the same. Exit codes: 0 success; 1
failure while working; 2 wrong settings, data, model or usage; 3 unusable checkpoint or run folder;
130 stopped with Ctrl-C, 143 by SIGTERM, 129 by SIGHUP, 138 by SIGUSR1."""


def stage(folder: Path) -> None:
    """Writes what the site's builder reads into `folder`, which is emptied first."""
    from treegraft import __version__

    shutil.rmtree(folder, ignore_errors=True)
    place = folder / "docs"
    shutil.copytree(PAGES, place, ignore=shutil.ignore_patterns("*.py", "*.t*", "__pycache__"))
    site = (PAGES / "zensical.toml").read_text(encoding="utf-8")
    (folder / "zensical.toml").write_text(site.replace("{version}", __version__), encoding="utf-8")
    shutil.copy(ROOT / "src/treegraft/view/static/icon.svg", place / "assets")
    (place / "index.md").write_text(home(), encoding="utf-8")
    for page in place.rglob("*.md"):
        text = INCLUDE.sub(included, page.read_text(encoding="utf-8"))
        # A number and its interval stay on one line.
        text = INTERVAL.sub("\u00a0±\u00a0", text)
        # In a clone these links lead to a page that is there.
        page.write_text(REFERENCE.sub(r"](reference/\1.md)", text), encoding="utf-8")
    for name, text in references().items():
        (place / "reference" / f"{name}.md").write_text(text, encoding="utf-8")


def home() -> str:
    """Returns README as the site's first page: links lead from the pages' folder, and those to
    files that the site lacks are text."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(?<=\]\()docs/|(?<=src=\")docs/|(?<=srcset=\")docs/", "", text)
    return re.sub(r"\[([^\]]+)\]\([A-Z]+\.md\)", r"`\1`", text)


def included(found: re.Match[str]) -> str:
    """Returns the included file as Markdown."""
    path = ROOT / found[1]
    text = path.read_text(encoding="utf-8").rstrip()
    if path.suffix == ".svg":
        return f'<div class="drawing">{text}</div>'  # in a block, which Markdown leaves as it is
    return f'```{path.suffix[1:]} title="{found[1]}"\n{text}\n```'


def references() -> dict[str, str]:
    """Returns the generated pages by name: those of a clone (KEPT), and two of the site alone."""
    pages = {"settings": settings_page(), "metrics": metrics_page(), "commands": commands_page()}
    return {**pages, "names": names_page(), "errors": errors_page()}


# --- settings -------------------------------------------------------------------------------------


def settings_page() -> str:
    """Returns all settings with type, default and meaning, grouped by the tables of a recipe."""
    from treegraft.settings.config import Config, known_settings
    from treegraft.settings.load import setting_rows

    known = known_settings()
    lines = [SETTINGS_HEAD]
    tables: dict[str, list[str]] = {}
    for row in setting_rows(Config()):
        table, _, name = row.name.rpartition(".")
        default = "none" if row.value is None else json.dumps(row.value, ensure_ascii=False)
        kind = type_name(known[row.name].field.annotation)
        tables.setdefault(table, []).append(
            f"| `{name}` | {code(kind)} | {code(default)} | {cell(row.meaning)} |"
        )
    for table, rows in tables.items():
        lines += [
            "",
            f"## [{table}]" if table else "## Without a table",
            "",
            "| setting | type | default | meaning |",
            "|---|---|---|---|",
            *rows,
        ]
    return "\n".join(lines) + servers_table() + "\n"


def servers_table() -> str:
    """Returns the settings of one entry of tools.mcp, which have no dotted names."""
    from treegraft.extras.mcp.plugin import McpSettings

    rows = [
        "",
        "",
        "## An entry of tools.mcp",
        "",
        "| setting | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for name, field in McpSettings.model_fields.items():
        default = "required" if field.is_required() else code(json.dumps(field.default))
        rows.append(
            f"| `{name}` | {code(type_name(field.annotation))} | {default} |"
            f" {cell(field.description or '')} |"
        )
    return "\n".join(rows)


def type_name(annotation: Any) -> str:
    """Returns a type in the words of a recipe: text, number, one of several names."""
    is_plain = isinstance(annotation, type) and not hasattr(annotation, "__args__")
    text = annotation.__name__ if is_plain else str(annotation)
    text = re.sub(r"typing\.Annotated\[(\w+), .*?\]\)\]", r"\1", text)
    text = re.sub(
        r"typing\.Literal\[(.*?)\]",
        lambda found: found[1].replace("'", '"').replace(", ", " or "),
        text,
    )
    text = re.sub(r"(?:\w+\.)+(\w+)", r"\1", text)
    for python, plain in (
        ("str", "text"),
        ("int", "integer"),
        ("float", "number"),
        ("bool", "true or false"),
        ("None", "none"),
    ):
        text = re.sub(rf"\b{python}\b", plain, text)
    return text.replace("NoneType", "none").replace(" | ", " or ")


# --- metrics --------------------------------------------------------------------------------------


def metrics_page() -> str:
    """Returns every metric with its meaning, a table for each group."""
    from treegraft.runs.metrics import METRICS

    groups: dict[str, list[str]] = {}
    for key, meaning in METRICS.items():
        group = key.partition("/")[0] if "/" in key else "run"
        groups.setdefault(group, []).append(f"| `{key}` | {cell(meaning)} |")
    lines = [METRICS_HEAD]
    for group, rows in groups.items():
        lines += ["", f"## {group}", "", "| key | meaning |", "|---|---|", *rows]
    return "\n".join(lines) + "\n"


# --- errors ---------------------------------------------------------------------------------------


class Raised(NamedTuple):
    """A place of the source where an error of ours is made."""

    place: str
    """File and line."""
    kind: str
    """Name of its class."""
    code: str
    """Empty where it has none, or one that is no literal."""
    text: str
    """Its message, with … for what is filled in; empty where it is made elsewhere."""


@functools.cache
def raised() -> list[Raised]:
    """Returns every place where an error of ours is made, by files and lines."""
    folder = ROOT / "src" / "treegraft"
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py")}
    classes = [one for tree in trees.values() for one in ast.walk(tree)]
    classes = [one for one in classes if isinstance(one, ast.ClassDef)]
    kinds, size = {"TreegraftError"}, 0
    while size < len(kinds):
        size = len(kinds)
        kinds |= {one.name for one in classes if kinds & {_name(base) for base in one.bases}}
    found = []
    for path, tree in sorted(trees.items()):
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and _name(call.func) in kinds:
                code = next((one.value for one in call.keywords if one.arg == "code"), None)
                found.append(
                    Raised(
                        f"{path.relative_to(folder)}:{call.lineno}",
                        _name(call.func),
                        code.value if isinstance(code, ast.Constant) else "",
                        _template(call.args[0]) if call.args else "",
                    )
                )
    return found


def _name(node: ast.expr) -> str:
    """The last part of a name: EngineError of errors.EngineError."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = [one.value if isinstance(one, ast.Constant) else "…" for one in node.values]
        return "".join(map(str, parts))
    return ""


def errors_page() -> str:
    """Returns the codes of all errors by class, each with its messages."""
    lines = [ERRORS_HEAD]
    found = raised()
    for kind in sorted({one.kind for one in found}):
        lines += ["", f"## {kind}", "", "| code | message |", "|---|---|"]
        texts: dict[str, list[str]] = {}
        for one in found:
            if one.kind == kind:
                texts.setdefault(one.code, []).append(one.text)
        for name, several in sorted(texts.items()):
            said = sorted({" ".join(text.split()) for text in several} - {"", "…"})
            lines.append(f"| `{name}` | {cell(' / '.join(said))} |")
    return "\n".join(lines) + "\n"


# --- names ----------------------------------------------------------------------------------------


def foreign_versions() -> dict[str, str]:
    """Returns the version of each framework whose settings are all on the page of names."""
    found: dict[str, str] = tomllib.loads(FOREIGN_NAMES.read_text(encoding="utf-8"))["versions"]
    return found


def all_answers() -> list[Any]:
    """Returns the answers of the page of names: those in the package, then the rest."""
    from treegraft.settings.names import answers, answers_of

    return [*answers(), *answers_of(FOREIGN_NAMES.read_text(encoding="utf-8"))]


def names_page() -> str:
    """Returns every setting of other frameworks with what it is here, a table for each."""
    from treegraft.settings.names import FRAMEWORKS

    pinned = {FRAMEWORKS[key]: version for key, version in foreign_versions().items()}
    said = " and ".join(f"{name} {version}" for name, version in pinned.items())
    lines = [NAMES_HEAD.format(versions=said)]
    for key, framework in FRAMEWORKS.items():
        lines += [
            "",
            f"## {framework}",
            "",
            f"| {framework} | Treegraft | remarks |",
            "|---|---|---|",
        ]
        pairs = sorted((name, answer) for answer in all_answers() for name in getattr(answer, key))
        for name, answer in pairs:
            ours = " ".join(
                word if word in ("and", "or") else code(word) for word in answer.ours.split()
            )
            values = [f"`{value}`: {said}" for value, said in answer.values.items()]
            remarks = " ".join([answer.note, "; ".join(values)]).strip()
            lines.append(f"| `{name}` | {ours or 'none'} | {cell(remarks)} |")
    return "\n".join(lines) + "\n"


# --- commands -------------------------------------------------------------------------------------


def commands_page() -> str:
    """Returns every command with its arguments and options."""
    import typer

    from treegraft.cli.main import app
    from treegraft.cli.plugged import loaded_command
    from treegraft.core.registry import registered

    lines, whole = [COMMANDS_HEAD], [*commands(typer.main.get_command(app), "treegraft")]
    for name, one in registered("command").items():
        whole += commands(loaded_command(name, one.value), f"treegraft {name}")
    for name, command in whole:
        lines += ["", f"## {name}", "", *described(name, command)]
    return "\n".join(lines) + "\n"


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields each command that can be run, with its full name."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield name, command
        return
    for last, one in inner.items():
        yield from commands(one, f"{name} {last}".strip())


VALUES = {
    "str": "TEXT",
    "path": "PATH",
    "int": "INTEGER",
    "int range": "INTEGER",
    "float": "NUMBER",
    "float range": "NUMBER",
}


def described(name: str, command: Any) -> list[str]:
    """Returns the lines that describe one command."""
    context = command.context_class(command, info_name=name)
    words, rows = [name], []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is None:
            continue
        if parameter.param_type_name == "argument":
            shown = parameter.metavar or parameter.name.upper()
            words.append(shown)
        else:
            shown = re.sub(
                r"<([\w ]+)>", lambda found: VALUES.get(found[1], found[1].upper()), record[0]
            )
        rows.append(f"| {code(shown)} | {cell(record[1])} |")
    words[1:1] = ["[OPTIONS]"] if any(p.param_type_name == "option" for p in command.params) else []
    lines = [
        re.sub(r"(?<!\n)\n(?!\n)", " ", (command.help or "").strip()),
        "",
        "```text",
        " ".join(words),
        "```",
    ]
    return lines + (["", "| argument or option | meaning |", "|---|---|", *rows] if rows else [])


# --- files ----------------------------------------------------------------------------------------


def with_files(page: str) -> str:
    """Returns the text of docs/files.md with its list of files renewed."""
    package = ROOT / "src" / "treegraft"
    head = f"{'src/treegraft/':<28}{first_sentence(package)}"
    block = "\n".join(["```text", head, *tree(package)])
    return FILES.sub(lambda _: f"{block}\n```\n", page)


def tree(folder: Path, indent: str = "  ") -> Iterator[str]:
    """Yields a line for each module in `folder` and below: its name and first sentence."""
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        is_package = (path / "__init__.py").exists()
        if is_package or (path.suffix == ".py" and not path.name.startswith("__")):
            name = f"{indent}{path.name}{'/' if is_package else ''}"
            yield f"{name:<27} {first_sentence(path)}"
            if is_package:
                yield from tree(path, indent + "  ")


def first_sentence(path: Path) -> str:
    """Returns the first sentence of a module's or package's docstring, cut at a colon or else a
    comma where it is too long for one line."""
    source = (path / "__init__.py" if path.is_dir() else path).read_text(encoding="utf-8")
    text = " ".join((ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.?]) (?=[A-Z])", text)[0].removesuffix(".")
    if len(sentence) <= 72:
        return sentence
    heads = [sentence[: mark.start()] for mark in re.finditer(r"[:;,] ", sentence[:74])]
    whole = [
        head for head in heads if len(re.findall(r"[({]", head)) == len(re.findall(r"[)}]", head))
    ]
    clauses = [head for head in whole if len(head) > 24 and sentence[len(head)] != ","]
    return (clauses or whole or [sentence])[-1]


def with_names(page: str) -> str:
    """Returns the text of docs/parts.md with its table of names renewed."""
    rows = [f"| `{name}` | {said} |\n" for name, said in sorted(names_of_parts())]
    return NAMES.sub(lambda _: "".join(["\n| name | meaning |\n|---|---|\n", *rows, "\n"]), page)


def names_of_parts() -> Iterator[tuple[str, str]]:
    """Yields each name of `treegraft.parts` with the first sentence of its docstring, as a cell."""
    package = ROOT / "src" / "treegraft"
    for node in ast.walk(ast.parse((package / "parts.pyi").read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("treegraft."):
            continue
        home = package.joinpath(*(node.module or "").split(".")[1:])
        for name in (one.name for one in node.names):
            if home.is_dir() and (home / f"{name}.py").exists():
                described: ast.AST = ast.parse((home / f"{name}.py").read_text(encoding="utf-8"))
            else:
                place = home / "__init__.py" if home.is_dir() else home.with_suffix(".py")
                module = ast.parse(place.read_text(encoding="utf-8"))
                described = next(one for one in module.body if getattr(one, "name", "") == name)
            yield name, described_as(described)


def described_as(node: Any) -> str:
    """Returns the first sentence of a docstring as a cell."""
    text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    return cell(re.split(r"(?<=[.?]) (?=[A-Z])", text)[0].removesuffix("."))


def warnings_page() -> str:
    """Returns the text of docs/warnings.md: meaning, causes, advice and limit of each warning."""
    from treegraft.runs.health import RULES

    parts = [WARNINGS_HEAD]
    for rule in RULES:
        parts.append(
            f"\n## {rule.name}\n\n{rule.meaning}\n\n"
            f"* Likely causes: {'; '.join(rule.causes)}.\n* What to do: {rule.advice}\n"
            f"* Limit: {rule.limit:g}. {rule.limit_is}\n"
        )
    return "".join(parts)


def with_contents(log: str) -> str:
    """Returns the text of LOG.md with its contents renewed."""
    titles = re.findall(r"^## (.+)$", log, re.M)
    lines = [f"* [{title}](#{anchor(title)})\n" for title in titles]
    return CONTENTS.sub(lambda _: "".join(lines), log)


def anchor(title: str) -> str:
    """Returns the address of a heading as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


# --- writing --------------------------------------------------------------------------------------


def code(text: str) -> str:
    """Returns inline code, escaped for a table cell."""
    fence = "``" if "`" in text else "`"
    return f"{fence}{text}{fence}".replace("|", "\\|")


def with_tables(page: str) -> str:
    """Returns a page with what `treegraft study STUDY --table --brief` prints between each
    `<!-- table: STUDY [--only NAME ...] -->` and the next `<!-- end of table -->`."""
    return TABLE.sub(lambda found: f"{found[1]} -->\n\n{_brief(found[1])}\n", page)


def _brief(arguments: str) -> str:
    command = [sys.executable, "-m", "treegraft", "study", *shlex.split(arguments)]
    ran = subprocess.run(
        [*command, "--table", "--brief"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return ran.stdout.strip() + "\n"


def cell(text: str) -> str:
    """Returns text for a table cell: one line, markup escaped."""
    flat = " ".join(text.split())
    parts = re.split(r"(`[^`]*`)", flat)
    plain = [
        re.sub(r"([\\*_\[\]<>|{}])", r"\\\1", part) if number % 2 == 0 else part
        for number, part in enumerate(parts)
    ]
    return "".join(plain)


def build(folder: Path) -> int:
    """Stages the pages and builds the site; returns the builder's exit code, which is not 0 after
    any warning."""
    stage(folder)
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean", "--strict"],
        cwd=folder,
        env=environment,
    ).returncode


def write_files() -> None:
    """Writes the tables of docs/files.md."""
    page = ROOT / "docs" / "files.md"
    page.write_text(with_files(page.read_text("utf-8")), encoding="utf-8")


def write_names() -> None:
    """Writes the table of public names."""
    page = PAGES / "parts.md"
    page.write_text(with_names(page.read_text("utf-8")), encoding="utf-8")


def write_warnings() -> None:
    """Writes the page of warnings."""
    (PAGES / "warnings.md").write_text(warnings_page(), encoding="utf-8")


def write_reference() -> None:
    """Writes the pages of the reference that the repository holds."""
    pages = references()
    for name in KEPT:
        (PAGES / "reference" / f"{name}.md").write_text(pages[name], encoding="utf-8")


def write_log() -> None:
    """Writes the log's table of contents."""
    log = ROOT / "LOG.md"
    log.write_text(with_contents(log.read_text("utf-8")), encoding="utf-8")


def write_tables() -> None:
    """Writes the tables of README and of the pages that a command prints."""
    for path in (ROOT / "README.md", *PAGES.glob("*.md")):
        path.write_text(with_tables(path.read_text("utf-8")), encoding="utf-8")


WRITERS = {
    "files": write_files,
    "names": write_names,
    "warnings": write_warnings,
    "reference": write_reference,
    "log": write_log,
    "tables": write_tables,
}


def main() -> int:
    """Writes the generated parts that are named, or else builds the site; returns its status."""
    parser = argparse.ArgumentParser(
        description="Builds the documentation, or rewrites generated parts of pages."
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "docs")
    for name, write in WRITERS.items():
        parser.add_argument(f"--{name}", action="store_true", help=write.__doc__)
    chosen = parser.parse_args()
    writers = [write for name, write in WRITERS.items() if getattr(chosen, name)]
    for write in writers:
        write()
    if writers:
        return 0
    outcome = build(chosen.folder)
    if outcome == 0:
        site = (chosen.folder / "site").resolve()
        print(
            f"the pages: {site / 'index.html'}\nwith their search: python -m http.server -b"
            f" 127.0.0.1 -d {site}"
        )
    return outcome


if __name__ == "__main__":
    sys.exit(main())
