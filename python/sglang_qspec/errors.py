"""Every exception that QSPEC raises for its users and peers.

QSpecError
├── ConfigError       a setting, or a combination of settings, is not allowed: the start stops
├── RequestError      a request asks for what is not allowed: HTTP 400 for that request
│   └── GuessError    its guesses are malformed or over a cap
├── LinkError         a peer broke the protocol, or refused the handshake
├── DraftModelError   the draft model cannot be loaded, does not fit the target, or fails
│   └── PromptError   a pass over one text fails while others succeed
├── ClientError       `qspec complete`: a server does not answer, refuses, or is none of QSPEC
└── TheoryError       a figure is none that the model knows, or a measured run cannot be fitted
"""


class QSpecError(Exception):
    """Root of the tree; catch this to catch everything that QSPEC raises."""


class ConfigError(QSpecError, ValueError):
    """A setting's value, or a combination of settings, is not allowed."""


class RequestError(QSpecError, ValueError):
    """One request asks for what its server does not allow."""


class GuessError(RequestError):
    """The guesses of one request are malformed or over a cap."""


class LinkError(QSpecError):
    """A peer sent what the protocol does not allow, or refused the handshake."""


class DraftModelError(QSpecError):
    """The draft model cannot be loaded, or its vocabulary or tokenizer is not the target's."""


class PromptError(DraftModelError):
    """A pass of the draft model over one text fails, while a pass over another succeeds."""


class ClientError(QSpecError):
    """A server does not answer a client, refuses its request, or does not speculate with QSPEC."""


class TheoryError(QSpecError, ValueError):
    """A figure given to the model of the pipelines is not possible, or a run cannot be fitted."""
