"""Errors that reach a user: what went wrong, with which value, what is allowed, and the remedy, in one sentence.

Owns the one base class, `AppError`, and the errors of adapters. It knows nothing of HTTP beyond the status number
that each error stands for; `api/errors` turns any `AppError` into the OpenAI error envelope.
"""

from __future__ import annotations


class AppError(Exception):
    """A fault that is not ours: the sentence is meant for the person who caused it.

    Attributes:
        message: one sentence; never holds a path outside the adapter roots, a trace or a credential.
        status: HTTP status that a server answers with.
        error_type: OpenAI error type, such as `invalid_request_error`.
        code: machine-readable code or None.
        param: path of the request field at fault, such as `messages[0].content`, or None.
        retry_after: seconds after which the same request may succeed, or None.
    """

    status: int = 400
    error_type: str = "invalid_request_error"
    code: str | None = None
    retry_after: int | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class AdapterError(AppError):
    """An adapter operation failed for a reason that the caller can mend."""


class AdapterRefused(AdapterError):
    """The adapter's files are readable but cannot be served exactly; `reasons` holds one sentence each."""

    code = "adapter_refused"

    def __init__(self, reasons: list[str], *, param: str | None = None, name: str | None = None) -> None:
        prefix = "" if name is None else f"adapter {name!r} is refused: "
        super().__init__(prefix + "; ".join(reasons), param=param)
        self.reasons = reasons


class AdapterFilesNotFound(AdapterError):
    """No adapter lies at the path that was given."""

    status = 404
    error_type = "not_found_error"
    code = "adapter_files_not_found"


class AdapterNotFound(AdapterError):
    """No adapter has this name."""

    status = 404
    error_type = "not_found_error"
    code = "model_not_found"


class AdapterExists(AdapterError):
    """The name is taken; `load_inplace` would replace it."""

    code = "adapter_exists"


class DefaultStaysPinned(AdapterError):
    """An adapter that answers a modality by itself cannot be let out of memory."""

    code = "adapter_is_default"


class UploadTooLarge(AdapterError):
    """An upload is over a limit (bytes, entries or compression ratio)."""

    status = 413
    code = "upload_too_large"


class InvalidAdapterName(AdapterError):
    """The name cannot be given to an adapter: wrong characters, too long, or kept for something else."""

    code = "invalid_adapter_name"


class UploadRefused(AdapterError):
    """An upload holds something that is never unpacked (path tricks, links, encrypted entries) or no adapter at all."""

    code = "upload_refused"


class AdapterStoreFault(AdapterError):
    """The server's own adapter folder cannot be used: not writable, damaged, or not configured."""

    status = 500
    error_type = "server_error"
    code = "adapter_store_fault"


class StorageFull(AdapterError):
    """The disk that holds uploads or downloads has no room left."""

    status = 507
    error_type = "server_error"
    code = "storage_full"


class SourceUnreachable(AdapterError):
    """A source of adapters cannot be asked now, or took too long; the same request may succeed later."""

    status = 503
    error_type = "server_error"
    code = "adapter_source_unreachable"
    retry_after = 5


class InvalidSource(AdapterError):
    """A setting names a source of adapters that cannot be used."""

    code = "invalid_adapter_source"
