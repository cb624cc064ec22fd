"""`adapterswap recipes`: list, print and copy the shipped recipes, and check your own."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import click

from adapterswap.cli.options import Folder, Json, RecipePath
from adapterswap.cli.output import echo, note_output, print_errors, print_json
from adapterswap.cli.signature import Group, declare

_EXAMPLES = """\
adapterswap recipes ls
adapterswap recipes cat compose/llama-3.1-8b/swahili > mine.yaml"""


@click.group("recipes", cls=Group, epilog=_EXAMPLES, context_settings={"max_content_width": 110})
def recipes_command() -> None:
    """List, print, copy and check recipes.

    Recipes in train/, compose/ and sweep/ are complete: pass their name to the command of that name. Those in models/,
    data/ and regimes/ are fragments, for `extends:` in a recipe.
    """


@declare("ls", group=recipes_command)
def ls(*, kind: Annotated[str, "KIND"] | None = None, as_json: Json = False) -> None:
    """List the shipped recipes and what each is for.

    Args:
        kind: Only train, compose, sweep, models, data or regimes.

    Examples:
        adapterswap recipes ls --kind train
    """
    from dataclasses import asdict

    from adapterswap.experiments.recipes import list_recipes
    from adapterswap.kit.errors import ArgumentError

    recipes = list_recipes()
    kinds = list(dict.fromkeys(recipe.kind for recipe in recipes))
    if kind is not None and kind not in kinds:
        raise ArgumentError(f"{kind!r} is not a kind of recipe", f"Kinds are: {', '.join(kinds)}", parameter="kind")
    recipes = [recipe for recipe in recipes if kind in (None, recipe.kind)]
    if as_json:
        print_json([asdict(recipe) for recipe in recipes])
        return
    width = max(len(recipe.name) for recipe in recipes)
    for recipe in recipes:
        echo(f"{recipe.name:<{width}}  {recipe.about}")


@declare("cat", group=recipes_command)
def cat(name: Annotated[str, RecipePath()], *, resolved: bool = False, as_json: Json = False) -> None:
    """Print a recipe.

    NAME is a shipped recipe or a file. The output of --resolved is a complete recipe, too.

    Args:
        resolved: Print it with all `extends` resolved; each line names its file.
        as_json: Print JSON with all `extends` resolved.

    Examples:
        adapterswap recipes cat compose/llama-3.1-8b/swahili --resolved
    """
    from adapterswap.experiments.recipes import resolve_recipe
    from adapterswap.kit.files.yaml import find_recipe

    path = find_recipe(name)
    if not resolved and not as_json:
        echo(*path.read_text(encoding="utf-8").removesuffix("\n").split("\n"))
        return
    content, text = resolve_recipe(path)
    if as_json:
        print_json(content)
    else:
        echo(*text.removesuffix("\n").split("\n"))


@declare("cp", group=recipes_command)
def cp(
    names: Annotated[tuple[str, ...], RecipePath(), "NAME..."],
    folder: Folder,
    *,
    overwrite: bool = False,
    dry_run: bool = False,
    as_json: Json = False,
) -> None:
    """Copy shipped recipes into a new folder, to edit them.

    Everything that they extend is copied too, with relative paths, so the folder works on its own. To get one file
    instead: `adapterswap recipes cat NAME --resolved > mine.yaml`.

    Examples:
        adapterswap recipes cp compose/llama-3.1-8b/swahili mine
    """
    from adapterswap.experiments.recipes import copy_recipes
    from adapterswap.kit.errors import OutputError

    if folder.endswith((".yaml", ".yml")):
        raise OutputError(
            f"{folder} is a file name, but recipes are copied into a folder",
            f"Pass a folder, or write one file: adapterswap recipes cat {names[0]} --resolved > {folder}",
            parameter="folder",
        )
    files = copy_recipes(names, folder, overwrite=overwrite, dry_run=dry_run)
    if as_json:
        print_json(
            {"written": not dry_run, "out_path": folder, "recipes": [f"{name}.yaml" for name in names], "files": files}
        )
        return
    for name in files:
        echo(f"{folder}/{name}")
    note_output(folder, dry_run=dry_run)


@declare("validate", group=recipes_command)
def validate(files: Annotated[tuple[str, ...], RecipePath(), "FILE..."], *, as_json: Json = False) -> None:
    """Report every mistake in recipes, without reading models or data.

    FILE is a recipe file or the name of a shipped recipe. Exits with 1 if there is a mistake.

    Examples:
        adapterswap recipes validate recipe.yaml
    """

    from adapterswap.experiments.recipes import check_recipe
    from adapterswap.kit.errors import AdapterswapError
    from adapterswap.kit.files.yaml import find_recipe

    checked: list[dict[str, Any]] = []
    errors: list[AdapterswapError] = []
    for file in files:
        kind, problems = None, list[dict[str, Any]]()
        try:
            kind = check_recipe(find_recipe(file))
        except AdapterswapError as error:
            problems = [problem._asdict() | {"kind": problem.kind.__name__} for problem in error.problems]
            errors.append(error)
        checked.append({"path": file, "kind": kind, "problems": problems})
    if as_json:
        print_json(checked)
    else:
        for recipe in checked:
            verdict = "invalid"
            if recipe["kind"]:
                verdict = f"valid ({recipe['kind']})"
            echo(f"{recipe['path']}: {verdict}")
        for found in errors:
            print_errors(found.problems)
    if errors:
        sys.exit(1)
