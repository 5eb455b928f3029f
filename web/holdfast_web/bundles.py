"""A script with all that it imports as one file, put together when it is first asked for: nothing is built before.

Our modules keep to one form, `import { a, b as c } from "./other.js";` and `export const|function|class`, so each
becomes a function that returns what it exports. Comments, indentation and most line ends stay behind. What is
imported with `import()`, when it is needed, stays a file of its own and may share no state.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_IMPORT = re.compile(r'^import \{ ([^}]*) \} from "(\.[^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:const|function|class) (\w+))", re.MULTILINE)
_COMMENT = re.compile(r"^ *(?://[^\n]*|/\*\*.*?\*/)\n", re.MULTILINE | re.DOTALL)
_INDENT = re.compile(r"^[ ]+|^\n", re.MULTILINE)
_CONTINUED = re.compile(r"^((?:(?!//|`).)*[{;,(\[])\n", re.MULTILINE)
"""A line that the next may follow at once; in one with a template or an address, who knows what its end is."""


class NotBundled(ValueError):
    """A script that does not keep to the form."""


@dataclass(frozen=True, slots=True)
class _Module:
    path: Path
    imports: tuple[tuple[str, Path], ...]
    body: str
    exports: tuple[str, ...]


def bundle(entry: Path) -> str:
    """Raises NotBundled, for a circle too."""
    found = _modules(entry)
    names = {module.path: f"${number}" for number, module in enumerate(found)}
    return "".join(_wrapped(module, names) for module in found)


def _wrapped(module: _Module, names: dict[Path, str]) -> str:
    taken = "".join(
        f"const {{{names_of.replace(' as ', ':').replace(', ', ',')}}}={names[path]};\n"
        for names_of, path in module.imports
    )
    given = f"return {{{','.join(module.exports)}}};\n" if module.exports else ""
    return f"const {names[module.path]} =(()=>{{\n{taken}{module.body}{given}}})();\n"


def _modules(entry: Path) -> list[_Module]:
    found: dict[Path, _Module] = {}

    def visit(path: Path, way: tuple[Path, ...]) -> None:
        if path in way:
            raise NotBundled(f"{path.name} imports itself, by way of {', '.join(one.name for one in way)}")
        if path not in found:
            module = _read(path)
            for _, other in module.imports:
                visit(other, (*way, path))
            found[path] = module

    visit(entry.resolve(), ())
    return list(found.values())


def _read(path: Path) -> _Module:
    text = path.read_text()
    imports = tuple((names, (path.parent / other).resolve()) for names, other in _IMPORT.findall(text))
    exports = tuple(_EXPORT.findall(text))
    body = _INDENT.sub("", _COMMENT.sub("", _EXPORT.sub("", _IMPORT.sub("", text))))
    if re.search(r"^(import|export)\b(?!\()", body, re.MULTILINE):
        raise NotBundled(f"{path.name} imports or exports in another form than `{{ names }}`")
    return _Module(path, imports, _CONTINUED.sub(r"\1", body), exports)
