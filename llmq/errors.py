"""What can go wrong, as one tree.

    LlmqError                     an expected failure: one sentence on stderr, exit status 2
    ├── ConfigError               a value the user gave breaks a rule
    ├── CheckpointError           a source cannot be read, is damaged or incomplete
    │   ├── UnsupportedModelError     an architecture or tensor that no code here understands
    │   └── AlreadyQuantizedError     the source carries codes of another quantizer
    ├── ArtifactError             a directory written by llmq breaks its own layout
    ├── OutputError               the result cannot be written where it was asked for
    ├── CoverageError             ``--strict`` and a tensor that would not be quantized as asked
    ├── BackendError              a backend, device or kernel is not usable here
    └── EngineError               a request cannot be taken now, whatever it asks for
        ├── QueueFullError            too many requests wait already
        ├── QueueTimeoutError         it has waited too long for a slot
        ├── DrainingError             the engine is shutting down
        └── EngineDeadError           the backend failed; every request fails until a restart

Every message names the field, its value, the rule it breaks and a way out. Anything that is not
an `LlmqError` and reaches the terminal is a defect of llmq.
"""


class LlmqError(Exception):
    """An expected failure, told in one sentence."""


class ConfigError(LlmqError):
    """A value the user gave breaks a rule."""


class CheckpointError(LlmqError):
    """A source cannot be read, is damaged or incomplete."""


class UnsupportedModelError(CheckpointError):
    """An architecture or a tensor that no code here understands."""


class AlreadyQuantizedError(CheckpointError):
    """The source carries the codes of another quantizer."""


class ArtifactError(LlmqError):
    """A directory written by llmq breaks its own layout."""


class OutputError(LlmqError):
    """The result cannot be written where it was asked for."""


class CoverageError(LlmqError):
    """``--strict`` was given and a tensor would not be quantized as asked."""


class BackendError(LlmqError):
    """A backend, device or kernel is not usable here."""


class TrainingError(LlmqError):
    """A training run cannot go on."""


class EngineError(LlmqError):
    """A request cannot be taken now, whatever it asks for."""


class QueueFullError(EngineError):
    """Too many requests wait already."""


class QueueTimeoutError(EngineError):
    """A request has waited too long for a slot."""


class DrainingError(EngineError):
    """The engine is shutting down."""


class EngineDeadError(EngineError):
    """The backend failed; every request fails until a restart."""
