"""All exceptions that QSPEC raises for its users and peers, and how messages show a value.

QSpecError
├── ConfigError       a setting, or a combination of settings, is not allowed: the start stops
├── RequestError      a request has a value that is not allowed: HTTP 400 for that request
│   └── GuessError    the guesses of a request are malformed or over a limit
├── LinkError         a peer violated the protocol, or an endpoint or key file is not allowed
├── DraftModelError   the draft model cannot be loaded, does not fit the target, or fails
│   └── PromptError   a pass of the draft model fails for one prompt and succeeds for others
├── MeasureError      `qspec doctor --measure`: a model cannot be loaded, or fails
├── ClientError       a server does not answer a client, refuses, or does not run QSPEC
│   ├── AnswerError      an answer is too long, is no JSON, or is not what a server with QSPEC sends
│   └── ServerLostError  the connection to a server broke, and the server does not answer
├── BatchError        the input or the output of `qspec batch` cannot be used
│   └── ClaimLostError   another gateway of `qspec serve-batches` serves the batch now
└── TheoryError       a figure is out of range, or a measured run cannot be fitted
"""


class QSpecError(Exception):
    """Base class of all exceptions that QSPEC raises."""


class ConfigError(QSpecError, ValueError):
    """The value of a setting, or a combination of settings, is not allowed."""


class RequestError(QSpecError, ValueError):
    """A request has a value that the server does not allow."""


class GuessError(RequestError):
    """The guesses of a request are malformed or over a limit."""


class LinkError(QSpecError):
    """A peer violated the protocol, or an endpoint, a key file or a tokenizer is not allowed."""


class DraftModelError(QSpecError):
    """The draft model cannot be loaded, does not fit the target, or fails."""


class PromptError(DraftModelError):
    """A pass of the draft model fails for one prompt and succeeds for others."""


class MeasureError(QSpecError):
    """A model that `qspec doctor` measures cannot be loaded, or fails."""


class ClientError(QSpecError):
    """A server does not answer a client, refuses its request, or does not run QSPEC."""


class AnswerError(ClientError):
    """An answer is too long, is no JSON, or is not what a server with QSPEC sends."""


class ServerLostError(ClientError):
    """The connection to a server broke, and the server does not answer."""


class BatchError(QSpecError):
    """The input or the output of `qspec batch` cannot be used."""


class ClaimLostError(BatchError):
    """Another gateway of `qspec serve-batches` serves the batch now, or it has ended."""


class TheoryError(QSpecError, ValueError):
    """A figure for the pipeline model is out of range, or a measured run cannot be fitted."""


def shown(value: object) -> str:
    """The `repr` of a value for a message, cut to 60 characters; the type if there is no `repr`."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deep, or an integer with too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or the name of its type if it has no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
