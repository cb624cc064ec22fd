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
        help="Upload to a private repository only, or create a public one.  [default: a new one is private]",
    ),
    click.option("--revision", metavar="BRANCH", help="Branch to upload to, created where it does not exist."),
    click.option("--commit-message", metavar="TEXT", help="Message of the upload's commit."),
)


def push_options(function: _Function) -> _Function:
    """Add the options to a command; it hands them on to `Push.of`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


class Push(NamedTuple):
    """Where to upload what a command writes; `repo` is None where nothing is uploaded."""

    repo: str | None
    private: bool | None
    revision: str | None
    commit_message: str | None

    @classmethod
    def of(cls, options: dict[str, Any]) -> Push:
        """Take the four options out of a command's `options`, and check them before any work is done.

        Raises:
            click.UsageError: an option that belongs to an upload is given without --push-to-hub.
            ArgumentError: the repository's id cannot be one.
        """
        found = cls(*(options.pop(key) for key in ("push_to_hub", "private", "revision", "commit_message")))
        if found.repo is None:
            flags = ("--private/--public", "--revision", "--commit-message")
            if given := [flag for flag, value in zip(flags, found[1:], strict=True) if value is not None]:
                raise click.UsageError(
                    f"{' and '.join(given)}: give --push-to-hub as well, which says where to upload."
                )
        else:
            from adapterswap.experts.publishing import check_repository

            check_repository(found.repo)
        return found

    def upload(self, folder: str | Path) -> None:
        """Upload the folder, if that was asked for, and say where it is."""
        if self.repo is None:
            return
        from adapterswap.experts.publishing import publish

        with working("uploading"):
            url = publish(
                folder, self.repo, private=self.private, revision=self.revision, commit_message=self.commit_message
            )
        note(f"uploaded: {url}")
