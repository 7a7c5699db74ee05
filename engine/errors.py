"""Errors that the engine reports to a user; all are `AppError`s, so that one place turns them into answers."""

from __future__ import annotations

from adapters.errors import AppError

__all__ = [
    "AppError",
    "ContextTooLong",
    "EngineClosed",
    "EngineFault",
    "InvalidRequest",
    "MediaError",
    "ModelNotFound",
    "OutOfMemory",
    "Overloaded",
    "RequestTimeout",
    "UnsupportedModel",
    "WorkerLost",
]


class InvalidRequest(AppError):
    """A field of the request holds a value that is not allowed."""


class ModelNotFound(AppError):
    """The request names a model or adapter that is not served."""

    status = 404
    error_type = "not_found_error"
    code = "model_not_found"


class ContextTooLong(AppError):
    """Prompt and answer together do not fit the context window."""

    code = "context_length_exceeded"


class MediaError(AppError):
    """Audio or an image cannot be used: empty, unreadable, too long, or of a kind that the model does not take."""

    code = "invalid_media"


class UnsupportedModel(AppError):
    """The base model's architecture is not on the list of those that are served."""

    code = "unsupported_model"


class Overloaded(AppError):
    """The queue is full."""

    status = 429
    error_type = "rate_limit_error"
    code = "overloaded"


class RequestTimeout(AppError):
    """The answer took longer than the server allows."""

    status = 504
    error_type = "timeout_error"
    code = "request_timeout"


class EngineFault(AppError):
    """Our own fault: a step failed. The cause is in the log under the request's id."""

    status = 500
    error_type = "server_error"
    code = "engine_fault"


class OutOfMemory(EngineFault):
    """The device had no memory for this request, even in a step of its own."""

    status = 503
    code = "out_of_memory"


class WorkerLost(EngineFault):
    """A process of a model that is spread over several GPUs has gone, and the engine with it."""

    status = 503
    code = "worker_lost"


class EngineClosed(AppError):
    """The server is shutting down."""

    status = 503
    error_type = "server_error"
    code = "shutting_down"
