"""`adapterswap verify`: does this adapter or model still match its sources?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from adapterswap.cli.options import Expert, Json, NamedExpert, name_and_path
from adapterswap.cli.printing import echo, note, print_json, rare_collections, working
from adapterswap.cli.signature import declare

if TYPE_CHECKING:
    from adapterswap.tools.extracted import Verification

_WHERE = {"full": "--expert full=PATH", "base": "--base-model"}  # the options that locate an extraction's sources
_SHOWN = 10  # tensors to name; with a wrong source nearly all of them differ


@declare("verify")
@rare_collections()
def command(
    path: Expert,
    *,
    experts: tuple[NamedExpert, ...] = (),
    rules: Annotated[tuple[str, ...], "--rule", "RULE"] = (),
    base_model: Expert | None = None,
    as_json: Json = False,
) -> None:
    """Recompute an adapter or a model from its sources and compare.

    PATH is an adapter, a model or a GGUF file (or a folder of pieces) that adapterswap wrote. Its record names the
    sources: those from the Hub are found automatically; pass folders with --expert. The files of an extracted adapter
    are compared by their SHA-256; with --expert full=PATH and --base-model, so is the error of every module's ΔW. So
    are those of a converted adapter, if an SVD or a pickle was involved, and its source's; and those of an adapter that
    was trained from another one (--expert start=PATH). Exits with 1 if anything differs.

    Without a record, as after another tool's merge, say what PATH should be: pass the --base-model, and the experts
    that should be in it. The answer says what it is, within the rounding of its dtype: which expert, how much of it, in
    which layers.

    Args:
        experts: The folder of a source; repeatable.
        rules: Without a record: what PATH should be, as for `compose`; repeatable.  [default: the only expert]
        base_model: The base model, if it came from a folder.
    """
    from adapterswap.cli.composition_options import parsed_rules
    from adapterswap.tools.attributing import Attribution
    from adapterswap.tools.verification import verify

    source_paths = dict(map(name_and_path, experts))
    with working("verifying"):
        verification = verify(path, source_paths, base_model=base_model, rules=parsed_rules(rules) or None)
    if as_json:
        print_json(verification.as_json())
    elif isinstance(verification, Attribution):
        for answer in verification.answers:
            echo(answer)
    else:
        _print(verification)
    for remark in verification.notes:
        note(remark)
    if verification.unchecked:
        options = " and ".join(_WHERE.get(name, f"--expert {name}=PATH") for name in verification.unchecked)
        names = " and ".join(verification.unchecked)
        note(f"Not compared: {names} came from a folder, and its location is not recorded. Pass {options}.")
    if not verification.equal and isinstance(verification, Attribution):
        note(f"Error: {path} is not {verification.stated}.")
        sys.exit(1)
    if not verification.equal:
        note(f"Error: {path} does not match its sources. Make it again, or pass the sources it was made from.")
        sys.exit(1)


def _print(verification: Verification) -> None:
    if verification.equal:
        echo(f"equal: {_checked(verification)}")
    for name, file in verification.changed_sources.items():
        echo(f"source changed: {name}'s {file} differs from what was {verification.made} (SHA-256)")
    for key in verification.differing[:_SHOWN]:
        echo(f"differs: {key}")
    if len(verification.differing) > _SHOWN:
        echo(f"differs: {len(verification.differing) - _SHOWN} more; --json lists them all")
    if verification.config_differs:
        echo(f"differs: {verification.config}")
    if verification.record_differs:
        echo(f"differs: {', '.join(verification.record_differs)} in adapterswap.json")


def _checked(verification: Verification) -> str:
    """What was compared, for a result that is equal."""
    if verification.made == "composed":
        return "every tensor, the config and the record match the sources"
    if verification.unchecked:
        return "the files match the record"
    if verification.made == "trained":
        return "the files and the start match the record; nothing was trained again"
    if verification.made == "converted":
        return "the files and the source match the record; nothing was converted again"
    return "the files match the record, and every module has the recorded error of ΔW"
