"""`adapterswap recipes`: list, show and copy the shipped recipes, and check your own."""

from __future__ import annotations

import sys
from typing import Any

import click

from adapterswap.cli.options import FOLDER, RecipePath
from adapterswap.cli.printing import echo, note_output, print_errors, print_json


@click.group("recipes", context_settings={"max_content_width": 110})
def command() -> None:
    """List, show, copy and check recipes.

    Recipes in train/, compose/ and sweep/ are complete: pass their name to the command of that name. Those in models/,
    data/ and regimes/ are fragments, for `extends:` in a recipe.
    """


@command.command("ls")
@click.option("--kind", metavar="KIND", help="Only train, compose, sweep, models, data or regimes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ls(kind: str | None, as_json: bool) -> None:
    """List the shipped recipes and what each is for."""
    from dataclasses import asdict

    from adapterswap.errors import ArgumentError
    from adapterswap.recipes import list_recipes

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


@command.command("cat")
@click.argument("name", type=RecipePath())
@click.option("--resolved", is_flag=True, help="Include everything that it extends; each line names its file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with everything that it extends.")
def cat(name: str, resolved: bool, as_json: bool) -> None:
    """Print a recipe.

    NAME is a shipped recipe or a file. The output of --resolved is a complete recipe, too.
    """
    from adapterswap.files.yaml import find_recipe
    from adapterswap.recipes import resolve_recipe

    path = find_recipe(name)
    if not resolved and not as_json:
        echo(*path.read_text(encoding="utf-8").removesuffix("\n").split("\n"))
        return
    content, text = resolve_recipe(path)
    if as_json:
        print_json(content)
    else:
        echo(*text.removesuffix("\n").split("\n"))


@command.command("cp")
@click.argument("names", type=RecipePath(), nargs=-1, required=True, metavar="NAME...")
@click.argument("folder", type=FOLDER, metavar="DIR")
@click.option("--overwrite", is_flag=True, help="Replace what this command wrote there before.")
@click.option("--dry-run", is_flag=True, help="Print what would be written and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def cp(names: tuple[str, ...], folder: str, overwrite: bool, dry_run: bool, as_json: bool) -> None:
    """Copy shipped recipes into a new folder, to edit them.

    Everything that they extend is copied too, with relative paths, so the folder works on its own. To get one file
    instead: `adapterswap recipes cat NAME --resolved > mine.yaml`.
    """
    from adapterswap.errors import OutputError
    from adapterswap.recipes import copy_recipes

    if folder.endswith((".yaml", ".yml")):
        raise OutputError(
            f"{folder} is a file name, but recipes are copied into a folder",
            f"Pass a folder, or write one file: adapterswap recipes cat {names[0]} --resolved > {folder}",
            parameter="folder",
        )
    files = copy_recipes(names, folder, overwrite=overwrite, dry_run=dry_run)
    if as_json:
        print_json({"written": not dry_run, "out_path": folder, "recipes": [f"{name}.yaml" for name in names],
                    "files": files})  # fmt: skip
        return
    for name in files:
        echo(f"{folder}/{name}")
    note_output(folder, dry_run=dry_run)


@command.command("validate")
@click.argument("files", type=RecipePath(), nargs=-1, required=True, metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def validate(files: tuple[str, ...], as_json: bool) -> None:
    """Report every mistake in recipes, without reading models or data.

    FILE is a recipe file or the name of a shipped recipe. Exits with 1 if there is a mistake.
    """
    from dataclasses import asdict

    from adapterswap.errors import AdapterswapError, FieldError, Problems
    from adapterswap.files.yaml import find_recipe
    from adapterswap.recipes import check_recipe

    problems = Problems(FieldError)
    checked: list[dict[str, Any]] = []
    for file in files:
        try:
            checked.append({"path": file, "kind": check_recipe(find_recipe(file)), "problems": []})
        except AdapterswapError as error:
            checked.append(
                {
                    "path": file,
                    "kind": None,
                    "problems": [asdict(problem) | {"kind": problem.kind.__name__} for problem in error.problems],
                }
            )
            with problems.collect():
                raise
    if as_json:
        print_json(checked)
    else:
        for recipe in checked:
            echo(f"{recipe['path']}: {'valid (' + recipe['kind'] + ')' if recipe['kind'] else 'invalid'}")
        print_errors(problems.as_error().problems if problems else ())
    if problems:
        sys.exit(1)
