"""Why a request to the Hub failed, and what to do.

The Hub's client, its transports and its storage raise different errors.
"""

from __future__ import annotations

from adapterswap.kit.errors import reason_of

_UNREACHABLE = "the Hub cannot be reached"
_TRANSPORT = {"TransportError", "ConnectionError", "Timeout", "TimeoutError", "gaierror"}  # of several clients


class HubFailure:
    """A failed request to the Hub, in a few words of ours: the Hub's client explains it at length."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    @property
    def reason(self) -> str:
        """Why it failed."""
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return "HF_HUB_OFFLINE is set"
        from huggingface_hub import errors

        reasons: dict[type[BaseException], str] = {
            errors.GatedRepoError: "its owners must grant you access",  # a kind of the next one
            errors.RepositoryNotFoundError: "there is no such repository, or it is private",
            errors.RevisionNotFoundError: "the repository has no such revision",
        }
        for kind, reason in reasons.items():
            if isinstance(self.error, kind):
                return reason
        if self._is_unreachable:
            return _UNREACHABLE
        return reason_of(self.error)

    def remedy(
        self,
        online: str,
        *,
        offline: str = "Check the path, or unset HF_HUB_OFFLINE to download it",
        unreachable: str = "Check the path and the network",
    ) -> str:
        """What to do: `offline` if this process is in offline mode, `unreachable` if the Hub is, else `online`."""
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return offline
        if self._is_unreachable:
            return unreachable
        return online

    @property
    def _is_unreachable(self) -> bool:
        """Whether the error, or what caused it, is one of the network."""
        error: BaseException | None = self.error
        while error is not None:
            if _TRANSPORT & {kind.__name__ for kind in type(error).__mro__}:
                return True
            error = error.__cause__ or error.__context__
        return False
