"""What failed at the Hugging Face hub, and what to do about it."""

from __future__ import annotations

import errno
from pathlib import Path

from baton.errors import ConfigError

_TOKEN = "set HF_TOKEN to a token of an account with access, or run `hf auth login`"  # noqa: S105


def explained(error: Exception, model_id: str, revision: str, kept: str = "") -> ConfigError:
    """The error with what to do, to be raised ``from None``: its cause may show signed addresses.

    ``kept`` says what a download has left for the next one.
    """
    if isinstance(error, ConfigError):
        return error
    advice = _advice(error, model_id, revision)
    return ConfigError(f"{advice}. {kept}" if kept else advice)


def reason(error: Exception) -> str:
    """The error in a few words, without addresses: those of downloads may carry a signature."""
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    if isinstance(error, ConfigError):
        return error.message
    if isinstance(error, HfHubHTTPError):
        return f"it answers {error.response.status_code}"
    if isinstance(error, TimeoutError):
        return str(error) or "no answer in time"
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception):
        return reason(cause)  # the library's "not in the cache either"
    line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line and "://" not in line else type(error).__name__


def _advice(error: Exception, model_id: str, revision: str) -> str:
    from huggingface_hub import constants, errors, get_token  # noqa: PLC0415

    page = f"https://huggingface.co/{model_id}"
    account = "the account of your token" if get_token() else "your account"
    by_class: dict[type[Exception], str] = {
        # Before the class that it is derived from.
        errors.GatedRepoError: (
            f"{model_id} is gated: accept its terms on {page} with {account}, and {_TOKEN}"
        ),
        errors.RepositoryNotFoundError: (
            f"the hub has no model {model_id}, or it is private, and there is no folder of that "
            f"name here: check the spelling, or {_TOKEN}"
        ),
        errors.RevisionNotFoundError: (
            f"{model_id} has no revision {revision!r}: {page}/tree/main lists its branches and "
            "tags; without --revision main is taken"
        ),
        errors.RemoteEntryNotFoundError: (
            f"{model_id} has no config.json, so it is not in the Transformers format. Of a GGUF "
            f"model, download one file (`hf download {model_id} FILE.gguf`) and pass its path"
        ),
    }
    by_status = {
        401: (
            "the hub refuses the token: it is wrong or has expired. Unset HF_TOKEN for public "
            f"models, or {_TOKEN}"
        ),
        403: f"the token may not read {model_id}: give it that permission, or {_TOKEN}",
        429: "the hub limits the rate of requests: try again in a few minutes, or with a token",
    }
    for kind, advice in by_class.items():
        if isinstance(error, kind):
            return advice
    if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in by_status:
        return by_status[error.response.status_code]
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full: free some space, or set HF_HOME to a folder on another disk"
    cache = Path(constants.HF_HUB_CACHE).expanduser().resolve()
    if isinstance(error, OSError) and Path(error.filename or "").is_relative_to(cache):
        return (
            f"the cache {cache} cannot be written ({reason(error)}): check "
            "permissions there, or set HF_HOME to another folder"
        )
    return (
        f"cannot download {model_id} from the hub: {reason(error)}. Try again when the network is "
        f"back; or run `hf download {model_id}` on another machine, copy the folder that it "
        "prints, and pass its path"
    )
