"""``agentenv new``: a project with an environment, its test and its settings."""

from __future__ import annotations

import keyword
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from agentenv.cli.options import JsonOption
from agentenv.cli.output import err, escape, print_json, verb
from agentenv.errors import ConfigError

_PROJECT = Path(__file__).with_name("project")
_MODULE = "my_env"
"""The module's name in that project; there too as ``my-env`` and ``MyEnv``."""

_TEST_NEEDS = ("atroposlib", "pytest", "pytest_asyncio")
"""Modules that the project's test needs, which a plain installation does not have."""


@verb
def new(
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Directory to create; the environment gets its name.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Start a project: an environment, its test and its settings.

    It runs at once, with scripted players in place of a model: no GPU, no key. Its README tells how to use a model.

    \b
    Examples:
      agentenv new my_env
      cd my_env && python -m pytest
    """
    name = directory.resolve().name
    files = project(name)
    if importable(_module(name), besides=directory):
        raise ConfigError(
            "DIRECTORY",
            f"the environment's module would hide the module {_module(name)!r}, which exists already",
            next_step="choose another name",
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise ConfigError("DIRECTORY", f"{directory} is not empty", next_step="name a new one")
        for file, text in files.items():
            (directory / file).write_text(text)
    except OSError as error:
        raise ConfigError("DIRECTORY", f"cannot write {directory}: {error.strerror}") from error
    if as_json:
        print_json({"directory": str(directory.resolve()), "files": sorted(files)})
        return
    console = err()
    console.print(f"[green]made[/] {escape(str(directory))}: {escape(', '.join(sorted(files)))}", soft_wrap=True)
    install = "" if all(map(find_spec, _TEST_NEEDS)) else "pip install 'agentenv[env]' pytest pytest-asyncio && "
    console.print(f"[bold]next[/] {escape(f'cd {directory} && {install}python -m pytest')}", soft_wrap=True)


def importable(module: str, *, besides: Path) -> bool:
    """Whether ``import module`` finds something here, or would where the project's test runs. The directory
    ``besides`` does not count: each one on the path is a package, even an empty one."""
    if module in {*sys.stdlib_module_names, *sys.modules, *_TEST_NEEDS}:
        return True
    found = find_spec(module)
    if found is None or found.origin is not None:
        return found is not None
    return any(Path(place).resolve() != besides.resolve() for place in found.submodule_search_locations or ())


def _module(name: str) -> str:
    return name.replace("-", "_")


def project(name: str) -> dict[str, str]:
    """The files of a project of this name, by their names. Raises ConfigError when no module can have the name."""
    module = _module(name)
    if not module.isidentifier() or not module.isascii() or keyword.iskeyword(module):
        raise ConfigError(
            "DIRECTORY",
            f"{module!r} is not a valid module name",
            next_step="use letters, digits and _, begin with a letter, and avoid Python keywords",
        )
    spelt = {
        _MODULE: module,
        _MODULE.replace("_", "-"): module.replace("_", "-").strip("-").lower(),
        "MyEnv": "".join(part[:1].upper() + part[1:] for part in module.split("_")),
    }

    def renamed(text: str) -> str:
        for old, its in spelt.items():
            text = text.replace(old, its)
        return text

    files = sorted(path for path in _PROJECT.iterdir() if path.is_file())
    return {renamed(path.name): renamed(path.read_text()) for path in files}
