"""The options that upload a written folder to the Hub, shared by every command that writes an adapter or a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from adapterswap.cli.printing import note, working

__all__ = ["Push", "push_options"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--push-to-hub", metavar="ID", help="Upload the folder to this Hub repository, with its model card."),
    click.option(
        "--private/--public",
        default=None,
        help="Require a private repository, or create a public one.  [default: a new one is private]",
    ),
    click.option("--revision", metavar="BRANCH", help="Branch to upload to; created if it does not exist."),
    click.option("--commit-message", metavar="TEXT", help="Commit message of the upload."),
)


def push_options(function: _Function) -> _Function:
    """Add the options to a command, which passes them to `Push.of`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


class Push(NamedTuple):
    """Where to upload what a command writes; `repo` is None if nothing is uploaded."""

    repo: str | None
    private: bool | None
    revision: str | None
    commit_message: str | None

    @classmethod
    def of(cls, options: dict[str, Any]) -> Push:
        """Take the four options out of a command's `options`, and check them before anything is computed.

        Raises:
            click.UsageError: an upload option was passed without --push-to-hub.
            ArgumentError: the repository id is not valid.
        """
        push = cls(*(options.pop(key) for key in ("push_to_hub", "private", "revision", "commit_message")))
        if push.repo is None:
            flags = ("--private/--public", "--revision", "--commit-message")
            if unused_flags := [flag for flag, value in zip(flags, push[1:], strict=True) if value is not None]:
                raise click.UsageError(f"{' and '.join(unused_flags)} can only be used with --push-to-hub.")
        else:
            from adapterswap.experts.publishing import check_repository

            check_repository(push.repo)
        return push

    def upload(self, folder: str | Path) -> None:
        """Upload the folder, if --push-to-hub was passed, and print its address."""
        if self.repo is None:
            return
        from adapterswap.experts.publishing import publish

        with working("uploading"):
            url = publish(
                folder, self.repo, private=self.private, revision=self.revision, commit_message=self.commit_message
            )
        note(f"uploaded: {url}")
